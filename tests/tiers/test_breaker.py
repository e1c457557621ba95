"""A backend that is dead is out of the way at once, and taken back when it answers: any backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.tiers.rig import PAGE, K, Rig, V

from kvferry.events import StorageChanged
from kvferry.metrics import NullMetrics
from kvferry.storage import ItemResult, ItemStatus
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason
from kvferry.types import Tier

TOKENS = list(range(4 * PAGE))


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Lets blocked calls go, at the end of the test at the latest."""
    event = threading.Event()
    yield event
    event.set()


class Counts(NullMetrics):
    """What was dropped, and how storage fared."""

    enabled = True

    def __init__(self) -> None:
        self.pages_dropped: dict[str, int] = {}
        self.storage: list[tuple[str, bool]] = []
        self.matches: list[tuple[int, int]] = []

    def dropped(self, reason: str, pages: int) -> None:
        """Add them up."""
        self.pages_dropped[reason] = self.pages_dropped.get(reason, 0) + pages

    def storage_changed(self, state: str, *, usable: bool) -> None:
        """Note it."""
        self.storage.append((state, usable))

    def matched(self, tokens_by_tier: Any, missed_tokens: int) -> None:
        """Note what storage is said to have."""
        self.matches.append((tokens_by_tier[Tier.STORAGE], missed_tokens))


def _dead(backend: FaultyBackend, fault: Fault | FaultKind) -> None:
    for method in ("contains", "read_into", "write_from", "delete"):
        backend.script(method, None, fault, always=True)


def _later(rig: Rig, seconds: float) -> None:
    """Time passes, and what is due then ends."""
    rig.clock.now += seconds
    rig.manager.poll()
    rig.settle()


def _states(rig: Rig) -> list[str]:
    return [one.state for one in rig.events.drain() if isinstance(one, StorageChanged)]


@pytest.mark.parametrize("fault", [Fault(FaultKind.RAISE), Fault(FaultKind.STATUS)])
def test_a_dead_backend_is_out_of_the_way_and_comes_back(fault: Fault) -> None:
    """Lookups say miss at once, what is not written is counted, and no request is the trial."""
    backend, counts = FaultyBackend(), Counts()
    rig = Rig((K, V), backend=backend, breaker_failures=2, breaker_secs=30, metrics=counts)
    was = rig.pages(0, 4)
    rig.stored_in_storage(TOKENS)
    rig.manager.prefetch(rig.keys(TOKENS)).wait(20)
    rig.manager.reset()
    assert rig.match(TOKENS).tokens_by_tier[Tier.STORAGE] == 0  # forgotten with the reset
    assert _states(rig) == ["attached"]
    _dead(backend, fault)
    for number in range(2):
        rig.store([50 + number] * PAGE, 20 + number)
        rig.settle()
    assert rig.manager.stats().breaker == "open"
    assert "2 failures in a row" in rig.manager.stats().storage_trouble
    assert _states(rig) == ["down"]
    calls = len(backend.calls)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    assert (fetch.done, fetch.reason) == (True, Reason.STORAGE_DOWN)
    assert rig.manager.probe(rig.keys(TOKENS)).reason is Reason.STORAGE_DOWN
    assert rig.store([60] * (2 * PAGE), 22).num_stored == 2
    rig.settle()
    assert counts.pages_dropped[Reason.STORAGE_DOWN] == 2
    rig.manager.offer_all()  # as a flush does, again and again: the same pages
    assert counts.pages_dropped[Reason.STORAGE_DOWN] == 2
    assert len(backend.calls) == calls
    _later(rig, 31)
    assert len(backend.calls) > calls  # tried, and dead
    assert rig.manager.stats().breaker == "open"
    assert rig.manager.prefetch(rig.keys(TOKENS)).reason is Reason.STORAGE_DOWN
    for method in ("contains", "read_into", "write_from", "delete"):
        backend.script(method, None, FaultKind.OK, always=True)
    _later(rig, 31)
    assert _states(rig) == ["back"]
    assert counts.storage == [("attached", True), ("down", False), ("back", True)]
    assert rig.manager.stats().storage_trouble == ""
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    loaded = rig.load(rig.match(TOKENS), 40)
    loaded.wait(20)
    assert loaded.verified_pages == 4
    assert all(rig.same(40 + page, was[page]) for page in range(4))
    rig.close()


def test_while_it_is_down_no_tokens_count_as_in_storage() -> None:
    """What storage is known to have is no use to anybody then."""
    backend, counts = FaultyBackend(), Counts()
    rig = Rig(backend=backend, num_slots=4, breaker_failures=1, metrics=counts)
    rig.store(TOKENS)
    rig.settle()
    rig.store([9] * PAGE, 10)  # the last page of the first prompt leaves the host
    rig.settle()
    rig.match(TOKENS)
    assert counts.matches[-1] == (PAGE, 0)
    backend.script("write_from", None, FaultKind.STATUS, always=True)
    rig.store([8] * PAGE, 11)
    rig.settle()
    rig.match(TOKENS)
    assert counts.matches[-1][0] == 0
    rig.close()


def test_that_it_says_what_it_has_is_no_proof() -> None:
    """An index in memory answers while the disk below is gone."""
    backend = FaultyBackend()
    rig = Rig((K, V), backend=backend, breaker_failures=2)
    rig.stored_in_storage(TOKENS)
    backend.script("read_into", None, Fault(FaultKind.STATUS), always=True)
    for _ in range(2):
        rig.manager.prefetch(rig.keys(TOKENS)).wait(20)
        rig.settle()
    assert rig.manager.stats().breaker == "open"
    assert "as scripted" in rig.manager.stats().storage_trouble
    rig.close()


def test_a_full_backend_has_answered() -> None:
    """A trial that is refused finds nothing broken."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, breaker_failures=1, breaker_secs=5)
    backend.script("write_from", None, Fault(FaultKind.STATUS))
    full = Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED, reason="full"))
    backend.script("write_from", None, full, always=True)
    rig.store([1] * PAGE)
    rig.settle()
    assert rig.manager.stats().breaker == "open"
    _later(rig, 6)
    assert rig.manager.stats().breaker == "closed"
    rig.close()


def test_a_trial_that_hangs_is_alone_and_counts_when_it_returns(release: threading.Event) -> None:
    """No other is sent after it; requests are refused meanwhile; its late answer is one."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, breaker_failures=1, breaker_secs=5, prefetch_max_secs=10)
    backend.script("write_from", None, Fault(FaultKind.STATUS))
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("write_from", None, block)
    rig.store([1] * PAGE)
    rig.settle()
    rig.clock.now += 6
    rig.until(backend.blocked.is_set)
    calls = len(backend.calls)
    for _ in range(5):
        rig.clock.now += 20
        rig.manager.poll()
    assert len(backend.calls) == calls
    assert rig.manager.stats().late_storage_jobs == 1
    assert rig.manager.stats().num_parked == 0  # a trial has no slots
    assert rig.manager.prefetch(rig.keys(TOKENS)).reason is Reason.STORAGE_DOWN
    release.set()
    rig.settle()
    assert rig.manager.stats().breaker == "closed"
    rig.close()


def test_a_trial_of_one_backend_says_nothing_of_the_next(release: threading.Event) -> None:
    """Detached while its trial hangs: the next backend is judged by what it does itself."""
    first, second = FaultyBackend(), FaultyBackend()
    rig = Rig(backend=first, breaker_failures=1, breaker_secs=5)
    first.script("write_from", None, Fault(FaultKind.STATUS))
    first.script("write_from", None, Fault(FaultKind.BLOCK, release=release, deadline_secs=60))
    rig.store([1] * PAGE)
    rig.settle()
    rig.clock.now += 6
    rig.until(first.blocked.is_set)
    assert rig.manager.detach_storage(force=True)
    rig.attach(second)
    second.script("write_from", None, FaultKind.STATUS, always=True)
    rig.store([2] * PAGE, 1)
    rig.until(lambda: rig.manager.stats().breaker == "open")
    rig.clock.now += 6
    rig.until(lambda: len(second.calls) > 1)  # its own trial does not wait for that of the first
    release.set()
    rig.settle()
    assert rig.manager.stats().breaker == "open"
    assert _states(rig) == ["attached", "down", "detached", "attached", "down"]
    rig.close()


def test_pages_that_leave_the_host_while_it_is_down_are_counted_once() -> None:
    """What waited when it went down, and is evicted before it is back, was not stored."""
    backend, counts = FaultyBackend(), Counts()
    rig = Rig(backend=backend, num_slots=4, batch_pages=1, max_batches=1, num_threads=1,
              breaker_failures=1, breaker_secs=1000, metrics=counts)  # fmt: skip
    backend.script("write_from", None, FaultKind.STATUS, always=True)
    rig.store(TOKENS)  # one page is sent, and fails; three wait
    rig.settle()
    assert rig.manager.stats().waiting_for_storage == 3
    rig.store([7] * (4 * PAGE), 10)
    rig.settle()
    assert rig.manager.stats().waiting_for_storage == 0
    assert counts.pages_dropped == {Reason.STORAGE_FAILED: 1, Reason.STORAGE_DOWN: 3 + 4}
    rig.close()
