"""The bytes in front of every stored page: what it is, whose it is, and what proves it whole.

`docs/storage-format.md` describes each byte. All numbers are little-endian. The first 64 bytes mean
the same in every version, so a reader can tell a damaged header from one of another version.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import MissingDependencyError, StorageError
from kvferry.storage.base import key_complaint
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "CHECKSUM_BYTES",
    "FORMAT_VERSION",
    "HEADER_ALIGNMENT",
    "MAGIC",
    "HeaderFault",
    "HeaderProblem",
    "ObjectHeader",
    "checksum",
    "header_bytes",
    "new_checksum",
    "parse_header",
]

MAGIC = b"\x89KVFERRY"
FORMAT_VERSION = 1

HEADER_ALIGNMENT = 4096
"""A header is padded to a multiple of this, so that what follows it suits direct I/O."""

CHECKSUM_BYTES = 16

# magic, version, header bytes, payload bytes, digests, key bytes, kind, checksum's algorithm,
# checksum of the payload, checksum of the header
_FIXED = struct.Struct("<8sIIQIHBB16s16s")
_FINGERPRINT_BYTES = 32
_KEY_AT = _FIXED.size + _FINGERPRINT_BYTES
_HEADER_SUM_AT = _FIXED.size - CHECKSUM_BYTES
_DIGEST_BYTES = 8
_XXH3_128 = 1
_MAX_HEADER_BYTES = 1 << 24

_CODE_OF = {SlotKind.PAGE: 1, SlotKind.STATE: 2}
_KIND_OF = {code: kind for kind, code in _CODE_OF.items()}


class HeaderFault(enum.StrEnum):
    """What is wrong with a header."""

    DAMAGED = "damaged"
    """No header, or not the bytes that were written."""

    FOREIGN = "foreign"
    """Whole, and of another version of this format."""


@dataclasses.dataclass(frozen=True)
class HeaderProblem:
    """Why there is no `ObjectHeader`."""

    fault: HeaderFault
    reason: str


@dataclasses.dataclass(frozen=True)
class ObjectHeader:
    """What a header says. Shape of `digests`: ``[spans]``."""

    fingerprint: str
    key: bytes
    kind: SlotKind
    payload_bytes: int
    payload_checksum: bytes
    digests: NDArray[np.uint64]

    @property
    def num_bytes(self) -> int:
        """The length of the packed header, padding counted."""
        return header_bytes(len(self.key), len(self.digests))

    def pack(self) -> bytes:
        """The header as it is stored; StorageError for a field that does not fit."""
        fingerprint = self.fingerprint.encode("ascii")
        complaint = key_complaint(self.key)
        if len(fingerprint) != _FINGERPRINT_BYTES:
            complaint = f"a fingerprint has {_FINGERPRINT_BYTES} digits, not {len(fingerprint)}"
        if len(self.payload_checksum) != CHECKSUM_BYTES:
            complaint = f"a checksum has 16 bytes, not {len(self.payload_checksum)}"
        if complaint:
            raise StorageError(f"no header can be made: {complaint}")
        packed = bytearray(self.num_bytes)
        _FIXED.pack_into(
            packed,
            0,
            MAGIC,
            FORMAT_VERSION,
            len(packed),
            self.payload_bytes,
            len(self.digests),
            len(self.key),
            _CODE_OF[self.kind],
            _XXH3_128,
            self.payload_checksum,
            bytes(CHECKSUM_BYTES),
        )
        packed[_FIXED.size : _KEY_AT] = fingerprint
        packed[_KEY_AT : _KEY_AT + len(self.key)] = self.key
        digests = np.ascontiguousarray(self.digests, dtype="<u8").tobytes()
        at = _digests_at(len(self.key))
        packed[at : at + len(digests)] = digests
        packed[_HEADER_SUM_AT : _FIXED.size] = checksum(packed)
        return bytes(packed)


def checksum(*parts: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128 of `parts`, one after another, in its canonical (big-endian) form.

    Raises MissingDependencyError without xxhash.
    """
    # Unlike the call in one step, `update` releases the interpreter lock for what is large.
    state = new_checksum()
    for part in parts:
        state.update(part)
    found: bytes = state.digest()
    return found


def new_checksum() -> Any:
    """One to be fed with `update`. Raises MissingDependencyError where xxhash is not installed.

    A cache without storage does without xxhash, as on a machine where nothing can be installed.
    """
    try:
        import xxhash
    except ImportError as absent:
        raise MissingDependencyError(
            "xxhash is not installed, and storage checks every page by it: "
            "pip install 'xxhash>=3.5', or use the cache without storage"
        ) from absent
    return xxhash.xxh3_128()


def header_bytes(key_bytes: int, num_digests: int) -> int:
    """The length of a header, a multiple of `HEADER_ALIGNMENT`."""
    used = _digests_at(key_bytes) + num_digests * _DIGEST_BYTES
    return -(-used // HEADER_ALIGNMENT) * HEADER_ALIGNMENT


def parse_header(data: bytes) -> ObjectHeader | HeaderProblem:
    """What the header at the start of `data` says; `data` may go on behind it."""
    if len(data) < _KEY_AT or data[: len(MAGIC)] != MAGIC:
        return _damaged("it does not begin like one of kvferry's")
    (_, version, length, payload_bytes, num_digests, key_bytes, code, algorithm, payload_sum,
     header_sum) = _FIXED.unpack_from(data)  # fmt: skip
    if not HEADER_ALIGNMENT <= length <= min(len(data), _MAX_HEADER_BYTES):
        return _damaged(f"a header of {length} bytes in {len(data)}")
    blank = bytearray(data[:length])
    blank[_HEADER_SUM_AT : _FIXED.size] = bytes(CHECKSUM_BYTES)
    if checksum(blank) != header_sum:
        return _damaged("its header has another checksum than it says")
    if version != FORMAT_VERSION:
        told = f"format version {version}, and this is {FORMAT_VERSION}"
        return HeaderProblem(HeaderFault.FOREIGN, told)
    kind = _KIND_OF.get(code)
    if (
        kind is None
        or algorithm != _XXH3_128
        or length != header_bytes(key_bytes, num_digests)
        or key_complaint(bytes(key_bytes))
    ):
        return _damaged("its header contradicts itself")
    at = _digests_at(key_bytes)
    return ObjectHeader(
        fingerprint=data[_FIXED.size : _KEY_AT].decode("ascii", "replace"),
        key=bytes(data[_KEY_AT : _KEY_AT + key_bytes]),
        kind=kind,
        payload_bytes=payload_bytes,
        payload_checksum=payload_sum,
        digests=np.frombuffer(data, "<u8", num_digests, at).astype(np.uint64),
    )


def _damaged(reason: str) -> HeaderProblem:
    return HeaderProblem(HeaderFault.DAMAGED, reason)


def _digests_at(key_bytes: int) -> int:
    return -(-(_KEY_AT + key_bytes) // _DIGEST_BYTES) * _DIGEST_BYTES
