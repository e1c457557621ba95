"""What one process knows of the pool: what it wrote, and what went wrong."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable

from kvferry.storage.base import StorageStats

__all__ = ["Books"]

_MAX_KEYS = 1 << 18


class Books:
    """Counts, and the objects that this process wrote and has not seen gone. Thread-safe.

    The pool is shared, so what it holds in all is the master's to tell. The oldest of more than
    `_MAX_KEYS` objects are no longer counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self._num_bytes = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._errors: collections.Counter[str] = collections.Counter()

    def wrote(self, key: bytes, num_bytes: int) -> None:
        """There is such an object now."""
        with self._lock:
            self._forget(key)
            self._sizes[key] = num_bytes
            self._num_bytes += num_bytes
            while len(self._sizes) > _MAX_KEYS:
                _, gone = self._sizes.popitem(last=False)
                self._num_bytes -= gone

    def gone(self, keys: Iterable[bytes]) -> None:
        """There are no such objects."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def count(self, **counts: int) -> None:
        """Add to counts."""
        with self._lock:
            self._counts.update(counts)

    def error(self, kind: str, times: int = 1) -> None:
        """Something went wrong."""
        with self._lock:
            self._errors[kind] += times

    def stats(self, **now: int) -> StorageStats:
        """All of it, with counts of this moment beside it."""
        with self._lock:
            counts = {
                name: number for name, number in self._counts.items() if name != "quarantined"
            }
            return StorageStats(
                objects=len(self._sizes),
                num_bytes=self._num_bytes,
                quarantined=self._counts["quarantined"],
                errors=dict(self._errors),
                counts={**counts, **now},
            )

    def _forget(self, key: bytes) -> None:
        self._num_bytes -= self._sizes.pop(key, 0)
