"""Masters that die or say nothing, clients that are killed: bounded in time, no wrong byte."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from tests.storage.mooncake.pool_rig import Master, Member, opened
from tests.storage.server_rig import DEADLINE_SECS, until
from tests.storage.storage_rig import key_of, object_of, put

from kvferry.errors import StorageError
from kvferry.storage import ItemResult, ItemStatus
from kvferry.storage.mooncake import MooncakeBackend

SIZE = 4096
BAD = (ItemStatus.MISS, ItemStatus.FAILED)


def _read(backend: MooncakeBackend, numbers: range) -> list[ItemStatus]:
    """Read in one batch; whatever is OK has the right bytes."""
    into = np.full((len(numbers), SIZE), 0xA5, dtype=np.uint8)
    base = int(into.ctypes.data)
    results = backend.read_into(
        [key_of(number) for number in numbers],
        [[(base + row * SIZE, SIZE)] for row in range(len(numbers))],
    )
    for row, number in enumerate(numbers):
        if results[row].ok:
            assert (into[row] == object_of(number, SIZE)).all(), f"object {number} is wrong"
    return [result.status for result in results]


def test_a_client_that_is_killed() -> None:
    """Its objects are misses or failures, puts are tried on other memory, and all is well later."""
    with Master() as master, Member(master.address, 32 << 20), Member(
        master.address, 32 << 20
    ) as victim:  # fmt: skip
        backend = opened(master)
        assert all(one.ok for one in put(backend, range(60), SIZE))
        assert _read(backend, range(60)) == [ItemStatus.OK] * 60
        victim.kill()
        found = _read(backend, range(60))
        lost = sum(status in BAD for status in found)
        assert 0 < lost < 60, "each member should have had some"
        assert found.count(ItemStatus.OK) == 60 - lost
        wrote = put(backend, range(100, 160), SIZE)
        assert {one.status for one in wrote} <= {ItemStatus.OK, ItemStatus.FAILED}
        stats = backend.stats()
        assert stats.errors["transfer_failed"] > 0
        assert stats.counts["tried_again"] > 0
        # More than a half, which one try would give.
        assert sum(one.ok for one in wrote) > 40, wrote
        for number, one in enumerate(wrote):
            if one.ok:
                assert _read(backend, range(100 + number, 101 + number)) == [ItemStatus.OK]

        fresh = itertools.count(1000)

        def forgotten() -> bool:
            return all(one.ok for one in put(backend, [next(fresh)], SIZE)) and not (
                set(_read(backend, range(60))) - {ItemStatus.OK, ItemStatus.MISS}
            )

        until(forgotten, "the master did not forget the dead client")
        again = range(60)
        assert all(one.ok for one in put(backend, again, SIZE))
        assert _read(backend, again) == [ItemStatus.OK] * 60
        backend.close()


def test_a_master_that_dies_and_comes_back_empty() -> None:
    """Failures while it is away; then misses, and the pool fills again, without a new backend."""
    with Master() as master, Member(master.address, 32 << 20):
        backend = opened(master)
        assert all(one.ok for one in put(backend, range(10), SIZE))
        master.kill()
        assert backend.contains([key_of(1)]) == [False]
        assert _read(backend, range(3)) == [ItemStatus.FAILED] * 3
        assert backend.delete([key_of(1)])[0].status is ItemStatus.FAILED
        (wrote,) = put(backend, [50], SIZE)
        assert wrote.status is ItemStatus.FAILED
        assert "master" in wrote.reason
        assert backend.stats().errors["master_unreachable"] >= 3
        master.restart()
        until(lambda: put(backend, [51], SIZE)[0].ok, "it did not come back")
        assert _read(backend, range(10)) == [ItemStatus.MISS] * 10
        assert all(one.ok for one in put(backend, range(10), SIZE))
        assert _read(backend, range(10)) == [ItemStatus.OK] * 10
        backend.close()


@pytest.mark.parametrize("call", ["contains", "read", "write", "delete"])
def test_a_master_that_hangs(call: str) -> None:
    """Calls with memory that is not registered end by the deadline, and then at once."""
    with Master() as master, Member(master.address, 32 << 20):
        backend = opened(master, deadline_secs=0.3)
        assert put(backend, [1], SIZE)[0].ok
        calls: dict[str, Callable[[], object]] = {
            "contains": lambda: backend.contains([key_of(1)]),
            "read": lambda: _read(backend, range(1, 2)),
            "write": lambda: put(backend, [2], SIZE)[0].status,
            "delete": lambda: backend.delete([key_of(1)])[0].status,
        }
        expected = {"contains": [False], "read": [ItemStatus.FAILED]}
        master.pause()
        for _ in range(4):
            assert calls[call]() == expected.get(call, ItemStatus.FAILED)
        stats = backend.stats()
        assert stats.errors["late"] == 2, "two found out"
        assert stats.errors["stuck"] == 2, "and the others were not started"
        assert stats.counts["calls_running"] == 2
        rooms = backend._rooms
        assert rooms.num_free == (2 if call in ("read", "write") else 4), "what is used stays taken"
        master.go_on()
        until(lambda: backend.stats().counts["calls_running"] == 0, "the calls never returned")
        assert rooms.num_free == 4
        until(lambda: put(backend, [3], SIZE)[0].ok, "it did not go on")
        assert _read(backend, range(3, 4)) == [ItemStatus.OK]
        backend.close()


def test_memory_of_a_late_read_is_left_alone() -> None:
    """A read that was given up writes nothing into the caller's memory when it returns."""
    with Master() as master, Member(master.address, 32 << 20):
        backend = opened(master, deadline_secs=0.3)
        assert put(backend, [1], SIZE)[0].ok
        master.pause()
        into = np.full(SIZE, 0xA5, dtype=np.uint8)
        (result,) = backend.read_into([key_of(1)], [[(int(into.ctypes.data), SIZE)]])
        assert result.status is ItemStatus.FAILED
        master.go_on()
        until(lambda: backend.stats().counts["calls_running"] == 0, "the call never returned")
        assert (into == 0xA5).all()
        backend.close()


def test_registered_memory_is_held_until_the_library_lets_go() -> None:
    """A read in place returns when the library has, and not before: then nothing writes there."""
    with Master() as master, Member(master.address, 32 << 20):
        backend = opened(master, deadline_secs=0.3)
        assert put(backend, [1], SIZE)[0].ok
        into = np.full(SIZE, 0xA5, dtype=np.uint8)
        assert backend.register_memory(int(into.ctypes.data), SIZE)
        results: list[ItemResult] = []
        master.pause()
        reader = threading.Thread(
            target=lambda: results.extend(
                backend.read_into([key_of(1)], [[(int(into.ctypes.data), SIZE)]])
            ),
            daemon=True,
        )
        reader.start()
        reader.join(1.0)
        assert reader.is_alive(), "it returned while the library had the memory"
        master.go_on()
        reader.join(DEADLINE_SECS)
        assert not reader.is_alive()
        # The lease may have ended meanwhile: then it is a failure that is told.
        assert not results[0].ok or (into == object_of(1, SIZE)).all(), results
        backend.close()


def test_closing_while_a_call_hangs() -> None:
    """It is bounded; the library is ended behind the last call, and not under it."""
    with Master() as master, Member(master.address, 32 << 20):
        backend = opened(master, deadline_secs=0.3)
        assert put(backend, [1], SIZE)[0].ok
        master.pause()
        assert backend.contains([key_of(1)]) == [False]
        backend.close()
        assert not backend._calls._ended.is_set()
        assert put(backend, [2], SIZE)[0].status is ItemStatus.FAILED
        master.go_on()
        assert backend._calls._ended.wait(DEADLINE_SECS)
        assert _read(backend, range(1, 2)) == [ItemStatus.FAILED]
        backend.close()


def test_a_master_that_accepts_and_says_nothing() -> None:
    """Opening is bounded too."""
    with Master() as master:
        master.pause()
        with pytest.raises(StorageError, match="did not answer"):
            opened(master, setup_secs=0.5)
        master.go_on()


def _left_open(address: str, pipe: Connection) -> None:
    """Closes a backend that gives memory when its master is dead; tells what became of that."""
    backend = MooncakeBackend(
        address, segment_bytes=16 << 20, buffer_bytes=4 << 20, deadline_secs=20.0
    )
    pipe.send(put(backend, [1], SIZE)[0].status)
    pipe.recv()
    backend.close()
    ended = backend._calls._ended.wait(DEADLINE_SECS)
    later = put(backend, [2], SIZE)[0].status
    pipe.send((ended, backend.stats().errors["not_ended"], later))
    os._exit(0)  # the library would wait for the dead master


def test_a_client_that_gives_memory_is_not_ended_while_the_master_is_dead() -> None:
    """That would stop all of the process; the client stays, and this is counted.

    In a process of its own, where it may stay: it has threads and descriptors that come and go.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with Master() as master, ours:
        child = context.Process(target=_left_open, args=(master.address, theirs), daemon=True)
        child.start()
        theirs.close()
        assert ours.poll(DEADLINE_SECS)
        assert ours.recv() is ItemStatus.OK
        master.kill()
        ours.send(None)
        assert ours.poll(DEADLINE_SECS)
        assert ours.recv() == (True, 1, ItemStatus.FAILED)
        child.join(DEADLINE_SECS)
        assert child.exitcode == 0
        child.close()


def test_nothing_leaks() -> None:
    """Descriptors and threads are what they were after backends came and went."""

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    def once(master: Master) -> None:
        backend = opened(master)
        assert put(backend, [1], SIZE)[0].ok
        assert _read(backend, range(1, 2)) == [ItemStatus.OK]
        backend.close()

    assert Path("/proc/self/fd").is_dir()
    with Master() as master, Member(master.address, 16 << 20):
        once(master)
        once(master)
        before = held()
        for _ in range(2):
            once(master)
        until(lambda: held()[0] <= before[0] and held()[1] <= before[1], f"{before}, then {held()}")
