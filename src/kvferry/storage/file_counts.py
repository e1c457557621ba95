"""What the file backend counts, from any thread."""

from __future__ import annotations

import collections
import threading

__all__ = ["FileCounts"]


class FileCounts:
    """Counts by name; see `FileBackend.stats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()
        self._errors: collections.Counter[str] = collections.Counter()
        self._evicted = self._evicted_bytes = 0

    def add(self, name: str, count: int = 1) -> None:
        """Something happened `count` times."""
        with self._lock:
            self._counts[name] += count

    def error(self, kind: str) -> None:
        """Something went wrong."""
        with self._lock:
            self._errors[kind] += 1

    def evicted(self, num_bytes: int) -> None:
        """An object of `num_bytes` was removed to make room."""
        with self._lock:
            self._evicted += 1
            self._evicted_bytes += num_bytes

    def of(self, name: str) -> int:
        """How often something happened."""
        with self._lock:
            return self._counts[name]

    def told(self) -> tuple[dict[str, int], dict[str, int], int, int]:
        """(counts, errors, objects evicted, bytes of them)."""
        with self._lock:
            return dict(self._counts), dict(self._errors), self._evicted, self._evicted_bytes
