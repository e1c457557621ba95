"""What the control plane tells of the link to the device: how fast it was lately, and how busy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvferry.metrics import LinkMeter
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.metrics import MetricsSink

__all__ = ["DeviceLink"]

# A reading walks over all transfers of the window, which is too much for every step of an engine.
_READINGS_A_WINDOW = 20


class DeviceLink:
    """Takes note of transfers that are over, and tells `metrics` of the link a few times a window.

    What begins and ends by the GPU's clock is told by transfers. How long the link has rested since
    the last of them is told by `clock`.

    Args:
        metrics: That are on.
        window_secs: How far back a reading looks.
        clock: Seconds that never go back.
    """

    def __init__(
        self, metrics: MetricsSink, *, window_secs: float, clock: Callable[[], float]
    ) -> None:
        self._metrics = metrics
        self._meter = LinkMeter(window_secs)
        self._clock = clock
        self._every_secs = window_secs / _READINGS_A_WINDOW
        self._told = -math.inf
        self._latest: tuple[float, float] | None = None

    def add(self, direction: Direction, num_bytes: int, link_seconds: tuple[float, float]) -> None:
        """A transfer was on the link, from and to these seconds of the GPU's clock."""
        begin, end = link_seconds
        self._meter.add(direction, num_bytes, begin, end)
        if self._latest is None or end > self._latest[0]:
            self._latest = end, self._clock()

    def tell(self) -> None:
        """Tell `metrics`, unless nothing was ever moved, or it was told just now."""
        if self._latest is None:
            return
        now = self._clock()
        if now - self._told < self._every_secs:
            return
        self._told = now
        end, seen = self._latest
        for direction in Direction:
            reading = self._meter.read(direction, end + now - seen)
            self._metrics.link(direction, reading.gigabytes_per_second, reading.busy_fraction)
