"""Room in a storage folder: least recently used objects go, and what cannot go is passed over."""

from __future__ import annotations

import errno
import threading

from kvferry.storage.file_counts import FileCounts
from kvferry.storage.file_folder import StorageFolder
from kvferry.storage.file_index import FileIndex, KnownFile
from kvferry.storage.file_names import shard_of

__all__ = ["RoomMaker"]

# A folder in which nothing can be removed must not be tried file by file.
_MAX_UNDELETABLE_A_CALL = 16


class RoomMaker:
    """Removes files of `folder` in the order of `index`."""

    def __init__(self, folder: StorageFolder, index: FileIndex, counts: FileCounts) -> None:
        self._folder = folder
        self._index = index
        self._counts = counts
        # Two writers that both need room would remove twice as much.
        self._lock = threading.Lock()

    def reserve(self, num_bytes: int) -> str:
        """Set `num_bytes` aside within the capacity; why that cannot be, or nothing."""
        if num_bytes > self._index.capacity_bytes:
            return (
                f"{num_bytes} bytes do not fit into a capacity of {self._index.capacity_bytes}; "
                f"give more"
            )
        if self._index.reserve(num_bytes):
            return ""
        with self._lock:
            stuck = 0
            while not self._index.reserve(num_bytes):
                removed = self._remove_oldest()
                stuck += removed == 0
                if removed is None or stuck >= _MAX_UNDELETABLE_A_CALL:
                    usage = self._index.usage()
                    return (
                        f"{usage.num_bytes} of {self._index.capacity_bytes} bytes are taken, and "
                        f"nothing can be removed ({usage.undeletable} files were tried)"
                    )
        return ""

    def evict(self, num_bytes: int) -> int:
        """Remove `num_bytes` of objects at least, where there are as many; how many it were."""
        with self._lock:
            total = stuck = 0
            while total < num_bytes and stuck < _MAX_UNDELETABLE_A_CALL:
                removed = self._remove_oldest()
                if removed is None:
                    break
                total += removed
                stuck += removed == 0
            return total

    def _remove_oldest(self) -> int | None:
        """The bytes of one object that is gone, 0: it could not be removed; None: there is none."""
        victim = self._index.take_victim()
        if victim is None:
            return None
        with self._folder.shard_lock(shard_of(victim.key)):
            return self._remove(victim)

    def _remove(self, victim: KnownFile) -> int:
        if self._index.has(victim.key):
            return victim.num_bytes  # Written anew since it was chosen, and counted anew.
        try:
            self._folder.remove(victim.key)
        except FileNotFoundError:
            # Another process evicted it: as good, but no deed of ours.
            self._counts.add("vanished")
            self._index.forget(victim.key)
            return victim.num_bytes
        except OSError as bad:
            self._counts.error(f"unlink {errno.errorcode.get(bad.errno or 0, 'failed')}")
            self._index.put_back(victim)
            return 0
        self._index.forget(victim.key)
        self._counts.evicted(victim.num_bytes)
        return victim.num_bytes
