"""Keys that a backend says it has and then has not: not asked for again for a while."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

__all__ = ["MissingKeys"]

_MAX_KEYS = 1 << 16


class MissingKeys:
    """Bounded; the oldest go first. Thread-safe."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._until: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def add(self, keys: Iterable[bytes]) -> None:
        """These were not there, whatever the backend says."""
        with self._lock:
            until = self._clock() + self._seconds
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > _MAX_KEYS:
                self._until.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        """These were written."""
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def unknown(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` may be asked for."""
        with self._lock:
            if not self._until:
                return [True] * len(keys)
            now = self._clock()
            return [self._until.get(key, now) <= now for key in keys]
