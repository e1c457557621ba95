"""The page digest: 64 bits over one span, the same on every path and device.

A span is the bytes that one layer of one plane keeps of one page, in token order. It is read as
little-endian 64-bit words w_0 … w_{n-1}, the last one padded with zero bytes. With all arithmetic
modulo 2^64:

    t_i    = C + i·G
    x_i    = w_i XOR (t_i XOR (t_i >> 32))·M
    sum    = Σ x_i · ((x_i >> 32) + K)
    digest = mix(sum + seed(page, plane, layer, length)),  1 where that would be 0

so the value does not depend on who computes which words in what order, 0 is left to mean "none",
and words, spans, planes, layers and pages cannot change places unseen. Multiplying a word's halves
with each other is the idea of NH (Black et al., "UMAC: Fast and Secure Message Authentication",
CRYPTO 1999); with bit 32 of K clear and its lowest bit set, no change confined to the low half of
one word can cancel, and of changes to the high half only odd ones over a low half of exactly zero.
Two changes cancel with a chance of about 2^-32 where they are chosen for it, 2^-64 where not.
`mix` is the finalizer of MurmurHash3 (Austin Appleby, public domain).
"""

from __future__ import annotations

import hashlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NO_DIGEST", "digest_spans", "page_seed", "span_seeds", "span_where"]

NO_DIGEST = 0
"""What a digest table keeps where nothing was stored."""

_POSITION = 0x9E3779B97F4A7C15  # G: 2^64 over the golden ratio, odd
_START = 0x243F6A8885A308D3  # C: digits of pi; without it t_5 would be twice t_2, and flips cancel
_SPREAD = 0xC2B2AE3D27D4EB4F  # M: odd
_WEIGHT = 0xD6E8FEB86659FD93  # K: odd, bit 32 clear
_MIX_FIRST = 0xFF51AFD7ED558CCD
_MIX_SECOND = 0xC4CEB9FE1A85EC53

# Words worked on at once: few enough that they and the scratch stay in a core's own cache.
_CHUNK_WORDS = 1 << 14


def page_seed(key: bytes) -> int:
    """The 64-bit seed of the page called `key`; any bytes will do, a page hash as well."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def span_where(*, plane_index: int, layer: int, num_bytes: int) -> int:
    """What a span adds to the seed of every page: 64 bits of which one it is, and how long."""
    return _mix_int(_mix_int(plane_index << 32 | layer) ^ num_bytes)


def span_seeds(
    page_seeds: NDArray[np.uint64], *, plane_index: int, layer: int, num_bytes: int
) -> NDArray[np.uint64]:
    """The seed of one span of each page. Shape: ``[pages]`` in and out."""
    where = span_where(plane_index=plane_index, layer=layer, num_bytes=num_bytes)
    return _mix(page_seeds ^ np.uint64(where))


def digest_spans(spans: NDArray[np.uint8], seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The digest of each row.

    Args:
        spans: Shape ``[pages, num_bytes]``, each row contiguous.
        seeds: Shape ``[pages]``, from `span_seeds`.

    Returns:
        Shape ``[pages]``; never `NO_DIGEST`.
    """
    pages, num_bytes = spans.shape
    whole = num_bytes // 8
    sums = np.zeros(pages, dtype=np.uint64)
    words = spans[:, : whole * 8].view("<u8") if whole else None
    if words is not None:
        scratch = _scratch()
        columns = min(whole, _CHUNK_WORDS)
        rows = max(1, _CHUNK_WORDS // columns)
        for row in range(0, pages, rows):
            for column in range(0, whole, columns):
                part = words[row : row + rows, column : column + columns]
                sums[row : row + rows] += _weigh(part, column, scratch)
    if whole * 8 < num_bytes:
        tail = np.zeros((pages, 8), dtype=np.uint8)
        tail[:, : num_bytes - whole * 8] = spans[:, whole * 8 :]
        sums += _weigh(tail.view("<u8"), whole, _scratch())
    digests = _mix(sums + seeds)
    digests[digests == NO_DIGEST] = 1
    return digests


def _weigh(words: NDArray[Any], first: int, scratch: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Σ over each row of words that start at word number `first`. Shape: ``[rows, words]``."""
    count = words.shape[1]
    keys = _KEYS[:count] if not first else _position_keys(first, count)
    keyed = scratch[0, : words.size].reshape(words.shape)
    high = scratch[1, : words.size].reshape(words.shape)
    np.bitwise_xor(words, keys, out=keyed)
    np.right_shift(keyed, np.uint64(32), out=high)
    np.add(high, np.uint64(_WEIGHT), out=high)
    np.multiply(keyed, high, out=high)
    total: NDArray[np.uint64] = high.sum(axis=1, dtype=np.uint64)
    return total


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = values ^ (values >> np.uint64(33))
    mixed *= np.uint64(_MIX_FIRST)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(_MIX_SECOND)
    mixed ^= mixed >> np.uint64(33)
    return mixed


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value], dtype=np.uint64))[0])


def _position_keys(first: int, count: int) -> NDArray[np.uint64]:
    keys = np.arange(first, first + count, dtype=np.uint64)
    keys *= np.uint64(_POSITION)
    keys += np.uint64(_START)
    keys ^= keys >> np.uint64(32)
    keys *= np.uint64(_SPREAD)
    return keys


_KEYS = _position_keys(0, _CHUNK_WORDS)
_local = threading.local()


def _scratch() -> NDArray[np.uint64]:
    # One a thread, kept: allocating it anew costs as much as the digest of a small page.
    found: NDArray[np.uint64] | None = getattr(_local, "scratch", None)
    if found is None:
        found = _local.scratch = np.empty((2, _CHUNK_WORDS), dtype=np.uint64)
    return found
