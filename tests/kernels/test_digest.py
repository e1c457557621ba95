"""The page digest: golden values, agreement of all implementations, and what must change it."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from tests.compiler import needs_kernel

from kvferry.kernels import (
    NO_DIGEST,
    digest_spans,
    native_digest,
    native_library,
    page_seed,
    span_seeds,
)
from kvferry.testing.reference import reference_digest

_SIZES = (1, 2, 3, 7, 8, 9, 15, 16, 66, 100, 131, 132, 160, 288, 576, 584, 656, 1152, 4100, 42048)


def _digest(span: np.ndarray, key: bytes = b"page", plane_index: int = 0, layer: int = 0) -> int:
    seeds = span_seeds(
        np.array([page_seed(key)], dtype=np.uint64),
        plane_index=plane_index,
        layer=layer,
        num_bytes=span.size,
    )
    return int(digest_spans(np.ascontiguousarray(span).reshape(1, -1), seeds)[0])


def _numpy_digests(spans: np.ndarray, seeds: np.ndarray) -> list[int]:
    return [int(digest) for digest in digest_spans(spans, seeds)]


def _native_digests(spans: np.ndarray, seeds: np.ndarray) -> list[int]:
    library = native_library()
    assert library is not None
    return [
        native_digest(library, span.ctypes.data, span.size, int(seed))
        for span, seed in zip(spans, seeds, strict=True)
    ]


_Digests = Callable[[np.ndarray, np.ndarray], list[int]]
_each_implementation = pytest.mark.parametrize(
    "digests_of", [_numpy_digests, pytest.param(_native_digests, marks=needs_kernel)]
)


def _pattern(num_bytes: int) -> np.ndarray:
    return (np.arange(num_bytes, dtype=np.uint64) * 167 + 13).astype(np.uint8)


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1, 0x77CD9FF8071110CF),
        (8, 0x1B1F50B0535242C6),
        (132, 0x09BB16968D0F185A),
        (656, 0xDBA44D85FB745620),
        (8448, 0xEC03AF46E8A7936D),
        (41984, 0x73D4DF5EC47D276B),
    ],
)
def test_golden_values(num_bytes: int, expected: int) -> None:
    """The digest of a fixed pattern never changes: stored pages depend on it."""
    assert _digest(_pattern(num_bytes), b"golden", plane_index=2, layer=5) == expected


@_each_implementation
@pytest.mark.parametrize("num_bytes", _SIZES)
def test_all_implementations_agree(num_bytes: int, digests_of: _Digests) -> None:
    """numpy and the compiled kernel give the value of the plain definition for each page."""
    rng = np.random.default_rng(num_bytes)
    spans = rng.integers(0, 256, (5, num_bytes), dtype=np.uint8)
    keys = [b"a", b"b", b"", b"\0", b"page" * 20]
    seeds = span_seeds(
        np.array([page_seed(key) for key in keys], dtype=np.uint64),
        plane_index=3,
        layer=60,
        num_bytes=num_bytes,
    )
    expected = [
        reference_digest(span.tobytes(), page_seed=page_seed(key), plane_index=3, layer=60)
        for span, key in zip(spans, keys, strict=True)
    ]
    assert digests_of(spans, seeds) == expected


@needs_kernel
@pytest.mark.parametrize("num_bytes", [(1 << 17) - 1, 1 << 17, (1 << 17) + 9, 3 << 17])
def test_spans_larger_than_a_chunk(num_bytes: int) -> None:
    """Where a span is worked on in chunks makes no difference, nor does the number of rows."""
    spans = np.random.default_rng(3).integers(0, 256, (2, num_bytes), dtype=np.uint8)
    seeds = np.array([1, 2], dtype=np.uint64)
    expected = _native_digests(spans, seeds)
    assert digest_spans(spans, seeds).tolist() == expected
    assert digest_spans(spans[:1], seeds[:1]).tolist() == expected[:1]


def test_every_single_bit_counts() -> None:
    """Flipping any one bit of a span changes its digest."""
    span = np.random.default_rng(4).integers(0, 256, 131, dtype=np.uint8)
    for zeros in (span, np.zeros_like(span), np.full_like(span, 255)):
        seen = {_digest(zeros)}
        for bit in range(zeros.size * 8):
            flipped = zeros.copy()
            flipped[bit // 8] ^= 1 << bit % 8
            seen.add(_digest(flipped))
        assert len(seen) == 1 + zeros.size * 8


def test_every_pair_of_bits_counts() -> None:
    """Flipping any two bits of a small span changes its digest, on zeros and on random data."""
    for data in (np.zeros(24, np.uint8), np.random.default_rng(9).integers(0, 256, 24, np.uint8)):
        pairs = [(i, j) for i in range(192) for j in range(i)]
        spans = np.tile(data, (len(pairs) + 1, 1))
        for row, (one, other) in enumerate(pairs, start=1):
            spans[row, one // 8] ^= 1 << one % 8
            spans[row, other // 8] ^= 1 << other % 8
        digests = digest_spans(spans, np.zeros(len(spans), dtype=np.uint64))
        assert np.unique(digests).size == len(spans)


def test_same_bit_of_two_words_counts() -> None:
    """The hardest pairs for a sum, one bit in two words, do not cancel."""
    rng = random.Random(2)
    words = np.random.default_rng(2).integers(0, 1 << 63, 5000, dtype=np.uint64)
    plain = _digest(words.view(np.uint8))
    for bit in range(64):
        for _ in range(30):
            one, other = rng.sample(range(words.size), 2)
            changed = words.copy()
            changed[[one, other]] ^= np.uint64(1 << bit)
            assert _digest(changed.view(np.uint8)) != plain


@pytest.mark.parametrize("element_size", [1, 3, 8, 66, 132, 656])
def test_swapped_elements_count(element_size: int) -> None:
    """Two elements that change places change the digest."""
    rows = np.random.default_rng(5).integers(0, 256, (64, element_size), dtype=np.uint8)
    rows[:, 0] = np.arange(64)  # so that no two are equal
    plain = _digest(rows)
    for one, other in ((0, 1), (0, 63), (7, 8), (30, 50)):
        swapped = rows.copy()
        swapped[[one, other]] = swapped[[other, one]]
        assert _digest(swapped) != plain


def test_place_and_page_count() -> None:
    """The same bytes in another layer, plane, page or span length have another digest."""
    span = np.zeros(656, np.uint8)
    digests = {
        _digest(span, key, plane_index, layer)
        for key in (b"", b"a", b"b", b"\0", b"a\0")
        for plane_index in range(4)
        for layer in range(80)
    }
    digests |= {_digest(np.zeros(size, np.uint8)) for size in range(1, 656)}
    assert len(digests) == 5 * 4 * 80 + 655


@_each_implementation
def test_no_digest_is_never_a_digest(digests_of: _Digests) -> None:
    """The value that means "none" is never given to a span: where it would be, 1 is."""
    span = np.zeros((1, 8), np.uint8)
    step = 0x243F6A8885A308D3
    keyed = (step ^ step >> 32) * 0xC2B2AE3D27D4EB4F % (1 << 64)
    total = keyed * ((keyed >> 32) + 0xD6E8FEB86659FD93) % (1 << 64)
    seeds = np.array([(1 << 64) - total], dtype=np.uint64)  # mix(0) is 0
    assert NO_DIGEST == 0
    assert digests_of(span, seeds) == [1]
