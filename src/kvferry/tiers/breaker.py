"""A circuit breaker: a tier that keeps failing is left alone for a while."""

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
    """The while is over, and one operation finds out whether it works again."""


class Breaker:
    """Opens after `failures` failures in a row, for `seconds`; then lets one operation try.

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
        self._trial_at: float | None = None
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

    def is_usable(self) -> bool:
        """Whether an operation would be let through; takes nothing."""
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.TRYING and not self._is_tried()
        )

    def admit(self) -> bool:
        """Ask to start an operation. While trying, one at a time is let through."""
        if not self.is_usable():
            return False
        if self._opened_at is not None:
            self._trial_at = self._clock()
        return True

    def succeeded(self) -> None:
        """An operation did what it should."""
        self._in_a_row = 0
        self._opened_at = self._trial_at = None

    def failed(self) -> None:
        """An operation failed, or did not come back in time."""
        self._in_a_row += 1
        if self._opened_at is not None or self._in_a_row >= self._failures:
            if self._opened_at is None:
                self.times_opened += 1
            self._opened_at = self._clock()
            self._trial_at = None

    def _is_tried(self) -> bool:
        # A trial that never comes back must not keep the tier away for ever.
        return self._trial_at is not None and self._clock() - self._trial_at < self._seconds
