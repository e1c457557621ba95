"""When the bytes of transfers were on the link, by the GPU's own clock."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from kvferry.errors import DriverError
from kvferry.kernels.jit import Event, Stream
from kvferry.transfer.closing import close_all

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = ["RENEW_SECS", "LinkClock", "LinkInterval"]

_logger = logging.getLogger(__name__)

RENEW_SECS = 1.0
"""How old an anchor may become: at this age half a step of a 32-bit float is 0.06 µs."""


class _Anchor:
    """An event that was reached before any that is measured from it."""

    def __init__(self, event: Event, seconds: float) -> None:
        self.event = event
        self.seconds = seconds
        self.num_users = 0


class LinkClock:
    """Notes when transfers of one engine begin and end. The context must be current for all calls.

    The driver tells the time between two events as a 32-bit float of milliseconds, which after an
    hour is coarser than most transfers. So each is measured from an anchor that was reached lately,
    anchors one from another, and the sum is made here.

    Seconds count from that moment at which `time.monotonic` was 0 when the clock was made, so that
    those of several engines of a GPU can be compared. They go on by the GPU's clock.

    Args:
        context: Of the GPU.

    Raises:
        DriverError: The driver refused; nothing is left behind.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.RLock()  # transfers end on any thread
        self._events: list[Event] = []
        self._spare: list[Event] = []
        self._next: Event | None = None
        self._stream = Stream(context)
        try:
            first = self._event()
            first.record(self._stream.handle)
            self._stream.drain()  # it is empty: this is over at once
        except BaseException:
            self.close()
            raise
        self._renewed = time.monotonic()
        self._anchor = _Anchor(first, self._renewed)

    def interval(self) -> LinkInterval:
        """For a transfer that is about to be submitted; raises DriverError."""
        with self._lock:
            self._renew()
            return LinkInterval(self, self._anchor, self._event(), self._event())

    def _event(self) -> Event:
        if self._spare:
            return self._spare.pop()
        made = Event(self._context, timed=True)
        self._events.append(made)
        return made

    def _renew(self) -> None:
        """Take a younger anchor, once it is known to be reached: what comes now is behind it."""
        now = time.monotonic()
        if self._next is None:
            if now - self._renewed >= RENEW_SECS:
                event = self._event()
                event.record(self._stream.handle)
                self._next, self._renewed = event, now
        elif self._next.reached:
            event, self._next = self._next, None
            old = self._anchor
            self._anchor = _Anchor(event, old.seconds + event.seconds_since(old.event))
            self._let_go(old)

    def _let_go(self, anchor: _Anchor) -> None:
        if anchor is not self._anchor and not anchor.num_users:
            self._spare.append(anchor.event)

    def give_back(self, anchor: _Anchor, *events: Event) -> None:
        """An interval is over with its anchor and events."""
        with self._lock:
            self._spare.extend(events)
            anchor.num_users -= 1
            self._let_go(anchor)

    def close(self) -> None:
        """Destroy stream and events; no transfer may use one any more."""
        self._spare.clear()
        close_all((*self._events, self._stream))
        self._events.clear()


class LinkInterval:
    """From before the first byte of a transfer to behind its last. Made by `LinkClock.interval`."""

    def __init__(self, clock: LinkClock, anchor: _Anchor, first: Event, last: Event) -> None:
        self._clock = clock
        self._anchor = anchor
        self.first, self.last = first, last
        self._has_begun = self._is_over = False
        anchor.num_users += 1

    def begin(self, stream: Stream) -> None:
        """The first byte is next in `stream`. Only the first call counts."""
        if not self._has_begun:
            self.first.record(stream.handle)
            self._has_begun = True

    def begun(self) -> None:
        """`first` was recorded where the first byte was next in its stream."""
        self._has_begun = True

    def end(self, stream: Stream) -> None:
        """The last byte is before this in `stream`; once `last` is reached, `take` may be called.

        A transfer that never began, as it has no pages, begins here.
        """
        self.begin(stream)
        self.last.record(stream.handle)

    def take(self, *, whole: bool) -> tuple[float, float] | None:
        """Begin and end in seconds of the clock, and give the events back; the second time None.

        Args:
            whole: The transfer went through to its end; of others there is nothing to tell.
        """
        if self._is_over:
            return None
        self._is_over = True
        told = None
        if whole:
            try:
                begin = self._anchor.seconds + self.first.seconds_since(self._anchor.event)
                told = begin, begin + max(self.last.seconds_since(self.first), 0.0)
            except DriverError as refused:
                # The bytes are there all the same.
                _logger.warning("the driver does not say how long a transfer took: %s", refused)
        self._clock.give_back(self._anchor, self.first, self.last)
        return told
