"""How fast the link is while it works, and how much of the time that is, by the GPU's clock."""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Iterable
from typing import NamedTuple

from kvferry.errors import MetricsError
from kvferry.types import Direction

__all__ = ["DEFAULT_WINDOW_SECS", "MAX_INTERVALS", "LinkMeter", "LinkReading"]

DEFAULT_WINDOW_SECS = 10.0

MAX_INTERVALS = 8192
"""How many transfers of a direction are remembered; with more, the window is shorter."""


class LinkReading(NamedTuple):
    """What the link did in one direction lately."""

    gigabytes_per_second: float
    """10⁹ bytes per second of busy time; 0 without any."""

    busy_fraction: float
    """Busy time over all time, 0 to 1."""

    window_secs: float
    """How much time this is about: less than asked for at the start, and after very many
    transfers."""


class LinkMeter:
    """Transfers as intervals of the GPU's clock, over a sliding window. Any thread may call it.

    Time in which two transfers of one direction overlap is busy once. Bytes of a transfer count
    in proportion to the part of it that lies in the window.

    Times are seconds since any moment that is the same for all calls. CUDA tells the time between
    two events as a 32-bit float of milliseconds, which after a day is coarser than most transfers:
    measure each event from a recent one, and add up in Python.

    Args:
        window_secs: How far back a reading looks.

    Raises:
        MetricsError: `window_secs` is not above 0.
    """

    def __init__(self, window_secs: float = DEFAULT_WINDOW_SECS) -> None:
        if not 0 < window_secs < math.inf:
            raise MetricsError(f"window_secs={window_secs!r} must be above 0, and finite")
        self._window_secs = float(window_secs)
        self._lock = threading.Lock()
        # One clock for both directions: it is that of the GPU.
        self._first: float | None = None
        self._latest = -math.inf
        # (end, begin, bytes), so that the heap gives up first what leaves the window first.
        self._intervals: dict[Direction, list[tuple[float, float, int]]] = {
            direction: [] for direction in Direction
        }
        self._forgotten_until = dict.fromkeys(Direction, -math.inf)

    def add(
        self, direction: Direction, num_bytes: int, begin_seconds: float, end_seconds: float
    ) -> None:
        """A transfer of `num_bytes` went from `begin_seconds` to `end_seconds`; in any order.

        Raises:
            MetricsError: It ends before it begins, has negative bytes, or a time is not finite.
        """
        finite = math.isfinite(begin_seconds) and math.isfinite(end_seconds)
        if not finite or end_seconds < begin_seconds or num_bytes < 0:
            raise MetricsError(
                f"{num_bytes} bytes from {begin_seconds!r} s to {end_seconds!r} s are no transfer: "
                f"give bytes from 0 on, and the times of its first and last event on one clock"
            )
        with self._lock:
            if self._first is None or begin_seconds < self._first:
                self._first = begin_seconds
            self._latest = max(self._latest, end_seconds)
            intervals = self._intervals[direction]
            heapq.heappush(intervals, (end_seconds, begin_seconds, num_bytes))
            while intervals[0][0] < self._latest - self._window_secs:
                heapq.heappop(intervals)
                if not intervals:
                    break
            if len(intervals) > MAX_INTERVALS:
                end, _, _ = heapq.heappop(intervals)
                self._forgotten_until[direction] = max(self._forgotten_until[direction], end)

    def read(self, direction: Direction, now_seconds: float | None = None) -> LinkReading:
        """Speed and busy fraction over the window that ends now.

        Args:
            direction: Which way.
            now_seconds: Now, by the GPU's clock. None: the end of the latest transfer in either
                direction, so that a link that rests reads as when it last worked.

        Raises:
            MetricsError: `now_seconds` is not finite.
        """
        with self._lock:
            now = self._latest if now_seconds is None else now_seconds
            first, intervals = self._first, list(self._intervals[direction])
            forgotten_until = self._forgotten_until[direction]
        if first is None:
            return LinkReading(0.0, 0.0, 0.0)
        if not math.isfinite(now):
            raise MetricsError(f"now_seconds={now!r} must be a finite time of the GPU's clock")
        begin = max(now - self._window_secs, first, forgotten_until)
        window = now - begin
        if window <= 0:
            return LinkReading(0.0, 0.0, 0.0)
        busy = _union((max(one, begin), min(end, now)) for end, one, _ in intervals)
        moved = math.fsum(
            num_bytes * _share(one, end, begin, now) for end, one, num_bytes in intervals
        )
        speed = moved / busy / 1e9 if busy > 0 else 0.0
        return LinkReading(speed, min(busy / window, 1.0), window)


def _share(begin: float, end: float, window_begin: float, window_end: float) -> float:
    """How much of an interval lies in the window, 0 to 1."""
    if end == begin:
        # Too short for the clock.
        return 1.0 if window_begin <= begin <= window_end else 0.0
    return max(min(end, window_end) - max(begin, window_begin), 0.0) / (end - begin)


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """The time that at least one interval covers; those that end before they begin cover none."""
    covered, until = [], -math.inf
    for begin, end in sorted(intervals):
        if end > max(begin, until):
            covered.append(end - max(begin, until))
            until = end
    return math.fsum(covered)
