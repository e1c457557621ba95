"""The index against itself: each column against what the others say it must be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvferry.errors import PrefixIndexError
from kvferry.index.eviction import EvictionQueue
from kvferry.index.host_order import HostOrder
from kvferry.index.leases import Lease
from kvferry.index.nodes import (
    NO_NODE,
    NO_SLOT,
    QUEUED,
    STATE_QUEUED,
    STATE_TAKEN,
    STORED,
    TAKEN,
    NodeTable,
)

__all__ = ["check_counts", "check_leases", "check_nodes"]


def check_nodes(table: NodeTable, order: HostOrder) -> None:
    """PrefixIndexError for the first key, link, count, slot or queue that is not as it must be."""
    alive = _check_places(table)
    _check_links(table, alive)
    for node in alive:
        for what in ("pins", "leases", "hits"):
            if getattr(table, what)[node] < 0:
                raise _wrong(node, what, getattr(table, what)[node], "0 or more")
        flags = table.flags[node]
        for taken, slots in ((TAKEN, table.host_slots), (STATE_TAKEN, table.state_slots)):
            if flags & taken and slots[node] == NO_SLOT:
                raise _wrong(node, "its place", "nowhere", "on the host until it is cleared")
        _expect(node, "queued page", bool(flags & QUEUED), order.may_leave(node))
        _expect(node, "queued state", bool(flags & STATE_QUEUED), order.state_may_leave(node))
    _check_queue(order.pages, order, [node for node in alive if order.may_leave(node)])
    _check_queue(order.states, order, [node for node in alive if order.state_may_leave(node)])


def check_leases(table: NodeTable, leases: Sequence[Lease]) -> None:
    """PrefixIndexError where a node's count is not that of the leases that are out."""
    counts = Counter(node for lease in leases for node in lease.nodes)
    table.check(list(counts))
    for node in table.node_of.values():
        _expect(node, "leases", table.leases[node], counts[node])


def check_counts(table: NodeTable, on_host: int, states: int, stored: int) -> None:
    """PrefixIndexError where a total is not the sum over the nodes."""
    nodes = list(table.node_of.values())
    for what, counted, found in (
        ("pages on the host", on_host, sum(table.host_slots[node] != NO_SLOT for node in nodes)),
        ("states", states, sum(table.state_slots[node] != NO_SLOT for node in nodes)),
        ("stored pages", stored, sum(bool(table.flags[node] & STORED) for node in nodes)),
    ):
        if counted != found:
            raise PrefixIndexError(f"{counted} {what} were counted, and there are {found}")


def _check_places(table: NodeTable) -> list[int]:
    """Every place is a node under its key, or free and empty; returns the nodes."""
    alive = [node for node in range(table.num_places) if table.exists(node)]
    free = table.free_places()
    if sorted([*alive, *free]) != list(range(table.num_places)):
        raise PrefixIndexError("the free places are not those that have no node, each once")
    if len(table) != len(alive):
        raise PrefixIndexError(f"{len(table)} keys stand for {len(alive)} nodes")
    for node in alive:
        if table.node_of.get(table.keys[node]) != node:
            raise PrefixIndexError(f"node {node} is not what its key stands for")
    for node in free:
        left: tuple[Any, ...] = (
            *(table.keys[node], table.children[node], table.blockers[node]),
            *(table.pins[node], table.leases[node], table.flags[node]),
            *(table.host_slots[node] - NO_SLOT, table.state_slots[node] - NO_SLOT),
        )
        if any(left):
            raise PrefixIndexError(f"free place {node} is not empty: {left}")
    for what, slots in (("host", table.host_slots), ("state", table.state_slots)):
        twice = _first_twice(slots[node] for node in alive if slots[node] != NO_SLOT)
        if twice is not None:
            raise PrefixIndexError(f"{what} slot {twice} belongs to two nodes")
    return alive


def _check_links(table: NodeTable, alive: list[int]) -> None:
    """Parents exist, chains end at a first page, and children are counted."""
    children: Counter[int] = Counter()
    blockers: Counter[int] = Counter()
    for node in alive:
        parent = table.parents[node]
        if parent != NO_NODE and not table.exists(parent):
            raise _wrong(node, "parent", parent, "a node")
        children[parent] += 1
        if table.host_slots[node] != NO_SLOT and not table.flags[node] & TAKEN:
            blockers[parent] += 1
    ends_well = {NO_NODE}
    for node in alive:
        path: list[int] = []
        while node not in ends_well:
            path.append(node)
            if len(path) > len(alive):
                raise PrefixIndexError(f"the pages before node {node} go round in a circle")
            node = table.parents[node]
        ends_well.update(path)
    for node in alive:
        _expect(node, "children", table.children[node], children[node])
        _expect(node, "blockers", table.blockers[node], blockers[node])


def _check_queue(queue: EvictionQueue, order: HostOrder, nodes: list[int]) -> None:
    entries = list(queue)
    if entries != sorted(entries) or len(entries) != len(queue):
        raise PrefixIndexError("the eviction queue is out of order")
    if entries != sorted((order.rank(node), node) for node in nodes):
        raise PrefixIndexError(
            "the eviction queue is not that of the pages that may leave, by their ranks of today"
        )


def _first_twice(numbers: Iterable[int]) -> int | None:
    seen: set[int] = set()
    for number in numbers:
        if number in seen:
            return number
        seen.add(number)
    return None


def _expect(node: int, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise _wrong(node, what, found, wanted)


def _wrong(node: int, what: str, found: object, wanted: object) -> PrefixIndexError:
    return PrefixIndexError(f"node {node}: {what} is {found}, and must be {wanted}")
