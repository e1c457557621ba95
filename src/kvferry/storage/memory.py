"""Objects in this process's memory: bounded, least recently used first out."""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import ConfigError
from kvferry.storage.base import (
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
    StorageStats,
    check_batch,
    key_complaint,
    total_bytes,
)
from kvferry.storage.raw_memory import copy_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MemoryBackend"]

_CLOSED = ItemResult(ItemStatus.FAILED, reason="the backend is closed")
_MISS = ItemResult(ItemStatus.MISS)


class MemoryBackend(StorageBackend):
    """Keeps at most `capacity_bytes` of objects; None: as many as there is memory for.

    For tests, and for objects shared by caches of one process. Raises ConfigError for a capacity
    below 1.
    """

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        if capacity_bytes is not None and capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes={capacity_bytes}: give at least 1, or None")
        self._capacity_bytes = capacity_bytes
        # An array is never changed once it is in here, so copies need no lock.
        self._objects: collections.OrderedDict[bytes, NDArray[np.uint8]] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._evicted = self._evicted_bytes = self._quarantined = 0
        self._closed = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are."""
        with self._lock:
            return [key in self._objects for key in keys]

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Scatter each object into its buffers."""
        check_batch(keys, buffers)
        return [self._read(key, into) for key, into in zip(keys, buffers, strict=True)]

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Copy each object from its buffers; the oldest go when it does not fit."""
        check_batch(keys, buffers)
        return [self._write(key, source) for key, source in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Drop objects."""
        with self._lock:
            return [self._drop(key) for key in keys]

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Drop damaged objects, and count them."""
        results = self.delete(keys)
        with self._lock:
            self._quarantined += sum(result.ok for result in results)
        return results

    def stats(self) -> StorageStats:
        """What is kept, and what happened."""
        with self._lock:
            return StorageStats(
                objects=len(self._objects),
                num_bytes=self._num_bytes,
                capacity_bytes=self._capacity_bytes,
                evicted=self._evicted,
                evicted_bytes=self._evicted_bytes,
                quarantined=self._quarantined,
            )

    def close(self) -> None:
        """Drop everything."""
        with self._lock:
            self._closed = True
            self._objects.clear()
            self._num_bytes = 0

    def _read(self, key: bytes, buffers: Buffers) -> ItemResult:
        with self._lock:
            kept = self._objects.get(key)
            if kept is None:
                return _MISS
            self._objects.move_to_end(key)
        asked = total_bytes(buffers)
        if kept.size != asked:
            reason = f"the object has {kept.size} bytes, and {asked} were asked for"
            return ItemResult(ItemStatus.CORRUPT, reason=reason)
        at = int(kept.ctypes.data)
        for address, length in buffers:
            copy_bytes(address, at, length)
            at += length
        return ItemResult(ItemStatus.OK, asked)

    def _write(self, key: bytes, buffers: Buffers) -> ItemResult:
        complaint = key_complaint(key)
        size = total_bytes(buffers)
        if self._capacity_bytes is not None and size > self._capacity_bytes:
            complaint = f"{size} bytes do not fit into a capacity of {self._capacity_bytes}"
        if size == 0:
            complaint = "an object has at least one byte"
        if complaint:
            return ItemResult(ItemStatus.REFUSED, reason=complaint)
        if self.contains([key]) == [True]:
            return ItemResult(ItemStatus.OK, size)
        kept: NDArray[np.uint8] = np.empty(size, dtype=np.uint8)
        at = int(kept.ctypes.data)
        for address, length in buffers:
            copy_bytes(at, address, length)
            at += length
        with self._lock:
            if self._closed:
                return _CLOSED
            self._drop(key)  # Another thread was faster; the later one stays.
            while self._capacity_bytes is not None and (
                self._num_bytes + size > self._capacity_bytes
            ):
                _, victim = self._objects.popitem(last=False)
                self._num_bytes -= victim.size
                self._evicted += 1
                self._evicted_bytes += victim.size
            self._objects[key] = kept
            self._num_bytes += size
        return ItemResult(ItemStatus.OK, size)

    def _drop(self, key: bytes) -> ItemResult:
        found = self._objects.pop(key, None)
        if found is None:
            return _MISS
        self._num_bytes -= found.size
        return ItemResult(ItemStatus.OK, found.size)
