"""Whole objects between memory and an open file, past the page cache where that is possible.

Direct I/O wants memory, offsets and lengths in multiples of a block. Host slots are such memory.
What is left over at the end of an object goes through one block of our own; memory that does not
start on a block makes the whole object go through the page cache, which is counted by the caller.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence

from kvferry.storage.base import Buffers
from kvferry.storage.raw_memory import AlignedBlock, view_of

__all__ = [
    "BLOCK_BYTES",
    "can_be_direct",
    "direct_io_works",
    "read_scattered",
    "write_gathered",
]

BLOCK_BYTES = 4096
"""A multiple of what any disk in use asks for."""

_MAX_SEGMENTS = 1024  # IOV_MAX of Linux
_local = threading.local()

_Call = Callable[[int, list[memoryview], int], int]


def can_be_direct(buffers: Buffers) -> bool:
    """Whether direct I/O takes `buffers`: whole blocks of memory, but for the end of the last."""
    *inner, last = buffers
    return last[0] % BLOCK_BYTES == 0 and not any(
        address % BLOCK_BYTES or length % BLOCK_BYTES for address, length in inner
    )


def read_scattered(descriptor: int, buffers: Buffers, *, direct: bool) -> int:
    """Read from the start of a file into `buffers`, in order; how many bytes there were.

    Raises OSError as the system does.
    """
    views, tail = _split(buffers, direct=direct)
    if tail is None:
        return _move(os.preadv, descriptor, views, direct=direct)
    block = _tail_block()
    address, length = tail
    count = _move(os.preadv, descriptor, [*views, block.view], direct=direct)
    whole = sum(view.nbytes for view in views)
    if count < whole:
        return count
    kept = min(count - whole, length)
    view_of(address, length)[:kept] = block.view[:kept]
    # One byte more than asked for is enough to tell that the file is too long.
    return count


def write_gathered(descriptor: int, buffers: Buffers, *, direct: bool) -> None:
    """Write `buffers`, in order, as all that an empty file holds.

    Raises OSError as the system does, with ENOSPC where it just stops writing.
    """
    views, tail = _split(buffers, direct=direct)
    if tail is not None:
        block = _tail_block()
        address, length = tail
        block.view[:length] = view_of(address, length)
        block.view[length:] = bytes(BLOCK_BYTES - length)
        views = [*views, block.view]
    wanted = sum(view.nbytes for view in views)
    if _move(os.pwritev, descriptor, views, direct=direct) < wanted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if tail is not None:
        os.ftruncate(descriptor, wanted - BLOCK_BYTES + tail[1])


def direct_io_works(path: str) -> bool:
    """Whether the file system takes direct I/O: asked by doing it, in a new file called `path`.

    The file is removed. Raises OSError where no file can be made or removed.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as bad:
        if bad.errno != errno.EINVAL:
            raise
        # Some file systems make the file before they refuse the flag.
        if os.path.lexists(path):
            os.unlink(path)
        return False
    try:
        block = AlignedBlock(BLOCK_BYTES)
        block.view[:] = bytes(range(256)) * (BLOCK_BYTES // 256)
        wrote = block.view.tobytes()
        try:
            os.pwritev(descriptor, [block.view], 0)
            block.view[:] = bytes(BLOCK_BYTES)
            os.preadv(descriptor, [block.view], 0)
        except OSError as bad:
            if bad.errno != errno.EINVAL:
                raise
            return False
        return block.view.tobytes() == wrote
    finally:
        os.close(descriptor)
        os.unlink(path)


def _split(buffers: Buffers, *, direct: bool) -> tuple[list[memoryview], tuple[int, int] | None]:
    """What the system moves itself, and the (address, length) that goes through our block."""
    whole = [view_of(address, length) for address, length in buffers[:-1] if length]
    address, length = buffers[-1]
    left = length % BLOCK_BYTES if direct else 0
    if length > left:
        whole.append(view_of(address, length - left))
    return whole, (address + length - left, left) if left else None


def _move(call: _Call, descriptor: int, views: Sequence[memoryview], *, direct: bool) -> int:
    """Call until all of `views` is moved or there is no more; how many bytes."""
    moved, index, inside = 0, 0, 0
    while index < len(views):
        segments = [views[index][inside:], *views[index + 1 : index + _MAX_SEGMENTS]]
        count = call(descriptor, segments, moved)
        moved += count
        inside += count
        while index < len(views) and inside >= views[index].nbytes:
            inside -= views[index].nbytes
            index += 1
        # Direct I/O stops inside a block only at the end of a file; more would be refused.
        if count == 0 or (direct and moved % BLOCK_BYTES):
            break
    return moved


def _tail_block() -> AlignedBlock:
    # One a thread, kept: mapping a block anew takes longer than filling it.
    found: AlignedBlock | None = getattr(_local, "block", None)
    if found is None:
        found = _local.block = AlignedBlock(BLOCK_BYTES)
    return found
