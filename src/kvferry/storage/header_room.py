"""Aligned memory for the headers of a batch, used again by the next one."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.storage.raw_memory import AlignedBlock

__all__ = ["HeaderRoom", "HeaderRooms"]

_MAX_KEPT = 8


class HeaderRoom(NamedTuple):
    """Room for headers at `stride` bytes from each other."""

    block: AlignedBlock
    stride: int

    def address(self, number: int) -> int:
        """Where header `number` begins."""
        return self.block.address + number * self.stride

    def view(self, number: int) -> memoryview:
        """The bytes of header `number`, and what is left up to the next."""
        return self.block.view[number * self.stride : (number + 1) * self.stride]


class HeaderRooms:
    """Rooms of one stride; thread-safe."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._lock = threading.Lock()
        self._kept: list[AlignedBlock] = []

    def take(self, count: int) -> HeaderRoom:
        """Room for `count` headers. What it holds is undefined."""
        wanted = count * self._stride
        with self._lock:
            for number, block in enumerate(self._kept):
                if block.num_bytes >= wanted:
                    return HeaderRoom(self._kept.pop(number), self._stride)
        return HeaderRoom(AlignedBlock(wanted), self._stride)

    def give_back(self, room: HeaderRoom) -> None:
        """Nobody reads or writes `room` any more."""
        with self._lock:
            self._kept.append(room.block)
            # The smallest serve least.
            self._kept.sort(key=lambda block: block.num_bytes)
            del self._kept[:-_MAX_KEPT]
