"""Which page slots are free, kept as runs of neighbours. Pure bookkeeping: no memory, no numpy.

A copy over neighbouring slots is one strided copy, so the allocator hands out as few runs as it
can and keeps the free ones long. Each call costs O(slots asked for), whatever the pool's size, and
the slowest does too. `benchmarks/host_runs.py` measures that, and how long the runs are.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple, SupportsIndex, TypeAlias

from kvferry.errors import ConfigError, SlotOwnershipError

__all__ = ["SlotRun", "SlotRunAllocator", "Slots", "merge_slots", "slot_number", "whole_number"]

# Runs up to this long are binned by their exact length, longer ones in steps of 1/16 of a power
# of two: so the bins, and the mask that says which are filled, stay few however large the pool is.
_EXACT_LENGTHS = 512
_STEPS_LOG2 = 4
_EXACT_LOG2 = _EXACT_LENGTHS.bit_length() - 1
_NONE = -1


class SlotRun(NamedTuple):
    """Neighbouring slots ``[start, start + length)``."""

    start: int
    length: int

    @property
    def stop(self) -> int:
        """The first slot after the run."""
        return self.start + self.length

    @property
    def slots(self) -> range:
        """The slots of the run, in ascending order."""
        return range(self.start, self.start + self.length)


Slots: TypeAlias = Iterable[SlotRun | SupportsIndex]
"""Runs, single slots or both, in any order."""


def merge_slots(slots: Slots, num_slots: int) -> tuple[SlotRun, ...]:
    """`slots` (runs, single slots or both, in any order) as the fewest runs, ascending.

    Raises SlotOwnershipError for a slot outside ``[0, num_slots)``, a slot named twice, or
    something that is no slot.
    """
    given = sorted(_as_run(slot) for slot in slots)
    merged: list[SlotRun] = []
    for run in given:
        start, length = run
        if start < 0 or length < 1 or start + length > num_slots:
            raise SlotOwnershipError(
                f"slots [{start}, {start + length}) are not a run of slots of this pool, which has "
                f"slots 0 to {num_slots - 1}: pass the runs that allocate() returned"
            )
        if merged and start < merged[-1].stop:
            raise SlotOwnershipError(
                f"slot {start} is named twice in one call: name each slot once"
            )
        if merged and start == merged[-1].stop:
            merged[-1] = SlotRun(merged[-1].start, merged[-1].length + length)
        else:
            merged.append(run)
    return tuple(merged)


class SlotRunAllocator:
    """The free slots of a pool of `num_slots` page slots.

    Best fit by length: a request that fits in one free run takes the shortest that holds it; one
    that fits in none takes the longest runs whole, so that it gets few. Belongs to one thread.
    """

    def __init__(self, num_slots: int) -> None:
        num_slots = whole_number("num_slots", num_slots, 1)
        self._num_slots = num_slots
        self._num_free = 0
        self._num_free_runs = 0
        self._is_free = bytearray(num_slots)
        # Tables of a fixed size, where dicts of the runs would be smaller: a dict is now and then
        # hashed anew within one call, which takes milliseconds once there are 10^5 runs.
        code = "i" if num_slots < 1 << 31 else "q"
        # A free run's length, at its first and at its last slot; what is elsewhere means nothing.
        self._length_at = array(code, [0]) * num_slots
        # The runs of a bin are a doubly linked list of first slots; new runs go to its head.
        self._next = array(code, [_NONE]) * num_slots
        self._previous = array(code, [_NONE]) * num_slots
        self._heads = [_NONE] * (_bin_of(num_slots) + 1)
        self._filled_bins = 0
        self._give(0, num_slots)

    @property
    def num_slots(self) -> int:
        """How many slots there are, free or not."""
        return self._num_slots

    @property
    def num_free(self) -> int:
        """How many slots are free."""
        return self._num_free

    @property
    def num_free_runs(self) -> int:
        """In how many runs the free slots lie."""
        return self._num_free_runs

    def is_free(self, slot: int) -> bool:
        """Whether `slot`, from 0 to ``num_slots - 1``, is free."""
        return self._is_free[slot] == 1

    def allocate(self, num_slots: int) -> tuple[SlotRun, ...] | None:
        """`num_slots` slots as few runs, or None when fewer are free: all or nothing.

        None also comes when more is asked for than the pool will ever have. Raises ConfigError
        for anything but a whole number from 0 on.
        """
        num_slots = whole_number("num_slots", num_slots, 0)
        if num_slots > self._num_free:
            return None
        taken: list[SlotRun] = []
        left = num_slots
        while left:
            run = self._take(left)
            taken.append(run)
            left -= run.length
        self._num_free -= num_slots
        return tuple(taken)

    def free(self, slots: Iterable[SlotRun | SupportsIndex]) -> None:
        """Give `slots` (runs, single slots or both) back.

        Raises SlotOwnershipError, and changes nothing, when a slot is out of range, named twice
        or already free.
        """
        runs = merge_slots(slots, self._num_slots)
        for start, length in runs:
            already_free = self._is_free.find(1, start, start + length)
            if already_free >= 0:
                raise SlotOwnershipError(
                    f"slot {already_free} is already free and was freed again: whoever frees it "
                    f"must own it, and only once"
                )
        for start, length in runs:
            self._give(start, length)

    def check_integrity(self) -> None:
        """Prove that runs, bins and slots agree; SlotOwnershipError names the first that differ.

        Costs O(num_slots).
        """
        runs: dict[int, int] = {}
        start = self._is_free.find(1)
        while start >= 0:
            stop = self._is_free.find(0, start)
            stop = self._num_slots if stop < 0 else stop
            runs[start] = stop - start
            start = self._is_free.find(1, stop)
        listed = list(self._listed_runs())
        lengths = {start: self._length_at[start] for start, _ in listed}
        if runs != lengths:
            odd = min(runs.items() ^ lengths.items())
            raise SlotOwnershipError(
                f"the free run at slot {odd[0]} of length {odd[1]} is known to only one of the "
                f"slot table and the run table: a run was lost, doubled or not joined"
            )
        if not len(runs) == len(listed) == self._num_free_runs:
            raise SlotOwnershipError(
                f"there are {len(runs)} free runs, but {len(listed)} were listed and "
                f"{self._num_free_runs} counted"
            )
        if any(self._length_at[start + length - 1] != length for start, length in runs.items()):
            raise SlotOwnershipError("the ends of the free runs disagree with their starts")
        if sum(runs.values()) != self._num_free:
            raise SlotOwnershipError(
                f"{sum(runs.values())} slots are free but {self._num_free} were counted"
            )
        if any(_bin_of(runs[start]) != number for start, number in listed):
            raise SlotOwnershipError("the free runs are not binned by their length")
        filled = sum(1 << number for number in {number for _, number in listed})
        if filled != self._filled_bins:
            raise SlotOwnershipError(
                f"filled bins are {filled:#x} but were noted as {self._filled_bins:#x}"
            )

    def _listed_runs(self) -> Iterator[tuple[int, int]]:
        """The first slot of each listed run, with its bin; SlotOwnershipError for a broken list."""
        for number, start in enumerate(self._heads):
            before = _NONE
            while start != _NONE:
                # Each run is the next of one other at most, so no walk goes round for ever.
                if self._previous[start] != before:
                    raise SlotOwnershipError(
                        f"the free run at slot {start} comes after the one at {before}, but names "
                        f"the one at {self._previous[start]}"
                    )
                yield start, number
                before, start = start, self._next[start]

    def _take(self, wanted: int) -> SlotRun:
        """Take up to `wanted` slots from one free run; there must be one."""
        # Only exact bins are sure to fit at their own number; of the coarse ones the next is.
        number = _bin_of(wanted) + (wanted > _EXACT_LENGTHS)
        fitting = self._filled_bins >> number
        if fitting:
            number += (fitting & -fitting).bit_length() - 1
        else:
            number = self._filled_bins.bit_length() - 1
        start = self._heads[number]
        length = self._length_at[start]
        self._unlist(start, length)
        taken = min(wanted, length)
        if taken < length:
            self._list(start + taken, length - taken)
        self._is_free[start : start + taken] = bytes(taken)
        return SlotRun(start, taken)

    def _give(self, start: int, length: int) -> None:
        stop = start + length
        self._is_free[start:stop] = b"\x01" * length
        self._num_free += length
        if stop < self._num_slots and self._is_free[stop]:
            after = self._length_at[stop]
            self._unlist(stop, after)
            stop += after
        if start and self._is_free[start - 1]:
            before = self._length_at[start - 1]
            start -= before
            self._unlist(start, before)
        self._list(start, stop - start)

    def _list(self, start: int, length: int) -> None:
        number = _bin_of(length)
        head = self._heads[number]
        self._length_at[start] = self._length_at[start + length - 1] = length
        self._next[start] = head
        self._previous[start] = _NONE
        if head == _NONE:
            self._filled_bins |= 1 << number
        else:
            self._previous[head] = start
        self._heads[number] = start
        self._num_free_runs += 1

    def _unlist(self, start: int, length: int) -> None:
        after, before = self._next[start], self._previous[start]
        if after != _NONE:
            self._previous[after] = before
        if before != _NONE:
            self._next[before] = after
        else:
            number = _bin_of(length)
            self._heads[number] = after
            if after == _NONE:
                self._filled_bins &= ~(1 << number)
        self._num_free_runs -= 1


def _bin_of(length: int) -> int:
    if length <= _EXACT_LENGTHS:
        return length
    power = length.bit_length() - 1
    step = (length >> (power - _STEPS_LOG2)) - (1 << _STEPS_LOG2)
    return _EXACT_LENGTHS + 1 + ((power - _EXACT_LOG2) << _STEPS_LOG2) + step


def _as_run(slot: SlotRun | SupportsIndex) -> SlotRun:
    if isinstance(slot, SlotRun):
        return SlotRun(slot_number(slot.start), slot_number(slot.length))
    return SlotRun(slot_number(slot), 1)


def slot_number(slot: SupportsIndex) -> int:
    """`slot` as a plain int, whatever integer type it came in; SlotOwnershipError if it is none."""
    try:
        return operator.index(slot)
    except TypeError as bad:
        raise SlotOwnershipError(
            f"{slot!r} is neither a slot number nor a SlotRun: pass what allocate() returned"
        ) from bad


def whole_number(what: str, value: SupportsIndex, low: int) -> int:
    """`value` as a plain int; ConfigError unless it is a whole number from `low` on."""
    try:
        number = operator.index(value)
    except TypeError as bad:
        raise ConfigError(f"{what}={value!r} must be a whole number from {low} on") from bad
    if number < low:
        raise ConfigError(f"{what}={number} must be a whole number from {low} on")
    return number
