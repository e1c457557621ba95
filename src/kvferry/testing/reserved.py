"""Terabytes of address space of which only chosen pages exist, to test 64-bit offsets."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvferry.closing import ClosedAtExit
from kvferry.errors import BudgetError, ConfigError, PoolClosedError

__all__ = ["ReservedSpace"]

# linux/mman.h; the mmap module has no name for it on Python 3.11.
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0


class ReservedSpace(ClosedAtExit):
    """`num_bytes` of address space in which only committed ranges may be touched.

    Touching anything else ends the process with SIGSEGV: a wrong address cannot go unnoticed.
    Views made by `commit` do not keep the space mapped; drop them before `close`.

    Raises ConfigError for a bad size and BudgetError when there is no such address space.
    """

    def __init__(self, num_bytes: int) -> None:
        if num_bytes < 1:
            raise ConfigError(f"num_bytes={num_bytes}: reserve at least 1 byte")
        self._num_bytes = num_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._address: int | None = None
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        found = self._libc.mmap(
            None, ctypes.c_size_t(num_bytes), _PROT_NONE, flags, -1, ctypes.c_int64(0)
        )
        if found is None or found == ctypes.c_void_p(-1).value:
            raise BudgetError(
                f"the system did not reserve {num_bytes} bytes of address space "
                f"({os.strerror(ctypes.get_errno())}): ask for less, or look at ulimit -v"
            )
        self._address = int(found)

    @property
    def num_bytes(self) -> int:
        """The size that was reserved."""
        return self._num_bytes

    @property
    def address(self) -> int:
        """Where the space starts, page aligned. Raises PoolClosedError after `close`."""
        if self._address is None:
            raise PoolClosedError(f"{self._num_bytes} reserved bytes were used after close()")
        return self._address

    def commit(self, offset: int, num_bytes: int) -> memoryview:
        """Make ``[offset, offset + num_bytes)`` usable, zeroed at first; a writable view of it.

        Whole system pages become usable, so a few bytes around the range do too. Raises
        ConfigError for a range outside the space and BudgetError when the system refuses.
        """
        address = self.address
        if offset < 0 or num_bytes < 1 or offset + num_bytes > self._num_bytes:
            raise ConfigError(
                f"cannot commit [{offset}, {offset + num_bytes}): the space has bytes 0 to "
                f"{self._num_bytes}"
            )
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        refused = self._libc.mprotect(
            ctypes.c_void_p(address + start),
            ctypes.c_size_t(offset + num_bytes - start),
            mmap.PROT_READ | mmap.PROT_WRITE,
        )
        if refused:
            raise BudgetError(
                f"the system did not commit {num_bytes} bytes at offset {offset} "
                f"({os.strerror(ctypes.get_errno())}): commit less at once"
            )
        return memoryview((ctypes.c_ubyte * num_bytes).from_address(address + offset)).cast("B")

    def close(self) -> None:
        """Unmap the space; a second call does nothing. Views of it must not be used again."""
        if self._address is None:
            return
        self._libc.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._num_bytes))
        self._address = None
