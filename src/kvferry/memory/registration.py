"""Pinned host memory, and the addresses that a GPU has for it."""

from __future__ import annotations

import bisect
import logging
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from kvferry.errors import DriverError, PinError
from kvferry.memory.budget import format_bytes

__all__ = ["PinDriver", "PinnedChunk", "Registration", "give_up"]

_logger = logging.getLogger(__name__)

# After "deinitialised" and "not registered" there is nothing left to unregister.
_GONE = frozenset({4, 713})

# Memory that the driver would not let go of. A GPU may still write there, so it must not be reused.
_parked: list[object] = []


class PinDriver(Protocol):
    """The calls to the driver that pinning takes. Refusals are DriverError with their `code`."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin ``[address, address + num_bytes)`` and map it for every GPU of the process."""

    def unregister(self, address: int) -> None:
        """Undo the `register` of exactly this address."""

    def device_pointer(self, address: int) -> int:
        """What the GPU calls `address`, which lies anywhere in pinned memory."""

    def is_pinned(self, address: int) -> bool:
        """Whether a GPU can reach the byte at `address` of host memory."""

    def clear_error(self) -> None:
        """Take back a failure that the driver would otherwise report at an unrelated call."""


class PinnedChunk(NamedTuple):
    """A piece of host memory in one registration. A strided copy must not leave it."""

    address: int
    num_bytes: int
    device_address: int
    """What the GPU calls `address`."""

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.num_bytes


class Registration:
    """Pinned host memory, until `close`. Made by `register` and `look_up`.

    It keeps the memory alive. One that is dropped without `close` is unregistered before the
    memory goes.
    """

    def __init__(
        self,
        driver: PinDriver,
        chunks: Sequence[PinnedChunk],
        *,
        own: Sequence[int],
        contiguous: bool,
        owner: object,
    ) -> None:
        self._driver = driver
        self._chunks = sorted(chunks)
        self._contiguous = contiguous
        self._own = list(own)
        self._owner = owner
        self._closed = False
        self._finalizer = weakref.finalize(self, _give_up_dropped, driver, self._own, owner)
        # At the end of the process the driver lets go of everything, if it is still there to ask.
        self._finalizer.atexit = False

    @classmethod
    def merged(cls, driver: PinDriver, parts: Sequence[Registration]) -> Registration:
        """One registration in place of `parts`, which must not be used any more."""
        whole = cls(
            driver,
            [chunk for part in parts for chunk in part._chunks],
            own=[address for part in parts for address in part._own],
            contiguous=all(part._contiguous for part in parts),
            owner=tuple(part._owner for part in parts),
        )
        for part in parts:
            part._finalizer.detach()
            part._own.clear()
            part._closed = True
        return whole

    @property
    def chunks(self) -> tuple[PinnedChunk, ...]:
        """The registered pieces, by host address."""
        return tuple(self._chunks)

    @property
    def num_bytes(self) -> int:
        """How many bytes are registered."""
        return sum(chunk.num_bytes for chunk in self._chunks)

    @property
    def contiguous(self) -> bool:
        """Whether an offset from the start of a range is the same on both sides.

        Only then may a kernel take one base address and add offsets.
        """
        return self._contiguous

    @property
    def closed(self) -> bool:
        """Whether `close` was called: from then on nothing has an address here."""
        return self._closed

    def device_address(self, host_address: int, num_bytes: int = 1) -> int:
        """What the GPU calls `host_address`, good for `num_bytes` from there on.

        Raises:
            PinError: The bytes are not all in this registration, or not in one piece on the
                GPU's side, or the registration is closed.
        """
        first = self.chunk_of(host_address)
        shift = first.device_address - first.address
        chunk, end = first, host_address + num_bytes
        while chunk.end < end:
            following = self.chunk_of(chunk.end)
            if following.device_address - following.address != shift:
                raise PinError(
                    f"{num_bytes} bytes at {host_address:#x} cross from one registration into the "
                    f"next at {chunk.end:#x}, and the GPU has the two apart: cut the copy there "
                    f"(see chunk_of)"
                )
            chunk = following
        return host_address + shift

    def chunk_of(self, host_address: int) -> PinnedChunk:
        """The chunk that `host_address` lies in. Raises PinError where it lies in none."""
        if self._closed:
            raise PinError(
                f"the registration of {host_address:#x} is closed: pin the memory again first"
            )
        place = bisect.bisect_right(self._chunks, host_address, key=lambda chunk: chunk.address)
        if place and host_address < self._chunks[place - 1].end:
            return self._chunks[place - 1]
        raise PinError(
            f"host address {host_address:#x} is not in this registration of {self.num_bytes} "
            f"bytes from {self._chunks[0].address:#x}: register its memory too"
        )

    def close(self) -> None:
        """Unregister every chunk, the last one first; once that is done, a no-op.

        Nothing may be using the memory any more.

        Raises:
            PinError: The driver refused. All other chunks are unregistered, and `close` may be
                called again for those that are not; their memory must not be unmapped before.
        """
        self._closed = True
        total = len(self._own)
        failures = _give_back(self._driver, self._own)
        if not self._own:
            self._finalizer.detach()
        if failures:
            address, bad = failures[0]
            left = (
                f"{len(self._own)} chunks stay pinned: call close() again before their memory is "
                f"unmapped"
                if self._own
                else "nothing stays pinned, but something else unregistered this memory"
            )
            raise PinError(
                f"{len(failures)} of {total} chunks could not be unregistered, the first at "
                f"{address:#x} with code {bad.code} ({bad}). {left}"
            ) from bad

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except PinError as bad:
            if exc is None:
                raise
            exc.add_note(f"not closed: {bad}")

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self._chunks)} chunks"
        return f"Registration({format_bytes(self.num_bytes)}, {state})"


def give_up(driver: PinDriver, own: list[int], owner: object) -> list[tuple[int, DriverError]]:
    """Unregister all of `own` for the last time; the refusals.

    Where the driver does not let go of something, `owner` is kept until the process ends.
    """
    failures = _give_back(driver, own)
    if own:
        _parked.append(owner)
    return failures


def _give_back(driver: PinDriver, own: list[int]) -> list[tuple[int, DriverError]]:
    """Unregister `own`, the last first, and take out of it what is no longer registered."""
    failures: list[tuple[int, DriverError]] = []
    for place in range(len(own) - 1, -1, -1):
        try:
            driver.unregister(own[place])
        except DriverError as bad:
            driver.clear_error()
            failures.append((own[place], bad))
            if bad.code not in _GONE:
                continue
        del own[place]
    return failures


def _give_up_dropped(driver: PinDriver, own: list[int], owner: object) -> None:
    """For a registration that nobody closed."""
    for address, bad in give_up(driver, own, owner):
        _logger.error("pinned memory at %#x was dropped and not unregistered: %s", address, bad)
