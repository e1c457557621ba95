"""Staging in two rooms: kernels lay rows out in one while the copy engine empties the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.kernels.jit import Event, PieceCopy, Stream

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.kernels.jit import Context

__all__ = ["Room", "RowRooms", "rooms_of"]

_ALIGNMENT = 128


class Room(NamedTuple):
    """A part of staging, and which rows of a list it has next."""

    number: int
    address: int
    first: int
    num_rows: int


def rooms_of(staging: int, staging_rows: int, row_bytes: int, count: int) -> Iterator[Room]:
    """Which rows go through which room, in turn.

    One room where all rows have room at once, or where half of them would not begin on 128 bytes.
    """
    per_room = staging_rows
    if count > staging_rows:
        step = _ALIGNMENT // math.gcd(row_bytes, _ALIGNMENT)
        per_room = staging_rows // 2 // step * step or staging_rows
    num_rooms = 2 if per_room < staging_rows else 1
    for piece, first in enumerate(range(0, count, per_room)):
        number = piece % num_rooms
        at = staging + number * per_room * row_bytes
        yield Room(number, at, first, min(per_room, count - first))


class RowRooms:
    """The stream of the copies, and the events between it and the caller's. One thread's at a time.

    Each method must be called with the context current.
    """

    def __init__(self, context: Context) -> None:
        self._aside = Stream(context)
        self._laid_out, self._copied = ([Event(context) for _ in range(2)] for _ in range(2))
        self._over = Event(context)
        self._pieces = PieceCopy(context) if context.driver.version >= (12, 8) else None

    def store(
        self,
        rooms: Iterator[Room],
        lay_out: Callable[[Room], None],
        addresses: NDArray[np.int64],
        row_bytes: int,
        stream: Stream,
    ) -> None:
        """Lay out each room in `stream`, and copy it to `addresses`; `stream` is behind all of it.

        Args:
            rooms: As `rooms_of` has them.
            lay_out: Puts the kernels of a room into `stream`.
            addresses: Where each row goes, as the GPU calls it. Shape ``[rows]``.
            row_bytes: Of each.
            stream: The caller's.
        """
        used = set[int]()
        try:
            for room in rooms:
                if room.number in used:
                    stream.wait_for(self._copied[room.number])
                lay_out(room)
                self._laid_out[room.number].record(stream.handle)
                self._aside.wait_for(self._laid_out[room.number])
                used.add(room.number)
                part = addresses[room.first : room.first + room.num_rows]
                self._copy_out(part, row_bytes, room.address)
                self._copied[room.number].record(self._aside.handle)
        finally:
            # Also where a call failed: what is under way still reads staging.
            self._over.record(self._aside.handle)
            stream.wait_for(self._over)

    def _copy_out(self, addresses: NDArray[np.int64], row_bytes: int, room: int) -> None:
        """Rows of a room to `addresses`, neighbours in one piece."""
        breaks = np.flatnonzero(addresses[1:] - addresses[:-1] != row_bytes) + 1
        starts = np.concatenate([np.zeros(1, np.int64), breaks])
        ends = np.append(breaks, len(addresses))
        targets = np.ascontiguousarray(addresses[starts], np.int64)
        sources = room + starts * row_bytes
        sizes = (ends - starts) * row_bytes
        if self._pieces is not None and len(sizes) > 1:
            self._pieces.submit(self._aside, targets, sources, sizes)
            return
        for target, source, size in zip(targets, sources, sizes, strict=True):
            self._aside.copy_out(int(target), int(source), int(size))

    def close(self) -> None:
        """Give streams and events back; nothing that was put into them may be under way."""
        for event in (*self._laid_out, *self._copied, self._over):
            event.close()
        self._aside.close()
