"""What every storage backend is: batches in, one result an item out, nothing raised for one.

A backend keeps *objects*: a key and some bytes. It knows nothing of pages, headers or digests;
`PageStore` does. Bytes are gathered from, and scattered into, memory that the caller owns.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvferry.errors import StorageError

__all__ = [
    "INTERFACE_VERSION",
    "MAX_KEY_BYTES",
    "Buffers",
    "ItemResult",
    "ItemStatus",
    "StorageBackend",
    "StorageStats",
    "check_batch",
    "key_complaint",
    "total_bytes",
]

INTERFACE_VERSION = 1
"""Goes up when a backend written for the old interface would no longer do."""

MAX_KEY_BYTES = 96
"""Longer keys are refused everywhere: in hex they still fit into any file system's names."""

Buffers = Sequence[tuple[int, int]]
"""(address, length in bytes) pairs, gathered or scattered in this order."""


class ItemStatus(enum.StrEnum):
    """What became of one item of a batch."""

    OK = "ok"

    MISS = "miss"
    """There is no such object."""

    CORRUPT = "corrupt"
    """There is one, and it is not what was asked for: damaged, or of another length."""

    REFUSED = "refused"
    """It could not be kept, and nothing is broken: full, read-only, too large, a bad key."""

    FAILED = "failed"
    """Something is broken; `ItemResult.reason` says what."""


class ItemResult(NamedTuple):
    """One item's outcome."""

    status: ItemStatus
    num_bytes: int = 0
    """The object's length where the status is OK, else 0."""

    reason: str = ""
    """Why it is not OK, in words; empty for a plain miss."""

    @property
    def ok(self) -> bool:
        """Whether the object was read, written or removed."""
        return self.status is ItemStatus.OK


@dataclasses.dataclass(frozen=True)
class StorageStats:
    """A backend at one moment. Counts are since it was opened, sizes are in bytes."""

    objects: int
    num_bytes: int
    """All that counts against the capacity: objects, and what is being written."""

    capacity_bytes: int | None = None
    """None: without a bound of its own."""

    evicted: int = 0
    evicted_bytes: int = 0
    quarantined: int = 0
    errors: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """What went wrong, by kind."""

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """What this backend alone can tell."""


class StorageBackend(abc.ABC):
    """Keeps objects under keys. Thread-safe; every call blocks until its batch is done.

    A call returns one result a key, in the order of the keys, and raises nothing for an item: not
    for a key that is too long, a full disk, or damage. `StorageError` is for arguments that do not
    fit together. Memory given to `read_into` belongs to that call until it returns, and afterwards
    no byte of it is written; what it holds after a result that is not OK is undefined. `read_into`
    writes to the buffers alone, `write_from` only reads them.
    """

    interface_version = INTERFACE_VERSION

    @abc.abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are. A read may still miss: another one may evict in between."""

    @abc.abstractmethod
    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Scatter each object into its buffers.

        An object whose length is not exactly the sum of its buffers' is CORRUPT.
        """

    @abc.abstractmethod
    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Gather each object from its buffers and publish it, whole or not at all.

        A key that has an object already is OK, and either object may be kept: equal keys mean
        equal content.
        """

    @abc.abstractmethod
    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove objects; MISS where there is none."""

    @abc.abstractmethod
    def stats(self) -> StorageStats:
        """What is kept, and what happened since the backend was opened."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back what the backend holds; again does nothing.

        Calls after it find nothing and keep nothing: False, MISS, FAILED or REFUSED.
        """

    def register_memory(self, address: int, num_bytes: int) -> bool:  # noqa: ARG002
        """Many objects will be read and written in this memory: whether it is used in place now.

        For backends whose library must know memory, and may pin it, before it moves bytes there
        without a copy. It may take as long as that does. Calls with other memory work as before.
        Raises nothing; False where it makes no difference, or was not possible.
        """
        return False

    def unregister_memory(self, address: int) -> None:  # noqa: B027  most backends have nothing to do
        """The memory registered from `address` on will be freed; no call uses it any more."""

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Take damaged objects out of service; a backend may keep them aside for inspection."""
        return self.delete(keys)


def total_bytes(buffers: Buffers) -> int:
    """The length of an object in `buffers`."""
    return sum(length for _, length in buffers)


def check_batch(keys: Sequence[bytes], buffers: Sequence[object]) -> None:
    """Raise StorageError unless there is one entry of `buffers` for each key."""
    if len(keys) != len(buffers):
        raise StorageError(
            f"{len(keys)} keys and {len(buffers)} entries beside them: give one for each key"
        )


def key_complaint(key: bytes) -> str:
    """Why no backend takes `key`; empty if it is one."""
    if not isinstance(key, bytes):
        return f"a key is bytes, not {type(key).__name__}"
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        return f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}"
    return ""
