"""A storage folder seen from outside: what is in it, whether it is whole, and what may go."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.errors import StorageError
from kvferry.storage.file_folder import FsyncPolicy, StorageFolder
from kvferry.storage.file_index import KnownFile
from kvferry.storage.file_names import shards
from kvferry.storage.file_scan import scan_shard
from kvferry.storage.format import HeaderFault, HeaderProblem, checksum, parse_header

__all__ = ["FolderContents", "Inspected", "Pruned", "StorageInspector"]


@dataclasses.dataclass(frozen=True)
class FolderContents:
    """What lies in a folder; sizes in bytes, objects by their last use, the latest first."""

    files: tuple[KnownFile, ...]
    temporary_bytes: int
    """Being written, or left by dead writers."""
    quarantine_bytes: int
    ignored: int
    """Names that are none of kvferry's."""
    free_bytes: int

    @property
    def object_bytes(self) -> int:
        """All objects together."""
        return sum(file.num_bytes for file in self.files)


class Inspected(NamedTuple):
    """One object, read whole."""

    file: KnownFile
    complaint: str
    """Empty if it is whole."""
    fault: HeaderFault | None
    """FOREIGN: whole as far as can be told, and of another version."""


class Pruned(NamedTuple):
    """What `StorageInspector.prune` removed."""

    objects: int
    object_bytes: int
    dead_writers: int
    quarantined: int
    not_removed: int


class StorageInspector:
    """The storage folder `path`, which must exist; other processes may go on using it.

    Raises StorageError where it is no storage folder, or cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = StorageFolder(
            path, fsync=FsyncPolicy.NEVER, use_direct_io=False, read_only=True
        )

    def contents(self, *, clean: bool = False) -> tuple[FolderContents, int]:
        """What there is, and how many files of dead writers were removed, if `clean`."""
        files: list[KnownFile] = []
        temporary_bytes = removed = ignored = 0
        for shard in shards():
            scan = scan_shard(self._folder.shard_path(shard), shard, clean=clean)
            files += scan.files
            temporary_bytes += scan.temporary_bytes
            removed += scan.removed
            ignored += scan.ignored
        files.sort(key=lambda file: (file.used_ns, file.key), reverse=True)
        contents = FolderContents(
            files=tuple(files),
            temporary_bytes=temporary_bytes,
            quarantine_bytes=self._folder.quarantine_bytes(),
            ignored=ignored,
            free_bytes=self._folder.free_bytes(),
        )
        return contents, removed

    def verify(self) -> Iterator[Inspected]:
        """Read every object and check all that can be checked without its geometry."""
        contents, _ = self.contents()
        for file in contents.files:
            try:
                complaint, fault = self._complaint(file)
            except FileNotFoundError:
                continue  # Evicted since.
            except OSError as bad:
                complaint, fault = f"it cannot be read: {bad.strerror or bad}", None
            yield Inspected(file, complaint, fault)

    def quarantine(self, file: KnownFile) -> bool:
        """Move a damaged object out of service; False: it is gone."""
        try:
            self._folder.quarantine(file.key, max_bytes=1 << 62)
        except FileNotFoundError:
            return False
        except OSError as bad:
            raise StorageError(
                f"{self._folder.object_path(file.key)} cannot be moved: {bad.strerror or bad}"
            ) from bad
        return True

    def prune(self, *, max_bytes: int | None, used_before_ns: int | None, dry_run: bool) -> Pruned:
        """Remove what dead writers left, quarantined objects, and objects used long ago.

        Args:
            max_bytes: The most that objects may take afterwards; None: any.
            used_before_ns: Objects last used before this wall-clock time go; None: none for it.
            dry_run: Only tell; files of dead writers are not told from those of living ones then.
        """
        contents, dead_writers = self.contents(clean=not dry_run)
        left = contents.object_bytes
        objects = object_bytes = not_removed = 0
        for file in reversed(contents.files):
            is_old = used_before_ns is not None and file.used_ns < used_before_ns
            if not is_old and (max_bytes is None or left <= max_bytes):
                break  # The others were used later.
            if not dry_run:
                try:
                    self._folder.remove(file.key)
                except FileNotFoundError:
                    pass
                except OSError:
                    not_removed += 1
                    continue
            left -= file.num_bytes
            objects += 1
            object_bytes += file.num_bytes
        quarantined = self._folder.empty_quarantine(dry_run=dry_run)
        return Pruned(objects, object_bytes, dead_writers, quarantined, not_removed)

    def _complaint(self, file: KnownFile) -> tuple[str, HeaderFault | None]:
        with open(self._folder.object_path(file.key), "rb") as opened:
            head = opened.read(4096)
            # How long the header is says the header; what is behind it does no harm.
            length = int.from_bytes(head[12:16], "little")
            head += opened.read(min(max(0, length - len(head)), file.num_bytes))
            header = parse_header(head)
            if isinstance(header, HeaderProblem):
                return header.reason, header.fault
            if header.key != file.key:
                return f"it is the object of another key, {header.key.hex()}", HeaderFault.DAMAGED
            expected = header.num_bytes + header.payload_bytes
            if file.num_bytes != expected:
                told = f"it has {file.num_bytes} bytes, and its header says {expected}"
                return told, HeaderFault.DAMAGED
            payload = opened.read(header.payload_bytes)
        if checksum(payload) != header.payload_checksum:
            return "its bytes have another checksum than its header says", HeaderFault.DAMAGED
        return "", None
