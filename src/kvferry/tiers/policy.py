"""When pages are stored, loaded and prefetched: what the user chooses, as pure decisions."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "HitCounter",
    "PrefetchPolicy",
    "Reason",
    "StorePolicy",
    "TierOptions",
    "Verify",
]


class StorePolicy(enum.StrEnum):
    """When pages go from the device to the host. None blocks the caller."""

    WRITE_THROUGH = "write_through"
    """As soon as they are offered."""

    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When they are offered again: the second time, unless told otherwise."""

    WRITE_BACK = "write_back"
    """When the engine is about to evict them."""


class PrefetchPolicy(enum.StrEnum):
    """How long a request waits for a prefetch."""

    BEST_EFFORT = "best_effort"
    """Not at all: what has come at the first look is used."""

    WAIT_COMPLETE = "wait_complete"
    """Until all has come, but never longer than the upper bound."""

    TIMEOUT = "timeout"
    """Until all has come, or a time that grows with the number of tokens is over."""


class Verify(enum.StrEnum):
    """What is checked."""

    ALWAYS = "always"
    """Digests on every store and load, and checksums in storage."""

    STORAGE = "storage"
    """Checksums in storage only."""

    OFF = "off"
    """Nothing."""


class Reason(enum.StrEnum):
    """Why something was not done, or was cut short. An expected outcome, never an exception."""

    NONE = ""
    SWITCHED_OFF = "switched_off"
    NO_WHOLE_PAGE = "no_whole_page"
    NOT_WRITTEN_BACK = "not_written_back"
    """The policy is write_back, and nobody said that these pages are about to be evicted."""

    TOO_FEW_HITS = "too_few_hits"
    ALREADY_HERE = "already_here"
    HOST_FULL = "host_full"
    """No page of the host tier may be evicted just now."""

    NOTHING_FOUND = "nothing_found"
    BELOW_THRESHOLD = "below_threshold"
    STALE_MATCH = "stale_match"
    UNALIGNED_SKIP = "unaligned_skip"
    """The caller's first missing token is inside a page, and pages are loaded whole."""

    NO_STATE_SLOTS = "no_state_slots"
    TRANSFER_FAILED = "transfer_failed"
    BAD_PAGES = "bad_pages"
    NO_STORAGE = "no_storage"
    STORAGE_DOWN = "storage_down"
    STORAGE_FAILED = "storage_failed"
    STORAGE_REFUSED = "storage_refused"
    QUEUE_FULL = "queue_full"
    MISSING = "missing"
    """Storage does not have the next page, or no longer."""

    CORRUPT = "corrupt"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    RESET = "reset"
    CLOSED = "closed"
    EVICTED = "evicted"
    EVICTED_UNSTORED = "evicted_unstored"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierOptions:
    """What the tier manager is told. Times in seconds, sizes in pages where no unit is named."""

    store_policy: StorePolicy = StorePolicy.WRITE_THROUGH
    selective_hits: int = 2
    max_queue_pages: int = 4096
    """The most pages that wait to be written to storage; more are skipped and counted."""

    writes_storage: bool = True
    """False for a rank whose bytes another rank writes too, as of planes that all ranks have."""

    load_threshold_tokens: int = 10
    prefetch: bool = True
    prefetch_policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    prefetch_threshold_tokens: int = 256
    timeout_base_secs: float = 1.0
    timeout_secs_per_1024_tokens: float = 0.25
    prefetch_max_secs: float = 60.0
    """The upper bound on every policy, and of a storage read before its slots are parked."""

    max_storage_hints: int = 1 << 20
    """Pages, and checkpoints, that storage is remembered to have; never fewer than twice the host's
    slots. A million are some 250 MB."""

    prefetch_budget_pages: int = 0
    """The most pages being read from storage at a time; 0: half of the host tier."""

    write_max_secs: float = 60.0
    """A storage write that takes longer counts as a failure of the backend."""

    batch_pages: int = 128
    max_batches: int = 4
    """Storage batches of each direction in flight."""

    breaker_failures: int = 3
    breaker_secs: float = 30.0
    lease_secs: float = 30.0
    """How long a match keeps its pages from being evicted."""

    miss_memory_secs: float = 5.0
    """How long a page that storage promised and did not have is not asked for again."""

    agree_timeout_secs: float = 10.0
    """How long ranks wait for each other."""

    verify: Verify = Verify.ALWAYS

    link_window_secs: float = 10.0
    """How far back the speed and busy fraction of the link to the device look."""

    def fetch_seconds(self, num_tokens: int) -> float:
        """How long a request may wait for the prefetch of `num_tokens` tokens, by the policy."""
        if self.prefetch_policy is PrefetchPolicy.BEST_EFFORT:
            return 0.0
        if self.prefetch_policy is PrefetchPolicy.WAIT_COMPLETE:
            return self.prefetch_max_secs
        wanted = self.timeout_base_secs + self.timeout_secs_per_1024_tokens * num_tokens / 1024
        return min(wanted, self.prefetch_max_secs)


class HitCounter:
    """How often pages were offered that are not kept yet. Bounded: the oldest are forgotten.

    Args:
        capacity: How many pages are remembered.
    """

    def __init__(self, capacity: int = 1 << 17) -> None:
        self._capacity = capacity
        self._hits: OrderedDict[bytes, int] = OrderedDict()

    def count(self, keys: Sequence[bytes], needed: int) -> int:
        """Count an offer of `keys`, a chain; how many of the first have come to `needed`."""
        enough = 0
        for position, key in enumerate(keys):
            hits = self._hits.pop(key, 0) + 1
            self._hits[key] = hits
            if hits >= needed and enough == position:
                enough += 1
        while len(self._hits) > self._capacity:
            self._hits.popitem(last=False)
        return enough

    def forget(self) -> None:
        """Start anew."""
        self._hits.clear()
