"""The file backend: a folder of objects, bounded, shared by processes, whole after any crash."""

from __future__ import annotations

import errno
import numbers
import os
import threading
import time
from collections.abc import Callable, Sequence

from kvferry.errors import ConfigError, StorageError
from kvferry.storage.base import (
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
    StorageStats,
    check_batch,
    key_complaint,
    total_bytes,
)
from kvferry.storage.batch_threads import BatchThreads
from kvferry.storage.file_counts import FileCounts
from kvferry.storage.file_folder import FsyncPolicy, StorageFolder, WrongLengthError
from kvferry.storage.file_index import FileIndex, KnownFile
from kvferry.storage.file_names import shard_of, shards
from kvferry.storage.file_room import RoomMaker
from kvferry.storage.file_scan import scan_shard

__all__ = ["FileBackend"]

_MISS = ItemResult(ItemStatus.MISS)
_CLOSED = ItemResult(ItemStatus.FAILED, reason="the backend is closed")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_SHARE_OF_FREE = 0.9
_MOST_SECS = 10**9
# Of the capacity: damaged objects must not take the place of whole ones.
_QUARANTINE_SHARE = 16
# Longer than hosts remember the length of a file: 60 s at most by default (acregmax, nfs(5)).
_SETTLE_NS = 90 * 10**9


class FileBackend(StorageBackend):
    """Objects as files in the folder `path`, which other processes may use at the same time.

    Args:
        path: Made if absent; its parent must exist.
        capacity_bytes: What objects, temporary and quarantined files may take together; the least
            recently used objects go first. None: nine tenths of what is free or ours already.
        fsync: ``never``, ``data`` or ``full``, see `FsyncPolicy`.
        direct_io: Go past the page cache where the file system and the memory allow it.
        num_threads: How many files of a batch are worked on at a time.
        read_only: Keep, change and remove nothing. The folder must exist.
        shared: Several hosts use the folder over a network. Then `fsync` is at least ``data``, so
            that no host sees a name before its bytes, and a file that is too short soon after it
            was written is a miss, not damage: this host may not see all of it yet.
        touch_secs: A read tells an object's file that it was used if the file says longer ago than
            this; it is what a restart knows of the order of use.
        rescan_secs: In about this time, writes look through the whole folder for what other
            processes did, a small part at each batch.

    Raises ConfigError for a value that is not accepted, and StorageError where the folder cannot be
    opened. The folder is scanned before the constructor returns.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int | None = None,
        fsync: FsyncPolicy | str = FsyncPolicy.NEVER,
        direct_io: bool = True,
        num_threads: int = 4,
        read_only: bool = False,
        shared: bool = False,
        touch_secs: float = 60.0,
        rescan_secs: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        policy = _checked(capacity_bytes, fsync, num_threads, touch_secs, rescan_secs)
        if shared and policy is FsyncPolicy.NEVER:
            policy = FsyncPolicy.DATA
        self._settle_ns = _SETTLE_NS if shared else 0
        self._folder = StorageFolder(
            path, fsync=policy, use_direct_io=direct_io, read_only=read_only
        )
        self._touch_ns = int(touch_secs * 1e9)
        self._rescan_secs = rescan_secs
        self._clock = clock
        self._closed = False
        self._counts = FileCounts()
        self._threads = BatchThreads(num_threads)
        self._index = FileIndex(0, clock=clock)
        self._room = RoomMaker(self._folder, self._index, self._counts)
        self._scan_lock = threading.Lock()
        self._next_shard = 0
        self._last_scan = clock()
        try:
            self._load()
            ours, free = self._index.usage().num_bytes, self._folder.free_bytes()
        except OSError as bad:
            raise StorageError(
                f"the storage folder {self._folder.path!r} cannot be read: {bad.strerror or bad}"
            ) from bad
        if capacity_bytes is None:
            capacity_bytes = int(ours + free * _SHARE_OF_FREE)
        self._index.capacity_bytes = capacity_bytes
        self._counts.add("capacity_beyond_disk_bytes", max(0, capacity_bytes - ours - free))

    @property
    def path(self) -> str:
        """The folder."""
        return self._folder.path

    @property
    def direct_io(self) -> bool:
        """Whether the file system takes direct I/O, and may."""
        return self._folder.direct_io

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are. What is not known here is looked for: another process's."""
        if self._closed:
            return [False] * len(keys)
        return [self._contains(key) for key in keys]

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Scatter each object into its buffers, several at a time."""
        check_batch(keys, buffers)
        return self._threads.map(self._read, list(zip(keys, buffers, strict=True)))

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Publish each object, several at a time."""
        check_batch(keys, buffers)
        if not self._closed:
            self._scan_next()
        return self._threads.map(self._write, list(zip(keys, buffers, strict=True)))

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove objects."""
        return [self._take_away(key, self._folder.remove) for key in keys]

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Move damaged objects into a folder of their own, which keeps the last few."""
        return [self._quarantine(key) for key in keys]

    def stats(self) -> StorageStats:
        """What is kept, and what happened.

        `StorageStats.counts` has, where not 0: ``direct`` and ``buffered`` objects that were moved
        past and through the page cache; ``adopted`` objects of other processes that were found;
        ``vanished`` ones that others removed; ``dead_writers`` whose files were removed;
        ``ignored`` names that are not kvferry's; ``other_bytes`` of files that are no objects;
        ``undeletable`` files; ``capacity_beyond_disk_bytes`` that the disk did not have.
        """
        usage = self._index.usage()
        counts, errors, evicted, evicted_bytes = self._counts.told()
        quarantined = counts.pop("quarantined", 0)
        counts |= {"other_bytes": usage.other_bytes, "undeletable": usage.undeletable}
        return StorageStats(
            objects=usage.objects,
            num_bytes=usage.num_bytes,
            capacity_bytes=self._index.capacity_bytes,
            evicted=evicted,
            evicted_bytes=evicted_bytes,
            quarantined=quarantined,
            errors=errors,
            counts={name: count for name, count in counts.items() if count},
        )

    def close(self) -> None:
        """Let the threads go; the folder stays."""
        self._closed = True
        self._threads.close()

    def _load(self) -> None:
        files: list[KnownFile] = []
        for shard in shards():
            scan = scan_shard(
                self._folder.shard_path(shard), shard, clean=not self._folder.read_only
            )
            files += scan.files
            self._index.set_other_bytes(shard, scan.temporary_bytes)
            self._counts.add("dead_writers", scan.removed)
            self._counts.add("ignored", scan.ignored)
        self._index.load(files)
        self._index.set_other_bytes("quarantine", self._folder.quarantine_bytes())

    def _scan_next(self) -> None:
        """Look through the parts of the folder whose turn it is, if any."""
        if not self._scan_lock.acquire(blocking=False):
            return  # Another batch is at it.
        try:
            now = self._clock()
            share = (now - self._last_scan) / self._rescan_secs if self._rescan_secs else 1.0
            due = min(int(share * len(shards())), len(shards()))
            if due:
                self._last_scan = now
            for _ in range(due):
                self._scan(f"{self._next_shard:02x}")
                self._next_shard = (self._next_shard + 1) % len(shards())
        finally:
            self._scan_lock.release()

    def _scan(self, shard: str) -> None:
        with self._folder.shard_lock(shard):
            try:
                scan = scan_shard(
                    self._folder.shard_path(shard),
                    shard,
                    own=self._folder.writing(),
                    clean=not self._folder.read_only,
                )
            except OSError as bad:
                self._counts.error(f"scan {_name_of(bad)}")
                return
            new, gone = self._index.reconcile(scan.files, lambda key: shard_of(key) == shard)
            self._index.set_other_bytes(shard, scan.temporary_bytes)
        self._counts.add("adopted", new)
        self._counts.add("vanished", gone)
        self._counts.add("dead_writers", scan.removed)

    def _contains(self, key: bytes) -> bool:
        if key_complaint(key) or self._index.is_blocked(key):
            return False
        return self._index.has(key) or self._look_for(key) is not None

    def _look_for(self, key: bytes) -> int | None:
        """The bytes of the object's file as the folder has it now, which the index then knows."""
        with self._folder.shard_lock(shard_of(key)):
            known = self._index.size_of(key)
            try:
                num_bytes, used_ns = self._folder.size_of(key)
            except FileNotFoundError:
                if self._index.forget(key) is not None:
                    self._counts.add("vanished")
                return None
            except OSError as bad:
                self._counts.error(f"stat {_name_of(bad)}")
                return None
            if known != num_bytes:
                self._index.add(KnownFile(key, num_bytes, used_ns))
                self._counts.add("adopted")
            return num_bytes

    def _read(self, item: tuple[bytes, Buffers]) -> ItemResult:
        key, buffers = item
        if self._closed:
            return _CLOSED
        if key_complaint(key) or self._index.is_blocked(key):
            return _MISS
        num_bytes = total_bytes(buffers)
        try:
            direct = self._folder.read(key, buffers, num_bytes, lambda: self._touched(key))
        except FileNotFoundError:
            if self._index.forget(key) is not None:
                self._counts.add("vanished")
            return _MISS
        except WrongLengthError as bad:
            # Clocks of hosts differ, so what seems to come from the future is new as well.
            if time.time_ns() - bad.modified_ns < self._settle_ns:
                self._counts.add("unsettled")
                return _MISS
            self._counts.error("wrong length")
            return ItemResult(ItemStatus.CORRUPT, reason=str(bad))
        except OSError as bad:
            return self._failed("read", bad)
        self._counts.add("direct" if direct else "buffered")
        return ItemResult(ItemStatus.OK, num_bytes)

    def _touched(self, key: bytes) -> int:
        if not self._index.has(key):
            self._look_for(key)  # Another process's, and read without being asked for first.
        now_ns = self._folder.next_ns()
        save = self._index.touch(key, now_ns, save_after_ns=self._touch_ns)
        return now_ns if save and not self._folder.read_only else 0

    def _write(self, item: tuple[bytes, Buffers]) -> ItemResult:
        key, buffers = item
        if self._closed:
            return _CLOSED
        num_bytes = total_bytes(buffers)
        complaint = key_complaint(key)
        if num_bytes == 0:
            complaint = "an object has at least one byte"
        if self._folder.read_only:
            complaint = "the folder is open for reading alone"
        if complaint:
            return ItemResult(ItemStatus.REFUSED, reason=complaint)
        if self._look_for(key) == num_bytes and not self._index.is_blocked(key):
            self._index.touch(key, self._folder.next_ns(), save_after_ns=self._touch_ns)
            return ItemResult(ItemStatus.OK, num_bytes)
        try:
            return self._write_new(key, buffers, num_bytes)
        except OSError as bad:
            if bad.errno not in _FULL:
                return self._failed("write", bad)
        # Others filled the disk before our capacity was reached. Make room and try once more, for
        # the writes beside this one too: they are after the same room.
        self._counts.error("disk full")
        self._room.evict(num_bytes + self._index.usage().reserved_bytes)
        try:
            return self._write_new(key, buffers, num_bytes)
        except OSError as bad:
            return self._failed("write", bad)

    def _write_new(self, key: bytes, buffers: Buffers, num_bytes: int) -> ItemResult:
        complaint = self._room.reserve(num_bytes)
        if complaint:
            return ItemResult(ItemStatus.REFUSED, reason=complaint)
        is_published = False

        def publishing(used_ns: int) -> None:
            nonlocal is_published
            is_published = True
            self._index.add(KnownFile(key, num_bytes, used_ns), from_reserved=num_bytes)

        try:
            direct = self._folder.publish(key, buffers, publishing)
        finally:
            if not is_published:
                self._index.unreserve(num_bytes)
        self._counts.add("direct" if direct else "buffered")
        return ItemResult(ItemStatus.OK, num_bytes)

    def _quarantine(self, key: bytes) -> ItemResult:
        def move(key: bytes) -> None:
            max_bytes = self._index.capacity_bytes // _QUARANTINE_SHARE
            self._index.set_other_bytes("quarantine", self._folder.quarantine(key, max_bytes))

        result = self._take_away(key, move)
        if result.status is ItemStatus.FAILED and not self._closed:
            # It stays where it is, and is not read again.
            self._index.block(key)
            result = ItemResult(ItemStatus.OK, reason=f"left in place: {result.reason}")
        self._counts.add("quarantined", int(result.ok))
        return result

    def _take_away(self, key: bytes, action: Callable[[bytes], None]) -> ItemResult:
        if self._closed:
            return _CLOSED
        if key_complaint(key):
            return _MISS
        if self._folder.read_only:
            return ItemResult(ItemStatus.FAILED, reason="the folder is open for reading alone")
        with self._folder.shard_lock(shard_of(key)):
            try:
                action(key)
            except FileNotFoundError:
                self._index.forget(key)
                return _MISS
            except OSError as bad:
                return self._failed("remove", bad)
            return ItemResult(ItemStatus.OK, self._index.forget(key) or 0)

    def _failed(self, what: str, bad: OSError) -> ItemResult:
        name = _name_of(bad)
        self._counts.error(f"{what} {name}")
        can_be = bad.errno in _FULL or (what == "write" and bad.errno in _NOT_WRITABLE)
        status = ItemStatus.REFUSED if can_be else ItemStatus.FAILED
        return ItemResult(status, reason=f"{what}: {name}, {bad.strerror or bad}")


def _name_of(bad: OSError) -> str:
    return errno.errorcode.get(bad.errno or 0, type(bad).__name__)


def _checked(
    capacity_bytes: int | None,
    fsync: FsyncPolicy | str,
    num_threads: int,
    touch_secs: float,
    rescan_secs: float,
) -> FsyncPolicy:
    for name, value, kind in (
        ("capacity_bytes", 1 if capacity_bytes is None else capacity_bytes, numbers.Integral),
        ("num_threads", num_threads, numbers.Integral),
        ("touch_secs", touch_secs, numbers.Real),
        ("rescan_secs", rescan_secs, numbers.Real),
    ):
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r}: give a number")
    if capacity_bytes is not None and capacity_bytes < 1:
        raise ConfigError(f"capacity_bytes={capacity_bytes}: give at least 1, or None")
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads}: give at least 1")
    for name, value in (("touch_secs", touch_secs), ("rescan_secs", rescan_secs)):
        if not 0 <= value <= _MOST_SECS:
            raise ConfigError(f"{name}={value}: give 0 to {_MOST_SECS}")
    known = [policy.value for policy in FsyncPolicy]
    if fsync not in known:
        raise ConfigError(f"fsync={fsync!r}: give one of {', '.join(known)}")
    return FsyncPolicy(fsync)
