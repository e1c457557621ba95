"""A backend learns of the host pools while it is attached, and they outlive what it knows."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tiers.rig import K, V

from kvferry.errors import PoolInUseError
from kvferry.geometry import Geometry
from kvferry.memory import HostPool
from kvferry.storage import MemoryBackend, StorageBackend
from kvferry.testing import FaultyBackend
from kvferry.tiers.commands import Completion, StorageDetached, WorkerFault
from kvferry.tiers.storage_workers import StorageWorkers
from kvferry.types import SlotKind

GEOMETRY = Geometry(planes=(K, V), page_size=4)


class _Knows(MemoryBackend):
    """Takes memory, or raises."""

    def __init__(self, fault: BaseException | None = None) -> None:
        super().__init__()
        self.known: dict[int, int] = {}
        self.calls: list[str] = []
        self.registered = threading.Event()
        self._fault = fault

    def register_memory(self, address: int, num_bytes: int) -> bool:
        self.calls.append("register")
        self.registered.set()
        if self._fault:
            raise self._fault
        self.known[address] = num_bytes
        return True

    def unregister_memory(self, address: int) -> None:
        self.calls.append("unregister")
        del self.known[address]

    def close(self) -> None:
        self.calls.append("close")
        super().close()


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """Eight slots."""
    with HostPool(GEOMETRY, num_slots=8) as pool:
        yield pool


def _workers(backend: Any, pool: HostPool, answers: list[Completion]) -> StorageWorkers:
    return StorageWorkers(1, backend, GEOMETRY, {SlotKind.PAGE: pool}, answers.append)


def test_pools_are_registered_and_given_back(pool: HostPool) -> None:
    """All slots, once whatever the threads; unregistered before the backend is closed."""
    backend, answers = _Knows(), list[Completion]()
    workers = _workers(backend, pool, answers)
    assert backend.registered.wait(60)
    workers.stop()
    assert workers.join(60)
    assert backend.calls == ["register", "unregister", "close"]
    assert backend.known == {}
    assert pool.num_leases == 0
    assert [type(one) for one in answers] == [StorageDetached]


def test_a_pool_is_not_freed_while_it_is_registered(pool: HostPool) -> None:
    """It cannot be closed before the backend was told."""
    backend = _Knows()
    workers = _workers(backend, pool, [])
    assert backend.registered.wait(60)
    ends = threading.Event()
    for _ in range(6000):
        if backend.known and workers._registered:
            break
        ends.wait(0.01)
    with pytest.raises(PoolInUseError):
        pool.close()
    workers.stop()
    assert workers.join(60)
    pool.close()


def test_a_backend_that_raises_as_it_is_told(pool: HostPool) -> None:
    """It is told of, and the threads go on without."""
    backend, answers = _Knows(RuntimeError("no memory for me")), list[Completion]()
    workers = _workers(backend, pool, answers)
    assert backend.registered.wait(60)
    assert workers.num_alive == 4
    workers.stop()
    assert workers.join(60)
    assert backend.calls == ["register", "close"]
    assert [type(one) for one in answers] == [WorkerFault, StorageDetached]
    assert pool.num_leases == 0


def test_backends_that_need_no_such_thing(pool: HostPool) -> None:
    """The interface has a default that does nothing, and classes from before it are taken."""

    class _Old:
        def __init__(self, inner: StorageBackend) -> None:
            self.closed = inner.close

        def close(self) -> None:
            self.closed()

    for backend in (MemoryBackend(), _Old(MemoryBackend())):
        answers = list[Completion]()
        workers = _workers(backend, pool, answers)
        workers.stop()
        assert workers.join(60)
        assert [type(one) for one in answers] == [StorageDetached]
        assert pool.num_leases == 0


def test_wrappers_pass_it_on() -> None:
    """The double for tests says what was registered."""
    inner = _Knows()
    double = FaultyBackend(inner)
    assert double.register_memory(4096, 100)
    assert double.registered == inner.known == {4096: 100}
    double.unregister_memory(4096)
    assert double.registered == inner.known == {}
    assert not FaultyBackend().register_memory(4096, 100)
