"""Which pages and states may leave the host, kept in order while they are used, held and moved.

A page may leave when it is on the host, was not chosen already, is neither leased nor pinned, and
no page behind it is on the host. A state may leave when it is there, not chosen, and its node is
neither leased nor pinned.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvferry.index.eviction import EvictionQueue, Policy
from kvferry.index.nodes import (
    NO_SLOT,
    QUEUED,
    STATE_QUEUED,
    STATE_TAKEN,
    TAKEN,
    NodeTable,
)

__all__ = ["HostOrder"]

# Pages of one call get few stamps, so that long prompts do not spread the queue over many buckets,
# but not one alone, so that no bucket is long.
_NODES_PER_STAMP: Final = 256


class HostOrder:
    """The queues of pages and of states, over the nodes of an index."""

    def __init__(self, nodes: NodeTable, policy: Policy) -> None:
        self._nodes = nodes
        self._policy = policy
        self._stamp = 0
        self.pages = EvictionQueue()
        self.states = EvictionQueue()

    def new_stamp(self) -> int:
        """A stamp that is later than all before."""
        self._stamp += 1
        return self._stamp

    def rank(self, node: int) -> int:
        """Where the policy puts the node, as it is now."""
        nodes = self._nodes
        return self._policy.rank(nodes.stamps[node], nodes.hits[node], nodes.priorities[node])

    def may_leave(self, node: int) -> bool:
        """Whether the node's page may be evicted, by what the columns say."""
        nodes = self._nodes
        return not (
            nodes.host_slots[node] == NO_SLOT
            or nodes.blockers[node]
            or nodes.leases[node]
            or nodes.pins[node]
            or nodes.flags[node] & TAKEN
        )

    def state_may_leave(self, node: int) -> bool:
        """The same for its state."""
        nodes = self._nodes
        return not (
            nodes.state_slots[node] == NO_SLOT
            or nodes.leases[node]
            or nodes.pins[node]
            or nodes.flags[node] & STATE_TAKEN
        )

    def enter(self, node: int) -> None:
        """Queue what of the node may leave and is not queued."""
        flags = self._nodes.flags
        if not flags[node] & QUEUED and self.may_leave(node):
            self.pages.add(self.rank(node), node)
            flags[node] |= QUEUED
        if not flags[node] & STATE_QUEUED and self.state_may_leave(node):
            self.states.add(self.rank(node), node)
            flags[node] |= STATE_QUEUED

    def withdraw_page(self, node: int) -> None:
        """Take the node's page out of the queue, if it is there."""
        flags = self._nodes.flags
        if flags[node] & QUEUED:
            self.pages.remove(self.rank(node), node)
            flags[node] &= ~QUEUED

    def withdraw_state(self, node: int) -> None:
        """Take the node's state out of the queue, if it is there."""
        flags = self._nodes.flags
        if flags[node] & STATE_QUEUED:
            self.states.remove(self.rank(node), node)
            flags[node] &= ~STATE_QUEUED

    def withdraw(self, node: int) -> None:
        """Both, before the node is held or its rank changes."""
        if self._nodes.flags[node] & (QUEUED | STATE_QUEUED):
            self.withdraw_page(node)
            self.withdraw_state(node)

    def block(self, node: int) -> None:
        """A page behind `node` came to the host, or was spared; `node` may be `NO_NODE`."""
        if node >= 0:
            self.withdraw_page(node)
            self._nodes.blockers[node] += 1

    def unblock(self, node: int) -> None:
        """A page behind `node` left the host, or was chosen to; `node` may be `NO_NODE`."""
        if node >= 0:
            blockers = self._nodes.blockers
            blockers[node] -= 1
            if not blockers[node]:
                self.enter(node)

    def hit(self, chain: list[int]) -> None:
        """Count a hit on each, and put them where the policy has them now; first page first."""
        nodes, restamps = self._nodes, self._policy.stamps_hits
        hits, flags, stamps = nodes.hits, nodes.flags, nodes.stamps
        stamp = self.new_stamp()
        # The last page first, and so with the oldest stamp: it is of no use without the others.
        for count, node in enumerate(reversed(chain), 1):
            is_queued = flags[node] & (QUEUED | STATE_QUEUED)
            if is_queued:
                self.withdraw(node)
            hits[node] += 1
            if restamps:
                if is_queued or not count % _NODES_PER_STAMP:
                    stamp = self.new_stamp()
                stamps[node] = stamp
            if is_queued:
                self.enter(node)

    def arrive(self, pages: Iterable[tuple[int, int]]) -> None:
        """Put pages, as (node, slot), on the host, the last of a chain first."""
        nodes = self._nodes
        stamp = self.new_stamp()
        for count, (node, slot) in enumerate(pages, 1):
            self.withdraw_state(node)
            nodes.host_slots[node] = slot
            if not nodes.blockers[node] or not count % _NODES_PER_STAMP:
                stamp = self.new_stamp()
            nodes.stamps[node] = stamp
            self.block(nodes.parents[node])
            self.enter(node)

    def take_pages(self, num_pages: int) -> list[int]:
        """Choose up to `num_pages` that leave, in order; each frees those before it to follow."""
        nodes, queue = self._nodes, self.pages
        flags, parents = nodes.flags, nodes.parents
        taken: list[int] = []
        while len(taken) < num_pages and len(queue):
            node = queue.pop()
            flags[node] = flags[node] & ~QUEUED | TAKEN
            taken.append(node)
            self.unblock(parents[node])
        return taken

    def take_states(self, num_states: int) -> list[int]:
        """Choose up to `num_states` that leave, in order."""
        flags, queue = self._nodes.flags, self.states
        taken: list[int] = []
        while len(taken) < num_states and len(queue):
            node = queue.pop()
            flags[node] = flags[node] & ~STATE_QUEUED | STATE_TAKEN
            taken.append(node)
        return taken
