"""Times work by the GPU's own clock, so that the CPU's time to submit it is not in the figure."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.errors import DriverError, TransferTimeoutError
from kvferry.kernels.jit import Event, Stream

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = ["PATIENCE_SECS", "GpuClock"]

PATIENCE_SECS = 10.0
"""How long one piece of work may take; a hundred times what the slowest link needs."""


class GpuClock:
    """A stream with two events that note the time. The context must be current.

    Args:
        context: Of the GPU.
        delay: Work that keeps the stream busy while what is timed is submitted behind it.
    """

    def __init__(self, context: Context, delay: Callable[[Stream], None]) -> None:
        self._delay = delay
        self.stream = Stream(context)
        self._events: list[Event] = []
        try:
            self._events += [Event(context, timed=True)]
            self._events += [Event(context, timed=True)]
        except BaseException:
            self.close()
            raise

    def seconds(self, work: Callable[[Stream], None], *, repeats: int) -> float:
        """How long `work` takes in the stream: the median of `repeats` times, after a first one.

        Raises:
            DriverError: The driver refused, the work failed, or it took no time.
            TransferTimeoutError: It is not over after `PATIENCE_SECS`.
        """
        begin, end = self._events
        found = []
        for _ in range(1 + repeats):
            self._delay(self.stream)
            begin.record(self.stream.handle)
            work(self.stream)
            end.record(self.stream.handle)
            self._wait(end)
            found.append(end.seconds_since(begin))
        # The first one warms up what there is to warm: page tables, instructions, clock rates.
        median = statistics.median(found[1:])
        if median <= 0:
            raise DriverError(
                f"the GPU's clock went on by {median:g} s during a copy; look for another version "
                f"of the driver, and until then do without calibration"
            )
        return median

    def settle(self) -> None:
        """Wait until all in the stream is over; raises as `seconds`."""
        end = self._events[-1]
        end.record(self.stream.handle)
        self._wait(end)

    def _wait(self, event: Event) -> None:
        deadline = time.monotonic() + PATIENCE_SECS
        while not event.reached:
            if time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"work of the calibration is not over after {PATIENCE_SECS:g} s on a GPU that "
                    f"should need milliseconds: look at what else runs there (nvidia-smi), and "
                    f"run kvferry calibrate on an idle GPU"
                )
            os.sched_yield()

    def close(self) -> None:
        """Destroy stream and events."""
        for event in self._events:
            event.close()
        self.stream.close()
