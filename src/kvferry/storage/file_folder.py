"""A storage folder on disk: opening it, and one object in or out of it.

Nothing here knows of capacities or of other objects; OSError passes through as the system raises
it, and `FileBackend` makes results of it.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import itertools
import os
import pathlib
import secrets
import stat
import threading
import time
from collections.abc import Callable

from kvferry.errors import StorageError
from kvferry.storage.base import Buffers
from kvferry.storage.direct_io import (
    can_be_direct,
    direct_io_works,
    read_scattered,
    write_gathered,
)
from kvferry.storage.file_names import (
    LAYOUT_TEXT,
    MARKER,
    QUARANTINE,
    object_name,
    shard_of,
    temporary_name,
)
from kvferry.storage.file_retries import passing_einval, past_stale
from kvferry.storage.file_scan import NO_LOCKS

__all__ = ["FolderGoneError", "FsyncPolicy", "StorageFolder", "WrongLengthError"]

_WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# Something that is no file, put there by somebody, must not block.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_TRIES = 8
_MAX_QUARANTINED = 16
_OLD_PROBE_SECS = 3600.0


class FsyncPolicy(enum.StrEnum):
    """What a write waits for. A crash of the process loses nothing under any of them."""

    NEVER = "never"
    """Nothing: after a power cut the last objects may be gone or torn, and a torn one is found."""

    DATA = "data"
    """The object's bytes are on the disk before it is published."""

    FULL = "full"
    """The same, and so is its name before the write returns."""


class FolderGoneError(OSError):
    """The storage folder is no longer the one that was opened: removed, or unmounted."""


class WrongLengthError(Exception):
    """An object has another length than its buffers; never leaves this package."""

    def __init__(self, message: str, modified_ns: int) -> None:
        super().__init__(message)
        self.modified_ns = modified_ns


class StorageFolder:
    """The folder `path`, made if absent.

    Args:
        path: Its parent must exist.
        fsync: What a write waits for.
        use_direct_io: Go past the page cache where the file system and the memory allow it.
        read_only: Make, change and remove nothing; the folder must exist.

    Raises StorageError where it cannot be opened, or is laid out by another version.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, fsync: FsyncPolicy, use_direct_io: bool,
        read_only: bool,
    ) -> None:  # fmt: skip
        self.path = os.fspath(path)
        self.read_only = read_only
        self._fsync = fsync
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._last_ns = 0
        self._lock = threading.Lock()
        self._shard_locks = [threading.Lock() for _ in range(64)]
        self._writing: set[str] = set()
        self.direct_io = False
        try:
            if not read_only and not os.path.isdir(self.path):
                os.mkdir(self.path, 0o700)
            found = os.stat(self.path)
            self._identity = (found.st_dev, found.st_ino)
            is_new = self._check_marker()
            if not read_only:
                self._remove_old_probes()
            if use_direct_io:
                self.direct_io = self._probe_direct_io(is_new=is_new)
        except OSError as bad:
            raise StorageError(
                f"the storage folder {self.path!r} cannot be opened: {bad.strerror or bad}; make "
                f"its parent, mount its disk, or open an existing one with read_only=True"
            ) from bad

    def shard_path(self, shard: str) -> str:
        """Where the objects of `shard` lie."""
        return f"{self.path}/{shard}"

    def object_path(self, key: bytes) -> str:
        """Where `key` lies, or would."""
        return f"{self.path}/{shard_of(key)}/{object_name(key)}"

    def shard_lock(self, shard: str) -> threading.Lock:
        """Held while a name of `shard` and what is known of it change together."""
        return self._shard_locks[int(shard, 16) % len(self._shard_locks)]

    def writing(self) -> frozenset[str]:
        """Names of the temporary files that are being written through this very object."""
        with self._lock:
            return frozenset(self._writing)

    def size_of(self, key: bytes) -> tuple[int, int]:
        """(bytes, nanoseconds of last use) of the object's file.

        Raises FileNotFoundError where there is none, also if something else has its name.
        """
        path = self.object_path(key)
        found = past_stale(lambda: os.stat(path, follow_symlinks=False))
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a file", path)
        return found.st_size, found.st_mtime_ns

    def free_bytes(self) -> int:
        """What the disk has left for us."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def check_identity(self) -> None:
        """Raise FolderGoneError unless the folder is still the one that was opened."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._identity:
            raise FolderGoneError(
                errno.ENOENT, "the storage folder is gone; mount or make it, and open it again"
            )

    def next_ns(self) -> int:
        """The wall clock, in nanoseconds, later than at any call before."""
        with self._lock:
            self._last_ns = max(time.time_ns(), self._last_ns + 1)
            return self._last_ns

    def read(self, key: bytes, buffers: Buffers, num_bytes: int, touch: Callable[[], int]) -> bool:
        """Scatter an object of `num_bytes` into `buffers`; whether direct I/O did.

        Args:
            touch: Called after the bytes are there: the time of use to note at the file, or 0.

        Raises WrongLengthError where its length is another.
        """
        path = self.object_path(key)
        if self.direct_io and can_be_direct(buffers):
            # EINVAL: this file lies where direct I/O is not, or wants larger blocks.
            with passing_einval():
                past_stale(lambda: self._read_once(path, buffers, num_bytes, os.O_DIRECT, touch))
                return True
        past_stale(lambda: self._read_once(path, buffers, num_bytes, 0, touch))
        return False

    def publish(self, key: bytes, buffers: Buffers, publishing: Callable[[int], None]) -> bool:
        """Write an object and give it its name; whether direct I/O did.

        `publishing` is called with the time of use just after the file has its name, or not at all.
        """
        if self.direct_io and can_be_direct(buffers):
            with passing_einval():
                self._publish_once(key, buffers, os.O_DIRECT, publishing)
                return True
        self._publish_once(key, buffers, 0, publishing)
        return False

    def remove(self, key: bytes) -> None:
        """Remove an object's file."""
        past_stale(lambda: os.unlink(self.object_path(key)))

    def quarantine(self, key: bytes, max_bytes: int) -> int:
        """Move an object out of service; the bytes that the folder of such now has.

        Only the last few are kept, within `max_bytes`.
        """
        folder = f"{self.path}/{QUARANTINE}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        # Sorted by name they are sorted by time.
        away = f"{folder}/{self.next_ns():020d}-{object_name(key)}"
        past_stale(lambda: os.rename(self.object_path(key), away))
        total = 0
        for count, path in enumerate(sorted(pathlib.Path(folder).iterdir(), reverse=True)):
            total += path.stat().st_size
            if count >= _MAX_QUARANTINED or total > max_bytes:
                path.unlink(missing_ok=True)
        return self.quarantine_bytes()

    def quarantine_bytes(self) -> int:
        """What damaged objects take that were moved away."""
        try:
            with os.scandir(f"{self.path}/{QUARANTINE}") as entries:
                return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
        except FileNotFoundError:
            return 0  # None yet, or another process removed one: counted at the next look.

    def empty_quarantine(self, *, dry_run: bool) -> int:
        """Remove every quarantined object; how many there were."""
        folder = pathlib.Path(self.path, QUARANTINE)
        kept = list(folder.iterdir()) if folder.is_dir() else []
        for path in kept:
            if not dry_run:
                path.unlink(missing_ok=True)
        return len(kept)

    def _read_once(
        self, path: str, buffers: Buffers, num_bytes: int, flag: int, touch: Callable[[], int]
    ) -> None:
        descriptor = os.open(path, _READ_FLAGS | flag)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != num_bytes:
                raise WrongLengthError(
                    f"the file has {found.st_size} bytes, and {num_bytes} were asked for",
                    found.st_mtime_ns,
                )
            count = read_scattered(descriptor, buffers, direct=bool(flag)) if num_bytes else 0
            if count != num_bytes:
                raise WrongLengthError(
                    f"the file ended after {count} of {num_bytes} bytes", found.st_mtime_ns
                )
            used_ns = touch()
            if used_ns:
                # A folder that may only be read keeps its order of use in memory.
                with contextlib.suppress(OSError):
                    os.utime(descriptor, ns=(used_ns, used_ns))
        finally:
            os.close(descriptor)

    def _publish_once(
        self, key: bytes, buffers: Buffers, flag: int, publishing: Callable[[int], None]
    ) -> None:
        folder = self.shard_path(shard_of(key))
        descriptor, name = self._open_temporary(folder, flag)
        temporary = f"{folder}/{name}"
        try:
            write_gathered(descriptor, buffers, direct=bool(flag))
            used_ns = self.next_ns()
            os.utime(descriptor, ns=(used_ns, used_ns))
            if self._fsync is FsyncPolicy.DATA:
                os.fdatasync(descriptor)
            elif self._fsync is FsyncPolicy.FULL:
                os.fsync(descriptor)
            # Atomic; and a reader of an older file of this name keeps what it has open.
            with self.shard_lock(shard_of(key)):
                os.rename(temporary, f"{folder}/{object_name(key)}")
                publishing(used_ns)
        except BaseException:
            # What stays all the same is unlocked in a moment, and counted and removed by scans.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(descriptor)
            with self._lock:
                self._writing.discard(name)
        if self._fsync is FsyncPolicy.FULL:
            _sync_folder(folder)

    def _open_temporary(self, folder: str, flag: int) -> tuple[int, str]:
        """A new, locked file in `folder`: its descriptor and name."""
        for _ in range(_MAX_TRIES):
            name = temporary_name(self._token, next(self._numbers))
            with self._lock:
                self._writing.add(name)
            descriptor = None
            try:
                descriptor = self._create(folder, name, flag)
            finally:
                if descriptor is None:
                    with self._lock:
                        self._writing.discard(name)
            if descriptor is not None:
                return descriptor, name
        raise FolderGoneError(errno.ENOENT, f"somebody removes every new file in {folder}")

    def _create(self, folder: str, name: str, flag: int) -> int | None:
        """One try; None: there is reason for another."""
        path = f"{folder}/{name}"
        try:
            descriptor = past_stale(lambda: os.open(path, _WRITE_FLAGS | flag, 0o600))
        except FileNotFoundError:
            # The first object of this folder; not if all of it was on a disk that is gone.
            self.check_identity()
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            return None
        except OSError:
            # Some file systems make the file before they refuse the flag.
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        is_locked = False
        try:
            is_locked = _lock_file(descriptor)
        finally:
            if not is_locked:
                os.close(descriptor)
                with contextlib.suppress(OSError):
                    os.unlink(path)
        return descriptor if is_locked else None

    def _check_marker(self) -> bool:
        """Whether the folder is a new one."""
        path = pathlib.Path(self.path, MARKER)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            if self.read_only:
                raise StorageError(
                    f"the storage folder {self.path!r} cannot be opened: it is none, as it has no "
                    f"file {MARKER}; give the folder that a cache writes to"
                ) from None
            # Several processes may do this at once, with the same outcome.
            temporary = path.with_name(temporary_name(self._token, next(self._numbers)))
            try:
                temporary.write_bytes(LAYOUT_TEXT)
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            return True
        if text != LAYOUT_TEXT:
            raise StorageError(
                f"{path} says {text[:80]!r} and should say {LAYOUT_TEXT!r}: the folder was made by "
                f"another version of kvferry; give a new folder"
            )
        return False

    def _remove_old_probes(self) -> None:
        """Remove what somebody left who died while it opened the folder; it takes a second."""
        for path in pathlib.Path(self.path).glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.stat().st_mtime > _OLD_PROBE_SECS:
                    path.unlink()

    def _probe_direct_io(self, *, is_new: bool) -> bool:
        if self.read_only:
            return True  # Reads fall back one by one.
        name = temporary_name(self._token, next(self._numbers))
        try:
            return direct_io_works(f"{self.path}/{name}")
        except OSError as bad:
            # Objects that are there can be read from a full disk, and can make room.
            if is_new or bad.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return True


def _lock_file(descriptor: int) -> bool:
    """Lock a new temporary file; False: somebody took it for a dead writer's just before."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as bad:
        if bad.errno not in NO_LOCKS:
            return False
    return os.fstat(descriptor).st_nlink > 0


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
