"""Everything out of the index at once, but for what is in flight."""

from __future__ import annotations

from typing import NamedTuple

from kvferry.index.host_order import HostOrder
from kvferry.index.nodes import NO_SLOT, STORED, NodeTable

__all__ = ["Dropped", "drop_unpinned"]


class Dropped(NamedTuple):
    """What a reset took out of an index."""

    host_slots: list[int]
    """Slots that no page has any more."""

    state_slots: list[int]
    num_stored: int
    """How many pages were known to be in storage; they still are there."""


def drop_unpinned(table: NodeTable, order: HostOrder) -> Dropped:
    """Drop every node that is not pinned and leads to none that is; leases must have ended."""
    host_slots: list[int] = []
    state_slots: list[int] = []
    num_stored = 0
    for node in table.node_of.values():
        order.withdraw(node)
        table.leases[node] = table.blockers[node] = 0
        table.flags[node] &= STORED
        if not table.pins[node]:
            num_stored += bool(table.flags[node])
            table.flags[node] = 0
            for column, taken in (
                (table.host_slots, host_slots),
                (table.state_slots, state_slots),
            ):
                if column[node] != NO_SLOT:
                    taken.append(column[node])
                    column[node] = NO_SLOT
    for node in list(table.node_of.values()):
        table.drop_useless(node)
    for node in table.node_of.values():
        if table.host_slots[node] != NO_SLOT:
            order.block(table.parents[node])
    return Dropped(host_slots, state_slots, num_stored)
