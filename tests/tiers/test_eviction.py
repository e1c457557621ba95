"""What leaves the host, and what has to be written first."""

from __future__ import annotations

import threading

from tests.tiers.rig import PAGE, Rig

from kvferry.events import PagesEvicted
from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason
from kvferry.types import Tier

TOKENS = list(range(4 * PAGE))
OTHER = [77] * (3 * PAGE)


def test_pages_that_storage_lacks_are_written_before_they_go() -> None:
    """Nothing is evicted that is on its way to storage, nor what comes before it in the prompt."""
    release = threading.Event()
    backend = FaultyBackend()
    rig = Rig(num_slots=4, backend=backend, batch_pages=1, max_batches=1)
    rig.manager.switches.flip(storage=False)
    rig.store(TOKENS).wait(20)
    rig.manager.switches.flip(storage=True)
    backend.script("write_from", None, Fault(FaultKind.BLOCK, release=release))
    stored = rig.manager.store(rig.keys(OTHER), rig.slots(10, 3))
    assert (stored.num_submitted, stored.reason) == (0, Reason.HOST_FULL)
    assert rig.match(TOKENS).num_tokens == 4 * PAGE
    release.set()
    rig.clock.now += 1000  # the match's lease
    rig.settle()
    assert rig.index.is_stored(rig.manager._control.chain_nodes(rig.keys(TOKENS))[3])
    rig.close()


def test_what_storage_has_goes_without_a_write() -> None:
    """Eviction of stored pages writes nothing, and tells routers leaves first."""
    backend = FaultyBackend()
    rig = Rig(num_slots=4, backend=backend)
    rig.store(TOKENS).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    writes = sum(method == "write_from" for method, _ in backend.calls)
    rig.events.drain()
    rig.manager.switches.flip(storage=False)  # so that the new pages are not written either
    rig.store(OTHER, 10).wait(20)
    assert sum(method == "write_from" for method, _ in backend.calls) == writes
    gone = [
        key
        for event in rig.events.drain()
        if isinstance(event, PagesEvicted) and event.tier is Tier.HOST
        for key in event.keys
    ]
    assert gone == rig.keys(TOKENS)[:0:-1]
    rig.manager.switches.flip(storage=True)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert fetch.result().num_tokens == 4 * PAGE
    rig.close()


def test_without_storage_pages_just_go() -> None:
    """With nowhere to write to, room is made at once."""
    rig = Rig(num_slots=4)
    rig.store(TOKENS).wait(20)
    rig.store(OTHER, 10).wait(20)
    assert rig.match(TOKENS).num_tokens == PAGE
    assert rig.match(OTHER).num_tokens == 3 * PAGE
    rig.close()


def test_storage_keeps_what_the_host_could_not() -> None:
    """Whatever order pages leave in, the whole prompt can be had again."""
    rig = Rig(num_slots=6, backend=MemoryBackend(), batch_pages=1)
    for turn in range(12):
        rig.store([turn % 3] * (4 * PAGE), 10).wait(20)
        rig.settle()
    for number in range(3):
        fetch = rig.manager.prefetch(rig.keys([number] * (4 * PAGE)))
        fetch.wait(20)
        assert fetch.result().num_tokens == 4 * PAGE
    rig.close()


def test_another_backend_gets_what_the_last_one_had() -> None:
    """What was known of a backend goes with it: pages of the host are written to the next."""
    rig = Rig(num_slots=12, backend=MemoryBackend())
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.store(OTHER, 10).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    rig.manager.reset()
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.manager.detach_storage()
    rig.settle()
    second = MemoryBackend()
    rig.attach(second)
    assert rig.index.num_stored == 0
    rig.store(OTHER, 10).wait(20)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert second.stats().objects == 7
    assert rig.manager.backup_gaps() == (0, 0)
    rig.close()
