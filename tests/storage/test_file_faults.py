"""Disks that are full, read-only, gone or strange: values, counts, and no byte too many."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.storage_rig import (
    get,
    held,
    key_of,
    object_of,
    objects_in,
    open_descriptors,
    put,
    temporaries_in,
)

import kvferry
from kvferry.storage import FileBackend, ItemStatus

_SIZE = 8192


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_disk_that_becomes_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Writes are refused with the reason, reads go on, and quarantine still ends in misses."""
    backend = FileBackend(tmp_path / "store")
    put(backend, range(3), _SIZE)
    inner = os.open

    def opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(code, os.strerror(code))
        return inner(path, flags, *args, **kwargs)

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "open", opened)
    for name in ("unlink", "rename", "utime", "mkdir"):
        monkeypatch.setattr(os, name, refused)
    (result,) = put(backend, [5], _SIZE)
    assert result.status is ItemStatus.REFUSED
    assert errno.errorcode[code] in result.reason
    assert all(get(backend, range(3), _SIZE)[1])
    (result,) = backend.delete([key_of(0)])
    assert result.status is ItemStatus.FAILED
    assert backend.quarantine([key_of(1)])[0].ok
    assert held(backend, range(3)) == [0, 2]
    assert get(backend, [1], _SIZE)[0][0].status is ItemStatus.MISS
    assert backend.stats().num_bytes == 3 * _SIZE
    monkeypatch.undo()
    assert put(backend, [1], _SIZE)[0].ok
    assert held(backend, range(3)) == [0, 1, 2]
    backend.close()


def test_opened_for_reading_alone(tmp_path: Path) -> None:
    """A folder that may only be read serves reads and changes nothing."""
    folder = tmp_path / "store"
    FileBackend(folder).close()
    writer = FileBackend(folder)
    put(writer, range(3), _SIZE)
    dead = objects_in(folder)[0].with_name(".00-0.tmp")
    dead.write_bytes(bytes(100))
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    backend = FileBackend(folder, read_only=True, touch_secs=0)
    assert all(get(backend, range(3), _SIZE)[1])
    assert put(backend, [5], _SIZE)[0].status is ItemStatus.REFUSED
    assert backend.delete([key_of(0)])[0].status is ItemStatus.FAILED
    assert backend.quarantine([key_of(0)])[0].ok
    assert held(backend, range(3)) == [1, 2]
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert backend.stats().counts["other_bytes"] == 100
    writer.close()
    backend.close()


def test_a_folder_that_vanished(tmp_path: Path) -> None:
    """With the folder gone, or another in its place, reads miss and writes fail: none is made."""
    folder = tmp_path / "store"
    backend = FileBackend(folder)
    put(backend, range(5), _SIZE)
    folder.rename(tmp_path / "elsewhere")
    results, _ = get(backend, range(3), _SIZE)
    assert {one.status for one in results} == {ItemStatus.MISS}
    (result,) = put(backend, [7], _SIZE)
    assert result.status is ItemStatus.FAILED
    assert "gone" in result.reason
    assert not folder.exists()
    folder.mkdir()  # what is left of a disk that was unmounted
    (result,) = put(backend, [8], _SIZE)
    assert result.status is ItemStatus.FAILED
    assert list(folder.iterdir()) == []
    folder.rmdir()
    (tmp_path / "elsewhere").rename(folder)
    assert put(backend, [9], _SIZE)[0].ok
    assert all(get(backend, range(5), _SIZE)[1])
    backend.close()


def test_a_part_of_the_folder_that_vanished(tmp_path: Path) -> None:
    """Objects removed behind the backend are misses, and are written again into new folders."""
    folder = tmp_path / "store"
    backend = FileBackend(folder)
    put(backend, range(20), _SIZE)
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    assert {one.status for one in get(backend, range(20), _SIZE)[0]} == {ItemStatus.MISS}
    assert held(backend, range(20)) == []
    assert backend.stats().num_bytes == 0
    assert all(one.ok for one in put(backend, range(20), _SIZE))
    assert all(get(backend, range(20), _SIZE)[1])
    backend.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("call", ["open", "preadv", "fstat"])
def test_a_read_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """An error while one object is read is that item's result; nothing stays open."""
    backend = FileBackend(tmp_path / "store", num_threads=1)
    put(backend, range(5), _SIZE)
    inner, calls = getattr(os, call), iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 2:
            raise OSError(code, os.strerror(code))
        return inner(*args, **kwargs)

    before = open_descriptors()
    monkeypatch.setattr(os, call, failing)
    results, whole = get(backend, range(5), _SIZE)
    monkeypatch.undo()
    assert [one.status.value for one in results] == ["ok", "ok", "failed", "ok", "ok"]
    assert errno.errorcode[code] in results[2].reason
    assert whole == [True, True, False, True, True]
    assert backend.stats().errors == {f"read {errno.errorcode[code]}": 1}
    assert open_descriptors() == before
    backend.close()


@pytest.mark.parametrize("call", ["open", "pwritev", "rename", "utime", "fdatasync", "ftruncate"])
def test_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An error at any step of one write leaves no file, no reservation and nothing open."""
    backend = FileBackend(tmp_path / "store", num_threads=1, fsync="data")
    size = _SIZE + 100
    memory = np.zeros(3 * 12288 + 4096, dtype=np.uint8)
    base = int(memory.ctypes.data) + -memory.ctypes.data % 4096
    inner, calls = getattr(os, call), iter(range(100))

    def failing(*args: Any, **kwargs: Any) -> Any:
        if call == "open" and not args[1] & os.O_CREAT:
            return inner(*args, **kwargs)
        if next(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return inner(*args, **kwargs)

    keys = [key_of(number) for number in range(3)]
    for key in keys:  # so that folders are there, and each write opens one file
        (tmp_path / "store" / backend._folder.object_path(key).split("/")[-2]).mkdir(exist_ok=True)
    before = open_descriptors()
    monkeypatch.setattr(os, call, failing)
    results = backend.write_from(keys, [[(base + number * 12288, size)] for number in range(3)])
    monkeypatch.undo()
    if call == "ftruncate" and not backend.direct_io:
        return
    assert [one.status.value for one in results] == ["ok", "failed", "ok"]
    assert open_descriptors() == before
    assert temporaries_in(tmp_path) == []
    stats = backend.stats()
    assert (stats.objects, stats.num_bytes) == (2, 2 * size)
    assert backend._folder.writing() == frozenset()
    backend.close()


@pytest.mark.parametrize("call", ["open", "preadv", "pwritev"])
def test_direct_io_that_does_not_work_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A system that refuses direct I/O for a file is asked without it; that is counted."""
    backend = FileBackend(tmp_path / "store")
    backend._folder.direct_io = True
    inner = getattr(os, call)

    def refusing(*args: Any, **kwargs: Any) -> Any:
        import fcntl

        if call == "open":
            wrong = args[1] & os.O_DIRECT
        else:
            wrong = fcntl.fcntl(args[0], fcntl.F_GETFL) & os.O_DIRECT
        if wrong:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inner(*args, **kwargs)

    monkeypatch.setattr(os, call, refusing)
    memory = np.zeros(4 * 4096, dtype=np.uint8)
    base = int(memory.ctypes.data) + -memory.ctypes.data % 4096
    content = object_of(1, 8192 + 5)
    inside = memory[base - memory.ctypes.data :][: content.size]
    inside[:] = content
    assert backend.write_from([b"k"], [[(base, content.size)]])[0].ok
    inside[:] = 0
    assert backend.read_into([b"k"], [[(base, content.size)]])[0].ok
    assert np.array_equal(inside, content)
    assert backend.stats().counts["buffered"] >= 1
    assert backend.stats().errors == {}
    assert temporaries_in(tmp_path) == []
    backend.close()


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the file system takes is asked by doing it, when the folder is opened."""
    inner = os.open

    def refusing(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return inner(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    backend = FileBackend(tmp_path / "store")
    assert not backend.direct_io
    assert all(one.ok for one in put(backend, range(3), _SIZE))
    assert all(get(backend, range(3), _SIZE)[1])
    assert backend.stats().counts == {"buffered": 6}
    backend.close()


def test_calls_that_move_less_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads and writes that stop early are gone on with, to the last byte."""
    wrote, read = os.pwritev, os.preadv

    def some(buffers: Sequence[memoryview]) -> list[memoryview]:
        first = buffers[0]
        return [first[: max(1, min(4096, first.nbytes))]]

    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, at: wrote(fd, some(buffers), at))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: read(fd, some(buffers), at))
    for number, direct_io in enumerate((True, False)):
        backend = FileBackend(tmp_path / str(number), direct_io=direct_io)
        assert all(one.ok for one in put(backend, range(3), 5 * 4096 + 9))
        assert all(get(backend, range(3), 5 * 4096 + 9)[1])
        backend.close()


def test_an_object_that_is_replaced_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read under way when its object goes and comes anew has the bytes it began with."""
    backend = FileBackend(tmp_path / "store", num_threads=1)
    other = FileBackend(tmp_path / "store", num_threads=1)
    put(backend, [1], _SIZE)
    inner, reading, release = os.preadv, threading.Event(), threading.Event()

    def blocked(*args: Any) -> int:
        reading.set()
        assert release.wait(30)
        return inner(*args)

    monkeypatch.setattr(os, "preadv", blocked)
    outcome: list[Any] = []
    reader = threading.Thread(target=lambda: outcome.append(get(backend, [1], _SIZE)))
    reader.start()
    assert reading.wait(30)
    assert other.delete([key_of(1)])[0].ok
    changed = object_of(99, _SIZE)
    assert other.write_from([key_of(1)], [[(int(changed.ctypes.data), _SIZE)]])[0].ok
    release.set()
    reader.join(30)
    ((results, whole),) = outcome
    assert (results[0].ok, whole) == (True, [True])
    assert not get(backend, [1], _SIZE)[1][0], "the next read has the new bytes"
    backend.close()
    other.close()


def test_contains_does_not_look_through_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 keys cost at most 64 questions, known ones none, however many objects there are."""
    backend = FileBackend(tmp_path / "store")
    asked: list[str] = []
    inner = os.stat

    def stat(path: Any, **kwargs: Any) -> os.stat_result:
        asked.append(path)
        return inner(path, **kwargs)

    def never(*_: Any) -> Any:
        raise AssertionError("the folder was listed")

    for total in (100, 1000):
        put(backend, range(total), 100)
        monkeypatch.setattr(os, "stat", stat)
        monkeypatch.setattr(os, "scandir", never)
        monkeypatch.setattr(os, "listdir", never)
        assert len(held(backend, range(64))) == 64
        assert len(asked) == 0
        assert held(backend, range(5000, 5064)) == []
        assert len(asked) == 64
        asked.clear()
        monkeypatch.undo()
    backend.close()


def test_objects_are_spread_over_folders(tmp_path: Path) -> None:
    """Keys that begin alike still lie in many folders."""
    backend = FileBackend(tmp_path / "store")
    keys = [b"the same beginning " + bytes([0, number]) for number in range(256)]
    content = object_of(0, 10)
    backend.write_from(keys, [[(int(content.ctypes.data), 10)]] * 256)
    folders: dict[str, int] = {}
    for path in objects_in(tmp_path):
        folders[path.parent.name] = folders.get(path.parent.name, 0) + 1
    assert len(folders) > 130
    assert max(folders.values()) < 10
    backend.close()


_FEW_DESCRIPTORS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from tests.storage.storage_rig import get, open_descriptors, put
from kvferry.storage import FileBackend
backend = FileBackend(sys.argv[1], capacity_bytes=200 * 4096, rescan_secs=0.05)
put(backend, range(50), 4096)
before = open_descriptors()
bad = 0
for round in range(25):
    put(backend, range(round * 100, round * 100 + 100), 4096)
    get(backend, range(round * 100, round * 100 + 100), 4096)
    results, _ = get(backend, range(round * 100, round * 100 + 100), 4095)
    bad += sum(not one.ok for one in results)
    get(backend, range(10**6, 10**6 + 100), 4096)
    backend.contains([b"none %d" % number for number in range(100)])
assert bad == 2500, bad
assert open_descriptors() == before, (before, open_descriptors())
assert backend.stats().evicted > 2000
backend.close()
print("done", backend.stats().errors)
"""


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """10,000 operations, failing ones too, with 64 descriptors: none fails for it, none is left."""
    roots = [str(Path(kvferry.__file__).parents[1]), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS, str(tmp_path / "store")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done {'wrong length': 2500}\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 64


def test_what_died_while_it_opened_is_cleared_up(tmp_path: Path) -> None:
    """A probe left at the top of the folder goes when it is old; a new one may be in use."""
    FileBackend(tmp_path / "store").close()
    old, new = (tmp_path / "store" / f".{name}-0.tmp" for name in ("aa", "bb"))
    for path in (old, new):
        path.write_bytes(bytes(4096))
    os.utime(old, (0, 0))
    FileBackend(tmp_path / "store").close()
    assert [path.name for path in temporaries_in(tmp_path)] == [new.name]
