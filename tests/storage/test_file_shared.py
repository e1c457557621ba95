"""Several users of one folder: they find each other's objects and break nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.storage.storage_rig import get, held, key_of, put

import kvferry
from kvferry.storage import FileBackend, ItemStatus

_SIZE = 8192


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """Two backends on one folder, as two processes would have them."""
    both = [
        FileBackend(tmp_path / "store", capacity_bytes=20 * _SIZE, num_threads=1, rescan_secs=0)
        for _ in range(2)
    ]
    yield both
    for one in both:
        one.close()


def test_objects_of_the_other_are_found(pair: list[FileBackend]) -> None:
    """What one writes the other has at once, and counts from then on."""
    one, other = pair
    put(one, range(5), _SIZE)
    assert other.stats().objects == 0
    assert held(other, range(6)) == list(range(5))
    assert all(get(other, range(5), _SIZE)[1])
    assert other.stats().num_bytes == 5 * _SIZE
    assert other.stats().counts["adopted"] == 5


def test_what_the_other_evicted_is_a_miss(pair: list[FileBackend]) -> None:
    """An object that is gone is a miss once, absent afterwards, and no longer counted."""
    one, other = pair
    put(one, range(5), _SIZE)
    held(other, range(5))
    assert all(result.ok for result in one.delete([key_of(2), key_of(3)]))
    assert held(other, range(5)) == [0, 1, 2, 3, 4], "it cannot know yet"
    results, _ = get(other, range(5), _SIZE)
    assert [result.status.value for result in results] == ["ok", "ok", "miss", "miss", "ok"]
    assert held(other, range(5)) == [0, 1, 4]
    assert other.stats().num_bytes == 3 * _SIZE
    assert put(other, [2], _SIZE)[0].ok
    assert all(get(one, [2], _SIZE)[1])


def test_a_write_of_what_the_other_evicted_is_a_write(tmp_path: Path) -> None:
    """A write is not taken for done because the object was there once."""
    one, other = (FileBackend(tmp_path / "store", rescan_secs=3600) for _ in range(2))
    put(one, [1], _SIZE)
    held(other, [1])
    one.delete([key_of(1)])
    assert put(other, [1], _SIZE)[0].ok
    assert get(other, [1], _SIZE)[1] == [True]
    one.close()
    other.close()


def test_the_folder_is_looked_through_bit_by_bit(tmp_path: Path) -> None:
    """Within the time for it, writes find all that others wrote, used and removed."""
    now = [0.0]
    one = FileBackend(tmp_path / "store", num_threads=1)
    other = FileBackend(tmp_path / "store", rescan_secs=30, clock=lambda: now[0])
    put(one, range(100), _SIZE)
    put(other, [1000], _SIZE)
    assert other.stats().objects == 1, "no time has gone by"
    now[0] = 15.0
    put(other, [1001], _SIZE)
    half = other.stats().objects
    assert 20 < half < 80, "half of the time, about half of the objects"
    now[0] = 30.0
    put(other, [1002], _SIZE)
    assert other.stats().objects == 103
    one.delete([key_of(number) for number in range(100)])
    now[0] = 60.0
    put(other, [1003], _SIZE)
    stats = other.stats()
    assert (stats.objects, stats.num_bytes) == (4, 4 * _SIZE)
    assert stats.counts["vanished"] == 100
    one.close()
    other.close()


def test_capacity_counts_what_the_other_wrote(pair: list[FileBackend], tmp_path: Path) -> None:
    """Two writers keep to one capacity, but for what was written since the last look."""
    one, other = pair
    for number in range(0, 100, 2):
        put(one, [number], _SIZE)
        put(other, [number + 1], _SIZE)
        total = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.kvo"))
        assert total <= 21 * _SIZE
    assert held(one, range(90, 100)) == list(range(90, 100))


def test_use_by_the_other_counts_as_use(tmp_path: Path) -> None:
    """An object that another process reads is not the first to go here."""
    one = FileBackend(tmp_path / "store", touch_secs=0)
    other = FileBackend(tmp_path / "store", capacity_bytes=5 * _SIZE, num_threads=1, rescan_secs=0)
    put(other, range(5), _SIZE)
    get(one, [0], _SIZE)
    put(other, [10, 11], _SIZE)
    assert held(other, range(5)) == [0, 3, 4]
    one.close()
    other.close()


def test_files_that_are_being_written_are_left_alone(
    pair: list[FileBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan by another, or by oneself, takes no file from under its writer."""
    one, other = pair
    inner, writing, release = os.pwritev, threading.Event(), threading.Event()

    def blocked(*args: Any) -> int:
        count = inner(*args)
        if threading.current_thread() is writer:
            writing.set()
            assert release.wait(30)
        return count

    outcome: list[Any] = []
    writer = threading.Thread(target=lambda: outcome.extend(put(one, [1], _SIZE)))
    monkeypatch.setattr(os, "pwritev", blocked)
    writer.start()
    assert writing.wait(30)
    for backend in (one, other, FileBackend(tmp_path / "store")):
        put(backend, [2], _SIZE)
        assert backend.stats().counts.get("dead_writers", 0) == 0
        assert backend.stats().num_bytes == 2 * _SIZE, "what is being written counts once"
    release.set()
    writer.join(30)
    assert [result.status for result in outcome] == [ItemStatus.OK]
    assert get(other, [1], _SIZE)[1] == [True]


def test_a_writer_whose_file_is_taken_starts_anew(
    pair: list[FileBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file that a scan takes for a dead writer's, before it is locked, is made again."""
    import fcntl

    one, other = pair
    taken: list[int] = []
    inner = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(descriptor)
            put(other, [50], _SIZE)  # scans, and may lock: nobody else does yet
        inner(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert put(one, [1], _SIZE)[0].ok
    assert taken
    assert other.stats().counts["dead_writers"] == 1
    assert get(other, [1], _SIZE)[1] == [True]
    assert list(tmp_path.rglob(".*.tmp")) == []


_PROCESS = """
import random, sys
from kvferry.storage import FileBackend
from tests.storage.storage_rig import get, put
rng = random.Random(int(sys.argv[2]))
backend = FileBackend(sys.argv[1], capacity_bytes=30 * 8192, rescan_secs=0.01)
wrong = refused = hits = 0
for _ in range(150):
    numbers = rng.sample(range(60), 4)
    if rng.random() < 0.5:
        refused += sum(not one.ok for one in put(backend, numbers, 8192))
    else:
        results, whole = get(backend, numbers, 8192)
        hits += sum(one.ok for one in results)
        wrong += sum(one.ok and not right for one, right in zip(results, whole))
        wrong += sum(one.status not in ("ok", "miss") for one in results)
print(wrong, refused, int(hits > 20), backend.stats().errors)
"""


def test_processes_share_a_folder(tmp_path: Path) -> None:
    """Three processes that write, read and evict in one folder see whole objects or none."""
    roots = [str(Path(kvferry.__file__).parents[1]), str(Path(__file__).parents[2])]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path / "store"), str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        )
        for seed in range(3)
    ]
    for child in children:
        out, _ = child.communicate(timeout=100)
        assert child.returncode == 0
        assert out == "0 0 1 {}\n"
    again = FileBackend(tmp_path / "store", capacity_bytes=30 * _SIZE)
    files = list(tmp_path.rglob("*.kvo"))
    assert again.stats().num_bytes == len(files) * _SIZE
    assert list(tmp_path.rglob(".*.tmp")) == []
    put(again, range(100, 104), _SIZE)
    assert again.stats().num_bytes <= 30 * _SIZE
    again.close()
