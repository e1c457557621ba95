"""What storage is thought to have: bounded, by kind of slot, and never what another backend had."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.tiers.rig import PAGE, STATE, K, Rig

from kvferry.events import PagesQuarantined
from kvferry.index import PrefixIndex
from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason
from kvferry.tiers.breaker import BreakerState
from kvferry.tiers.hints import StorageHints
from kvferry.types import SlotKind, Tier

TOKENS = list(range(4 * PAGE))


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()


def _chain(name: int, length: int) -> list[bytes]:
    return [bytes([name, page]) for page in range(length)]


def test_old_chains_go_from_their_end_on() -> None:
    """What is left of a chain can be found, and no node stays behind."""
    index = PrefixIndex()
    hints = StorageHints(index, max_hints=6)
    for name in range(3):
        keys = _chain(name, 4)
        index.insert(keys)
        hints.note(SlotKind.PAGE, keys[:2])
        hints.note(SlotKind.PAGE, keys[2:])
    assert index.num_nodes == index.num_stored == 6
    for name in range(3):
        known = [index.node_of(key) is not None for key in _chain(name, 4)]
        assert known == sorted(known, reverse=True)  # a prefix
    index.check_integrity()


def test_pages_on_the_host_keep_their_hints() -> None:
    """Else they would be written again and again."""
    index = PrefixIndex()
    hints = StorageHints(index, max_hints=2)
    first = _chain(0, 2)
    index.set_host(index.insert(first), [0, 1])
    hints.note(SlotKind.PAGE, first)
    for name in range(1, 9):
        index.insert(_chain(name, 2))
        hints.note(SlotKind.PAGE, _chain(name, 2))
    assert all(index.is_stored(index.insert(first)[page]) for page in range(2))
    assert index.num_nodes <= 6
    index.check_integrity()


def test_states_are_bounded_too() -> None:
    """The first go first."""
    index = PrefixIndex()
    nodes = index.insert(_chain(0, 5))
    hints = StorageHints(index, max_hints=3)
    hints.note(SlotKind.STATE, _chain(0, 5))
    assert [hints.is_stored(SlotKind.STATE, node) for node in nodes] == [False, False, *[True] * 3]


def test_a_process_that_runs_for_long_knows_a_bounded_number_of_pages() -> None:
    """Storage drops pages without a word, so nodes that it alone has must not add up."""
    rig = Rig(backend=MemoryBackend(), num_slots=8, max_storage_hints=32)
    for number in range(200):
        rig.store([number] * len(TOKENS)).wait(20)
        rig.settle()
    assert rig.index.num_stored > 8
    assert rig.index.num_nodes <= 32 + 8
    rig.manager.check_integrity()
    rig.close()


def test_a_checkpoint_that_storage_dropped_is_written_again() -> None:
    """Its hint is its own: the page's says nothing of it."""
    backend = MemoryBackend()
    rig = Rig((K, STATE), backend=backend)
    rig.stored_in_storage(TOKENS)
    state = rig.keys(TOKENS)[-1] + b":state"
    assert backend.delete([state])[0].ok
    rig.manager.prefetch(rig.keys(TOKENS)).wait(20)
    rig.store(TOKENS).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert backend.contains([state]) == [True]
    rig.close()


def test_a_checkpoint_that_vanishes_between_probe_and_read() -> None:
    """It is written again, and pages before its own can still be asked for."""
    backend = FaultyBackend()
    rig = Rig((K, STATE), backend=backend)
    rig.store(TOKENS[: 2 * PAGE]).wait(20)
    rig.stored_in_storage(TOKENS)
    state = rig.keys(TOKENS)[-1] + b":state"
    backend.script("contains", state, FaultKind.EVICT_AFTER)
    keys = rig.keys(TOKENS)
    rig.manager.prefetch(keys).wait(20)
    second = rig.manager.prefetch(keys)
    second.wait(20)
    assert second.result().num_tokens == 2 * PAGE
    rig.store(TOKENS).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert backend.inner.contains([state]) == [True]
    rig.close()


def test_checkpoints_alone() -> None:
    """Without pages: a flush can be complete, and a miss ends a prefetch as any other."""
    backend = FaultyBackend()
    rig = Rig((STATE,), backend=backend)
    rig.store(TOKENS[: 2 * PAGE]).wait(20)
    rig.store(TOKENS, 1).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert rig.manager.backup_gaps() == (0, 0)
    rig.manager.reset()
    keys = rig.keys(TOKENS)
    backend.script("contains", keys[-1] + b":state", FaultKind.EVICT_AFTER)
    first = rig.manager.prefetch(keys)
    first.wait(20)
    assert first.reason is Reason.MISSING
    second = rig.manager.prefetch(keys)
    second.wait(20)
    assert second.result().num_tokens == 2 * PAGE
    rig.close()


def test_what_a_backend_wrote_that_was_given_up_is_not_in_the_next(
    release: threading.Event,
) -> None:
    """A write that ends late says nothing of a storage that is not there any more."""
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    block = Fault(FaultKind.BLOCK, release=release)
    backend.script("write_from", None, block, always=True)
    rig.store(TOKENS).wait(20)
    rig.until(backend.blocked.is_set)
    assert rig.manager.detach_storage(force=True)
    release.set()
    rig.settle()
    assert rig.index.num_stored == 0
    following = MemoryBackend()
    rig.attach(following)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert following.stats().objects == 4
    rig.close()


def test_work_that_was_given_up_is_late_once(release: threading.Event) -> None:
    """Its time being up later takes nothing away from what others may have in flight."""
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.stored_in_storage(TOKENS)
    block = Fault(FaultKind.BLOCK, release=release)
    for method in ("write_from", "read_into"):
        backend.script(method, None, block, always=True)
    rig.manager.prefetch(rig.keys(TOKENS))
    rig.store([9] * len(TOKENS)).wait(20)
    rig.until(lambda: sum(name == "read_into" for name, _ in backend.calls) > 0)
    rig.manager.detach_storage(force=True)
    late = rig.manager.stats().late_storage_jobs
    rig.clock.now += 1000
    rig.manager.poll()
    stats = rig.manager.stats()
    assert stats.late_storage_jobs == late
    assert stats.writing_to_storage == 0
    assert rig.manager._prefetch.num_batches == 0
    release.set()
    rig.settle()
    rig.close()


def test_a_checkpoint_gets_the_last_chance_of_its_page() -> None:
    """It goes with the page, so it must not go unwritten where it could be written."""
    backend = FaultyBackend()
    rig = Rig((K, STATE), num_slots=4, backend=backend)
    rig.manager.switches.flip(storage=False)
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.manager.switches.flip(storage=True)
    page = rig.keys(TOKENS)[-1]
    state = page + b":state"
    assert backend.inner.contains([page, state]) == [False, False]
    rig.store([9] * PAGE, state_page=None)
    rig.settle()
    assert backend.inner.contains([page, state]) == [True, True]
    rig.close()


def test_questions_that_were_refused_are_not_failures(release: threading.Event) -> None:
    """A burst of prefetches that is longer than the queue does not take storage away."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, num_threads=1)
    backend.script("contains", None, Fault(FaultKind.BLOCK, release=release))
    fetches = [rig.manager.prefetch(rig.keys([number] * PAGE)) for number in range(1100)]
    rig.manager.poll()
    refused = [fetch for fetch in fetches if fetch.reason is Reason.STORAGE_REFUSED]
    assert len(refused) > 10
    assert rig.manager.stats().breaker == BreakerState.CLOSED
    release.set()
    rig.settle()
    rig.close()


def test_a_damaged_page_is_told_of() -> None:
    """Also where nothing but the damaged object knew of the page."""
    backend = FaultyBackend()
    rig = Rig(backend=backend)
    rig.stored_in_storage(TOKENS)
    rig.events.drain()
    key = rig.keys(TOKENS)[3]
    backend.script("read_into", key, Fault(FaultKind.WRONG_BYTES, bit=40_000), always=True)
    rig.manager.prefetch(rig.keys(TOKENS)).wait(20)
    told = [event for event in rig.events.drain() if isinstance(event, PagesQuarantined)]
    assert [(event.keys, event.tier) for event in told] == [((key,), Tier.STORAGE)]
    rig.close()


def test_a_prefetch_that_is_short_says_why() -> None:
    """Storage has the first pages alone."""
    rig = Rig(backend=MemoryBackend())
    rig.stored_in_storage(TOKENS[: 2 * PAGE])
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert (fetch.result().num_tokens, fetch.reason) == (2 * PAGE, Reason.MISSING)
    rig.close()
