"""Who owns each slot of a pool. Pure bookkeeping: no memory, no numpy.

free list --allocate--> transfer in flight --hand_over--> index entry --hand_over--> transfer …
    ^________________________________free________________________________|
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import SupportsIndex

from kvferry.errors import SlotOwnershipError
from kvferry.memory.slot_runs import SlotRun, SlotRunAllocator, merge_slots, slot_number

__all__ = ["SlotOwner", "SlotOwners", "free_slots_named", "why_in_use"]


class SlotOwner(enum.StrEnum):
    """Who may free a slot or hand it on."""

    FREE = "free"
    """The free list."""

    INDEX = "index"
    """An entry of the prefix index: the slot's bytes are whole and may be read."""

    TRANSFER = "transfer"
    """A transfer in flight: the slot's bytes are being written or read."""


_OWNERS = tuple(SlotOwner)
_CODES = {owner: code for code, owner in enumerate(_OWNERS)}


class SlotOwners:
    """The owner of each of `num_slots` slots, all free at first. Belongs to one thread.

    Every call either does all it was asked for, or raises and changes nothing.
    """

    def __init__(self, num_slots: int) -> None:
        self._allocator = SlotRunAllocator(num_slots)
        self._owners = bytearray(num_slots)
        self._num_owned = dict.fromkeys(SlotOwner, 0)
        self._num_owned[SlotOwner.FREE] = num_slots

    @property
    def num_slots(self) -> int:
        """How many slots there are, free or not."""
        return self._allocator.num_slots

    def num_owned(self, owner: SlotOwner) -> int:
        """How many slots `owner` has."""
        return self._num_owned[owner]

    @property
    def codes(self) -> memoryview:
        """One byte a slot, read-only and always current: 0 where the slot is free."""
        return memoryview(self._owners).toreadonly()

    def owner_of(self, slot: SupportsIndex) -> SlotOwner:
        """Who owns `slot`. Raises SlotOwnershipError for a slot out of range."""
        return _OWNERS[self._owners[self.checked(slot)]]

    def checked(self, slot: SupportsIndex) -> int:
        """`slot` as a plain int. Raises SlotOwnershipError when there is no such slot."""
        number = slot_number(slot)
        if not 0 <= number < self.num_slots:
            raise SlotOwnershipError(
                f"slot {number} does not exist: the pool has slots 0 to {self.num_slots - 1}"
            )
        return number

    def allocate(self, num_slots: int, owner: SlotOwner) -> tuple[SlotRun, ...] | None:
        """`num_slots` free slots for `owner`, in few runs; None when fewer are free."""
        _check_owner(owner)
        runs = self._allocator.allocate(num_slots)
        if runs is not None:
            self._assign(runs, SlotOwner.FREE, owner)
        return runs

    def free(self, slots: Iterable[SlotRun | SupportsIndex], owner: SlotOwner) -> None:
        """Give `slots`, which `owner` has, back to the free list."""
        runs = self._owned_runs(slots, owner)
        self._allocator.free(runs)
        self._assign(runs, owner, SlotOwner.FREE)

    def hand_over(
        self,
        slots: Iterable[SlotRun | SupportsIndex],
        owner: SlotOwner,
        new_owner: SlotOwner,
    ) -> None:
        """Make `slots`, which `owner` has, those of `new_owner`."""
        _check_owner(new_owner)
        self._assign(self._owned_runs(slots, owner), owner, new_owner)

    def check_integrity(self) -> None:
        """Prove that each slot has one owner; SlotOwnershipError tells the first that has not.

        Costs O(num_slots).
        """
        self._allocator.check_integrity()
        for slot, code in enumerate(self._owners):
            listed = self._allocator.is_free(slot)
            if listed != (_OWNERS[code] is SlotOwner.FREE):
                raise SlotOwnershipError(
                    f"slot {slot} belongs to {_OWNERS[code].value} by the owner table, but is "
                    f"{'on' if listed else 'not on'} the free list: one of the two was changed "
                    f"without the other"
                )
        for owner, code in _CODES.items():
            found = self._owners.count(code)
            if found != self._num_owned[owner]:
                raise SlotOwnershipError(
                    f"{found} slots belong to {owner.value}, but {self._num_owned[owner]} were "
                    f"counted"
                )

    def _owned_runs(
        self, slots: Iterable[SlotRun | SupportsIndex], owner: SlotOwner
    ) -> tuple[SlotRun, ...]:
        _check_owner(owner)
        runs = merge_slots(slots, self.num_slots)
        code = _CODES[owner]
        for run in runs:
            if self._owners.count(code, run.start, run.stop) != run.length:
                slot = next(slot for slot in run.slots if self._owners[slot] != code)
                raise SlotOwnershipError(
                    f"slot {slot} belongs to {_OWNERS[self._owners[slot]].value}, not to "
                    f"{owner.value}: only its owner may free it or hand it on, and only once"
                )
        return runs

    def _assign(self, runs: Iterable[SlotRun], owner: SlotOwner, new_owner: SlotOwner) -> None:
        code = bytes([_CODES[new_owner]])
        for run in runs:
            self._owners[run.start : run.stop] = code * run.length
            self._num_owned[owner] -= run.length
            self._num_owned[new_owner] += run.length


def _check_owner(owner: SlotOwner) -> None:
    if owner not in _CODES:
        raise SlotOwnershipError(
            f"{owner!r} is no owner: give one of {', '.join(_OWNERS)} as SlotOwner"
        )
    if owner == SlotOwner.FREE:
        raise SlotOwnershipError(
            "the free list takes and gives slots only by itself: name SlotOwner.INDEX or "
            "SlotOwner.TRANSFER; free() gives back, allocate() takes"
        )


def free_slots_named(first: int, num_free: int, num_slots: int) -> SlotOwnershipError:
    """The error for a transfer over slots some of which are free, `first` among them."""
    return SlotOwnershipError(
        f"slot {first} is free (free: {num_free} of the {num_slots} slots of this transfer): take "
        f"slots from allocate(), and free() them only when they are done with"
    )


def why_in_use(num_leases: int, num_in_flight: int) -> str:
    """What keeps a pool from being closed, and what to do about each."""
    reasons = []
    if num_leases:
        reasons.append(
            f"leases out: {num_leases} (a running transfer holds one; wait for it, then release())"
        )
    if num_in_flight:
        reasons.append(
            f"slots still owned by TRANSFER: {num_in_flight} (free() them, or hand_over() to "
            f"SlotOwner.INDEX those that stay)"
        )
    return f"the pool cannot close. {'; '.join(reasons)}"
