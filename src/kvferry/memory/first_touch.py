"""Making pages present: by several threads, since the kernel clears one page a time on each."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.errors import BudgetError, ConfigError
from kvferry.memory import linux_calls

__all__ = ["Commit", "commit_pages"]

_MAX_DEFAULT_THREADS = 16


class Commit(NamedTuple):
    """How pages were made present."""

    method: str
    threads: int


class _Pieces:
    """Pieces of a range, each given to one thread; none any more once one has failed."""

    def __init__(self, address: int, num_bytes: int, piece_bytes: int, advice: int) -> None:
        self._address, self._num_bytes, self._advice = address, num_bytes, advice
        self._starts: Iterator[int] = iter(range(0, num_bytes, piece_bytes))
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._done = 0
        self.failure: OSError | None = None
        self.method = "populate_write"

    def work(self) -> None:
        while (start := self._next()) is not None:
            length = min(self._piece_bytes, self._num_bytes - start)
            try:
                self._commit(self._address + start, length)
            except OSError as bad:
                self.failure = bad
                return
            with self._lock:
                self._done += length

    def stop(self) -> None:
        """Hand out no more pieces."""
        with self._lock:
            self._starts = iter(())

    @property
    def done(self) -> int:
        """Bytes that are present."""
        return self._done

    def _next(self) -> int | None:
        with self._lock:
            return None if self.failure else next(self._starts, None)

    def _commit(self, address: int, length: int) -> None:
        if self.method == "populate_write":
            try:
                linux_calls.advise(address, length, self._advice)
                return
            except OSError as bad:
                if bad.errno != errno.EINVAL:
                    raise
                self.method = "touch"  # the kernel does not know it
        linux_calls.clear(address, length)


def commit_pages(
    address: int, num_bytes: int, *, threads: int | None, piece_bytes: int, advice: int
) -> Commit:
    """Make all pages from `address` on present; what is in them is zero, or becomes so.

    `threads` None: as many as this process may use processors, and 16 at most. Raises BudgetError
    when the system does not have the pages, and ConfigError for less than one thread.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads}: at least 1 has to touch the memory")
    allowed = threads or min(len(os.sched_getaffinity(0)), _MAX_DEFAULT_THREADS)
    count = min(allowed, -(-num_bytes // piece_bytes))
    pieces = _Pieces(address, num_bytes, piece_bytes, advice)
    # Kernel calls cannot be broken off, so these threads end with the memory, or its refusal.
    others = [threading.Thread(target=pieces.work, name="kvferry-touch") for _ in range(count - 1)]
    for other in others:
        other.start()
    try:
        pieces.work()
    finally:
        # After an interrupt the memory goes: nobody may still touch it.
        pieces.stop()
        for other in others:
            other.join()
    if pieces.failure is not None:
        raise BudgetError(
            f"only {pieces.done} of {num_bytes} bytes of host memory could be committed "
            f"({pieces.failure}): ask for less"
        ) from pieces.failure
    return Commit(pieces.method, count)
