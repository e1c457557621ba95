"""What pages there are, which tiers hold each, and which are the next to leave the host.

The index knows keys, slots and uses, and neither bytes nor tokens. It belongs to one thread, and no
call waits for anything. What a call costs depends on the pages that it is about, never on how many
others there are; ``check_integrity`` and ``reset`` alone walk over all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.index.eviction import EvictionPolicyName, policy_called
from kvferry.index.host_order import HostOrder
from kvferry.index.integrity import check_counts, check_leases, check_nodes
from kvferry.index.leases import Lease, LeaseBook
from kvferry.index.node_checks import (
    MAX_INT32,
    check_arriving,
    check_chain,
    check_leaving,
    check_pinned,
    checked_int32,
)
from kvferry.index.nodes import NO_NODE, NO_SLOT, STATE_TAKEN, STORED, TAKEN, NodeTable
from kvferry.index.reset import Dropped, drop_unpinned
from kvferry.types import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Match", "PrefixIndex"]


class Match(NamedTuple):
    """What an index knows of a prompt."""

    nodes: list[int]
    """The leading known pages."""

    num_on_host: int
    """How many of these, from the first on, are on the host."""

    num_held: int
    """How many, from the first on, are on the host or, as far as is known, in storage."""


class PrefixIndex:
    """Pages by their chained keys. A node is a number that stands for a page.

    A node keeps its number until it is forgotten; another page may have the number then. Who keeps
    one from call to call holds it by a lease or a pin. Calls that take nodes raise PrefixIndexError
    for one that does not exist, and every call does all it was asked for, or raises and changes
    nothing. Chains of nodes are given first page first.

    Args:
        policy: Which page leaves the host first; see `EvictionPolicyName`.
        clock: The time in seconds, for leases; it must not go back.

    Raises:
        ConfigError: There is no such policy.
    """

    def __init__(
        self,
        *,
        policy: str = EvictionPolicyName.LRU,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._nodes = NodeTable()
        self._order = HostOrder(self._nodes, policy_called(policy))
        self._leases = LeaseBook(self._nodes, self._order)
        self._num_on_host = 0
        self._num_states = 0
        self._num_stored = 0

    # ------------------------------------------------------------------------------- pages

    @property
    def num_nodes(self) -> int:
        """How many pages are known."""
        return len(self._nodes)

    @property
    def num_on_host(self) -> int:
        """How many pages are on the host."""
        return self._num_on_host

    @property
    def num_states(self) -> int:
        """How many states are on the host."""
        return self._num_states

    @property
    def num_stored(self) -> int:
        """How many pages are, as far as is known, in storage."""
        return self._num_stored

    @property
    def num_leases(self) -> int:
        """How many leases are out."""
        return len(self._leases)

    @property
    def num_expired(self) -> int:
        """How many leases ended because their time was up, so far."""
        return self._leases.num_expired

    def match(self, keys: Sequence[bytes]) -> Match:
        """The leading pages that are known. Changes neither order nor counts."""
        nodes = self._nodes.leading(keys)
        on_host = held = self._host_prefix(nodes)
        slots, flags = self._nodes.host_slots, self._nodes.flags
        while held < len(nodes) and (flags[nodes[held]] & STORED or slots[nodes[held]] != NO_SLOT):
            held += 1
        return Match(nodes, on_host, held)

    def node_of(self, key: bytes) -> int | None:
        """The page with this key; None if it is not known."""
        return self._nodes.node_of.get(key)

    def key_of(self, node: int) -> bytes:
        """The key of a page."""
        self._nodes.check((node,))
        return self._nodes.keys[node]

    def parent_of(self, node: int) -> int:
        """The page before; -1 for a first page."""
        self._nodes.check((node,))
        return self._nodes.parents[node]

    def hits_of(self, node: int) -> int:
        """How often `touch` was called for the page since it is known."""
        self._nodes.check((node,))
        return self._nodes.hits[node]

    def insert(
        self, keys: Sequence[bytes], *, first_parent: int = NO_NODE, priority: int = 0
    ) -> list[int]:
        """Make pages known, in no tier yet; those that are known already stay as they are.

        Args:
            keys: Of neighbouring pages.
            first_parent: The page before the first of them; -1 if it is the first of its prompt.
            priority: For the policy of that name. A known page keeps the higher one.

        Returns:
            The node of each key.

        Raises:
            PrefixIndexError: A key is known behind another page, comes twice or is no bytes: keys
                of a chain were hashed from another start, or put together by hand.
        """
        nodes = self._nodes
        priority = checked_int32("priority", priority, -MAX_INT32)
        chain = check_chain(nodes, keys, first_parent)
        new = keys[len(chain) :]
        for node in chain:
            if nodes.priorities[node] < priority:
                self._order.withdraw(node)
                nodes.priorities[node] = priority
                self._order.enter(node)
        parent = chain[-1] if chain else first_parent
        stamp = self._order.new_stamp()
        for key in new:
            parent = nodes.add(key, parent, stamp, priority)
            chain.append(parent)
        return chain

    def touch(self, nodes: Sequence[int]) -> None:
        """A request found these pages: they count as used once more, and just now."""
        self._nodes.check(nodes)
        self._order.hit(list(nodes))

    def forget(self, nodes: Sequence[int]) -> int:
        """Drop pages that are of no more use, and those before them that are not either.

        Of no use is a page that no tier holds, that nobody leased or pinned, and that no known page
        comes behind. Others stay.

        Returns:
            How many pages were dropped.
        """
        table = self._nodes
        table.check(nodes)
        dropped = 0
        for node in nodes:
            dropped += table.drop_useless(node)
        return dropped

    # --------------------------------------------------------------------------- residency

    def set_host(self, nodes: Sequence[int], slots: Sequence[int] | NDArray[np.int64]) -> None:
        """Pages came to the host, and are whole in these slots. They count as used just now."""
        pages = check_arriving(self._nodes, nodes, slots, self._nodes.host_slots, "page")
        self._order.arrive(reversed(pages))
        self._num_on_host += len(pages)

    def clear_host(self, nodes: Sequence[int], *, even_if_leased: bool = False) -> list[int]:
        """Pages leave the host; returns the slot of each, which is the caller's from now on.

        A page goes whether or not pages behind it are on the host. One that is pinned never goes,
        and a leased one only when told so, as when its bytes were found to be bad: who has the
        lease must look at `host_prefix` again before it loads.
        """
        table, order = self._nodes, self._order
        check_leaving(table, nodes, table.host_slots, even_if_leased, "page")
        slots = [table.host_slots[node] for node in nodes]
        for node in nodes:
            order.withdraw_page(node)
            table.host_slots[node] = NO_SLOT
            if table.flags[node] & TAKEN:
                table.flags[node] &= ~TAKEN
            else:
                order.unblock(table.parents[node])
        self._num_on_host -= len(slots)
        return slots

    def host_slot(self, node: int) -> int:
        """Where a page is on the host; -1: nowhere."""
        self._nodes.check((node,))
        return self._nodes.host_slots[node]

    def host_slots(self, nodes: Sequence[int]) -> NDArray[np.int64]:
        """The same for many; shape ``[nodes]``."""
        self._nodes.check(nodes)
        return np.array([self._nodes.host_slots[node] for node in nodes], dtype=np.int64)

    def host_prefix(self, nodes: Sequence[int]) -> int:
        """How many pages, from the first on, are on the host."""
        self._nodes.check(nodes)
        return self._host_prefix(list(nodes))

    def set_state(self, node: int, slot: int) -> None:
        """The state at the end of a page came to the host, and is whole in this slot."""
        column = self._nodes.state_slots
        [(_, column[node])] = check_arriving(self._nodes, (node,), (slot,), column, "state")
        self._num_states += 1
        self._order.enter(node)

    def clear_state(self, node: int, *, even_if_leased: bool = False) -> int:
        """A state leaves the host; returns its slot, as `clear_host` does."""
        table = self._nodes
        check_leaving(table, (node,), table.state_slots, even_if_leased, "state")
        self._order.withdraw_state(node)
        slot = table.state_slots[node]
        table.state_slots[node] = NO_SLOT
        table.flags[node] &= ~STATE_TAKEN
        self._num_states -= 1
        return slot

    def state_slot(self, node: int) -> int:
        """Where the state at the end of a page is on the host; -1: nowhere."""
        self._nodes.check((node,))
        return self._nodes.state_slots[node]

    def set_stored(self, nodes: Sequence[int], stored: bool) -> None:
        """What is known of storage. It is a hint: storage may drop a page by itself."""
        self._nodes.check(nodes)
        flags = self._nodes.flags
        for node in nodes:
            if bool(flags[node] & STORED) != stored:
                flags[node] ^= STORED
                self._num_stored += 1 if stored else -1

    def is_stored(self, node: int) -> bool:
        """Whether storage has the page, as far as is known."""
        self._nodes.check((node,))
        return bool(self._nodes.flags[node] & STORED)

    def tiers_of(self, node: int) -> frozenset[Tier]:
        """Which of host and storage hold the page; what is on the device the engine knows."""
        self._nodes.check((node,))
        tiers = {Tier.HOST} if self._nodes.host_slots[node] != NO_SLOT else set()
        if self._nodes.flags[node] & STORED:
            tiers.add(Tier.STORAGE)
        return frozenset(tiers)

    # ------------------------------------------------------------------------ leases and pins

    def lease(self, nodes: Sequence[int], *, seconds: float) -> Lease:
        """Keep pages from being evicted or forgotten for so long, or until it is given back."""
        self._nodes.check(nodes)
        return self._leases.write(tuple(nodes), self._clock(), seconds)

    def release(self, lease: Lease) -> bool:
        """Give a lease back; False, and nothing else, if it was given back or its time was up."""
        if not self.holds(lease):
            return False
        self._leases.strike(lease)
        return True

    def holds(self, lease: Lease) -> bool:
        """Whether the pages of a lease are still kept for it."""
        return self._leases.holds(lease, self._clock())

    def expire(self, now: float | None = None) -> list[Lease]:
        """End the leases whose time is up, and return them. Evicting does so first, by itself."""
        return self._leases.expire(self._clock() if now is None else now)

    def num_leased(self, node: int) -> int:
        """How many leases keep a page."""
        self._nodes.check((node,))
        return self._nodes.leases[node]

    def pin(self, nodes: Sequence[int]) -> None:
        """Keep pages that are in flight from being evicted, cleared or forgotten until `unpin`."""
        self._nodes.check(nodes)
        for node in nodes:
            self._order.withdraw(node)
            self._nodes.pins[node] += 1

    def unpin(self, nodes: Sequence[int]) -> None:
        """Take one pin from each. Raises PrefixIndexError where there is none."""
        self._nodes.check(nodes)
        check_pinned(self._nodes, nodes)
        pins = self._nodes.pins
        for node in nodes:
            pins[node] -= 1
            if not pins[node]:
                self._order.enter(node)

    def num_pinned(self, node: int) -> int:
        """How many pins keep a page."""
        self._nodes.check((node,))
        return self._nodes.pins[node]

    # ---------------------------------------------------------------------------- eviction

    def evict_host(self, num_pages: int) -> list[int]:
        """Choose pages to leave the host, leaves first, in the order of the policy.

        They are still there: `clear_host` lets them go, at once or after they were written to
        storage, and `spare` keeps them. Until then none is chosen again. A page before them is
        chosen as if they were gone.

        Returns:
            The pages, fewer than asked for where no more may leave.
        """
        self.expire()
        return self._order.take_pages(num_pages)

    def evict_states(self, num_states: int) -> list[int]:
        """The same for states, each by itself: `clear_state` lets them go, `spare` keeps them."""
        self.expire()
        return self._order.take_states(num_states)

    def spare(self, nodes: Sequence[int]) -> None:
        """Pages or states that were chosen to leave stay after all; others are left as they are."""
        table, order = self._nodes, self._order
        table.check(nodes)
        for node in nodes:
            if table.flags[node] & TAKEN:
                order.block(table.parents[node])
            table.flags[node] &= ~(TAKEN | STATE_TAKEN)
            order.enter(node)

    def reset(self) -> Dropped:
        """End all leases and drop every page that is not pinned, and whatever was known of it.

        Pages before a pinned one stay known, in no tier. Costs O(pages).

        Returns:
            The slots of what was dropped, which are the caller's from now on.
        """
        self._leases.forget_all()
        dropped = drop_unpinned(self._nodes, self._order)
        self._num_on_host -= len(dropped.host_slots)
        self._num_states -= len(dropped.state_slots)
        self._num_stored -= dropped.num_stored
        return dropped

    def check_integrity(self) -> None:
        """Walk over everything; PrefixIndexError tells the first thing that does not add up.

        Costs O(pages log pages).
        """
        check_nodes(self._nodes, self._order)
        check_leases(self._nodes, self._leases.all())
        check_counts(self._nodes, self._num_on_host, self._num_states, self._num_stored)

    def _host_prefix(self, nodes: list[int]) -> int:
        slots = list(map(self._nodes.host_slots.__getitem__, nodes))
        return slots.index(NO_SLOT) if NO_SLOT in slots else len(slots)
