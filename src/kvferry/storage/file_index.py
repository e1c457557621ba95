"""What the file backend knows of its folder: sizes, order of use, and how much room is left.

Bookkeeping only: nothing here touches a file. Thread-safe.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

__all__ = ["FileIndex", "KnownFile", "Usage"]

_RETRY_UNDELETABLE_SECS = 60.0
_MAX_BLOCKED = 1 << 16


class KnownFile(NamedTuple):
    """One object's file."""

    key: bytes
    num_bytes: int
    used_ns: int
    """When it was last used, as its file says: wall-clock nanoseconds."""


class Usage(NamedTuple):
    """Bytes, and what they are."""

    objects: int
    object_bytes: int
    reserved_bytes: int
    """Of objects that are being written."""
    other_bytes: int
    """Of temporary files of others, and of quarantined ones."""
    undeletable: int

    @property
    def num_bytes(self) -> int:
        """All that counts against the capacity."""
        return self.object_bytes + self.reserved_bytes + self.other_bytes


class FileIndex:
    """Files by key, least recently used first, within `capacity_bytes`."""

    def __init__(self, capacity_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity_bytes = capacity_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._files: collections.OrderedDict[bytes, KnownFile] = collections.OrderedDict()
        # Chosen for eviction, still on the disk, so still counted.
        self._leaving: dict[bytes, KnownFile] = {}
        # Could not be removed: readable and counted, and no victim before the time given.
        self._undeletable: dict[bytes, tuple[KnownFile, float]] = {}
        # Damaged, and could not be moved away: never to be read again.
        self._blocked: dict[bytes, None] = {}
        self._object_bytes = self._reserved_bytes = 0
        self._other_bytes: dict[str, int] = {}

    def load(self, files: Iterable[KnownFile]) -> None:
        """Take in what a scan of the whole folder found, in any order."""
        with self._lock:
            for file in sorted(files, key=lambda file: (file.used_ns, file.key)):
                self._add(file)

    def has(self, key: bytes) -> bool:
        """Whether a file for `key` is known."""
        with self._lock:
            return self._find(key) is not None

    def size_of(self, key: bytes) -> int | None:
        """The bytes of the file for `key`; None if none is known."""
        with self._lock:
            found = self._find(key)
            return None if found is None else found.num_bytes

    def add(self, file: KnownFile, *, from_reserved: int = 0) -> None:
        """A file was published or found; `from_reserved` bytes were reserved for it."""
        with self._lock:
            self._reserved_bytes -= from_reserved
            self._add(file)
            if from_reserved:
                self._blocked.pop(file.key, None)

    def touch(self, key: bytes, now_ns: int, *, save_after_ns: int) -> bool:
        """`key` was used; whether its file should be told, as it says a time too long ago."""
        with self._lock:
            file = self._files.get(key)
            if file is None:
                return False
            self._files.move_to_end(key)
            if now_ns - file.used_ns < save_after_ns:
                return False
            self._files[key] = file._replace(used_ns=now_ns)
            return True

    def forget(self, key: bytes) -> int | None:
        """There is no such file any more; its size, None if it was not known."""
        with self._lock:
            found = self._pop(key)
            return None if found is None else found.num_bytes

    def block(self, key: bytes) -> None:
        """Never read `key` again, until it is written anew."""
        with self._lock:
            while len(self._blocked) >= _MAX_BLOCKED:
                self._blocked.pop(next(iter(self._blocked)))
            self._blocked[key] = None

    def is_blocked(self, key: bytes) -> bool:
        """Whether `key` is damaged and could not be moved away."""
        with self._lock:
            return key in self._blocked

    def reserve(self, num_bytes: int) -> bool:
        """Set `num_bytes` aside for a file to be written; False: something must go first."""
        with self._lock:
            if self._usage().num_bytes + num_bytes > self.capacity_bytes:
                return False
            self._reserved_bytes += num_bytes
            return True

    def unreserve(self, num_bytes: int) -> None:
        """Give back what was set aside."""
        with self._lock:
            self._reserved_bytes -= num_bytes

    def set_other_bytes(self, of: str, num_bytes: int) -> None:
        """`num_bytes` lie in the folder that are no object; `of` says which part of it."""
        with self._lock:
            self._other_bytes[of] = num_bytes

    def take_victim(self) -> KnownFile | None:
        """The file used longest ago; tell by `forget` or `put_back` what became of it."""
        with self._lock:
            file: KnownFile | None = None
            if self._undeletable:
                key, (stuck, retry_at) = next(iter(self._undeletable.items()))
                if self._clock() >= retry_at:
                    del self._undeletable[key]
                    file = stuck
            if file is None and self._files:
                _, file = self._files.popitem(last=False)
            if file is not None:
                self._leaving[file.key] = file
            return file

    def put_back(self, file: KnownFile) -> None:
        """`file`, a victim, could not be removed: pass it over for a while."""
        with self._lock:
            # Not there any more if it was written anew meanwhile.
            if self._leaving.pop(file.key, None) is not None:
                self._undeletable[file.key] = (file, self._clock() + _RETRY_UNDELETABLE_SECS)

    def reconcile(
        self, found: Iterable[KnownFile], belongs: Callable[[bytes], bool]
    ) -> tuple[int, int]:
        """Make the keys that `belongs` accepts those of `found`, a scan of where they lie.

        Returns how many files were new here, and how many are gone.
        """
        with self._lock:
            there = {file.key: file for file in found}
            gone = [key for key in self._keys() if belongs(key) and key not in there]
            for key in gone:
                self._pop(key)
            new = 0
            for key, file in there.items():
                known = self._find(key)
                if known is None:
                    new += 1
                elif known.num_bytes == file.num_bytes:
                    is_recent = known.used_ns < file.used_ns and key in self._files
                    if not is_recent:
                        continue
                # Other processes wrote or used it since the last scan, so it is recent.
                self._add(file)
            return new, len(gone)

    def usage(self) -> Usage:
        """How much there is of what."""
        with self._lock:
            return self._usage()

    def known(self) -> Mapping[bytes, KnownFile]:
        """Every file, least recently used first, as it is now."""
        with self._lock:
            undeletable = {key: file for key, (file, _) in self._undeletable.items()}
            return {**undeletable, **self._files}

    def _keys(self) -> list[bytes]:
        return [*self._files, *self._undeletable]

    def _find(self, key: bytes) -> KnownFile | None:
        found = self._files.get(key)
        if found is None and key in self._undeletable:
            found = self._undeletable[key][0]
        return found

    def _add(self, file: KnownFile) -> None:
        self._pop(file.key)
        self._files[file.key] = file
        self._object_bytes += file.num_bytes

    def _pop(self, key: bytes) -> KnownFile | None:
        found = self._files.pop(key, None) or self._leaving.pop(key, None)
        if found is None and key in self._undeletable:
            found = self._undeletable.pop(key)[0]
        if found is not None:
            self._object_bytes -= found.num_bytes
        return found

    def _usage(self) -> Usage:
        return Usage(
            objects=len(self._files) + len(self._leaving) + len(self._undeletable),
            object_bytes=self._object_bytes,
            reserved_bytes=self._reserved_bytes,
            other_bytes=sum(self._other_bytes.values()),
            undeletable=len(self._undeletable),
        )
