"""What a cache says that it did: one method for each thing, and a sink that listens to none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvferry.types import Direction, Tier

__all__ = ["MetricsSink", "NullMetrics"]


class MetricsSink(Protocol):
    """Takes note of what happens. Every method may be called on any thread, and none blocks."""

    @property
    def enabled(self) -> bool:
        """Whether anything is noted. If not, there is no need to work out what to say."""

    def transferred(
        self,
        direction: Direction,
        path: str,
        *,
        pages: int,
        num_bytes: int,
        tokens: int,
        seconds: float,
        ok: bool,
    ) -> None:
        """A transfer between device and host is over.

        Args:
            direction: A load counts as load back, a store as backup.
            path: As the handle names it.
            pages: How many it moved.
            num_bytes: Of all planes.
            tokens: In those pages.
            seconds: From its first to its last byte, by the GPU's clock.
            ok: It ended as it should. Of others only the failure is counted.
        """

    def routed(self, direction: Direction, mover: str, reason: str) -> None:
        """A plan is to be carried by `mover`, for that reason."""

    def matched(self, tokens_by_tier: Mapping[Tier, int], missed_tokens: int) -> None:
        """A prompt was looked up: how many of its tokens come from which tier, and from none."""

    def stored(self, tier: Tier, pages: int, num_bytes: int) -> None:
        """Pages are in `tier` now."""

    def dropped(self, reason: str, pages: int) -> None:
        """Pages that were to be stored are not, as there was no room, the queue was full…"""

    def evicted(self, tier: Tier, pages: int) -> None:
        """Pages were given up to make room."""

    def prefetched(self, outcome: str, pages: int, num_bytes: int, seconds: float) -> None:
        """A prefetch is over, well or not; `pages` came in `seconds` from its submission."""

    def digest_failed(self, tier: Tier, pages: int) -> None:
        """Pages from `tier` were not what was stored there."""

    def quarantined(self, tier: Tier, pages: int) -> None:
        """Pages of `tier` were put where nobody reads them."""

    def worker_fault(self, kind: str) -> None:
        """A worker met an error that it is not made for."""

    def storage_changed(self, state: str, *, usable: bool) -> None:
        """Storage is ``attached``, ``down``, ``back`` or ``detached`` from now on."""

    def occupancy(self, tier: Tier, used_pages: int, capacity_pages: int) -> None:
        """How full a tier is now."""

    def queue(self, name: str, depth: int) -> None:
        """How many jobs wait in a queue now."""

    def link(self, direction: Direction, gigabytes_per_second: float, busy_fraction: float) -> None:
        """What the link did lately, as `LinkMeter.read` tells it."""


class NullMetrics:
    """Metrics that are off: nothing is noted, allocated or imported."""

    enabled = False

    def transferred(
        self,
        direction: Direction,
        path: str,
        *,
        pages: int,
        num_bytes: int,
        tokens: int,
        seconds: float,
        ok: bool,
    ) -> None: ...

    def routed(self, direction: Direction, mover: str, reason: str) -> None: ...

    def matched(self, tokens_by_tier: Mapping[Tier, int], missed_tokens: int) -> None: ...

    def stored(self, tier: Tier, pages: int, num_bytes: int) -> None: ...

    def dropped(self, reason: str, pages: int) -> None: ...

    def evicted(self, tier: Tier, pages: int) -> None: ...

    def prefetched(self, outcome: str, pages: int, num_bytes: int, seconds: float) -> None: ...

    def digest_failed(self, tier: Tier, pages: int) -> None: ...

    def quarantined(self, tier: Tier, pages: int) -> None: ...

    def worker_fault(self, kind: str) -> None: ...

    def storage_changed(self, state: str, *, usable: bool) -> None: ...

    def occupancy(self, tier: Tier, used_pages: int, capacity_pages: int) -> None: ...

    def queue(self, name: str, depth: int) -> None: ...

    def link(
        self, direction: Direction, gigabytes_per_second: float, busy_fraction: float
    ) -> None: ...
