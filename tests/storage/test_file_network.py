"""A folder that several hosts use over a network: what this host sees late, and what it loses.

There is no second host here. What one would do to this one is injected where the system is called,
and processes stand for hosts.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.storage.storage_rig import get, held, key_of, open_descriptors, put

import kvferry
from kvferry.storage import FileBackend, ItemStatus
from kvferry.storage.file_names import object_name

_SIZE = 8192
_STATUS = {0: "ok", 1: "ok", 2: "miss"}


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FileBackend]:
    """One host's."""
    with closing(FileBackend(tmp_path / "store", num_threads=1, shared=True)) as one:
        yield one


def stale(monkeypatch: pytest.MonkeyPatch, call: str, times: int) -> None:
    """`os.<call>` finds something stale so many times, then nothing."""
    inner = getattr(os, call)
    left = [times]

    def failing(*args: Any, **given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return inner(*args, **given)

    monkeypatch.setattr(os, call, failing)


def file_of(folder: Path, number: int) -> Path:
    """The file of an object."""
    (found,) = folder.rglob(object_name(key_of(number)))
    return found


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
def test_a_read_of_what_another_host_replaced(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch, call: str, times: int
) -> None:
    """It is looked for anew, once; what is stale then too is a miss, and no failure."""
    put(backend, range(3), _SIZE)
    before = open_descriptors()
    stale(monkeypatch, call, times)
    results, whole = get(backend, [1], _SIZE)
    monkeypatch.undo()
    assert results[0].status == _STATUS[times]
    assert whole == [times == 1]
    assert backend.stats().errors == {}
    assert backend.stats().counts.get("vanished", 0) == (times == 2)
    assert open_descriptors() == before
    assert get(backend, range(3), _SIZE)[1] == [True] * 3  # it was there all the time


@pytest.mark.parametrize("times", [1, 2])
def test_a_look_at_what_another_host_replaced(
    backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """What is not known here, and cannot be looked at, is not there, and is found later."""
    put(backend, [1], _SIZE)
    with closing(FileBackend(tmp_path / "store", num_threads=1)) as other:
        put(other, [2], _SIZE)
    stale(monkeypatch, "stat", times)
    assert held(backend, [2]) == ([2] if times == 1 else [])
    monkeypatch.undo()
    assert held(backend, [2]) == [2]
    assert backend.stats().errors == {}


@pytest.mark.parametrize("call", ["open", "stat"])
def test_a_write_where_another_host_removed_the_folder(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The folder is looked up anew, and made if it is gone."""
    stale(monkeypatch, call, 1)
    assert put(backend, [1], _SIZE)[0].ok
    monkeypatch.undo()
    assert get(backend, [1], _SIZE)[1] == [True]


@pytest.mark.parametrize(("call", "do"), [("unlink", "delete"), ("rename", "quarantine")])
def test_taking_away_what_another_host_removed(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch, call: str, do: str
) -> None:
    """It is gone, which is what was wanted; where it is not, it is taken away."""
    put(backend, range(2), _SIZE)
    stale(monkeypatch, call, 2)
    assert getattr(backend, do)([key_of(0)])[0].status is ItemStatus.MISS
    monkeypatch.undo()
    stale(monkeypatch, call, 1)
    assert getattr(backend, do)([key_of(1)])[0].ok
    monkeypatch.undo()
    assert backend.stats().errors == {}
    assert held(backend, [1]) == []


def test_a_scan_while_another_host_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is stale when it is looked at counts as gone; the others are found."""
    with closing(FileBackend(tmp_path / "store")) as one:
        put(one, range(20), _SIZE)
    victim, inner = object_name(key_of(7)), os.scandir

    class Stale:
        """A name that was there a moment ago."""

        def __init__(self, entry: os.DirEntry[str]) -> None:
            self.name, self.path = entry.name, entry.path

        def stat(self, **_: Any) -> os.stat_result:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    class Scan:
        """A scan with that name in it."""

        def __init__(self, path: Any) -> None:
            self._scan = inner(path)

        def __iter__(self) -> Iterator[Any]:
            return (Stale(one) if one.name == victim else one for one in self._scan)

        def __enter__(self) -> Scan:
            return self

        def __exit__(self, *_: object) -> None:
            self._scan.close()

    monkeypatch.setattr(os, "scandir", Scan)
    with closing(FileBackend(tmp_path / "store")) as two:
        monkeypatch.undo()
        assert two.stats().objects == 19
        assert held(two, range(20)) == list(range(20))  # asked for, it is looked for


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_that_is_seen_before_all_of_it(tmp_path: Path, shared: bool) -> None:
    """Between hosts it is a miss for a while; on one machine there is no such thing."""
    with closing(FileBackend(tmp_path / "store", shared=shared)) as backend:
        put(backend, [1], _SIZE)
        path = file_of(tmp_path, 1)
        whole = path.read_bytes()
        for length in (0, 4096, _SIZE - 1):
            os.truncate(path, length)
            (result,), _ = get(backend, [1], _SIZE)
            assert result.status is (ItemStatus.MISS if shared else ItemStatus.CORRUPT)
        assert backend.stats().counts.get("unsettled", 0) == 3 * shared
        path.write_bytes(whole)
        assert get(backend, [1], _SIZE)[1] == [True]
        os.truncate(path, 100)
        os.utime(path, (1e9, 1e9))  # what is too short for long is damaged
        (result,), _ = get(backend, [1], _SIZE)
        assert result.status is ItemStatus.CORRUPT


def test_a_name_that_is_seen_late(
    backend: FileBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss is not remembered: what becomes visible is found, without a scan."""
    name = object_name(key_of(5))
    inner_open, inner_stat = os.open, os.stat

    def hidden(inner: Any) -> Any:
        def call(path: Any, *args: Any, **given: Any) -> Any:
            if str(path).endswith(name):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return inner(path, *args, **given)

        return call

    with closing(FileBackend(tmp_path / "store", shared=True)) as other:
        put(other, [5], _SIZE)
    monkeypatch.setattr(os, "open", hidden(inner_open))
    monkeypatch.setattr(os, "stat", hidden(inner_stat))
    assert held(backend, [5]) == []
    assert get(backend, [5], _SIZE)[0][0].status is ItemStatus.MISS
    monkeypatch.undo()
    assert held(backend, [5]) == [5]
    assert get(backend, [5], _SIZE)[1] == [True]


def test_bytes_are_there_before_their_name(
    backend: FileBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every object is flushed, then named; `fsync=full` stays what it is."""
    calls: list[str] = []
    for call in ("fdatasync", "fsync", "rename"):
        inner = getattr(os, call)

        def noted(*args: Any, call: str = call, inner: Any = inner) -> Any:
            calls.append(call)
            return inner(*args)

        monkeypatch.setattr(os, call, noted)
    put(backend, [1, 2], _SIZE)
    assert calls == ["fdatasync", "rename"] * 2
    calls.clear()
    with closing(FileBackend(backend.path, num_threads=1, shared=True, fsync="full")) as full:
        put(full, [3], _SIZE)
    assert calls[:2] == ["fsync", "rename"]


_HOST = """
import random, sys
from kvferry.storage import FileBackend
from tests.storage.storage_rig import get, put
rng = random.Random(int(sys.argv[2]))
backend = FileBackend(sys.argv[1], capacity_bytes=40 * 8192, rescan_secs=0.01, shared=True)
for turn in range(100_000):
    numbers = rng.sample(range(80), 4)
    if rng.random() < 0.6:
        good = [one.status in ("ok", "refused") for one in put(backend, numbers, 8192)]
    else:
        results, whole = get(backend, numbers, 8192)
        good = [one.status == "miss" or (one.ok and right) for one, right in zip(results, whole)]
    print("good" if all(good) and not backend.stats().errors else "bad", flush=True)
    if turn > 40 and not sys.stdin.readline():
        break
"""


def start_host(store: Path, seed: int) -> subprocess.Popen[str]:
    """A process that reads and writes there, and says after each call whether all was good."""
    roots = [str(Path(kvferry.__file__).parents[1]), str(Path(__file__).parents[2])]
    return subprocess.Popen(
        [sys.executable, "-c", _HOST, str(store), str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
    )


def said(host: subprocess.Popen[str], count: int) -> set[str]:
    """The next things that it says."""
    assert host.stdout is not None
    return {host.stdout.readline().strip() for _ in range(count)}


def test_hosts_that_die(tmp_path: Path) -> None:
    """Those that are left read and write on; no lock and no half file of the dead stays."""
    store = tmp_path / "store"
    with ExitStack() as running:
        hosts = [running.enter_context(start_host(store, seed)) for seed in range(5)]
        for number, host in enumerate(hosts[:3]):
            assert said(host, 10 * (number + 1)) == {"good"}
            host.kill()  # in the middle of whatever it does
            host.wait(60)
        for host in hosts[3:]:
            assert host.stdin is not None
            host.stdin.write("go on\n" * 40)
            host.stdin.close()
            assert said(host, 80) == {"good"}
            assert host.wait(60) == 0
    with closing(FileBackend(store, capacity_bytes=40 * _SIZE, shared=True)) as last:
        held_now = held(last, range(80))
        assert len(held_now) > 10
        results, whole = get(last, held_now, _SIZE)
        assert all(one.ok for one in results)
        assert all(whole)
        assert list(tmp_path.rglob(".*.tmp")) == []
