"""Prefetch: policies, deadlines, budget, cancel, and what is published when."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.tiers.rig import PAGE, K, Rig, V

from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import PageState, PrefetchPolicy, Reason
from kvferry.types import SlotKind

TOKENS = list(range(6 * PAGE))


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()


def blocked_rig(release: threading.Event, *, page: int, **options: object) -> Rig:
    """Six pages in storage, one of which does not come before `release`."""
    backend = FaultyBackend()
    rig = Rig((K, V), backend=backend, batch_pages=1, max_batches=8, **options)  # type: ignore[arg-type]
    rig.stored_in_storage(TOKENS)
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("read_into", rig.keys(TOKENS)[page], block)
    return rig


def test_best_effort_takes_what_has_come(release: threading.Event) -> None:
    """The first look ends it, with whatever is there."""
    rig = blocked_rig(release, page=2, prefetch_policy=PrefetchPolicy.BEST_EFFORT)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(lambda: fetch.num_pages == 2)
    result = fetch.look()
    assert result is not None
    assert (result.num_tokens, result.reason) == (2 * PAGE, Reason.DEADLINE)
    assert rig.match(TOKENS).num_tokens == 2 * PAGE
    release.set()
    rig.settle()
    assert rig.match(TOKENS).num_tokens == 2 * PAGE  # what came late was thrown away
    rig.close()


def test_wait_complete_waits_but_not_for_ever(release: threading.Event) -> None:
    """It waits past any deadline of the other policies, up to the upper bound."""
    rig = blocked_rig(
        release, page=2, prefetch_policy=PrefetchPolicy.WAIT_COMPLETE, prefetch_max_secs=30.0
    )
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(lambda: fetch.num_pages == 2)
    rig.clock.now += 29
    assert fetch.look() is None
    rig.clock.now += 2
    result = fetch.look()
    assert result is not None
    assert result.num_tokens == 2 * PAGE
    release.set()
    rig.settle()
    rig.close()


def test_timeout_grows_with_tokens(release: threading.Event) -> None:
    """The clock starts when it is submitted, whether or not anybody looks."""
    rig = blocked_rig(
        release, page=4, timeout_base_secs=1.0, timeout_secs_per_1024_tokens=1024 / (6 * PAGE)
    )
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(lambda: fetch.num_pages == 4)
    rig.clock.now += 1.9
    assert fetch.look() is None
    rig.clock.now += 0.2
    result = fetch.look()
    assert result is not None
    assert (result.num_tokens, result.num_pages) == (4 * PAGE, 4)
    release.set()
    rig.settle()
    rig.close()


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
def test_whatever_the_policy_what_is_complete_is_told(policy: PrefetchPolicy) -> None:
    """When all has come, the first look says so."""
    rig = Rig(backend=MemoryBackend(), prefetch_policy=policy)
    rig.stored_in_storage(TOKENS)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    result = fetch.look()
    assert result is not None
    assert (result.num_tokens, result.num_pages, result.reason) == (6 * PAGE, 6, Reason.NONE)
    rig.close()


@pytest.mark.parametrize("hole", range(6))
def test_pages_behind_a_hole_are_not_published(hole: int) -> None:
    """A sum of hits is no prefix: what comes behind the hole is given back."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, batch_pages=1, max_batches=8, num_threads=4)
    rig.stored_in_storage(TOKENS)
    backend.script("contains", rig.keys(TOKENS)[hole], FaultKind.SAYS_YES)
    backend.inner.delete([rig.keys(TOKENS)[hole]])
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    rig.settle()
    assert fetch.result().num_tokens == hole * PAGE
    assert fetch.reason is Reason.MISSING
    assert rig.manager.stats().slots[SlotKind.PAGE][PageState.RESIDENT] == hole
    rig.check_idle()
    rig.close()


def test_pages_are_published_in_order(release: threading.Event) -> None:
    """Later pages that come first are not told before the first has come."""
    rig = blocked_rig(release, page=0)
    rig.num_threads = 4
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    ledger = rig.manager._control.tiers[SlotKind.PAGE].ledger
    rig.until(lambda: ledger.count(PageState.FETCHING) == 6)
    rig.until(lambda: sum(status.name == "READ" for status in fetch._work.pages) == 5)
    assert fetch.num_pages == 0
    assert rig.match(TOKENS).num_tokens == 0
    release.set()
    fetch.wait(20)
    assert rig.match(TOKENS).num_tokens == 6 * PAGE
    rig.close()


def test_a_backend_that_promised_and_had_nothing_is_not_asked_again_soon() -> None:
    """A key that was not there is remembered for a while, and a write ends that."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, miss_memory_secs=50)
    rig.stored_in_storage(TOKENS)
    keys = rig.keys(TOKENS)
    backend.script("contains", keys[0], FaultKind.EVICT_AFTER)
    rig.manager.prefetch(keys).wait(20)
    before = len(backend.calls)
    again = rig.manager.prefetch(keys)
    assert (again.done, again.reason) == (True, Reason.MISSING)
    assert len(backend.calls) == before
    rig.stored_in_storage(TOKENS)
    fetch = rig.manager.prefetch(keys)
    fetch.wait(20)
    assert fetch.result().num_tokens == 6 * PAGE
    rig.close()


@pytest.mark.parametrize("batch_pages", [1, 3, 128])
def test_a_small_host_is_the_reason_that_is_told(batch_pages: int) -> None:
    """Storage has more than the host can take: as much as fits comes, and the reason says why."""
    backend = MemoryBackend()
    writer = Rig(num_slots=24, backend=backend)
    prompt = list(range(20 * PAGE))
    writer.stored_in_storage(prompt)
    rig = Rig(num_slots=8, backend=backend, batch_pages=batch_pages, max_batches=1)
    fetch = rig.manager.prefetch(rig.keys(prompt))
    fetch.wait(20)
    result = fetch.result()
    assert (result.num_tokens, result.reason) == (8 * PAGE, Reason.HOST_FULL)
    rig.check_idle()
    rig.close()
    writer.close()


def test_two_prefetches_of_one_prompt_read_it_once() -> None:
    """The second waits for what the first is bringing, and both are complete."""
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.stored_in_storage(TOKENS)
    first, second = (rig.manager.prefetch(rig.keys(TOKENS)) for _ in range(2))
    first.wait(20)
    second.wait(20)
    assert first.result().num_tokens == second.result().num_tokens == 6 * PAGE
    assert first.num_pages + second.num_pages == 6
    reads = [key for method, keys in backend.calls if method == "read_into" for key in keys]
    assert len(reads) == 6
    rig.close()


def test_a_second_prefetch_reads_what_the_first_gave_up(release: threading.Event) -> None:
    """The first is cancelled: the second gets the pages by itself."""
    rig = blocked_rig(release, page=3)
    first = rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(lambda: first.num_pages == 3)
    second = rig.manager.prefetch(rig.keys(TOKENS))
    rig.manager.poll()
    first.cancel()
    second.wait(20)
    assert second.result().num_tokens == 6 * PAGE
    release.set()
    rig.settle()
    rig.close()


STAGES = ("before the probe", "during the probe", "while reading", "after it came", "never polled")


@pytest.mark.parametrize("stage", STAGES)
def test_aborts_eat_no_budget(stage: str) -> None:
    """200 aborted prefetches at any stage, then a normal one: it has all the budget."""
    backend = FaultyBackend()
    rig = Rig(
        backend=backend,
        prefetch_budget_pages=6,
        max_batches=8,
        batch_pages=2,
        breaker_failures=10_000,
    )
    rig.stored_in_storage(TOKENS)
    for _ in range(200):
        fetch = rig.manager.prefetch(rig.keys(TOKENS))
        if stage == "during the probe":
            rig.data.wait(0.01)
        elif stage == "while reading":
            rig.until(lambda fetch=fetch: fetch._work.stage != "probing")  # type: ignore[misc]
        elif stage == "after it came":
            fetch.wait(20)
        if stage != "never polled":
            fetch.cancel()
        rig.manager.poll()
        if stage == "after it came":
            rig.manager.reset()
    if stage == "never polled":
        rig.clock.now += 1000
        rig.settle()
        rig.manager.reset()
    rig.settle()
    rig.check_idle()
    last = rig.manager.prefetch(rig.keys(TOKENS))
    last.wait(20)
    assert last.result().num_tokens == 6 * PAGE
    rig.close()


def test_a_prefetch_over_budget_waits_and_goes_on(release: threading.Event) -> None:
    """What is limited is tried again, not dropped."""
    rig = blocked_rig(release, page=0, prefetch_budget_pages=2)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    other = [9] * (2 * PAGE)
    ledger = rig.manager._control.tiers[SlotKind.PAGE].ledger
    rig.until(lambda: ledger.count(PageState.FETCHING) == 2)
    for _ in range(5):
        rig.pump(0.01)
    assert ledger.count(PageState.FETCHING) == 2
    assert rig.store(other, 20).num_stored == 2
    release.set()
    fetch.wait(20)
    assert fetch.result().num_tokens == 6 * PAGE
    rig.close()


def test_a_read_that_never_returns_parks_its_slots(release: threading.Event) -> None:
    """Visible, not reused, counted against the backend, and back when it returns after all."""
    rig = blocked_rig(release, page=1, prefetch_max_secs=10.0, breaker_failures=1)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(lambda: fetch.num_pages == 1)
    rig.clock.now += 11
    rig.manager.poll()
    assert (fetch.done, fetch.reason) == (True, Reason.DEADLINE)
    stats = rig.manager.stats()
    assert stats.num_parked >= 1
    assert stats.late_storage_jobs >= 1
    assert stats.breaker == "open"
    assert rig.manager.prefetch(rig.keys([5] * 8)).reason is Reason.STORAGE_DOWN
    free = rig.pools[SlotKind.PAGE].num_free
    filled = rig.store([3] * (12 * PAGE), 20)  # takes all there is, and never a parked slot
    filled.wait(20)
    assert filled.num_stored <= free + 1
    was = [rig.page(20 + page) for page in range(filled.num_stored)]
    release.set()
    rig.settle()
    loaded = rig.load(rig.match([3] * (12 * PAGE)), 40)
    loaded.wait(20)
    assert loaded.verified_pages == filled.num_stored
    assert all(rig.same(40 + page, one) for page, one in enumerate(was))
    rig.check_idle()
    rig.close()
