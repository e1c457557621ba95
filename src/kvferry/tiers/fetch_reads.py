"""What a prefetch does next: which pages are read now, which may be published, when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.tiers.fetch import PageFetch
from kvferry.tiers.policy import Reason
from kvferry.tiers.state import NO_NODE, Actor, PageState
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.tiers.control import Control
    from kvferry.tiers.fetch import Fetch
    from kvferry.tiers.prefetch import Prefetch

__all__ = ["FetchReads"]


class FetchReads:
    """Takes prefetches from one answer to the next.

    Args:
        control: What all parts share.
        desk: Sends reads, and ends prefetches.
    """

    def __init__(self, control: Control, desk: Prefetch) -> None:
        self._control = control
        self._desk = desk

    def advance(self, fetch: Fetch) -> None:
        """Publish what may be, start what can be, and end what is over."""
        self._settle_elsewhere(fetch)
        self._publish(fetch)
        hole = _first(fetch.pages, PageFetch.FAILED)
        if hole is None and not fetch.reason:
            self._start_reads(fetch)
        if self._is_over(fetch, hole):
            is_all = fetch.end == len(fetch.keys)
            self._desk.stop(fetch, fetch.reason or (Reason.NONE if is_all else Reason.MISSING))

    @staticmethod
    def _is_over(fetch: Fetch, hole: int | None) -> bool:
        # What is on its way behind a hole is not waited for.
        before = fetch.pages if hole is None else fetch.pages[:hole]
        if PageFetch.READING in before or PageFetch.ELSEWHERE in before:
            return False
        if hole is None and fetch.state_fetch is PageFetch.READING:
            return False
        if fetch.reason:
            return True
        return PageFetch.WANTED not in before and fetch.state_fetch is PageFetch.HERE

    def _settle_elsewhere(self, fetch: Fetch) -> None:
        control = self._control
        tier = control.tiers.get(SlotKind.PAGE)
        for position, page in enumerate(fetch.pages):
            if page is not PageFetch.ELSEWHERE or tier is None:
                continue
            node = control.index.node_of(fetch.keys[fetch.start + position])
            if node is not None and tier.is_readable(node):
                fetch.pages[position] = PageFetch.HERE
            elif node is None or not tier.is_filling(node):
                fetch.pages[position] = PageFetch.WANTED

    def _publish(self, fetch: Fetch) -> None:
        control = self._control
        whole = []
        for position, page in enumerate(fetch.pages):
            if page is PageFetch.READ:
                whole.append(fetch.slots.pop(position))
                fetch.pages[position] = PageFetch.HERE
            elif page is not PageFetch.HERE:
                break
        published = control.tiers[SlotKind.PAGE].publish(whole, Actor.READ) if whole else []
        fetch.num_fetched += len(published)
        if published:
            control.hints.note(SlotKind.PAGE, map(control.index.key_of, published))
            self._desk.hold(fetch, published)
            control.tell_loaded(Tier.STORAGE, published)
            control.tell_stored(Tier.HOST, SlotKind.PAGE, published)
        if fetch.state_fetch is PageFetch.READ and all(
            page is PageFetch.HERE for page in fetch.pages
        ):
            nodes = control.tiers[SlotKind.STATE].publish([fetch.state_slot], Actor.READ)
            fetch.state_slot, fetch.state_fetch = -1, PageFetch.HERE
            control.hints.note(SlotKind.STATE, map(control.index.key_of, nodes))
            control.tell_stored(Tier.HOST, SlotKind.STATE, nodes)

    def _budget(self) -> int:
        control = self._control
        tier = control.tiers.get(SlotKind.PAGE)
        if tier is None:
            return 0
        limit = control.options.prefetch_budget_pages or max(1, tier.num_slots // 2)
        return limit - tier.ledger.count(PageState.FETCHING)

    def _start_reads(self, fetch: Fetch) -> None:
        control = self._control
        while self._desk.num_batches < control.options.max_batches:
            if control.link.refusal():
                return
            position = _first(fetch.pages, PageFetch.WANTED)
            if position is None:
                break
            if not self._read_pages(fetch, position):
                return
        if fetch.state_fetch is PageFetch.WANTED and self._desk.num_batches < (
            control.options.max_batches
        ):
            self._read_state(fetch)

    def _read_pages(self, fetch: Fetch, first: int) -> bool:
        """Start one batch at position `first`; whether to look for the next."""
        control = self._control
        room = min(control.options.batch_pages, self._budget())
        if room <= 0:
            return False  # asked again at the next tick
        stop = first
        while stop < len(fetch.pages) and stop - first < room:
            if fetch.pages[stop] is not PageFetch.WANTED:
                break
            stop += 1
        begin = fetch.start + first
        parent = control.index.node_of(fetch.keys[begin - 1]) if begin else NO_NODE
        if parent is None:  # nothing holds the page before any more
            begin, parent = 0, NO_NODE
        nodes = control.index.insert(fetch.keys[begin : fetch.start + stop], first_parent=parent)
        control.index.pin(nodes)
        try:
            return self._read_nodes(fetch, first, nodes[fetch.start + first - begin :])
        finally:
            control.index.unpin(nodes)
            control.index.forget(nodes[::-1])

    def _read_nodes(self, fetch: Fetch, first: int, nodes: list[int]) -> bool:
        control = self._control
        tier = control.tiers[SlotKind.PAGE]
        wanted: dict[int, int] = {}
        for position, node in enumerate(nodes, start=first):
            if tier.slot_of(node) >= 0:
                fetch.pages[position] = PageFetch.HERE
            elif tier.is_filling(node):
                fetch.pages[position] = PageFetch.ELSEWHERE
            else:
                wanted[position] = node
        if not wanted:
            return True
        if control.link.refusal():
            return False
        slots = tier.reserve(list(wanted.values()), PageState.FETCHING)
        if len(slots) < len(wanted) and not control.num_writing:
            fetch.reason = fetch.reason or Reason.HOST_FULL
        positions = list(wanted)[: len(slots)]
        for position, slot in zip(positions, slots, strict=True):
            fetch.pages[position] = PageFetch.READING
            fetch.slots[position] = slot
        if slots:
            self._desk.send(fetch, SlotKind.PAGE, positions, slots)
        # Short of room, with pages on their way to storage that will make some: asked again then.
        return len(slots) == len(wanted)

    def _read_state(self, fetch: Fetch) -> None:
        control, tier = self._control, self._control.tiers[SlotKind.STATE]
        page = fetch.state_page
        if page is None:
            return
        nodes = control.index.insert(fetch.keys[: page + 1])
        control.index.pin(nodes)
        try:
            if tier.slot_of(nodes[-1]) >= 0:
                fetch.state_fetch = PageFetch.HERE
            elif not tier.is_filling(nodes[-1]) and not control.link.refusal():
                slots = tier.reserve(nodes[-1:], PageState.FETCHING)
                if not slots:
                    if not control.num_writing:
                        fetch.reason = fetch.reason or Reason.HOST_FULL
                    return
                fetch.state_slot, fetch.state_fetch = slots[0], PageFetch.READING
                self._desk.send(fetch, SlotKind.STATE, [page - fetch.start], slots)
        finally:
            control.index.unpin(nodes)
            control.index.forget(nodes[::-1])


def _first(pages: Sequence[PageFetch], what: PageFetch) -> int | None:
    return next((position for position, page in enumerate(pages) if page is what), None)
