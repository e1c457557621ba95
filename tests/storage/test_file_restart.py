"""What a file backend knows after a restart, of its own files and of others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.storage.storage_rig import get, held, key_of, put

from kvferry.errors import ConfigError, StorageError
from kvferry.storage import FileBackend, ItemStatus

_SIZE = 8192


def _file(folder: Path, number: int) -> Path:
    (path,) = folder.rglob(f"{key_of(number).hex()}.kvo")
    return path


def test_everything_is_found_again(tmp_path: Path) -> None:
    """A new process has every object, the usage, and the order in which they were used."""
    folder, numbers = tmp_path / "store", list(range(100))
    first = FileBackend(folder, touch_secs=0, num_threads=1)
    assert all(one.ok for one in put(first, numbers, _SIZE))
    get(first, [3, 1, 4], _SIZE)  # No close: a killed process closes nothing.
    again = FileBackend(folder, capacity_bytes=100 * _SIZE, num_threads=1)
    assert (again.stats().objects, again.stats().num_bytes) == (100, 100 * _SIZE)
    assert held(again, numbers) == numbers
    results, whole = get(again, [50], _SIZE)
    assert (results[0].ok, whole) == (True, [True])
    # 97 new ones evict all but those used last.
    assert all(one.ok for one in put(again, range(1000, 1096), _SIZE))
    assert held(again, numbers) == [1, 3, 4, 50]
    put(again, [2000], _SIZE)
    assert held(again, numbers) == [1, 4, 50]
    put(again, [2001], _SIZE)
    assert held(again, numbers) == [4, 50]
    assert again.stats().evicted == 98
    first.close()
    again.close()


def test_the_order_of_use_within_one_process(tmp_path: Path) -> None:
    """Reads and repeated writes count as use, before files are told of it."""
    backend = FileBackend(tmp_path / "store", capacity_bytes=4 * _SIZE, num_threads=1)
    put(backend, [0, 1, 2, 3], _SIZE)
    get(backend, [0], _SIZE)
    put(backend, [1], _SIZE)
    put(backend, [4, 5], _SIZE)
    assert held(backend, range(6)) == [0, 1, 4, 5]
    backend.close()


@pytest.mark.parametrize("touch_secs", [0.0, 3600.0])
def test_files_are_told_of_use_lazily(tmp_path: Path, touch_secs: float) -> None:
    """A read renews a file's time only where it is older than `touch_secs`."""
    backend = FileBackend(tmp_path / "store", touch_secs=touch_secs)
    put(backend, [0], _SIZE)
    before = _file(tmp_path, 0).stat().st_mtime_ns
    get(backend, [0], _SIZE)
    assert (_file(tmp_path, 0).stat().st_mtime_ns > before) is (touch_secs == 0)
    backend.close()


def test_what_is_not_ours_is_left_alone_and_counted(tmp_path: Path) -> None:
    """Other files, links, folders and objects in the wrong place are no objects."""
    folder = tmp_path / "store"
    backend = FileBackend(folder)
    put(backend, [0, 1], _SIZE)
    shard = _file(folder, 0).parent
    (shard / "notes.txt").write_text("mine")
    (shard / f"{key_of(7).hex()}.kv0").write_bytes(bytes(_SIZE))
    (shard / f"{key_of(0).hex().upper()}A.kvo").write_bytes(bytes(_SIZE))
    (shard / f"{b'x'.hex()}.kvo").symlink_to(_file(folder, 0))
    (shard / f"{b'folder'.hex()}.kvo").mkdir()
    other = next(path for path in folder.iterdir() if path.is_dir() and path != shard)
    (other / _file(folder, 0).name).write_bytes(bytes(_SIZE))  # of another folder of objects
    (folder / "README").write_text("also mine")
    again = FileBackend(folder)
    stats = again.stats()
    assert (stats.objects, stats.num_bytes, stats.counts["ignored"]) == (2, 2 * _SIZE, 6)
    assert (shard / "notes.txt").read_text() == "mine"
    for key in (b"x", b"folder"):
        assert again.contains([key]) == [False]
        (result,) = again.read_into([key], [[(0, 0)]])
        assert result.status is not ItemStatus.OK
    for one in (backend, again):
        one.close()


def test_another_layout_is_refused(tmp_path: Path) -> None:
    """A folder of another layout version is not touched."""
    FileBackend(tmp_path / "store").close()
    marker = tmp_path / "store" / "KVFERRY"
    marker.write_text("kvferry storage folder, layout 2\n")
    with pytest.raises(StorageError, match="layout 2"):
        FileBackend(tmp_path / "store")


def test_folders_that_cannot_be_opened(tmp_path: Path) -> None:
    """No parent, a file in its place, or nothing to read alone, is a message, not a new folder."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "no" / "parent", tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StorageError, match="cannot be opened"):
            FileBackend(path)
    with pytest.raises(StorageError, match="cannot be opened"):
        FileBackend(tmp_path / "new", read_only=True)
    assert sorted(os.listdir(tmp_path)) == ["file"]  # noqa: PTH208  names alone


@pytest.mark.parametrize(
    "options",
    [{"capacity_bytes": 0}, {"num_threads": 0}, {"fsync": "sometimes"}, {"touch_secs": -1.0},
     {"touch_secs": float("inf")}, {"touch_secs": "60"}, {"capacity_bytes": "1GiB"},
     {"num_threads": 2.5}, {"num_threads": True},
     {"rescan_secs": float("nan")}],
)  # fmt: skip
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """A value that is not accepted is named, and no folder is made."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        FileBackend(tmp_path / "store", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


def test_a_capacity_of_ones_own(tmp_path: Path) -> None:
    """Without a capacity it follows the disk; more than the disk has is told."""
    backend = FileBackend(tmp_path / "store")
    capacity = backend.stats().capacity_bytes
    assert capacity is not None
    found = os.statvfs(tmp_path)
    total = found.f_blocks * found.f_frsize
    assert 0 < capacity < total
    large = FileBackend(tmp_path / "store", capacity_bytes=2 * total)
    assert large.stats().counts["capacity_beyond_disk_bytes"] > total // 2
    backend.close()
    large.close()


def test_a_smaller_capacity_after_a_restart(tmp_path: Path) -> None:
    """Objects beyond a new capacity go with the next write."""
    first = FileBackend(tmp_path / "store")
    put(first, range(20), _SIZE)
    again = FileBackend(tmp_path / "store", capacity_bytes=5 * _SIZE)
    assert again.stats().objects == 20
    assert put(again, [100], _SIZE)[0].ok
    assert again.stats().num_bytes == 5 * _SIZE
    assert len(list((tmp_path / "store").rglob("*.kvo"))) == 5
    first.close()
    again.close()


def test_damaged_objects_are_kept_aside(tmp_path: Path) -> None:
    """Quarantined objects lie in their own folder, are counted, and are few."""
    backend = FileBackend(tmp_path / "store", capacity_bytes=1000 * _SIZE)
    put(backend, range(40), _SIZE)
    assert all(one.ok for one in backend.quarantine([key_of(number) for number in range(30)]))
    kept = sorted(path.name for path in (tmp_path / "store" / "quarantine").iterdir())
    assert [name.split("-")[1] for name in kept] == [
        f"{key_of(number).hex()}.kvo" for number in range(14, 30)
    ]
    stats = backend.stats()
    assert (stats.objects, stats.quarantined, stats.num_bytes) == (10, 30, 26 * _SIZE)
    assert FileBackend(tmp_path / "store").stats().num_bytes == 26 * _SIZE
    small = FileBackend(tmp_path / "store", capacity_bytes=32 * _SIZE)
    small.quarantine([key_of(35)])
    assert small.stats().counts["other_bytes"] == 2 * _SIZE
    backend.close()
    small.close()
