"""The life of a page on the host, as a table of states and of who may move a page between them.

A page's bytes lie in one host slot. The slot's state says whether they may be read, and whose the
slot is; every change of it goes through `SlotLedger.move`, which raises on one that the table does
not have. Pure bookkeeping: no memory, no I/O.
"""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING

from kvferry.errors import PageStateError
from kvferry.memory import SlotOwner

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["NO_NODE", "OWNER_OF", "TRANSITIONS", "Actor", "PageState", "SlotLedger"]

NO_NODE = -1


class PageState(enum.StrEnum):
    """What a host slot holds."""

    ABSENT = "absent"
    """Nothing: the slot is free."""

    STORING = "storing"
    """A store from the device writes it."""

    FETCHING = "fetching"
    """A read from storage writes it."""

    RESIDENT = "resident"
    """A whole page that the index names; loads and storage writes may read it."""

    PARKED = "parked"
    """Still being written, by a store or a read whose result nobody wants any more."""

    CONDEMNED = "condemned"
    """Out of the index, and still being read: free when the last reader is done."""


class Actor(enum.StrEnum):
    """Who moves a page from one state to another."""

    CALLER = "caller"
    """A call of the engine: a store or a prefetch takes the slot."""

    TRANSFER = "transfer"
    """The end of a store from the device."""

    READ = "read"
    """The end of a read from storage."""

    READER = "reader"
    """The end of the last load or storage write that read the slot."""

    EVICTION = "eviction"
    """Room is needed."""

    INTEGRITY = "integrity"
    """The page's bytes are not what was stored."""

    ABORT = "abort"
    """Cancel, time-out, detach or reset."""


TRANSITIONS: Mapping[tuple[PageState, PageState], frozenset[Actor]] = {
    (PageState.ABSENT, PageState.STORING): frozenset({Actor.CALLER}),
    (PageState.ABSENT, PageState.FETCHING): frozenset({Actor.CALLER}),
    (PageState.STORING, PageState.RESIDENT): frozenset({Actor.TRANSFER}),
    (PageState.STORING, PageState.ABSENT): frozenset({Actor.TRANSFER}),
    (PageState.STORING, PageState.PARKED): frozenset({Actor.ABORT}),
    (PageState.FETCHING, PageState.RESIDENT): frozenset({Actor.READ}),
    (PageState.FETCHING, PageState.ABSENT): frozenset({Actor.READ}),
    (PageState.FETCHING, PageState.PARKED): frozenset({Actor.ABORT}),
    (PageState.RESIDENT, PageState.ABSENT): frozenset(
        {Actor.EVICTION, Actor.INTEGRITY, Actor.ABORT}
    ),
    (PageState.RESIDENT, PageState.CONDEMNED): frozenset({Actor.INTEGRITY, Actor.ABORT}),
    (PageState.PARKED, PageState.ABSENT): frozenset({Actor.TRANSFER, Actor.READ}),
    (PageState.CONDEMNED, PageState.ABSENT): frozenset({Actor.READER}),
}
"""Every change of state there is, and who may make it. A parked page never becomes resident: what
comes late is thrown away."""

OWNER_OF: Mapping[PageState, SlotOwner] = {
    PageState.ABSENT: SlotOwner.FREE,
    PageState.STORING: SlotOwner.TRANSFER,
    PageState.FETCHING: SlotOwner.TRANSFER,
    PageState.RESIDENT: SlotOwner.INDEX,
    PageState.PARKED: SlotOwner.TRANSFER,
    PageState.CONDEMNED: SlotOwner.TRANSFER,
}
"""Whose a slot is in the pool's books, by the state of its page."""

_STATES = tuple(PageState)
_CODES = {state: code for code, state in enumerate(_STATES)}
_READABLE = (_CODES[PageState.RESIDENT], _CODES[PageState.CONDEMNED])
_ABSENT = _CODES[PageState.ABSENT]
_ALLOWED = {
    (_CODES[before], _CODES[after], actor)
    for (before, after), actors in TRANSITIONS.items()
    for actor in actors
}


class SlotLedger:
    """The state, the readers and the index node of each of `num_slots` host slots."""

    def __init__(self, num_slots: int) -> None:
        self._states = bytearray(num_slots)
        self._readers = array("i", [0]) * num_slots
        self._nodes = array("q", [NO_NODE]) * num_slots
        self._counts = [0] * len(_STATES)
        self._counts[_ABSENT] = num_slots
        self._num_readers = 0

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return len(self._states)

    @property
    def num_readers(self) -> int:
        """How many readings are in flight, over all slots."""
        return self._num_readers

    def count(self, state: PageState) -> int:
        """How many slots are in `state`."""
        return self._counts[_CODES[state]]

    def state(self, slot: int) -> PageState:
        """The state of `slot`."""
        return _STATES[self._states[slot]]

    def readers(self, slot: int) -> int:
        """How many loads and storage writes read `slot` just now."""
        return self._readers[slot]

    def node(self, slot: int) -> int:
        """The index node that `slot` is, or is to be, a copy of; -1 where there is none."""
        return self._nodes[slot]

    def slots_in(self, state: PageState) -> Iterator[int]:
        """The slots in `state`. Costs O(num_slots)."""
        code = _CODES[state]
        at = self._states.find(code)
        while at >= 0:
            yield at
            at = self._states.find(code, at + 1)

    def move(self, slot: int, state: PageState, actor: Actor, node: int | None = None) -> None:
        """Put `slot` into `state`.

        Args:
            slot: Which.
            state: The new state.
            actor: Who does it.
            node: The index node, where the slot becomes one's; None leaves it, and leaving the
                index or being freed forgets it.

        Raises:
            PageStateError: The table has no such transition, or not by that actor, or a slot that
                is being read would be freed.
        """
        before, after = self._states[slot], _CODES[state]
        if (before, after, actor) not in _ALLOWED:
            raise self._forbidden(slot, state, actor)
        if after == _ABSENT and self._readers[slot]:
            raise PageStateError(
                f"slot {slot} ({_STATES[before]}) would be freed by {actor} while it has "
                f"{self._readers[slot]} readers; condemn it, and the last reader frees it"
            )
        self._states[slot] = after
        self._counts[before] -= 1
        self._counts[after] += 1
        if node is not None:
            self._nodes[slot] = node
        elif state in (PageState.ABSENT, PageState.PARKED, PageState.CONDEMNED):
            self._nodes[slot] = NO_NODE

    def _forbidden(self, slot: int, state: PageState, actor: Actor) -> PageStateError:
        before = self.state(slot)
        allowed = TRANSITIONS.get((before, state))
        if allowed is None:
            targets = sorted(after for start, after in TRANSITIONS if start is before)
            return PageStateError(
                f"slot {slot} is {before} and cannot become {state}; from there it becomes "
                f"{', '.join(targets)}"
            )
        return PageStateError(
            f"slot {slot} becomes {state} from {before} by {', '.join(sorted(allowed))}, not by "
            f"{actor}"
        )

    def add_readers(self, slots: Iterable[int]) -> None:
        """A load or a storage write begins to read `slots`; PageStateError if one is not whole."""
        slots = list(slots)
        for slot in slots:
            if self.state(slot) is not PageState.RESIDENT:
                raise PageStateError(
                    f"slot {slot} is {self.state(slot)} and cannot be read: only a resident page "
                    f"has all of its bytes"
                )
        for slot in slots:
            self._readers[slot] += 1
        self._num_readers += len(slots)

    def drop_reader(self, slot: int) -> bool:
        """One reader of `slot` is done. Returns whether the slot, condemned, is to be freed now."""
        if not self._readers[slot] or self._states[slot] not in _READABLE:
            raise PageStateError(
                f"slot {slot} is {self.state(slot)} with {self._readers[slot]} readers: a reader "
                f"that is done twice, or was never counted"
            )
        self._readers[slot] -= 1
        self._num_readers -= 1
        return not self._readers[slot] and self._states[slot] == _CODES[PageState.CONDEMNED]

    def check_integrity(self) -> None:
        """Prove that counts and states agree; PageStateError names the first that do not."""
        for state, code in _CODES.items():
            found = self._states.count(code)
            if found != self._counts[code]:
                raise PageStateError(f"{found} slots are {state}, but {self._counts[code]} counted")
        if sum(self._readers) != self._num_readers:
            raise PageStateError(
                f"slots have {sum(self._readers)} readers, but {self._num_readers} were counted"
            )
        for slot, readers in enumerate(self._readers):
            if readers < 0 or (readers and self._states[slot] not in _READABLE):
                raise PageStateError(f"slot {slot} is {self.state(slot)} with {readers} readers")
