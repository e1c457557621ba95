"""The time of a fake GPU: what work costs there is the test's to say."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple


class Work(NamedTuple):
    """Something that a stream carried out."""

    kind: str
    """``copy``, ``rows`` or the name of a kernel."""
    to_device: bool
    num_bytes: int
    width: int = 0
    """Of a row."""
    blocks: int = 0
    """Of a launch."""


class FakeTime:
    """Seconds that pass while work is carried out, and only then."""

    def __init__(self) -> None:
        self.cost: Callable[[Work], float] = lambda _: 0.0
        """What work takes, in seconds."""
        self.done: list[Work] = []
        """What was carried out, in order."""
        self.seconds = 0.0
        self._timed: set[int] = set()
        self._reached_at: dict[int, float] = {}

    def spend(self, work: Work) -> None:
        """It was carried out."""
        self.done.append(work)
        self.seconds += self.cost(work)

    def watch(self, event: int) -> None:
        """`event` is one that notes the time."""
        self._timed.add(event)

    def reach(self, event: int) -> None:
        """`event` is reached now."""
        if event in self._timed:
            self._reached_at[event] = self.seconds

    def between(self, earlier: int, later: int) -> float | None:
        """Milliseconds between two events, with 32 bits; None: one of them has no time."""
        if not {earlier, later} <= self._reached_at.keys():
            return None
        return ctypes.c_float((self._reached_at[later] - self._reached_at[earlier]) * 1e3).value
