"""The staging memory of one direction: a ring of bytes whose reuse waits by events alone."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import DriverError
from kvferry.kernels.jit import DeviceBuffer, Event
from kvferry.transfer.closing import close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kernels.jit import Context, Stream

__all__ = ["StagingRing", "StagingRoom"]

_ALIGNMENT = 512


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

    The context must be current for every call.

    Raises:
        DriverError: There is no device memory for it.
    """

    def __init__(self, context: Context, num_bytes: int) -> None:
        self._context = context
        try:
            self._memory = DeviceBuffer(context, num_bytes)
        except DriverError as full:
            full.add_note(
                f"it was to be {num_bytes:,} bytes of staging memory for one direction; pass a "
                f"smaller staging_bytes, or 0 to do without"
            )
            raise
        self._live: collections.deque[StagingRoom] = collections.deque()
        self._events: list[Event] = []
        self._spare: list[Event] = []
        self._next = self._memory.address

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self._memory.num_bytes

    def take(self, num_bytes: int, streams: Sequence[Stream]) -> StagingRoom:
        """Room for `num_bytes`, at most those of the ring.

        `streams` are all that may ever write to the ring, as a room is forgotten once it is in
        the way: they wait on the GPU until what lay there is empty.
        """
        begin, limit = self._next, self._memory.address + self._memory.num_bytes
        if begin + num_bytes > limit:
            begin = self._memory.address
        end = begin + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        # Rooms are live in the order of the ring, so those in the way are the oldest ones.
        while self._live and self._in_the_way(self._live[0], begin, end):
            before = self._live[0]
            for stream in streams:
                stream.wait_for(before.emptied)
            self._live.popleft()  # only now: where a wait is refused, the next must wait, too
            self._spare += (before.filled, before.emptied)
        while len(self._spare) < 2:
            self._events.append(made := Event(self._context))
            self._spare.append(made)
        room = StagingRoom(begin, end, filled=self._spare.pop(), emptied=self._spare.pop())
        self._live.append(room)
        self._next = end
        return room

    def _in_the_way(self, room: StagingRoom, begin: int, end: int) -> bool:
        # Also rooms behind the point where the ring was left early: they are older than what
        # begins at its start.
        wrapped = begin == self._memory.address and room.address >= self._next
        return wrapped or (room.address < end and begin < room.end)

    def close(self) -> None:
        """Give everything back; nothing may use it any more."""
        self._live.clear()
        self._spare.clear()
        close_all((*self._events, self._memory))
        self._events.clear()
