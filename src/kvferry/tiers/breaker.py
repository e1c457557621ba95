"""A circuit breaker: a tier that keeps failing is left alone until it is seen to work again."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Breaker", "BreakerState"]


class BreakerState(enum.StrEnum):
    """Whether the tier is used."""

    CLOSED = "closed"
    """It is."""

    OPEN = "open"
    """It is not, for a while."""

    TRYING = "trying"
    """It is not yet: the while is over, and a trial of its own finds out whether it works again."""


class Breaker:
    """Opens after `failures` failures in a row; after each `seconds` a trial is due.

    No request is the trial: until one has succeeded, everybody else is refused at once.

    Args:
        failures: In a row, before it opens.
        seconds: How long it stays open.
        clock: Seconds that never go back.
    """

    def __init__(self, *, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._failures = failures
        self._seconds = seconds
        self._clock = clock
        self._in_a_row = 0
        self._opened_at: float | None = None
        self.times_opened = 0
        """How often it opened so far."""

    @property
    def state(self) -> BreakerState:
        """Closed, open or trying."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        if self._clock() - self._opened_at < self._seconds:
            return BreakerState.OPEN
        return BreakerState.TRYING

    @property
    def is_usable(self) -> bool:
        """Whether operations are let through."""
        return self._opened_at is None

    @property
    def num_failures(self) -> int:
        """Failures in a row, up to now."""
        return self._in_a_row

    @property
    def seconds_left(self) -> float:
        """Until a trial is due; 0 if it is, or if nothing has to be tried."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self._seconds - self._clock())

    def succeeded(self) -> None:
        """An operation did what it should."""
        self._in_a_row = 0
        self._opened_at = None

    def failed(self) -> None:
        """An operation failed, or did not come back in time."""
        self._in_a_row += 1
        if self._opened_at is not None or self._in_a_row >= self._failures:
            if self._opened_at is None:
                self.times_opened += 1
            self._opened_at = self._clock()
