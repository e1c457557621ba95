"""The host tier: slots of one kind, what state each is in, and room made by eviction.

It keeps three books in step: the pool's owners, the ledger's states and the index's residency. Pins
of index nodes follow from the ledger: one for a slot that is being filled, one for every reader of
a resident one. So nothing else has to be remembered when work is given up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvferry.errors import PageStateError
from kvferry.memory import SlotOwner, SlotRun
from kvferry.tiers.state import NO_NODE, OWNER_OF, Actor, PageState, SlotLedger
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import SupportsIndex

    from kvferry.index import PrefixIndex

__all__ = ["HostTier", "SlotPool"]

_NO_SLOT = -1


class SlotPool(Protocol):
    """Who owns each slot: a `HostPool`, or `SlotOwners` where the memory is another process's."""

    @property
    def num_slots(self) -> int: ...

    def num_owned(self, owner: SlotOwner) -> int: ...

    def owner_of(self, slot: SupportsIndex) -> SlotOwner: ...

    def allocate(self, num_slots: int, owner: SlotOwner) -> tuple[SlotRun, ...] | None: ...

    def free(self, slots: Iterable[SlotRun | SupportsIndex], owner: SlotOwner) -> None: ...

    def hand_over(
        self, slots: Iterable[SlotRun | SupportsIndex], owner: SlotOwner, new_owner: SlotOwner
    ) -> None: ...

    def check_integrity(self) -> None: ...


class HostTier:
    """Host slots of one kind, pages or checkpoints.

    Args:
        kind: What a slot holds.
        pool: Its slots.
        index: Whose nodes the slots are copies of.
        evicted: Told of each node whose copy was given up for room.
        keep: Asked before a victim is given up; True: it has just been pinned, take another.
    """

    def __init__(
        self,
        kind: SlotKind,
        pool: SlotPool,
        index: PrefixIndex,
        *,
        evicted: Callable[[int], None] = lambda _: None,
        keep: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.kind = kind
        self.pool = pool
        self.ledger = SlotLedger(pool.num_slots)
        self._index = index
        self._evicted = evicted
        self._keep = keep
        self._filling: dict[int, int] = {}
        self.suspects: set[int] = set()
        """Nodes here whose bytes are in doubt."""

        self._is_pages = kind is SlotKind.PAGE

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return self.pool.num_slots

    @property
    def num_free(self) -> int:
        """How many slots hold nothing."""
        return self.pool.num_owned(SlotOwner.FREE)

    @property
    def num_in_use(self) -> int:
        """How many slots hold, or are about to hold, something."""
        return self.num_slots - self.num_free

    def slot_of(self, node: int) -> int:
        """The slot of the copy of `node`; -1 where there is none."""
        if self._is_pages:
            return self._index.host_slot(node)
        return self._index.state_slot(node)

    def is_readable(self, node: int) -> bool:
        """Whether `node` is here and may be loaded."""
        return self.slot_of(node) != _NO_SLOT and node not in self.suspects

    def is_filling(self, node: int) -> bool:
        """Whether a store or a read is bringing `node` here."""
        return node in self._filling

    def resident_nodes(self) -> list[int]:
        """The nodes that are here. Costs O(slots)."""
        return [self.ledger.node(slot) for slot in self.ledger.slots_in(PageState.RESIDENT)]

    def suspect(self, node: int, *, is_suspect: bool) -> None:
        """Do not load `node` while its bytes are in doubt."""
        if is_suspect:
            self.suspects.add(node)
        else:
            self.suspects.discard(node)

    # ---------------------------------------------------------------- filling

    def reserve(self, nodes: Sequence[int], state: PageState) -> list[int]:
        """Slots for the first of `nodes`, as many as there is room for; evicts to make it.

        Each goes into `state`, STORING or FETCHING. None of `nodes` may be here or on its way.
        """
        busy = next((node for node in nodes if node in self._filling), None)
        if busy is not None:
            raise PageStateError(
                f"node {busy} is being filled into slot {self._filling[busy]} already: ask "
                f"is_filling() before a slot is reserved for it"
            )
        count = min(len(nodes), self._make_room(len(nodes)))
        runs = self.pool.allocate(count, SlotOwner.TRANSFER) if count else ()
        slots = [slot for run in runs or () for slot in run.slots]
        for node, slot in zip(nodes, slots, strict=False):
            self.ledger.move(slot, state, Actor.CALLER, node)
            self._filling[node] = slot
        self._index.pin(nodes[: len(slots)])
        return slots

    def publish(self, slots: Sequence[int], actor: Actor) -> list[int]:
        """The pages in `slots` are whole: the index names them from now on. Their nodes."""
        nodes = [self.ledger.node(slot) for slot in slots]
        for node, slot in zip(nodes, slots, strict=True):
            self.ledger.move(slot, PageState.RESIDENT, actor, node)
            del self._filling[node]
        self.pool.hand_over(slots, SlotOwner.TRANSFER, SlotOwner.INDEX)
        if self._is_pages:
            self._index.set_host(nodes, slots)
        else:
            for node, slot in zip(nodes, slots, strict=True):
                self._index.set_state(node, slot)
        self._index.unpin(nodes)
        return nodes

    def abandon(self, slot: int, actor: Actor) -> None:
        """Nothing came into `slot`, or came too late: it is free again."""
        node = self.ledger.node(slot)
        self.ledger.move(slot, PageState.ABSENT, actor)
        self.pool.free((slot,), SlotOwner.TRANSFER)
        self._stop_filling(node)

    def park(self, slot: int) -> None:
        """Nobody wants what is being written into `slot`; it stays with the writer."""
        node = self.ledger.node(slot)
        self.ledger.move(slot, PageState.PARKED, Actor.ABORT)
        self._stop_filling(node)

    def _stop_filling(self, node: int) -> None:
        if node == NO_NODE:  # it was parked before
            return
        del self._filling[node]
        self._index.unpin([node])
        self._index.forget([node])

    # ---------------------------------------------------------------- reading

    def begin_reading(self, nodes: Sequence[int]) -> list[int]:
        """Pin `nodes` and count a reader on their slots, which are returned."""
        slots = [self.slot_of(node) for node in nodes]
        self.ledger.add_readers(slots)
        self._index.pin(nodes)
        return slots

    def end_reading(self, slots: Iterable[int]) -> None:
        """A reader is done with `slots`."""
        unpinned, freed = [], []
        for slot in slots:
            node = self.ledger.node(slot)
            if self.ledger.drop_reader(slot):
                self.ledger.move(slot, PageState.ABSENT, Actor.READER)
                freed.append(slot)
            elif node != NO_NODE:  # not condemned meanwhile
                unpinned.append(node)
        if freed:
            self.pool.free(freed, SlotOwner.TRANSFER)
        self._index.unpin(unpinned)

    # ---------------------------------------------------------------- leaving

    def drop(self, node: int, actor: Actor) -> None:
        """Take the copy of `node` out of the index; its slot is free when nobody reads it."""
        slot = self.slot_of(node)
        # The index clears nothing that is pinned. Pins that are not this slot's come back: those
        # of the node's other kind of slot.
        pins = self._index.num_pinned(node)
        self._index.unpin([node] * pins)
        if self._is_pages:
            self._index.clear_host([node], even_if_leased=True)
        else:
            self._index.clear_state(node, even_if_leased=True)
        self._index.pin([node] * (pins - self.ledger.readers(slot)))
        self.suspects.discard(node)
        self._release(slot, actor)

    def _release(self, slot: int, actor: Actor) -> None:
        if self.ledger.readers(slot):
            self.ledger.move(slot, PageState.CONDEMNED, actor)
            self.pool.hand_over((slot,), SlotOwner.INDEX, SlotOwner.TRANSFER)
        else:
            self.ledger.move(slot, PageState.ABSENT, actor)
            self.pool.free((slot,), SlotOwner.INDEX)

    def wipe(self) -> None:
        """Forget everything: what is being written is parked, what is being read condemned."""
        for state in (PageState.STORING, PageState.FETCHING):
            for slot in list(self.ledger.slots_in(state)):
                self.park(slot)
        for slot in list(self.ledger.slots_in(PageState.RESIDENT)):
            self.drop(self.ledger.node(slot), Actor.ABORT)

    def _make_room(self, wanted: int) -> int:
        free = self.num_free
        while free < wanted:
            victims = self._victims(wanted - free)
            if not victims:
                break
            behind: set[int] = set()  # what a page that stays comes behind stays too
            for node in victims:
                if node in behind or self._keep(node):
                    behind.add(self._index.parent_of(node))
                    self._index.spare([node])
                    continue
                self.drop(node, Actor.EVICTION)
                self._evicted(node)
            free = self.num_free
        return free

    def _victims(self, count: int) -> list[int]:
        if self._is_pages:
            return self._index.evict_host(count)
        return self._index.evict_states(count)

    def check_integrity(self) -> None:
        """Prove that the three books agree; raises the first difference."""
        self.pool.check_integrity()
        self.ledger.check_integrity()
        for slot in range(self.num_slots):
            state, owner = self.ledger.state(slot), self.pool.owner_of(slot)
            if OWNER_OF[state] is not owner:
                raise PageStateError(
                    f"slot {slot} is {state}, which is {OWNER_OF[state]}'s, but {owner} owns it"
                )
            node = self.ledger.node(slot)
            if state is PageState.RESIDENT and self.slot_of(node) != slot:
                raise PageStateError(
                    f"slot {slot} is resident as node {node}, but the index has that node in slot "
                    f"{self.slot_of(node)}"
                )
            is_filling = state in (PageState.STORING, PageState.FETCHING)
            if is_filling and self._filling.get(node) != slot:
                raise PageStateError(f"slot {slot} is {state} for node {node}, which knows not")
        filling = self.ledger.count(PageState.STORING) + self.ledger.count(PageState.FETCHING)
        if filling != len(self._filling):
            raise PageStateError(f"{filling} slots are being filled, {len(self._filling)} noted")
