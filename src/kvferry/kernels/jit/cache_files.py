"""Files of a cache folder that processes share: whole or not there, and nobody else's."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Collection

__all__ = [
    "ROOT",
    "TEMPORARY_SUFFIX",
    "complaint",
    "others_may_write",
    "publish_file",
    "read_file",
]

ROOT = 0
"""The superuser, who can do what a kernel can anyway."""

TEMPORARY_SUFFIX = ".tmp"
"""What a file is called while it is written, behind a leading dot."""

# A link would lead out of the folder; a pipe would block.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def others_may_write(found: os.stat_result, *, owners: Collection[int]) -> bool:
    """Whether somebody beside `owners` may put a file into a folder: its owner, group or anyone."""
    return found.st_uid not in owners or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def read_file(path: pathlib.Path) -> bytes | None:
    """The bytes of a file; None where `path` is something else."""
    with os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return None
        return file.read()


def publish_file(path: pathlib.Path, data: bytes) -> float:
    """Let `path` hold `data`, whole or not at all; the file system's time of the write."""
    temporary = path.with_name(
        f".{path.stem[:16]}.{os.getpid()}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
    )
    descriptor = os.open(temporary, _WRITE_FLAGS, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            written_at = os.fstat(file.fileno()).st_mtime
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # Without this a power cut may take the file back, no more; some file systems cannot do it.
    with contextlib.suppress(OSError):
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return written_at


def complaint(path: pathlib.Path, error: OSError) -> str:
    """What went wrong with `path`, in the system's words."""
    return f"{path}: {error.strerror or error}"
