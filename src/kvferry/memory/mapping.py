"""Memory that is there, not only promised: mapped, aligned and committed at once."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from types import TracebackType
from typing import Protocol, Self

from kvferry.errors import BudgetError, ConfigError, PoolClosedError, PoolInUseError
from kvferry.memory import linux_calls
from kvferry.memory.backing import (
    HUGE_PAGE_BYTES,
    Backing,
    HugePages,
    PageKind,
    check_huge_pages,
    huge_bytes_in,
    is_wasteful,
    transparent_mode,
    whole_pages,
)
from kvferry.memory.first_touch import Commit, commit_pages
from kvferry.memory.numa import NodeChoice, bind, choose_node, placement_note

__all__ = ["HostMapping", "close_on_exit"]

_MADV_POPULATE_WRITE = linux_calls.MADV_POPULATE_WRITE
# What one thread commits before it takes the next piece.
_COMMIT_PIECE_BYTES = 64 << 20
# Address space is reserved without a claim on memory; what is mapped over it has its own.
_MAP_NORESERVE = 0x4000
# Mappings that may have a hole, in which others may be by now. Never unmapped.
_LOST: list[mmap.mmap] = []


class HostMapping:
    """`num_bytes` of anonymous memory, zeroed, every page of it present.

    A mapping that is not closed is unmapped when it and all its views are gone.

    Args:
        num_bytes: The size. Reserved huge pages round it up.
        alignment: That of `address` in bytes, a power of two.
        locked: Keep the memory out of swap (mlock).
        huge_pages: See `HugePages`. What was got is in `backing`.
        huge_page_bytes: The size of a huge page, a power of two.
        numa_node: The node to take pages from while it has some; None: as the system chooses.
        shared: Let other processes map it too: they get `fd`, and use `attach`. It has no name, and
            is gone with its last mapping and descriptor, however their processes end.
        threads: How many threads make the pages present; None: one a processor, 16 at most.

    Raises:
        ConfigError: A size, alignment or number that cannot be.
        BudgetError: The system does not give the memory, or not in huge pages that must be.
    """

    def __init__(
        self,
        num_bytes: int,
        *,
        alignment: int = mmap.PAGESIZE,
        locked: bool = False,
        huge_pages: HugePages = "never",
        huge_page_bytes: int = HUGE_PAGE_BYTES,
        numa_node: int | None = None,
        shared: bool = False,
        threads: int | None = None,
    ) -> None:
        if num_bytes < 1:
            raise ConfigError(f"num_bytes={num_bytes}: a mapping needs at least 1 byte")
        check_huge_pages(huge_pages)
        for name, value in (("alignment", alignment), ("huge_page_bytes", huge_page_bytes)):
            if value < 1 or value & (value - 1):
                raise ConfigError(f"{name}={value} must be a power of two")
        choice = choose_node(numa_node, None)
        self._num_bytes = num_bytes
        self._notes: list[str] = []
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        try:
            pages, taken = self._map_pages(huge_pages, huge_page_bytes, alignment, shared)
            choice = bind(self._address, taken, choice)
            commit = commit_pages(
                self._address,
                taken,
                threads=threads,
                piece_bytes=_COMMIT_PIECE_BYTES,
                advice=_MADV_POPULATE_WRITE,
            )
            if locked:
                self._lock_pages()
        except BaseException:
            self.close()
            raise
        self._backing = self._found(pages, taken, choice, commit)

    @classmethod
    def attach(cls, fd: int, num_bytes: int, *, alignment: int = mmap.PAGESIZE) -> HostMapping:
        """The memory of a shared mapping of another process, whose `fd` came from there.

        The descriptor is the caller's to close. Nothing is written. Raises ConfigError for a size
        that the memory has not.
        """
        about = os.fstat(fd)
        if not 1 <= num_bytes <= about.st_size:
            raise ConfigError(
                f"num_bytes={num_bytes}: the shared memory has {about.st_size} bytes; give the "
                f"size that it was made with"
            )
        self = cls.__new__(cls)
        self._num_bytes, self._notes = num_bytes, []
        self._own(os.dup(fd))
        self._map = None
        # For reserved huge pages their size, else that of an ordinary page; st_blksize is not.
        grain = max(os.fstatvfs(fd).f_bsize, mmap.PAGESIZE)
        taken = whole_pages(num_bytes, grain)
        try:
            self._map_file(taken, max(alignment, grain))
        except BaseException:
            self.close()
            raise
        pages = PageKind.RESERVED if grain > mmap.PAGESIZE else PageKind.ORDINARY
        self._backing = self._found(pages, taken, NodeChoice(None), Commit("attach", 0))
        return self

    @property
    def num_bytes(self) -> int:
        """The size that was asked for; the system rounds it up to its page."""
        return self._num_bytes

    @property
    def commit_method(self) -> str:
        """How the pages were made present: ``populate_write``, or ``touch`` before Linux 5.14."""
        return self._backing.commit_method

    @property
    def backing(self) -> Backing:
        """What kind of pages there are, where, and why not those that were asked for."""
        return self._backing

    @property
    def fd(self) -> int:
        """The descriptor of shared memory, for other processes; this mapping closes it.

        Raises ConfigError where the memory is not shared, and PoolClosedError after `close`.
        """
        self._opened()
        return self._opened_fd()

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
        except OSError:
            # No view, or it would not have come to the system, which keeps some kinds as they are.
            return

    def close(self) -> None:
        """Give the memory back; a second call does nothing.

        Raises PoolInUseError while a view of it lives.
        """
        if self._map is not None:
            try:
                self._map.close()
            except BufferError as bad:
                raise self._in_use() from bad
            self._map = None
        if self._fd is not None:
            self._close_fd()
            self._fd = None

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

    def _own(self, fd: int) -> None:
        self._fd = fd
        # Also for a mapping that is dropped: what it maps is then unmapped by Python.
        self._close_fd = weakref.finalize(self, os.close, fd)

    def _opened_fd(self) -> int:
        if self._fd is None:
            raise ConfigError("this memory is private to the process: make it with shared=True")
        return self._fd

    def _in_use(self) -> PoolInUseError:
        return PoolInUseError(
            f"{self._num_bytes} bytes at {self._address:#x} cannot be unmapped while arrays, "
            f"tensors or memoryviews of them live: drop those first"
        )

    def _map_pages(
        self, asked: HugePages, huge: int, alignment: int, shared: bool
    ) -> tuple[PageKind, int]:
        """Map the kind of pages that can be had; gives it, and the bytes to commit."""
        rounded = whole_pages(self._num_bytes, huge)
        if asked == "always" or (asked == "auto" and not is_wasteful(self._num_bytes, huge)):
            try:
                self._map_reserved(rounded, huge, alignment, shared)
            except OSError as bad:
                if asked == "always":
                    raise BudgetError(
                        f"the system did not give {rounded} bytes in huge pages of {huge} bytes "
                        f"({bad}): reserve more of them (vm.nr_hugepages), or pass "
                        f"huge_pages='auto'"
                    ) from bad
                self._notes.append(f"no reserved huge pages ({bad.strerror or bad})")
            else:
                return PageKind.RESERVED, rounded
        if asked != "never":
            alignment = max(alignment, huge)
        if shared:
            try:
                self._own(linux_calls.shared_memory("kvferry", self._num_bytes))
            except OSError as bad:
                raise BudgetError(
                    f"the system did not give {self._num_bytes} bytes of shared memory ({bad}): "
                    f"ask for less, or pass shared=False"
                ) from bad
            self._map_file(self._num_bytes, alignment)
        else:
            self._map_anonymous(self._num_bytes, alignment)
        if asked != "never" and self._ask_for_transparent(huge, shared):
            return PageKind.TRANSPARENT, self._num_bytes
        return PageKind.ORDINARY, self._num_bytes

    def _map_reserved(self, num_bytes: int, huge: int, alignment: int, shared: bool) -> None:
        """Raises OSError where the system has not that many huge pages, and has mapped nothing."""
        if shared:
            self._own(linux_calls.shared_memory("kvferry", num_bytes, huge_page_bytes=huge))
            self._map_file(num_bytes, max(alignment, huge))
        elif alignment > huge:
            raise OSError(f"an alignment of {alignment} bytes would waste some of them")
        else:
            self._map = linux_calls.map_huge(num_bytes, huge)
            self._align(1)

    def _map_anonymous(self, num_bytes: int, alignment: int, flags: int = 0) -> None:
        """Ordinary pages with an aligned part of `num_bytes`; the rest is never touched."""
        slack = max(alignment - mmap.PAGESIZE, 0)
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            self._map = mmap.mmap(-1, num_bytes + slack, flags=flags)
        except (OSError, OverflowError) as bad:
            raise BudgetError(
                f"the system did not map {num_bytes} bytes of host memory ({bad}): ask for less, "
                f"or look at ulimit -v and vm.overcommit_memory"
            ) from bad
        self._align(alignment)

    def _map_file(self, num_bytes: int, alignment: int) -> None:
        """All of shared memory, aligned: over address space that Python unmaps."""
        self._map_anonymous(num_bytes, alignment, _MAP_NORESERVE)
        try:
            linux_calls.map_over(self._address, num_bytes, self._opened_fd())
        except OSError as bad:
            # There may be a hole now, in which others map something that must not be unmapped.
            _LOST.append(self._opened())
            self._map = None
            raise BudgetError(
                f"the system did not map {num_bytes} bytes of shared memory ({bad}): look at "
                f"vm.max_map_count and ulimit -v"
            ) from bad

    def _align(self, alignment: int) -> None:
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._opened()))
        self._address = -(-base // alignment) * alignment
        self._offset = self._address - base

    def _ask_for_transparent(self, huge: int, shared: bool) -> bool:
        # Whole huge pages only: one over the end would take more than was asked for.
        whole = self._num_bytes // huge * huge
        mode = transparent_mode(shared=shared)
        if whole == 0:
            self._notes.append(f"no transparent huge pages: smaller than one of {huge} bytes")
        elif mode in ("", "never", "deny"):
            self._notes.append(f"no transparent huge pages: the kernel's mode is {mode or 'none'}")
        else:
            try:
                linux_calls.advise(self._address, whole, linux_calls.MADV_HUGEPAGE)
            except OSError as bad:
                self._notes.append(f"no transparent huge pages ({bad.strerror or bad})")
            else:
                return True
        return False

    def _found(self, pages: PageKind, taken: int, choice: NodeChoice, commit: Commit) -> Backing:
        huge_bytes = taken if pages is PageKind.RESERVED else 0
        if pages is PageKind.TRANSPARENT:
            huge_bytes = min(huge_bytes_in(self._address, self._address + taken), taken)
            if huge_bytes == 0:
                self._notes.append("no transparent huge pages: the kernel found none")
                pages = PageKind.ORDINARY
        node_bytes = None
        if choice.node is not None:
            node_bytes, note = placement_note(self._address, taken, choice.node)
            self._notes += [note] * bool(note)
        return Backing(
            pages=pages,
            num_bytes=taken,
            huge_bytes=huge_bytes,
            shared=self._fd is not None,
            node=choice.node,
            node_bytes=node_bytes,
            commit_method=commit.method,
            threads=commit.threads,
            notes=(*self._notes, *[choice.note] * bool(choice.note)),
        )

    def _lock_pages(self) -> None:
        try:
            linux_calls.lock(self._address, self._num_bytes)
        except OSError as bad:
            raise BudgetError(
                f"{self._num_bytes} bytes of host memory could not be locked "
                f"({bad.strerror}): raise ulimit -l, grant CAP_IPC_LOCK, or pass locked=False"
            ) from bad


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
