"""The staging memory of one direction: a ring of bytes whose reuse waits by events alone."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import DriverError
from kvferry.kernels import RingArgs, RoomArgs
from kvferry.kernels.jit import DeviceBuffer, Event
from kvferry.transfer.closing import close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kernels.jit import Context, Stream

__all__ = ["MAX_ROOMS", "StagingRing", "StagingRoom"]

_ALIGNMENT = 512
MAX_ROOMS = 64
"""Rooms that are not known to be empty; small ones beyond them wait like those without bytes."""


class StagingRoom(NamedTuple):
    """Some bytes of the ring, and the two points in their life."""

    address: int
    end: int
    filled: Event
    """To be recorded where the bytes are there, in the stream that brings them."""

    emptied: Event
    """To be recorded where nobody reads them any more, in the stream that takes them."""


class StagingRing:
    """`num_bytes` of device memory, given out in order, again and again.

    Its state is in `args`, where compiled code takes rooms as `take` does. The context must be
    current for every call.

    Raises:
        DriverError: There is no device memory for it.
    """

    def __init__(self, context: Context, num_bytes: int) -> None:
        self._events: list[Event] = []
        try:
            self._memory = DeviceBuffer(context, num_bytes)
        except DriverError as full:
            full.add_note(
                f"it was to be {num_bytes:,} bytes of staging memory for one direction; pass a "
                f"smaller staging_bytes, or 0 to do without"
            )
            raise
        try:
            for _ in range(2 * MAX_ROOMS):
                self._events.append(Event(context))
        except BaseException:
            self.close()
            raise
        self._rooms = (RoomArgs * MAX_ROOMS)()
        for index, room in enumerate(self._rooms):
            room.filled, room.emptied = (one.address for one in self._pair(index))
        self.args = RingArgs(
            address=self._memory.address,
            num_bytes=num_bytes,
            next=self._memory.address,
            rooms=ctypes.addressof(self._rooms),
            num_rooms=MAX_ROOMS,
        )

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self._memory.num_bytes

    def _pair(self, index: int) -> list[Event]:
        return self._events[2 * index : 2 * index + 2]

    def take(self, num_bytes: int, streams: Sequence[Stream]) -> StagingRoom:
        """Room for `num_bytes`, at most those of the ring.

        `streams` are all that may ever write to the ring, as a room is forgotten once it is in
        the way: they wait on the GPU until what lay there is empty.
        """
        ring = self.args
        begin = ring.next
        if begin + num_bytes > ring.address + ring.num_bytes:
            begin = ring.address
        end = begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Rooms are live in the order of the ring, so those in the way are the oldest ones.
        while ring.num_live and (
            ring.num_live == MAX_ROOMS or self._in_the_way(self._rooms[ring.oldest], begin, end)
        ):
            _, emptied = self._pair(ring.oldest)
            for stream in streams:
                stream.wait_for(emptied)
            # Only now: where a wait is refused, the next must wait, too.
            ring.oldest = (ring.oldest + 1) % MAX_ROOMS
            ring.num_live -= 1
        index = (ring.oldest + ring.num_live) % MAX_ROOMS
        self._rooms[index].begin, self._rooms[index].end = begin, end
        ring.num_live += 1
        ring.next = end
        return StagingRoom(begin, end, *self._pair(index))

    def _in_the_way(self, room: RoomArgs, begin: int, end: int) -> bool:
        # Also rooms behind the point where the ring was left early: they are older than what
        # begins at its start.
        wrapped = begin == self.args.address and room.begin >= self.args.next
        return bool(wrapped or (room.begin < end and begin < room.end))

    def close(self) -> None:
        """Give everything back; nothing may use it any more."""
        close_all((*self._events, self._memory))
        self._events.clear()
