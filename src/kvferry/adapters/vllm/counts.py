"""What the control plane did since it was last asked, as numbers that can be added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.types import Direction, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COUNTS", "StepCounts"]

COUNTS: Mapping[str, str] = {
    "loaded_tokens": "tokens loaded from the host tier into vLLM's blocks",
    "loaded_bytes": "bytes of these, of all ranks",
    "stored_tokens": "tokens stored from vLLM's blocks to the host tier",
    "stored_bytes": "bytes of these, of all ranks",
    "failed_transfers": "loads and stores that failed",
    "host_hit_tokens": "tokens of prompts that the host tier had, each time one was looked up",
    "missed_tokens": "tokens of prompts that no tier was known to have",
    "fetched_pages": "pages brought from storage to the host tier",
    "written_pages": "pages written to storage",
    "evicted_pages": "pages that left the host tier to make room",
    "dropped_pages": "pages that were to be kept and are not",
    "bad_pages": "pages that were not what was stored",
    "worker_faults": "errors of storage threads",
}
"""Everything that is counted."""


class StepCounts:
    """A metrics sink that only adds up. Belongs to the thread of the control plane."""

    enabled = True

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def _add(self, name: str, amount: float) -> None:
        if amount:
            self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """The counts since the last time; those that are zero are left out."""
        taken, self._counts = self._counts, {}
        return taken

    def transferred(
        self,
        direction: Direction,
        path: str,  # noqa: ARG002
        *,
        pages: int,  # noqa: ARG002
        num_bytes: int,
        tokens: int,
        seconds: float,  # noqa: ARG002
        ok: bool,
    ) -> None:
        """See `MetricsSink.transferred`."""
        if not ok:
            self._add("failed_transfers", 1)
            return
        what = "loaded" if direction is Direction.LOAD else "stored"
        self._add(f"{what}_tokens", tokens)
        self._add(f"{what}_bytes", num_bytes)

    def routed(self, direction: Direction, mover: str, reason: str) -> None:
        """Nothing: routes are planned in the workers."""

    def matched(self, tokens_by_tier: Mapping[Tier, int], missed_tokens: int) -> None:
        """See `MetricsSink.matched`."""
        self._add("host_hit_tokens", tokens_by_tier.get(Tier.HOST, 0))
        self._add("missed_tokens", missed_tokens)

    def stored(self, tier: Tier, pages: int, num_bytes: int) -> None:  # noqa: ARG002
        """See `MetricsSink.stored`."""
        if tier is Tier.STORAGE:
            self._add("written_pages", pages)

    def dropped(self, reason: str, pages: int) -> None:  # noqa: ARG002
        """See `MetricsSink.dropped`."""
        self._add("dropped_pages", pages)

    def evicted(self, tier: Tier, pages: int) -> None:
        """See `MetricsSink.evicted`."""
        if tier is Tier.HOST:
            self._add("evicted_pages", pages)

    def prefetched(self, outcome: str, pages: int, num_bytes: int, seconds: float) -> None:  # noqa: ARG002
        """See `MetricsSink.prefetched`."""
        self._add("fetched_pages", pages)

    def digest_failed(self, tier: Tier, pages: int) -> None:  # noqa: ARG002
        """See `MetricsSink.digest_failed`."""
        self._add("bad_pages", pages)

    def quarantined(self, tier: Tier, pages: int) -> None:
        """Nothing: such pages were counted when they failed."""

    def worker_fault(self, kind: str) -> None:  # noqa: ARG002
        """See `MetricsSink.worker_fault`."""
        self._add("worker_faults", 1)

    def storage_changed(self, state: str, *, usable: bool) -> None:
        """Nothing: what is lost by it is counted as dropped, or not fetched."""

    def occupancy(self, tier: Tier, used_pages: int, capacity_pages: int) -> None:
        """Nothing: a level is no count."""

    def queue(self, name: str, depth: int) -> None:
        """Nothing: a level is no count."""

    def link(self, direction: Direction, gigabytes_per_second: float, busy_fraction: float) -> None:
        """Nothing: the link is in the workers."""
