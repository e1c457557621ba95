"""What ranks promise, and the one collective that an agreement is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Collective", "Ranks"]


class Ranks(Protocol):
    """The processes, or threads, that carry one model replica; this is one of them.

    All ranks make the same calls in the same order, each from one thread.
    """

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def agree_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        """The smallest of each value over all ranks, the same list on every rank.

        Args:
            values: Integers of 64 bits, as many as on every other rank; may be empty.
            timeout: Seconds, more than 0 and at most a day, until all ranks must have come.

        After an error the ranks are broken: later calls raise at once, and new ranks have to be
        made. An agreement that fails on one rank may have been reached on another, which then
        learns of it in the next.

        Raises:
            RankMismatchError: Ranks brought different numbers of values, or are in different
                calls. All of them raise it, with the same text.
            RankTimeoutError: A rank did not come in time.
            RankError: A rank is dead, has closed, gave up or brought what is no value; or these
                ranks are broken, closed, or in use by another thread.
            ConfigError: `values` or `timeout` of this very rank are wrong.
        """

    def close(self) -> None:
        """Take no more part; a second call does nothing."""


class Collective(Protocol):
    """The operation that ranks meet in. Give one to `AgreedRanks` to join ranks by other means."""

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        """The smallest of each value over all ranks; all bring equally many of 64 bits.

        Must end within `timeout` seconds, or soon after. Where it fails on one rank it should fail
        on the others too, at once if that can be had. Raises RankError, or RankTimeoutError.
        """

    def close(self) -> None:
        """Take no more part; a second call does nothing."""
