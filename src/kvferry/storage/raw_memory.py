"""Memory by address: views that own nothing, copies, and aligned room of one's own."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["AlignedBlock", "copy_bytes", "view_of"]


def view_of(address: int, num_bytes: int) -> memoryview:
    """The `num_bytes` at `address`, writable, flat, owned by somebody else."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def copy_bytes(to_address: int, from_address: int, num_bytes: int) -> None:
    """Copy between addresses; the interpreter lock is released meanwhile."""
    ctypes.memmove(to_address, from_address, num_bytes)


class AlignedBlock:
    """`num_bytes` of zeroed memory that starts on a page of the system; freed when dropped."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
