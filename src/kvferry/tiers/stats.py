"""What the control plane holds at one moment, for people and for tests."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvferry.tiers.restore import leading
from kvferry.tiers.state import PageState
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.index import PrefixIndex
    from kvferry.tiers.control import Control
    from kvferry.tiers.link import LinkState

__all__ = ["LookUp", "TierStats", "backup_gaps", "look_up", "tier_stats"]


@dataclasses.dataclass(frozen=True)
class TierStats:
    """The control plane at one moment, in pages."""

    slots: Mapping[SlotKind, Mapping[PageState, int]]
    """How many host slots of each kind are in which state. PARKED ones belong to reads or stores
    whose result nobody wants, and come back when those return."""

    @property
    def num_parked(self) -> int:
        """Slots, of all kinds, that still belong to reads or stores that nobody waits for."""
        return sum(states[PageState.PARKED] for states in self.slots.values())

    readers: int
    """Loads and storage writes that read a host slot just now."""

    jobs: int
    """Commands without an answer."""

    waiting_for_storage: int
    writing_to_storage: int
    prefetches: int
    late_storage_jobs: int
    """Storage jobs that passed their deadline, so far."""

    worker_faults: int
    storage: LinkState
    breaker: str
    storage_trouble: str
    """Why storage is down, in words, and when it is tried again; empty if it is not."""

    transient_pages: int
    """Pages that failed their digest once and were right when read again."""

    listener_failures: int
    """How often metrics, or a subscriber of events, raised."""


def tier_stats(
    control: Control,
    *,
    waiting_for_storage: int,
    prefetches: int,
    worker_faults: int,
    transient_pages: int,
) -> TierStats:
    """What `control` holds now, with what its parts count themselves."""
    tiers, link = control.tiers, control.link
    return TierStats(
        slots={
            kind: {state: tier.ledger.count(state) for state in PageState}
            for kind, tier in tiers.items()
        },
        readers=sum(tier.ledger.num_readers for tier in tiers.values()),
        jobs=len(control.jobs),
        waiting_for_storage=waiting_for_storage,
        writing_to_storage=control.num_writing,
        prefetches=prefetches,
        late_storage_jobs=link.num_late,
        worker_faults=worker_faults,
        storage=link.state,
        breaker=link.breaker.state,
        storage_trouble=link.trouble,
        transient_pages=transient_pages,
        listener_failures=control.listeners.num_failures,
    )


def backup_gaps(control: Control) -> tuple[int, int]:
    """Pages of the host that storage lacks, and those that it has without all before them.

    The second are of no use after a restart. Checkpoints count as pages do.
    """
    index, hints = control.index, control.hints
    unstored = holes = 0
    if not control.options.writes_storage:  # what it has, another rank writes
        return 0, 0
    is_whole: dict[int, bool] = {}
    for kind, tier in control.tiers.items():
        for slot in tier.ledger.slots_in(PageState.RESIDENT):
            node = tier.ledger.node(slot)
            if not hints.is_stored(kind, node):
                unstored += 1
            elif kind is SlotKind.PAGE:
                holes += not _is_whole(index, node, is_whole)
    return unstored, holes


def _is_whole(index: PrefixIndex, node: int, known: dict[int, bool]) -> bool:
    """Whether storage has `node` and all before it; `known` are nodes that were looked at."""
    path = []
    while node >= 0 and node not in known:
        path.append(node)
        node = index.parent_of(node)
    whole = node < 0 or known[node]
    for one in reversed(path):
        whole = known[one] = whole and index.is_stored(one)
    return whole


@dataclasses.dataclass(frozen=True)
class LookUp:
    """What the control plane knows of a prompt, in pages from its first."""

    usable: int
    """Can be loaded."""

    present: int
    """Are on the host."""

    stored_hint: int
    """Are in storage, as far as is known."""

    first_unknown: int
    """Are known at all."""


def look_up(control: Control, keys: Sequence[bytes]) -> LookUp:
    """What is known of a prompt; changes nothing."""
    nodes = control.chain_nodes(keys)
    kind = control.kinds[0]
    return LookUp(
        usable=control.usable_on_host(nodes),
        present=leading(control.readable_pages(nodes)),
        stored_hint=leading([control.hints.is_stored(kind, node) for node in nodes]),
        first_unknown=len(nodes),
    )
