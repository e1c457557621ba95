"""What the parts of the control plane share: books, options, and who is told of what happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.events import (
    PagesEvicted,
    PagesLoaded,
    PagesQuarantined,
    PagesStored,
    StorageChanged,
    chains_of,
)
from kvferry.metrics import Listeners
from kvferry.tiers.device_link import DeviceLink
from kvferry.tiers.hints import StorageHints
from kvferry.tiers.state import Actor
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvferry.events import EventLog
    from kvferry.geometry import Geometry
    from kvferry.index import PrefixIndex
    from kvferry.metrics import MetricsSink
    from kvferry.switches import Switches
    from kvferry.tiers.commands import Moved
    from kvferry.tiers.handles import Pump
    from kvferry.tiers.host_tier import HostTier
    from kvferry.tiers.jobs import Jobs
    from kvferry.tiers.link import StorageLink
    from kvferry.tiers.policy import TierOptions
    from kvferry.tiers.restore import RestoreRule
    from kvferry.types import Direction

__all__ = ["Control"]

_NO_NODE = -1


class Control:
    """The shared state of one control plane. Belongs to one thread."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        rule: RestoreRule,
        index: PrefixIndex,
        tiers: Mapping[SlotKind, HostTier],
        options: TierOptions,
        switches: Switches,
        jobs: Jobs,
        link: StorageLink,
        metrics: MetricsSink,
        events: EventLog,
        clock: Callable[[], float],
        pump: Pump,
    ) -> None:
        self.geometry = geometry
        self.rule = rule
        self.index = index
        self.tiers = tiers
        self.options = options
        self.switches = switches
        self.jobs = jobs
        self.link = link
        most_slots = max((tier.num_slots for tier in tiers.values()), default=0)
        self.hints = StorageHints(index, max(options.max_storage_hints, 2 * most_slots))
        self.listeners = Listeners()
        self.metrics = metrics = self.listeners.guard(metrics)
        self.events = events
        self.clock = clock
        self.pump = pump
        self.life = 0
        """Goes up with every reset."""

        self.num_writing = 0
        """Pages and checkpoints that are being written to storage: room may come when they are."""

        self.closed = False
        self._device_link = (
            DeviceLink(metrics, window_secs=options.link_window_secs, clock=clock)
            if metrics.enabled
            else None
        )

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way here, nothing ends by itself, and nobody notes levels."""
        stirring = self.jobs or self.index.num_leases or self.link.is_trial_due
        return not stirring and self._device_link is None

    @property
    def kinds(self) -> tuple[SlotKind, ...]:
        """The kinds of slots that the geometry has."""
        return tuple(self.tiers)

    @property
    def page_size(self) -> int:
        """P, in tokens."""
        return self.geometry.page_size

    # ---------------------------------------------------------------- nodes

    def readable_pages(self, nodes: Sequence[int]) -> list[bool]:
        """Whether each of `nodes` is on the host as a page; all, where there are no pages."""
        tier = self.tiers.get(SlotKind.PAGE)
        if tier is None:
            return [True] * len(nodes)
        return [tier.is_readable(node) for node in nodes]

    def readable_states(self, nodes: Sequence[int]) -> list[bool]:
        """Whether each of `nodes` has a checkpoint on the host; empty where there are none."""
        tier = self.tiers.get(SlotKind.STATE)
        if tier is None:
            return []
        return [tier.is_readable(node) for node in nodes]

    def usable_on_host(self, nodes: Sequence[int]) -> int:
        """How many leading pages can be loaded."""
        if self.rule.is_monotone:
            return self.first_suspect(nodes, self.index.host_prefix(nodes))
        return self.rule.usable_pages(self.readable_pages(nodes), self.readable_states(nodes))

    def first_suspect(self, nodes: Sequence[int], limit: int) -> int:
        """How many of the first `limit` pages come before one whose bytes are in doubt."""
        suspects = self.tiers[SlotKind.PAGE].suspects
        if not suspects:  # nearly always: no walk over all pages then
            return limit
        return next((page for page in range(limit) if nodes[page] in suspects), limit)

    def chain_nodes(self, keys: Sequence[bytes]) -> list[int]:
        """The nodes of the longest known prefix of `keys`."""
        return self.index.match(keys).nodes

    def evicted(self, kind: SlotKind, node: int) -> None:
        """A page or checkpoint was given up for room."""
        if kind is SlotKind.PAGE:
            states = self.tiers.get(SlotKind.STATE)
            if states is not None and states.slot_of(node) >= 0:
                states.drop(node, Actor.EVICTION)
            self.tell_evicted(Tier.HOST, [node])
        self.index.forget([node])

    # ---------------------------------------------------------------- storage

    def judge(self, generation: int, *, ok: bool, why: str = "") -> None:
        """An operation on storage is over; tells where that takes the tier away or brings it back.

        Args:
            generation: Of the attachment that it went to.
            ok: It did what it should. That storage says what it has is no proof: it may know that
                by heart.
            why: What it said, where not.
        """
        link = self.link
        was = link.breaker.is_usable
        link.judge(generation, ok=ok, why=why)
        if link.breaker.is_usable is not was:
            self.tell_storage("down" if was else "back", link.trouble)

    # ---------------------------------------------------------------- telling

    def tell_storage(self, state: str, reason: str = "") -> None:
        """The tier came, went, failed or is back."""
        self.metrics.storage_changed(state, usable=state in ("attached", "back"))
        if self.events.active:
            self.events.record(StorageChanged(state=state, reason=reason))

    def _pages(self, nodes: Iterable[int]) -> list[tuple[bytes, bytes | None]]:
        pages = []
        for node in nodes:
            parent = self.index.parent_of(node)
            parent_key = None if parent == _NO_NODE else self.index.key_of(parent)
            pages.append((self.index.key_of(node), parent_key))
        return pages

    def tell_moved(self, direction: Direction, kind: SlotKind, pages: int, done: Moved) -> None:
        """A transfer of `pages` pages or checkpoints is over."""
        if self._device_link is None:
            return
        self.metrics.transferred(
            direction,
            done.path,
            pages=pages,
            num_bytes=done.num_bytes,
            tokens=pages * self.page_size if kind is SlotKind.PAGE else 0,
            seconds=done.seconds,
            ok=not done.error,
        )
        if done.mover:
            self.metrics.routed(direction, done.mover, done.route_reason)
        if done.link_seconds is not None:  # of one that failed there are none
            self._device_link.add(direction, done.num_bytes, done.link_seconds)

    def tell_levels(self) -> None:
        """How full, how long and how busy things are now."""
        if self._device_link is None:
            return
        pages = self.tiers.get(SlotKind.PAGE)
        if pages is not None:
            self.metrics.occupancy(Tier.HOST, pages.num_in_use, pages.num_slots)
        self.metrics.queue("jobs", len(self.jobs))
        self._device_link.tell()

    def tell_stored(self, tier: Tier, kind: SlotKind, nodes: Sequence[int]) -> None:
        """`nodes` are in `tier` now."""
        if not nodes:
            return
        self.metrics.stored(tier, len(nodes), len(nodes) * self.geometry.slot_bytes(kind))
        if kind is SlotKind.PAGE and self.events.active:
            for chain in chains_of(self._pages(nodes)):
                self.events.record(
                    PagesStored(keys=chain.keys, parent_key=chain.parent_key, tier=tier)
                )

    def tell_loaded(self, tier: Tier, nodes: Sequence[int]) -> None:
        """`nodes` were brought up from `tier`."""
        if nodes and self.events.active:
            for chain in chains_of(self._pages(nodes)):
                self.events.record(
                    PagesLoaded(keys=chain.keys, parent_key=chain.parent_key, tier=tier)
                )

    def tell_evicted(self, tier: Tier, nodes: Sequence[int], reason: str = "capacity") -> None:
        """`nodes` are in `tier` no more."""
        if not nodes:
            return
        self.metrics.evicted(tier, len(nodes))
        if self.events.active:
            for chain in chains_of(self._pages(nodes)):
                self.events.record(
                    PagesEvicted(
                        keys=chain.keys, parent_key=chain.parent_key, tier=tier, reason=reason
                    )
                )

    def tell_quarantined(
        self, tier: Tier, kind: SlotKind, nodes: Sequence[int], reason: str
    ) -> None:
        """`nodes` had wrong bytes in `tier`."""
        if not nodes:
            return
        self.metrics.quarantined(tier, len(nodes))
        if kind is SlotKind.PAGE and self.events.active:
            for chain in chains_of(self._pages(nodes)):
                self.events.record(
                    PagesQuarantined(
                        keys=chain.keys, parent_key=chain.parent_key, tier=tier, reason=reason
                    )
                )
