"""Anonymous memory that is there, not only promised: mapped, aligned and committed at once."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from types import TracebackType
from typing import Protocol, Self

from kvferry.errors import BudgetError, ConfigError, PoolClosedError, PoolInUseError

__all__ = ["HostMapping", "close_on_exit"]

# linux/mman.h; Python has no name for it. Unlike MAP_POPULATE it says when it failed. Linux 5.14.
_MADV_POPULATE_WRITE = 23

# Each call holds the interpreter lock, so a large pool is committed in pieces.
_COMMIT_PIECE_BYTES = 64 << 20


class HostMapping:
    """`num_bytes` of private anonymous memory, zeroed, every page of it present.

    `alignment` is the alignment of `address` in bytes, a power of two. `locked` keeps the memory
    out of swap (mlock). A mapping that is not closed is unmapped when it and all its views are
    gone.

    Raises ConfigError for a bad size or alignment, and BudgetError when the system does not give
    the memory.
    """

    def __init__(
        self, num_bytes: int, *, alignment: int = mmap.PAGESIZE, locked: bool = False
    ) -> None:
        if num_bytes < 1:
            raise ConfigError(f"num_bytes={num_bytes}: a mapping needs at least 1 byte")
        if alignment < 1 or alignment & (alignment - 1):
            raise ConfigError(f"alignment={alignment} must be a power of two")
        self._num_bytes = num_bytes
        # Address space around the aligned part is never touched, so it costs no memory.
        slack = max(alignment - mmap.PAGESIZE, 0)
        try:
            self._map: mmap.mmap | None = mmap.mmap(
                -1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as bad:
            raise BudgetError(
                f"the system did not map {num_bytes} bytes of host memory ({bad}): ask for less, "
                f"or look at ulimit -v and vm.overcommit_memory"
            ) from bad
        base = _address_of(self._map)
        self._address = -(-base // alignment) * alignment
        self._offset = self._address - base
        try:
            self._commit_method = self._commit()
            if locked:
                self._lock_pages()
        except BudgetError:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """The size that was asked for; the system rounds it up to its page."""
        return self._num_bytes

    @property
    def commit_method(self) -> str:
        """How the pages were made present: ``populate_write``, or ``touch`` before Linux 5.14."""
        return self._commit_method

    @property
    def closed(self) -> bool:
        """Whether the memory was given back."""
        return self._map is None

    @property
    def address(self) -> int:
        """Where the memory starts. Raises PoolClosedError after `close`."""
        self._opened()
        return self._address

    @property
    def view(self) -> memoryview:
        """All bytes, writable. Keeps the mapping from closing while it lives.

        Raises PoolClosedError after `close`.
        """
        return memoryview(self._opened())[self._offset : self._offset + self._num_bytes]

    def check_no_view(self) -> None:
        """Raise PoolInUseError where `close` would: while a view of the memory lives."""
        mapped = self._opened()
        try:
            # To the size it has already: this does nothing, but is refused while a view lives.
            mapped.resize(len(mapped))
        except BufferError as bad:
            raise self._in_use() from bad

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Raises PoolInUseError while a view of it lives.
        """
        if self._map is None:
            return
        try:
            self._map.close()
        except BufferError as bad:
            raise self._in_use() from bad
        self._map = None

    def __enter__(self) -> Self:
        self._opened()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        close_on_exit(self, exc)

    def _opened(self) -> mmap.mmap:
        if self._map is None:
            raise PoolClosedError(
                f"host memory of {self._num_bytes} bytes was used after close(): keep it open "
                f"until the last use"
            )
        return self._map

    def _in_use(self) -> PoolInUseError:
        return PoolInUseError(
            f"{self._num_bytes} bytes at {self._address:#x} cannot be unmapped while arrays, "
            f"tensors or memoryviews of them live: drop those first"
        )

    def _commit(self) -> str:
        opened = self._opened()
        end = self._offset + self._num_bytes
        for start in range(self._offset, end, _COMMIT_PIECE_BYTES):
            length = min(_COMMIT_PIECE_BYTES, end - start)
            try:
                opened.madvise(_MADV_POPULATE_WRITE, start, length)
            except OSError as bad:
                if bad.errno != errno.EINVAL:
                    raise BudgetError(
                        f"only {start - self._offset} of {self._num_bytes} bytes of host memory "
                        f"could be committed ({bad}): ask for less"
                    ) from bad
                for page in range(start, end, mmap.PAGESIZE):
                    opened[page] = 0
                return "touch"
        return "populate_write"

    def _lock_pages(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        locked = libc.mlock(ctypes.c_void_p(self._address), ctypes.c_size_t(self._num_bytes))
        if locked != 0:
            raise BudgetError(
                f"{self._num_bytes} bytes of host memory could not be locked "
                f"({os.strerror(ctypes.get_errno())}): raise ulimit -l, grant CAP_IPC_LOCK, or "
                f"pass locked=False"
            )


class _Closable(Protocol):
    def close(self) -> None: ...


def close_on_exit(closable: _Closable, exc: BaseException | None) -> None:
    """Close at the end of a ``with`` block that `exc` may have left.

    Frames of `exc` often hold views, so that closing is refused; that must not hide `exc` itself,
    and becomes a note on it.
    """
    try:
        closable.close()
    except PoolInUseError as in_use:
        if exc is None:
            raise
        exc.add_note(f"not closed: {in_use}")


def _address_of(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
