"""One prefetch: which pages it is after, what became of each, and when it is over."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvferry.tiers.handles import FetchResult, TierHandle
from kvferry.tiers.policy import Reason
from kvferry.tiers.work import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.index import Lease
    from kvferry.tiers.handles import Pump
    from kvferry.tiers.prefetch import Prefetch

__all__ = ["Fetch", "FetchHandle", "FetchStage", "PageFetch"]


class FetchStage(enum.StrEnum):
    """Where a prefetch stands."""

    PROBING = "probing"
    """Storage is asked what it has."""

    READING = "reading"
    """Pages are read, or wait for budget or room in the queue."""

    OVER = "over"


class PageFetch(enum.IntEnum):
    """What became of one page of a prefetch."""

    WANTED = 0
    READING = 1
    ELSEWHERE = 2
    """A store, or another prefetch, is bringing it."""

    READ = 3
    """Its bytes are in its slot; it is published when all before it are."""

    HERE = 4
    FAILED = 5


class Fetch(Work):
    """One prefetch, as `Prefetch` keeps it."""

    def __init__(self, keys: Sequence[bytes], start: int) -> None:
        super().__init__()
        self.keys = keys
        """Of all whole pages of the prompt."""

        self.start = start
        """Pages that were on the host when it was submitted."""

        self.submitted_at = 0.0
        self.look_deadline = 0.0
        self.hard_deadline = 0.0
        self.stage = FetchStage.OVER
        self.pages: list[PageFetch] = []
        """Of each page from `start` on that storage has."""

        self.slots: dict[int, int] = {}
        """Position to host slot, of those being read or read."""

        self.statuses_left = 0
        """Answers to reads and probes that are still to come."""

        self.state_page: int | None = None
        """Position of the page whose checkpoint is fetched, if one is needed."""

        self.state_fetch = PageFetch.HERE
        self.state_slot = -1
        self.states_found: list[bool] = []
        """By position: whether storage has a checkpoint."""

        self.leases: list[Lease] = []
        self.num_fetched = 0
        """How many pages it has brought so far; every one of them is whole."""

        self.num_bytes = 0
        self.end = start
        """Pages known to be in storage, from the first on: what is worth waiting for."""


class FetchHandle(TierHandle):
    """Pages on their way from storage to the host.

    `look` asks whether the request may go on, by the policy, and ends the prefetch where it says
    so; `cancel` ends it at once. What is being read then is thrown away when it comes.
    """

    _work: Fetch

    def __init__(self, fetch: Fetch, pump: Pump, desk: Prefetch) -> None:
        super().__init__(fetch, pump)
        self._desk = desk

    @property
    def num_pages(self) -> int:
        """How many pages it has brought so far; every one of them is whole."""
        return self._work.num_fetched

    def look(self) -> FetchResult | None:
        """What has come, if the policy says that the request goes on; None: wait some more."""
        return self._desk.look(self._work)

    def result(self) -> FetchResult:
        """What has come by now; ends nothing."""
        return self._desk.result(self._work)

    def cancel(self) -> FetchResult:
        """End it now. Safe at any time, and again."""
        self._desk.stop(self._work, Reason.CANCELLED)
        return self._desk.result(self._work)
