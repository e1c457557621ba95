"""Stores that refuse, cut, hang or lie: by a deadline, item by item, and never a wrong byte."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.storage.object_store.fault_proxy import FaultProxy, Harm
from tests.storage.object_store.s3_rig import Server, opened, s3rver
from tests.storage.server_rig import free_port, until
from tests.storage.storage_rig import key_of, object_of, put

from kvferry.storage import ItemResult, ItemStatus
from kvferry.storage.object_store import ObjectStoreBackend

SIZE = 4096
OK, MISS, CORRUPT, FAILED = (
    ItemStatus.OK, ItemStatus.MISS, ItemStatus.CORRUPT, ItemStatus.FAILED,
)  # fmt: skip
POISON = 0xA5


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    """One before the server, that does no harm yet."""
    with FaultProxy(server.port) as proxy:
        yield proxy


def _backend(proxy: FaultProxy, request: pytest.FixtureRequest, **options: Any) -> Any:
    options = {"deadline_secs": 2.0, **options}
    return opened(proxy.endpoint, f"faults/{request.node.name}", **options)


def _read(backend: ObjectStoreBackend, numbers: range) -> list[ItemResult]:
    """Read in one batch: what is OK has the right bytes, and nothing else was written."""
    guard = 64
    into = np.full((len(numbers), SIZE + 2 * guard), POISON, dtype=np.uint8)
    results = backend.read_into(
        [key_of(number) for number in numbers],
        [[(int(row.ctypes.data) + guard, 1000), (int(row.ctypes.data) + guard + 1000, SIZE - 1000)]
         for row in into],
    )  # fmt: skip
    for row, number, result in zip(into, numbers, results, strict=True):
        assert (row[:guard] == POISON).all()
        assert (row[-guard:] == POISON).all()
        inside = row[guard:-guard]
        wanted = object_of(number, SIZE) if result.ok else np.full(SIZE, POISON, dtype=np.uint8)
        assert (inside == wanted).all(), f"object {number}: {result}"
    return results


def _threads() -> set[threading.Thread]:
    """Those of backends."""
    return {one for one in threading.enumerate() if one.name.startswith("kvferry-objects")}


def _statuses(results: list[ItemResult]) -> list[ItemStatus]:
    return [result.status for result in results]


_READS = {
    Harm.FORBIDDEN: FAILED,
    Harm.BUSY: FAILED,
    Harm.CUT: OK,  # the library asks for the rest
    Harm.HANG: FAILED,
    Harm.HANG_IN_BODY: FAILED,
    Harm.SHORT: CORRUPT,
    Harm.LONG: CORRUPT,
}


@pytest.mark.parametrize("harm", Harm, ids=lambda harm: harm.name)
def test_a_read(proxy: FaultProxy, request: pytest.FixtureRequest, harm: Harm) -> None:
    """One object of a batch is harmed: it alone may fail, and is there again afterwards."""
    backend = _backend(proxy, request)
    assert _statuses(put(backend, range(5), SIZE)) == [OK] * 5
    proxy.harm(harm, about=key_of(2))
    results = _read(backend, range(6))
    assert _statuses(results) == [OK, OK, _READS[harm], OK, OK, MISS]
    assert bool(results[2].reason) != results[2].ok
    assert proxy.num_harmed
    proxy.harm(None)
    assert _statuses(_read(backend, range(5))) == [OK] * 5
    backend.close()


@pytest.mark.parametrize(
    "harm", [Harm.FORBIDDEN, Harm.BUSY, Harm.CUT, Harm.HANG], ids=lambda harm: harm.name
)
def test_what_is_no_read(proxy: FaultProxy, request: pytest.FixtureRequest, harm: Harm) -> None:
    """Writes, removals and questions: the harmed item alone has failed."""
    backend = _backend(proxy, request)
    proxy.harm(harm, about=key_of(1))
    assert _statuses(put(backend, range(3), SIZE)) == [OK, FAILED, OK]
    proxy.harm(None)
    assert _statuses(put(backend, range(3), SIZE)) == [OK] * 3
    keys = [key_of(number) for number in range(3)]
    proxy.harm(harm, about=key_of(1))
    assert backend.contains(keys) == [True, False, True]
    assert _statuses(backend.delete(keys)) == [OK, FAILED, OK]
    proxy.harm(None)
    assert backend.contains(keys) == [False, True, False]
    assert _statuses(backend.delete(keys)) == [MISS, OK, MISS]
    assert sum(backend.stats().errors.values()) >= 3
    backend.close()


@pytest.mark.parametrize("harm", [Harm.BUSY, Harm.CUT], ids=lambda harm: harm.name)
def test_what_passes_is_tried_again(
    proxy: FaultProxy, request: pytest.FixtureRequest, harm: Harm
) -> None:
    """Once, and then all is well: nobody is told."""
    backend = _backend(proxy, request, deadline_secs=20.0)
    assert _statuses(put(backend, range(1), SIZE)) == [OK]
    proxy.harm(Harm.BUSY, times=1)
    assert _statuses(_read(backend, range(1))) == [OK]
    assert proxy.num_harmed == 1
    proxy.harm(harm, times=1)
    assert backend.contains([key_of(0)]) == [True]
    assert proxy.num_harmed == 1
    assert not backend.stats().errors
    backend.close()


def test_all_ends_by_the_deadline(proxy: FaultProxy, request: pytest.FixtureRequest) -> None:
    """Everything hangs, with more items than requests at a time; nothing is left running."""
    others = _threads()
    backend = _backend(proxy, request, deadline_secs=1.0, num_requests=3)
    assert _statuses(put(backend, range(2), SIZE)) == [OK] * 2
    proxy.harm(Harm.HANG)
    keys = [key_of(number) for number in range(12)]
    for call in (
        lambda: _read(backend, range(12)),
        lambda: put(backend, range(12), SIZE),
        lambda: backend.delete(keys),
    ):
        began = time.monotonic()
        assert _statuses(call()) == [FAILED] * 12
        assert time.monotonic() - began < 30  # and not for ever; half of it is for slow machines
    assert backend.contains(keys) == [False] * 12
    assert backend.stats().errors["late"] > 0
    proxy.harm(None)
    until(lambda: backend.stats().counts["requests_running"] == 0, "requests go on")
    assert _statuses(_read(backend, range(2)))[:2] == [OK] * 2
    assert len(_threads() - others) <= 3
    backend.close()


def test_closing_with_requests_in_flight(proxy: FaultProxy, request: pytest.FixtureRequest) -> None:
    """It returns at once; what runs ends by itself, and nothing begins any more."""
    backend = _backend(proxy, request, deadline_secs=5.0, num_requests=2)
    proxy.harm(Harm.HANG)
    found: list[ItemStatus] = []
    reader = threading.Thread(target=lambda: found.extend(_statuses(_read(backend, range(6)))))
    reader.start()
    until(lambda: proxy.num_harmed >= 2, "no request came")
    backend.close()
    backend.close()
    proxy.released.set()
    reader.join(60)
    assert found == [FAILED] * 6
    assert _statuses(put(backend, range(2), SIZE)) == [FAILED] * 2
    assert backend.contains([key_of(0)]) == [False]
    assert backend.stats().errors["closed"] > 0


def test_a_server_that_is_not_there() -> None:
    """A value for each item, and what a caller may try."""
    backend = opened(f"http://127.0.0.1:{free_port()}", deadline_secs=1.0)
    assert _statuses(put(backend, range(2), SIZE)) == [FAILED] * 2
    assert backend.contains([key_of(0)]) == [False]
    assert _statuses(_read(backend, range(2))) == [FAILED] * 2
    backend.close()


def test_a_bucket_that_is_not_there(server: Server) -> None:
    """Nothing can be put there, and nothing is there."""
    backend = ObjectStoreBackend(
        "s3://nobody-s/p", endpoint=server.endpoint, region="us-east-1",
        access_key_id="x", secret_access_key="x", deadline_secs=5.0,
    )  # fmt: skip
    assert _statuses(put(backend, range(1), SIZE)) == [FAILED]
    assert _statuses(_read(backend, range(1))) == [MISS]
    backend.close()


def test_parts(server: Server, request: pytest.FixtureRequest) -> None:
    """A long object goes in parts, whole or not at all."""
    backend = opened(server.endpoint, request.node.name, part_bytes=5 << 20)
    size = (12 << 20) + 7
    assert _statuses(put(backend, range(1), size)) == [OK]
    into = np.full(size, POISON, dtype=np.uint8)
    (result,) = backend.read_into([key_of(0)], [[(int(into.ctypes.data), size)]])
    assert (result.status, result.num_bytes) == (OK, size)
    assert (into == object_of(0, size)).all()
    (result,) = backend.read_into([key_of(0)], [[(int(into.ctypes.data), size - 1)]])
    assert result.status is CORRUPT
    backend.close()


def test_nothing_leaks(server: Server, request: pytest.FixtureRequest) -> None:
    """Backends that came and went leave no thread of ours and no descriptor."""

    def once() -> None:
        backend = opened(server.endpoint, request.node.name)
        put(backend, range(8), SIZE)
        _read(backend, range(9))
        backend.close()

    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    once()
    until(lambda: not _threads(), "threads of ours")
    before = held()
    for _ in range(4):
        once()
    # The library keeps connections for a while: those of one backend, not of all.
    until(
        lambda: held()[0] <= before[0] + 16 and held()[1] <= before[1], f"{before}, then {held()}"
    )


def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """Its objects are on disk: calls fail meanwhile, and the same backend goes on afterwards."""
    with s3rver(tmp_path) as server:
        backend = opened(server.endpoint, deadline_secs=2.0)
        assert _statuses(put(backend, range(4), SIZE)) == [OK] * 4
        server.kill()
        assert _statuses(_read(backend, range(4))) == [FAILED] * 4
        assert _statuses(put(backend, range(4, 5), SIZE)) == [FAILED]
        server.restart()
        assert _statuses(_read(backend, range(5))) == [OK] * 4 + [MISS]
        backend.close()
