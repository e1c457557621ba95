"""What lies in a storage folder: objects, files being written, files left by dead writers.

A writer keeps its temporary file locked (flock) until it is published. The system drops the lock
when the writer dies, also by SIGKILL, and in whatever container it ran: who gets the lock knows
that nobody writes there any more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Collection
from typing import NamedTuple

from kvferry.storage.file_index import KnownFile
from kvferry.storage.file_names import key_of, shard_of, temporary_pattern

__all__ = ["NO_LOCKS", "ShardScan", "scan_shard"]

NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
"""What a file system without locks answers."""

# Only where there are no locks: older than any write can be.
_ABANDONED_SECS = 3600.0


class ShardScan(NamedTuple):
    """What one folder of objects holds."""

    files: list[KnownFile]
    temporary_bytes: int
    """Of files that somebody else is writing, or that could not be removed."""
    removed: int
    """Files of dead writers."""
    ignored: int
    """Names that are not kvferry's; they are left alone."""


def scan_shard(
    path: str, shard: str, *, own: Collection[str] = (), clean: bool = True
) -> ShardScan:
    """Look through the folder `path`; one that is not there is empty.

    Args:
        path: Of the folder.
        shard: Its name, which objects must belong to.
        own: Temporary files that this process is writing, which are passed over.
        clean: Remove what dead writers left; otherwise it is counted like the others.

    Raises OSError where the folder cannot be read.
    """
    files: list[KnownFile] = []
    temporary_bytes = removed = ignored = 0
    try:
        entries = os.scandir(path)
    except FileNotFoundError:
        return ShardScan([], 0, 0, 0)
    with entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError as bad:
                if bad.errno in (errno.ENOENT, errno.ESTALE):
                    continue  # Another process was faster, here or on another host.
                raise
            key = key_of(entry.name)
            regular = stat.S_ISREG(found.st_mode)
            if regular and key is not None and shard_of(key) == shard:
                files.append(KnownFile(key, found.st_size, found.st_mtime_ns))
            elif regular and temporary_pattern.fullmatch(entry.name):
                if entry.name in own:
                    continue
                if clean and _remove_if_abandoned(entry.path, found.st_mtime):
                    removed += 1
                else:
                    temporary_bytes += found.st_size
            else:
                ignored += 1
    return ShardScan(files, temporary_bytes, removed, ignored)


def _remove_if_abandoned(path: str, modified: float) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # Published or removed meanwhile, or not ours to open: counted as it is.
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as bad:
            if bad.errno not in NO_LOCKS or time.time() - modified < _ABANDONED_SECS:
                return False
        # Published under its own name meanwhile: then this one is gone, which is no harm.
        with contextlib.suppress(OSError):
            os.unlink(path)
            return True
        return False
    finally:
        os.close(descriptor)
