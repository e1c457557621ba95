"""A read or a store that ends after everybody has given it up writes to no one else's page."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from tests.tiers.rig import PAGE, K, Rig, V

from kvferry.errors import CacheError, PoolInUseError, SlotOwnershipError
from kvferry.memory import SlotOwner
from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import FetchHandle, LinkState, PageState, Reason
from kvferry.types import SlotKind

TOKENS = list(range(4 * PAGE))
OTHERS = [[50 + number] * (4 * PAGE) for number in range(4)]


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()


def _handle(rig: Rig) -> FetchHandle:
    desk = rig.manager._prefetch
    return FetchHandle(desk._open[0], rig.pump, desk)


def _cancel(rig: Rig) -> None:
    _handle(rig).cancel()


def _time_out(rig: Rig) -> None:
    rig.clock.now += 1000
    rig.manager.poll()


def _look(rig: Rig) -> None:
    rig.clock.now += 5
    _handle(rig).look()


def _reset(rig: Rig) -> None:
    rig.manager.reset()


def _detach(rig: Rig) -> None:
    assert not rig.manager.detach_storage()
    assert rig.manager.storage_state is LinkState.DETACHING


def _detach_by_force(rig: Rig) -> None:
    assert rig.manager.detach_storage(force=True)
    rig.attach(MemoryBackend())


def _close(rig: Rig) -> None:
    rig.manager.close()


ENDS = {
    "cancel": _cancel,
    "time-out of the read": _time_out,
    "deadline of the policy": _look,
    "reset": _reset,
    "detach": _detach,
    "detach by force": _detach_by_force,
    "close": _close,
}


@pytest.mark.parametrize("end", list(ENDS.values()), ids=list(ENDS))
def test_of_a_prefetch(end: Callable[[Rig], None], release: threading.Event) -> None:
    """After each way to end, slots of the blocked read are nobody else's until it returns; what
    others stored meanwhile is whole, and all slots come back."""
    backend = FaultyBackend()
    rig = Rig((K, V), num_slots=12, backend=backend, batch_pages=4)
    rig.stored_in_storage(TOKENS)
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("read_into", rig.keys(TOKENS)[0], block)
    rig.manager.prefetch(rig.keys(TOKENS))
    rig.until(backend.blocked.is_set)
    tier = rig.manager._control.tiers[SlotKind.PAGE]
    held = list(tier.ledger.slots_in(PageState.FETCHING))
    assert len(held) == 4
    end(rig)
    assert all(tier.ledger.state(slot) is PageState.PARKED for slot in held)
    assert rig.manager.stats().num_parked == 4
    was = {}
    if end is not _close:
        for number, prompt in enumerate(OTHERS):
            rig.store(prompt, 10 + 4 * number)
            was[number] = rig.pages(10 + 4 * number, 4)
        rig.manager.poll()
        assert all(tier.ledger.state(slot) is PageState.PARKED for slot in held)
    with pytest.raises(SlotOwnershipError, match="transfer that is not over"):
        rig.pools[SlotKind.PAGE].free(held[:1], SlotOwner.TRANSFER)
    with pytest.raises(PoolInUseError):
        rig.pools[SlotKind.PAGE].close()
    release.set()
    rig.until(lambda: not rig.manager.stats().num_parked)
    rig.settle()
    for number, prompt in enumerate(OTHERS if was else []):
        loaded = rig.load(rig.match(prompt), 40)
        if loaded.accepted:
            loaded.wait(20)
            count = loaded.usable_tokens // PAGE
            assert loaded.verified_pages == count
            assert all(rig.same(40 + page, was[number][page]) for page in range(count))
    rig.check_idle()
    rig.close()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("and_reset", [False, True])
def test_of_a_storage_write(force: bool, and_reset: bool, release: threading.Event) -> None:
    """A write that hangs keeps its pages readable and in place; others store on; detach is
    bounded; a new backend may come before the old one returned."""
    backend = FaultyBackend()
    rig = Rig((K, V), num_slots=12, backend=backend, max_batches=1)
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("write_from", None, block, always=True)
    was = rig.pages(0, 4)
    rig.store(TOKENS).wait(20)
    rig.until(backend.blocked.is_set)
    tier = rig.manager._control.tiers[SlotKind.PAGE]
    held = [rig.slot_of(TOKENS, page) for page in range(4)]
    assert all(tier.ledger.readers(slot) == 1 for slot in held)
    if and_reset:
        rig.manager.reset()
        assert all(tier.ledger.state(slot) is PageState.CONDEMNED for slot in held)
    gone = rig.manager.detach_storage(force=force)
    assert gone is force
    second = MemoryBackend()
    if force:
        rig.attach(second)
    else:
        with pytest.raises(CacheError, match="detaching"):
            rig.manager.new_generation()
    for number, prompt in enumerate(OTHERS[:2]):
        rig.store(prompt, 10 + 4 * number)
    if force:  # the hung write takes no part of what the new backend may have in flight
        rig.until(lambda: second.stats().objects >= 8)
    if not and_reset:
        loaded = rig.load(rig.match(TOKENS), 40)
        loaded.wait(20)
        assert loaded.verified_pages == 4
        assert all(rig.same(40 + page, was[page]) for page in range(4))
    release.set()
    rig.settle()
    assert rig.manager.storage_state is (LinkState.ATTACHED if force else LinkState.NONE)
    rig.check_idle()
    rig.close()


def test_puts_that_block_for_ever_stop_nothing(release: threading.Event) -> None:
    """Storage takes nothing more: stores to the host go on, writes are skipped and counted, the
    breaker opens, and prefetches are refused at once."""
    backend = FaultyBackend()
    rig = Rig(
        num_slots=16, backend=backend, max_queue_pages=4, breaker_failures=1, write_max_secs=10
    )
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("write_from", None, block, always=True)
    for number in range(30):
        stored = rig.store([number] * (2 * PAGE), 2 * (number % 16))
        assert stored.num_stored == 2
    assert rig.manager.stats().waiting_for_storage <= 4
    rig.clock.now += 11
    rig.manager.poll()
    assert rig.manager.stats().breaker == "open"
    assert rig.manager.prefetch(rig.keys([77] * 8)).reason is Reason.STORAGE_DOWN
    assert rig.store([99] * PAGE).num_stored == 1
    release.set()
    rig.settle()
    rig.close()


def test_fifty_resets_with_prefetches_in_flight() -> None:
    """Threads stay as many as they were, budget and slots come back, and no byte is wrong."""
    rig = Rig((K, V), num_slots=16, backend=MemoryBackend(), batch_pages=2, device_pages=96)
    prompts = [[number] * (4 * PAGE) for number in range(4)]
    for number, prompt in enumerate(prompts):
        rig.store(prompt, 4 * number).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    threads = threading.active_count()
    for turn in range(50):
        for prompt in prompts:
            rig.manager.prefetch(rig.keys(prompt))
        for _ in range(turn % 7):
            rig.pump(0.001)
        rig.manager.reset()
        stored = [turn + 100] * (4 * PAGE)
        was = rig.pages(turn, 4)
        rig.store(stored, turn)
        loaded = rig.load(rig.match(stored), 80)
        count = loaded.num_pages
        rig.until(lambda loaded=loaded: loaded.done)  # type: ignore[misc]
        assert loaded.verified_pages == count
        assert all(rig.same(80 + page, was[page]) for page in range(count))
        assert threading.active_count() == threads
    rig.settle()
    rig.manager.reset()
    fetch = rig.manager.prefetch(rig.keys(prompts[0]))
    fetch.wait(20)
    assert fetch.result().num_tokens == 4 * PAGE
    rig.check_idle()
    rig.close()


def test_detaching_while_all_four_kinds_run(release: threading.Event) -> None:
    """Store, load, prefetch and backup in flight: detach is bounded, twice is once."""
    backend = FaultyBackend()
    rig = Rig((K, V), num_slots=12, backend=backend, batch_pages=2)
    rig.stored_in_storage(TOKENS)
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("read_into", None, block, always=True)
    backend.script("write_from", None, block, always=True)
    rig.manager.prefetch(rig.keys(TOKENS))
    rig.store(OTHERS[0], 10)
    rig.until(backend.blocked.is_set)
    loaded = rig.load(rig.match(OTHERS[0]), 40)
    assert rig.manager.detach_storage(force=True)
    assert rig.manager.detach_storage(force=True)
    loaded.wait(20)
    assert loaded.verified_pages == 4
    rig.attach(MemoryBackend())
    with pytest.raises(CacheError, match="attached"):
        rig.manager.new_generation()
    release.set()
    rig.settle()
    rig.close()
