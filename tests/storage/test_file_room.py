"""Files on disks that run full, and files that make no room as they cannot be removed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.storage_rig import (
    bytes_on_disk,
    get,
    held,
    key_of,
    objects_in,
    put,
    temporaries_in,
)

from kvferry.errors import StorageError
from kvferry.storage import FileBackend, ItemStatus

_SIZE = 8192
_Refuse = Callable[[Sequence[int], int], list[str]]


class _SmallDisk:
    """A disk of `limit` bytes, played: what does not fit is not written, as the system does it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, limit: int) -> None:
        self.limit, self.foreign, self._folder = limit, 0, folder
        self._lock, self._inner = threading.Lock(), os.pwritev
        monkeypatch.setattr(os, "pwritev", self._pwritev)

    def free(self) -> int:
        return self.limit - self.foreign - bytes_on_disk(self._folder)

    def _pwritev(self, descriptor: int, buffers: Sequence[Any], offset: int) -> int:
        with self._lock:
            wanted = sum(memoryview(one).nbytes for one in buffers)
            room = max(0, self.free()) // 4096 * 4096
            if room >= wanted:
                return self._inner(descriptor, buffers, offset)
            if room == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            whole = b"".join(bytes(one) for one in buffers)[:room]
            block = np.zeros(room + 4096, dtype=np.uint8)
            begin = -block.ctypes.data % 4096
            block[begin : begin + room] = np.frombuffer(whole, dtype=np.uint8)
            return self._inner(descriptor, [block[begin : begin + room].data], offset)


def test_a_full_disk_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk smaller than the capacity: old objects go, new ones are kept, nothing is left over."""
    folder = tmp_path / "store"
    disk = _SmallDisk(monkeypatch, folder, 20 * _SIZE + 100)
    backend = FileBackend(folder, capacity_bytes=1 << 30, num_threads=1)
    for number in range(50):
        assert put(backend, [number], _SIZE)[0].ok, number
        assert disk.free() >= 0
    assert held(backend, range(50)) == list(range(50 - len(objects_in(folder)), 50))
    assert len(objects_in(folder)) >= 18
    stats = backend.stats()
    assert stats.errors["disk full"] == stats.evicted > 25
    assert stats.num_bytes == len(objects_in(folder)) * _SIZE
    assert temporaries_in(folder) == []
    assert all(get(backend, [49], _SIZE)[1])
    backend.close()


def test_a_disk_that_others_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take the disk: what is ours shrinks, and with nothing left a write is refused."""
    folder = tmp_path / "store"
    disk = _SmallDisk(monkeypatch, folder, 20 * _SIZE + 100)
    backend = FileBackend(folder, capacity_bytes=1 << 30, num_threads=2)
    put(backend, range(10), _SIZE)
    disk.foreign = disk.limit - bytes_on_disk(folder)
    assert put(backend, [10], _SIZE)[0].ok
    assert len(objects_in(folder)) == 10
    disk.foreign = disk.limit
    for number in range(11, 30):
        (result,) = put(backend, [number], _SIZE)
        assert result.status is ItemStatus.REFUSED
        assert "ENOSPC" in result.reason
    assert objects_in(folder) == []
    stats = backend.stats()
    assert (stats.objects, stats.num_bytes) == (0, 0)
    assert temporaries_in(folder) == []
    disk.foreign = 0
    assert put(backend, [31], _SIZE)[0].ok
    backend.close()


def test_a_capacity_is_kept_with_several_writers(tmp_path: Path) -> None:
    """Objects, and those that are being written, never take more than the capacity."""
    folder = tmp_path / "store"
    backend = FileBackend(folder, capacity_bytes=10 * _SIZE, num_threads=4)
    seen: list[int] = []
    inner = backend._folder.publish

    def publish(*args: Any) -> bool:
        seen.append(backend.stats().num_bytes)
        return inner(*args)

    backend._folder.publish = publish  # type: ignore[method-assign, assignment]
    results = put(backend, range(60), _SIZE)
    assert {one.status for one in results} == {ItemStatus.OK}
    assert max(seen) <= 10 * _SIZE
    assert len(objects_in(folder)) == 10
    assert backend.stats().num_bytes == 10 * _SIZE
    backend.close()


@pytest.fixture
def refuse_unlink(monkeypatch: pytest.MonkeyPatch) -> _Refuse:
    """Makes the files of some objects undeletable; the list has every try."""
    inner = os.unlink

    def refuse(numbers: Sequence[int], code: int) -> list[str]:
        names = {f"{key_of(number).hex()}.kvo" for number in numbers}
        tried: list[str] = []

        def unlink(path: Any, **kwargs: Any) -> None:
            if os.path.basename(path) in names:  # noqa: PTH119  paths are strings here
                tried.append(path)
                raise OSError(code, os.strerror(code), path)
            inner(path, **kwargs)

        monkeypatch.setattr(os, "unlink", unlink)
        return tried

    return refuse


@pytest.mark.parametrize("code", [errno.EPERM, errno.EBUSY, errno.EROFS, errno.EIO])
def test_a_file_that_cannot_be_removed_is_passed_over(
    tmp_path: Path, refuse_unlink: _Refuse, code: int
) -> None:
    """The oldest file stays, is counted and readable, and the next ones make room."""
    backend = FileBackend(tmp_path / "store", capacity_bytes=5 * _SIZE, num_threads=1)
    put(backend, range(5), _SIZE)
    tried = refuse_unlink([0, 1], code)
    for number in range(5, 20):
        assert put(backend, [number], _SIZE)[0].ok
    assert len(tried) == 2, "tried once each, not at every write"
    assert held(backend, range(20)) == [0, 1, 17, 18, 19]
    assert all(get(backend, [0, 1], _SIZE)[1])
    stats = backend.stats()
    assert (stats.num_bytes, stats.counts["undeletable"]) == (5 * _SIZE, 2)
    assert stats.errors[f"unlink {errno.errorcode[code]}"] == 2
    backend.close()


def test_undeletable_files_are_tried_again_later(tmp_path: Path, refuse_unlink: _Refuse) -> None:
    """After a while such a file is the first to go again."""
    now = [0.0]
    backend = FileBackend(
        tmp_path / "store", capacity_bytes=3 * _SIZE, num_threads=1, clock=lambda: now[0]
    )
    put(backend, range(3), _SIZE)
    refuse_unlink([0], errno.EBUSY)
    put(backend, [3], _SIZE)
    assert held(backend, range(4)) == [0, 2, 3]
    refuse_unlink([], errno.EBUSY)
    now[0] = 61.0
    put(backend, [4], _SIZE)
    assert held(backend, range(5)) == [2, 3, 4]
    assert "undeletable" not in backend.stats().counts
    backend.close()


def test_when_nothing_can_be_removed_a_write_is_refused(
    tmp_path: Path, refuse_unlink: _Refuse
) -> None:
    """Every file undeletable: refused after a bounded number of tries, and soon after none."""
    backend = FileBackend(tmp_path / "store", capacity_bytes=40 * _SIZE, num_threads=1)
    put(backend, range(40), _SIZE)
    tried = refuse_unlink(range(40), errno.EPERM)
    counts = []
    for number in range(50, 56):
        (result,) = put(backend, [number], _SIZE)
        assert result.status is ItemStatus.REFUSED
        assert "nothing can be removed" in result.reason
        counts.append(len(tried))
    assert counts == [16, 32, 40, 40, 40, 40]
    assert backend.stats().num_bytes == 40 * _SIZE
    assert all(get(backend, range(40), _SIZE)[1])
    backend.close()


def test_a_file_that_another_process_removed_first(tmp_path: Path) -> None:
    """A victim that is gone already made its room, and is no eviction of ours."""
    backend = FileBackend(tmp_path / "store", capacity_bytes=5 * _SIZE, num_threads=1)
    put(backend, range(5), _SIZE)
    for number in (0, 1):
        next(tmp_path.rglob(f"{key_of(number).hex()}.kvo")).unlink()
    assert all(one.ok for one in put(backend, [10, 11], _SIZE))
    stats = backend.stats()
    assert (stats.objects, stats.evicted, stats.counts["vanished"]) == (5, 0, 2)
    backend.close()


def test_nothing_is_allocated_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that cannot allocate ahead is not asked to."""

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    backend = FileBackend(tmp_path / "store")
    assert all(one.ok for one in put(backend, range(3), _SIZE))
    backend.close()


def test_a_full_disk_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder on a full disk is an error; one with objects opens, serves, and makes room."""
    folder = tmp_path / "store"
    first = FileBackend(folder)
    put(first, range(4), _SIZE)
    first.close()
    disk = _SmallDisk(monkeypatch, folder, bytes_on_disk(folder))
    assert disk.free() == 0
    backend = FileBackend(folder, num_threads=1)
    assert all(get(backend, range(4), _SIZE)[1])
    assert put(backend, [9], _SIZE)[0].ok
    assert get(backend, [9], _SIZE)[1] == [True]
    assert temporaries_in(folder) == []
    backend.close()
    monkeypatch.undo()

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(StorageError, match="No space left"):
        FileBackend(tmp_path / "new")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match="No space left"):
        FileBackend(tmp_path / "newer")
    assert temporaries_in(tmp_path) == []


def test_writers_on_a_full_disk_make_room_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that one write made, and another one took, does not make the first one fail."""
    folder = tmp_path / "store"
    first = FileBackend(folder)
    put(first, range(10), _SIZE)
    first.close()
    disk = _SmallDisk(monkeypatch, folder, bytes_on_disk(folder))
    backend = FileBackend(folder, capacity_bytes=1 << 30, num_threads=2)
    publish, evict = backend._folder.publish, backend._room.evict
    waits, evicted, written = threading.Event(), threading.Event(), threading.Event()

    def publishing(key: bytes, *rest: Any) -> bool:
        if key == key_of(101):
            waits.set()
            assert evicted.wait(30)
            direct = publish(key, *rest)
            written.set()
            return direct
        assert waits.wait(30)
        return publish(key, *rest)

    def evicting(num_bytes: int) -> int:
        removed = evict(num_bytes)
        evicted.set()
        assert written.wait(30)
        return removed

    monkeypatch.setattr(backend._folder, "publish", publishing)
    monkeypatch.setattr(backend._room, "evict", evicting)
    assert disk.free() == 0
    assert [one.status.value for one in put(backend, [100, 101], _SIZE)] == ["ok", "ok"]
    backend.close()
