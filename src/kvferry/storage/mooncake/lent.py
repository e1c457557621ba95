"""Which memory the library may use in place, and room of its own for all other."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.storage.base import Buffers, total_bytes
from kvferry.storage.raw_memory import AlignedBlock, copy_bytes

__all__ = ["LentMemory", "Room", "Rooms", "Way"]

_ALIGNMENT = 64
_NUM_ROOMS = 4


class Room(NamedTuple):
    """Memory that is registered, and one call's until it gives it back."""

    address: int
    num_bytes: int


class Rooms:
    """`num_bytes` in `_NUM_ROOMS` equal parts, so that as many calls may stage at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.block = AlignedBlock(num_bytes)
        self.room_bytes = num_bytes // _NUM_ROOMS // _ALIGNMENT * _ALIGNMENT
        self._free = [
            Room(self.block.address + number * self.room_bytes, self.room_bytes)
            for number in range(_NUM_ROOMS)
        ]
        self._changed = threading.Condition()

    @property
    def num_free(self) -> int:
        """Rooms that nobody has."""
        with self._changed:
            return len(self._free)

    def take(self, timeout: float) -> Room | None:
        """A room; None if none was given back within `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free, timeout):
                return None
            return self._free.pop()

    def give_back(self, room: Room) -> None:
        """No call uses `room` any more."""
        with self._changed:
            self._free.append(room)
            self._changed.notify()


class LentMemory:
    """Ranges that were registered. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, address: int, num_bytes: int) -> None:
        """The library may use these."""
        with self._lock:
            at = bisect.bisect(self._begins, address)
            self._begins.insert(at, address)
            self._ends.insert(at, address + num_bytes)

    def drop(self, address: int) -> bool:
        """The range that begins here is no longer lent; whether there was one."""
        with self._lock:
            if address not in self._begins:
                return False
            at = self._begins.index(address)
            del self._begins[at], self._ends[at]
            return True

    def all(self) -> list[int]:
        """Where each range begins."""
        with self._lock:
            return list(self._begins)

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether all of it lies in one range."""
        with self._lock:
            at = bisect.bisect(self._begins, address) - 1
            return at >= 0 and address + num_bytes <= self._ends[at]


class Way:
    """How one object gets to the library and back: parts in place, and parts through a room.

    Neighbouring parts that have to go through a room are one there.
    """

    def __init__(self, buffers: Buffers, lent: LentMemory | None) -> None:
        self.num_bytes = total_bytes(buffers)
        self.staged_bytes = 0
        """Room that it needs, rounded up."""

        self._pieces: list[tuple[bool, list[tuple[int, int]]]] = []
        for address, length in buffers:
            if not length:
                continue
            in_place = lent is not None and lent.covers(address, length)
            if not in_place and self._pieces and not self._pieces[-1][0]:
                self._pieces[-1][1].append((address, length))
            else:
                self._pieces.append((in_place, [(address, length)]))
        for in_place, parts in self._pieces:
            if not in_place:
                self.staged_bytes += -(-total_bytes(parts) // _ALIGNMENT) * _ALIGNMENT
        self._at = 0

    @property
    def num_in_place(self) -> int:
        """Parts in memory of the caller that the library gets as it is."""
        return sum(in_place for in_place, _ in self._pieces)

    def through(self, address: int) -> tuple[list[int], list[int]]:
        """Addresses and lengths for the library, with the room at `address`."""
        self._at = address
        addresses, lengths = [], []
        for in_place, parts in self._pieces:
            length = total_bytes(parts)
            addresses.append(parts[0][0] if in_place else address)
            lengths.append(length)
            if not in_place:
                address += -(-length // _ALIGNMENT) * _ALIGNMENT
        return addresses, lengths

    def copy_out(self) -> None:
        """From the caller's memory into the room."""
        for at, parts in self._staged():
            for address, length in parts:
                copy_bytes(at, address, length)
                at += length

    def copy_in(self) -> None:
        """From the room into the caller's memory."""
        for at, parts in self._staged():
            for address, length in parts:
                copy_bytes(address, at, length)
                at += length

    def _staged(self) -> Sequence[tuple[int, list[tuple[int, int]]]]:
        found: list[tuple[int, list[tuple[int, int]]]] = []
        at = self._at
        for in_place, parts in self._pieces:
            if not in_place:
                found.append((at, parts))
                at += -(-total_bytes(parts) // _ALIGNMENT) * _ALIGNMENT
        return found
