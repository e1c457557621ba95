"""Compiled kernels on disk: content-addressed, self-checking, shared by processes without locks.

A file appears under its name only when it is whole: it is written under another name, synced and
renamed. Whoever comes second renames over it the same bytes. What is not whole all the same (a disk
that lost a write, a foreign file) fails its digest on reading, is removed, and is built again.

A process that dies while writing leaves a temporary file; the next one that stores something after
an hour removes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import stat
import struct
import tempfile
import threading

from kvferry import env
from kvferry.errors import CubinCacheError
from kvferry.kernels.jit.cache_files import (
    ROOT,
    TEMPORARY_SUFFIX,
    complaint,
    others_may_write,
    publish_file,
    read_file,
)

__all__ = ["CacheCounts", "CubinCache"]

_logger = logging.getLogger(__name__)

# magic, format, length of the whole header, length of the cubin, key; then the digest of all these
# and of the cubin, and the cubin.
_HEADER = struct.Struct("<8sIIQ32s")
_MAGIC = b"kvfcubin"
_FORMAT = 1
_DIGEST_BYTES = 32
_HEADER_BYTES = _HEADER.size + _DIGEST_BYTES

_SUFFIX = ".cubin"
# Far more than a write takes, so that no file is removed that somebody is still writing.
_STALE_SECS = 3600.0

_NO_FOLDER = "neither KVFERRY_CACHE_DIR nor XDG_CACHE_HOME nor HOME names a folder"


@dataclasses.dataclass
class CacheCounts:
    """What happened in a cache since it was opened."""

    hits: int = 0
    misses: int = 0
    stored: int = 0
    damaged: int = 0
    """Files that were not what their name says; each was removed, if it could be."""
    unreadable: int = 0
    """Files that are there and could not be read."""
    unwritable: int = 0
    """Folders given up because something could not be written there."""


class CubinCache:
    """Cubins by key, in a folder; in a private temporary one where that cannot be written.

    Threads may share it.
    """

    def __init__(self, folder: pathlib.Path | None, *, why_none: str = _NO_FOLDER) -> None:
        """Open the cache, and make the folder if it is not there.

        Args:
            folder: where to keep cubins. None: there is no such place, use a temporary folder.
            why_none: the `reason` to show where `folder` is None.

        Raises:
            CubinCacheError: `folder` is another user's, or others may write in it.
        """
        self.counts = CacheCounts()
        self._lock = threading.Lock()
        self._readable: list[pathlib.Path] = []
        # Where to write: one folder, the temporary one after that, then none.
        self._target: pathlib.Path | None = None
        self._is_temporary = False
        self._reasons: list[str] = []
        self._swept: set[pathlib.Path] = set()
        if folder is None:
            self._move_on(why_none)
            return
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = folder.stat()
        except OSError as error:
            self._move_on(complaint(folder, error))
            return
        if others_may_write(found, owners=(os.geteuid(), ROOT)):
            raise CubinCacheError(
                f"others may write in {folder} (mode {stat.S_IMODE(found.st_mode):o}, owner "
                f"{found.st_uid}, and this is user {os.geteuid()}), so kernels in it may be "
                "anybody's: chown it to this user or root and chmod go-w it, or let "
                "KVFERRY_CACHE_DIR name a folder of this user's own"
            )
        self._readable.append(folder)
        self._target = folder
        if not os.access(folder, os.W_OK | os.X_OK):
            self._move_on(f"{folder}: not writable for user {os.geteuid()}")

    @classmethod
    def from_environment(cls) -> CubinCache:
        """The cache that the environment names; see KVFERRY_CACHE_DIR.

        Raises:
            ConfigError: KVFERRY_CACHE_DIR is no absolute path.
            CubinCacheError: the folder it names is another user's, or others may write in it.
        """
        where = env.cache_folder()
        try:
            return cls(where.path)
        except CubinCacheError as error:
            # Nobody asked for this folder, so there is no wish to insist on.
            if where.is_explicit:
                raise
            return cls(None, why_none=str(error))

    @property
    def location(self) -> pathlib.Path | None:
        """The folder that new cubins go to; None: to none, each process compiles for itself."""
        return self._target

    @property
    def reason(self) -> str | None:
        """Why `location` is not the folder that was asked for; None where it is."""
        return "; ".join(self._reasons) or None

    def get(self, key: str) -> bytes | None:
        """The cubin under `key` (64 hex digits), or None where there is no sound one."""
        for folder in tuple(self._readable):
            path = folder / (key + _SUFFIX)
            try:
                data = read_file(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._count("unreadable")
                _logger.warning("%s; the kernel is compiled instead", complaint(path, error))
                continue
            cubin = None if data is None else _unpack(key, data)
            if cubin is not None:
                self._count("hits")
                return cubin
            self._count("damaged")
            self._remove(path)
        self._count("misses")
        return None

    def put(self, key: str, cubin: bytes) -> pathlib.Path | None:
        """Keep `cubin` under `key`; the file, or None where none could be written.

        What goes wrong here never raises: the caller has its cubin. It is in `reason`, in `counts`
        and in the log.
        """
        data = _pack(key, cubin)
        while (folder := self._target) is not None:
            path = folder / (key + _SUFFIX)
            try:
                written_at = publish_file(path, data)
            except OSError as error:
                self._count("unwritable")
                self._move_on(complaint(path, error), given_up=folder)
                continue
            self._count("stored")
            self._sweep(folder, written_at)
            return path
        return None

    def _move_on(self, why: str, given_up: pathlib.Path | None = None) -> None:
        """Write to the temporary folder from now on, or if that is what failed, to none."""
        with self._lock:
            if given_up is not None and given_up != self._target:
                return  # another thread was here first
            self._reasons.append(why)
            self._target = None
            if not self._is_temporary:
                self._is_temporary = True
                try:
                    self._target = _private_temporary_folder()
                    self._readable.append(self._target)
                except OSError as error:
                    self._reasons.append(str(error))
        _logger.warning(
            "compiled kernels are kept in %s: %s", self._target or "memory only", self.reason
        )

    def _remove(self, path: pathlib.Path) -> None:
        _logger.warning("%s is damaged or foreign; it is removed and built again", path)
        try:
            path.unlink()
        except FileNotFoundError:
            pass  # another process removed it first
        except OSError as error:
            _logger.warning("it could not be removed: %s", complaint(path, error))

    def _sweep(self, folder: pathlib.Path, now: float) -> None:
        """Remove what dead processes left; `now` is the file system's own time, not this host's."""
        with self._lock:
            if folder in self._swept:
                return
            self._swept.add(folder)
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") and entry.name.endswith(TEMPORARY_SUFFIX):
                    # Somebody else may remove it at the same time.
                    with contextlib.suppress(OSError):
                        if entry.stat(follow_symlinks=False).st_mtime < now - _STALE_SECS:
                            pathlib.Path(entry.path).unlink()

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self.counts, name, getattr(self.counts, name) + 1)


def _private_temporary_folder() -> pathlib.Path:
    """A folder under the system's temporary one that is ours alone; OSError where there is none.

    Its name depends on the user alone, so that this user's processes share what they compile.
    """
    user = os.geteuid()
    folder = pathlib.Path(tempfile.gettempdir(), f"kvferry-{user}")
    folder.mkdir(mode=0o700, exist_ok=True)
    # Not through a link: somebody else may have put it there under this name.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or others_may_write(found, owners=(user,)):
        raise PermissionError(
            f"{folder} exists and is not a folder of user {user} alone (mode "
            f"{stat.filemode(found.st_mode)}, owner {found.st_uid}); remove it"
        )
    return folder


def _pack(key: str, cubin: bytes) -> bytes:
    header = _HEADER.pack(_MAGIC, _FORMAT, _HEADER_BYTES, len(cubin), bytes.fromhex(key))
    return header + _digest(header, cubin) + cubin


def _unpack(key: str, data: bytes) -> bytes | None:
    """The cubin in the file's `data`; None where it is not that of `key`, whole and unchanged."""
    cubin = data[_HEADER_BYTES:]
    return cubin if data == _pack(key, cubin) else None


def _digest(header: bytes, cubin: bytes) -> bytes:
    return hashlib.blake2b(header + cubin, digest_size=_DIGEST_BYTES).digest()
