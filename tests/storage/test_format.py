"""The header of stored objects: golden bytes, round trips, and every bit of it."""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import MissingDependencyError, StorageError
from kvferry.geometry import Geometry, Plane
from kvferry.storage import (
    MAX_KEY_BYTES,
    HeaderFault,
    HeaderProblem,
    MemoryBackend,
    ObjectHeader,
    PageStore,
    checksum,
    header_bytes,
    parse_header,
)
from kvferry.types import SlotKind

_DOCUMENT = Path(__file__).parents[2] / "docs" / "storage-format.md"


def _header(num_digests: int = 3, key: bytes = bytes(range(32))) -> ObjectHeader:
    return ObjectHeader(
        fingerprint="0123456789abcdef0123456789abcdef",
        key=key,
        kind=SlotKind.PAGE,
        payload_bytes=4096,
        payload_checksum=checksum(bytes(4096)),
        digests=np.arange(1, num_digests + 1, dtype=np.uint64),
    )


def _equal(one: ObjectHeader, other: ObjectHeader) -> bool:
    same = [(h.fingerprint, h.key, h.kind, h.payload_bytes, h.payload_checksum, h.digests.tolist())
            for h in (one, other)]  # fmt: skip
    return same[0] == same[1]


def test_golden_bytes() -> None:
    """The bytes of one header are those in docs/storage-format.md, on every machine."""
    packed = _header().pack()
    told = re.findall(r"^([0-9a-f]{4})  ((?:[0-9a-f]{2} ?){16})", _DOCUMENT.read_text(), re.M)
    shown = {int(at, 16): bytes.fromhex(row) for at, row in told}
    assert sorted(shown) == list(range(0, 160, 16))
    assert {at: packed[at : at + 16] for at in shown} == shown
    assert packed[160:] == bytes(4096 - 160)
    # Changing this number means a new FORMAT_VERSION.
    assert hashlib.sha256(packed).hexdigest()[:16] == "de49214cb0ffd43c"


@pytest.mark.parametrize("key_bytes", [1, 7, 8, 31, 32, 33, MAX_KEY_BYTES])
@pytest.mark.parametrize("num_digests", [0, 1, 99, 484, 485, 496, 497, 3000])
def test_round_trip(key_bytes: int, num_digests: int) -> None:
    """Any key and any number of digests come back, also with bytes of something else behind."""
    header = _header(num_digests, b"\xfe" * key_bytes)
    packed = header.pack()
    assert len(packed) == header.num_bytes == header_bytes(key_bytes, num_digests)
    assert len(packed) % 4096 == 0
    for data in (packed, packed + b"payload"):
        found = parse_header(data)
        assert isinstance(found, ObjectHeader)
        assert _equal(found, header)


def test_every_bit_counts() -> None:
    """A header with any one bit turned is damaged, padding included."""
    packed = _header().pack()
    for bit in range(8 * len(packed)):
        wrong = bytearray(packed)
        wrong[bit // 8] ^= 1 << bit % 8
        found = parse_header(bytes(wrong))
        assert isinstance(found, HeaderProblem), f"bit {bit}"
        assert found.fault is HeaderFault.DAMAGED, f"bit {bit}: {found}"


@pytest.mark.parametrize("length", [0, 7, 8, 63, 64, 95, 96, 4095])
def test_a_torn_header_is_damaged(length: int) -> None:
    """A header that ends early, or is zero from somewhere on, is damaged."""
    packed = _header().pack()
    for data in (packed[:length], packed[:length] + bytes(4096 - length)):
        if data != packed:
            found = parse_header(data)
            assert isinstance(found, HeaderProblem), length
            assert found.fault is HeaderFault.DAMAGED


def test_another_version_is_foreign() -> None:
    """A whole header of a later version is told from a damaged one, whatever follows byte 64."""
    later = bytearray(_header().pack())
    later[8:12] = struct.pack("<I", 2)
    later[64:320] = bytes(range(256))
    later[48:64] = bytes(16)
    later[48:64] = checksum(later)
    found = parse_header(bytes(later))
    assert isinstance(found, HeaderProblem)
    assert found.fault is HeaderFault.FOREIGN
    assert "2" in found.reason


@pytest.mark.parametrize(
    ("at", "value"), [(24, 9), (28, 0), (28, 200), (30, 7), (31, 2), (12, 8192)]
)
def test_a_header_that_contradicts_itself(at: int, value: int) -> None:
    """Sizes that cannot be, under a right checksum, are damage too, and no crash."""
    wrong = bytearray(_header().pack())
    struct.pack_into("<B" if at in (30, 31) else "<H", wrong, at, value)
    if at == 24:
        struct.pack_into("<I", wrong, at, 0xFFFFFFFF)
    wrong[48:64] = bytes(16)
    wrong[48:64] = checksum(wrong)
    found = parse_header(bytes(wrong))
    assert isinstance(found, HeaderProblem)
    assert found.fault is HeaderFault.DAMAGED


def test_what_cannot_be_packed() -> None:
    """A key or fingerprint that does not fit is an error of the caller."""
    with pytest.raises(StorageError, match="97"):
        _header(key=bytes(97)).pack()
    with pytest.raises(StorageError, match="32 digits"):
        ObjectHeader("ab", b"k", SlotKind.PAGE, 1, bytes(16), np.zeros(0, np.uint64)).pack()


def test_without_xxhash_a_page_store_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it is made, and not in a worker at the first page."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=8),), page_size=4)
    with pytest.raises(MissingDependencyError, match="pip install 'xxhash"):
        PageStore(MemoryBackend(), geometry)
