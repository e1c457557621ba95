"""Objects that are to go and cannot yet: somebody holds a lease on them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

__all__ = ["LeasedKeys"]

_MAX_KEYS = 1 << 16
_FIRST_SECS = 0.5
_LONGEST_SECS = 16.0


class LeasedKeys:
    """Keys whose removal is tried again, later each time. Bounded, oldest out; thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._due: collections.OrderedDict[bytes, tuple[float, float]] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: bytes) -> bool:
        return key in self._due

    def add(self, keys: Iterable[bytes]) -> None:
        """The removal of these was refused."""
        with self._lock:
            now = self._clock()
            for key in keys:
                self._due[key] = (now + _FIRST_SECS, _FIRST_SECS)
            while len(self._due) > _MAX_KEYS:
                self._due.popitem(last=False)

    def postpone(self, keys: Iterable[bytes]) -> None:
        """It was refused again. Those that were replaced meanwhile are left alone."""
        with self._lock:
            now = self._clock()
            for key in keys:
                if key in self._due:
                    wait = min(self._due[key][1] * 2, _LONGEST_SECS)
                    self._due[key] = (now + wait, wait)

    def discard(self, keys: Iterable[bytes]) -> None:
        """These are gone, or replaced."""
        with self._lock:
            for key in keys:
                self._due.pop(key, None)

    def hidden(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of `keys` are to count as removed."""
        with self._lock:
            return [key in self._due for key in keys]

    def due(self, most: int) -> list[bytes]:
        """Keys to try again now, `most` at most."""
        with self._lock:
            if not self._due:
                return []
            now = self._clock()
            return [key for key, (at, _) in self._due.items() if at <= now][:most]
