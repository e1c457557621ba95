"""A driver that pins nothing, keeps strict books, and refuses what a test tells it to."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

from kvferry.errors import DriverError

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713

_PAGE = mmap.PAGESIZE


def driver_error(code: int) -> DriverError:
    """What the driver raises for `code`."""
    error = DriverError(f"refused with {code}")
    error.code = code
    return error


def whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """The memory pages that a range lies in, as (start, end)."""
    return address // _PAGE * _PAGE, -(-(address + num_bytes) // _PAGE) * _PAGE


class Asked(NamedTuple):
    """One call of `FakePins.register`."""

    call: int
    """How many there were before it."""
    address: int
    num_bytes: int


class FakePins:
    """A `PinDriver`. Like the real one it takes each memory page once, and only its own address.

    Args:
        refuse: The code that a call of `register` fails with, or None.
        shift: What the GPU's addresses are above the CPU's.
        gap: What each further registration is shifted more than the one before it.
    """

    def __init__(
        self,
        refuse: Callable[[Asked], int | None] = lambda _: None,
        *,
        shift: int = 0,
        gap: int = 0,
    ) -> None:
        self.refuse = refuse
        self.keeps: dict[int, int] = {}
        """Addresses that `unregister` fails for, with the code."""
        self.has_no_pointer: set[int] = set()
        self.pinned: dict[int, int] = {}
        """What is pinned: address and size."""
        self.asked: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.pending: int | None = None
        """The error state: the code of the last failure that was not cleared."""
        self._shift = shift
        self._gap = gap
        self._shifts: dict[int, int] = {}

    def _fail(self, code: int) -> DriverError:
        self.pending = code
        return driver_error(code)

    def _range_of(self, address: int) -> int | None:
        for start, num_bytes in self.pinned.items():
            if start <= address < start + num_bytes:
                return start
        return None

    def register(self, address: int, num_bytes: int) -> None:
        """Pin a range, unless it is to be refused or shares a page with another."""
        self.asked.append((address, num_bytes))
        code = self.refuse(Asked(len(self.asked) - 1, address, num_bytes))
        if code is not None:
            raise self._fail(code)
        start, end = whole_pages(address, num_bytes)
        for other, size in self.pinned.items():
            first, last = whole_pages(other, size)
            if first < end and start < last:
                raise self._fail(ALREADY_REGISTERED)
        self._shifts[address] = self._shift + self._gap * len(self.pinned)
        self.pinned[address] = num_bytes

    def unregister(self, address: int) -> None:
        """Unpin what was registered at exactly `address`."""
        if address in self.keeps:
            raise self._fail(self.keeps[address])
        if address not in self.pinned:
            raise self._fail(NOT_REGISTERED)
        del self.pinned[address]
        self.unregistered.append(address)

    def device_pointer(self, address: int) -> int:
        """The GPU's address of a pinned byte."""
        start = self._range_of(address)
        if start is None or start in self.has_no_pointer:
            raise self._fail(INVALID_VALUE)
        return address + self._shifts[start]

    def is_pinned(self, address: int) -> bool:
        """Whether a byte is pinned."""
        return self._range_of(address) is not None

    def clear_error(self) -> None:
        """Forget the last failure."""
        self.pending = None
