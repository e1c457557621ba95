"""Each fault of a backend, at each page, under each policy and for each kind of plane."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.tiers.rig import PAGE, PLANE_SETS, STATE, Rig

from kvferry.geometry import Plane
from kvferry.storage import ItemResult, ItemStatus
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import PrefetchPolicy, Reason, StorePolicy, storage_key
from kvferry.types import SlotKind

TOKENS = list(range(5 * PAGE))


class Stop(BaseException):
    """Nothing that anybody expects."""


READ_FAULTS = {
    "raises OSError": Fault(FaultKind.RAISE, error=OSError("as scripted")),
    "raises MemoryError": Fault(FaultKind.RAISE, error=MemoryError()),
    "raises RuntimeError": Fault(FaultKind.RAISE, error=RuntimeError("as scripted")),
    "raises KeyError": Fault(FaultKind.RAISE, error=KeyError("as scripted")),
    "raises a BaseException": Fault(FaultKind.RAISE, error=Stop()),
    "failed": Fault(FaultKind.STATUS),
    "miss": Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.MISS)),
    "refused": Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED)),
    "one byte short": Fault(FaultKind.SHORT, num_bytes=1),
    "a page short": Fault(FaultKind.SHORT, num_bytes=4096),
    "no bytes": Fault(FaultKind.ZERO),
    "wrong bytes": Fault(FaultKind.WRONG_BYTES, bit=8 * 4100),
    "wrong header": Fault(FaultKind.WRONG_BYTES, bit=8 * 50),
    "reads nothing": Fault(FaultKind.SILENT),
    "None": Fault(FaultKind.NOT_A_RESULT, value=None),
    "False": Fault(FaultKind.NOT_A_RESULT, value=False),
    "True": Fault(FaultKind.NOT_A_RESULT, value=True),
}

BOTH_READS = {"one byte short", "a page short", "no bytes", "wrong bytes", "wrong header",
              "reads nothing"}  # fmt: skip
"""What a second read would heal: these are scripted for both."""


@pytest.mark.parametrize("policy", list(PrefetchPolicy))
@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("planes", list(PLANE_SETS.values()), ids=list(PLANE_SETS))
def test_reads(planes: tuple[Plane, ...], bad: int, policy: PrefetchPolicy) -> None:
    """Usable is what came before the bad page, byte for byte, and never more."""
    for what, fault in READ_FAULTS.items():
        backend = FaultyBackend()
        rig = Rig(planes, backend=backend, batch_pages=1, prefetch_policy=policy,
                  miss_memory_secs=1, breaker_failures=100)  # fmt: skip
        was = rig.pages(0, 5)
        rig.stored_in_storage(TOKENS)
        key = rig.keys(TOKENS)[bad]
        twice = what in BOTH_READS
        backend.script("read_into", key, *[fault] * (1 + twice))
        fetch = rig.manager.prefetch(rig.keys(TOKENS))
        fetch.wait(20)
        rig.settle()
        result = fetch.look()
        assert result is not None
        expected = 0 if STATE in planes else bad
        assert result.num_tokens == expected * PAGE, what
        assert result.reason is not Reason.NONE, what
        rig.check_idle()
        loaded = rig.load(rig.match(TOKENS), 20)
        rig.until(lambda loaded=loaded: loaded.done)  # type: ignore[misc]
        assert loaded.usable_tokens == expected * PAGE
        rule = rig.manager._control.rule
        first = expected - rule.pages_needed(expected)
        names = list(rule.whole_planes) + [name for name in rule.windows if first < expected]
        for page in range(first, expected):
            ok = rig.same(20 + page, was[page], names) if not rule.windows else True
            assert ok, f"{what}: page {page}"
        rig.clock.now += 100
        again = rig.manager.prefetch(rig.keys(TOKENS), forced=True)
        again.wait(20)
        rig.settle()
        healed = not (twice or "wrong" in what) and "miss" not in what
        if healed:
            assert again.result().num_tokens == 5 * PAGE, what
        if "BaseException" in what:
            assert rig.manager.stats().worker_faults == 1
        rig.check_idle()
        rig.close()


WRITE_FAULTS = {
    "raises OSError": Fault(FaultKind.RAISE, error=OSError("as scripted")),
    "raises a BaseException": Fault(FaultKind.RAISE, error=Stop()),
    "failed": Fault(FaultKind.STATUS),
    "refused": Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED)),
    "took nothing": Fault(FaultKind.ZERO),
    "kept nothing": Fault(FaultKind.SILENT),
    "wrong bytes": Fault(FaultKind.WRONG_BYTES, bit=8 * 4100),
    "None": Fault(FaultKind.NOT_A_RESULT, value=None),
}


@pytest.mark.parametrize("policy", list(StorePolicy))
@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("planes", list(PLANE_SETS.values()), ids=list(PLANE_SETS))
def test_writes(planes: tuple[Plane, ...], bad: int, policy: StorePolicy) -> None:
    """A failed write is a future miss: the host's copy serves on, others are kept, and storage
    never serves wrong bytes."""
    for what, fault in WRITE_FAULTS.items():
        backend = FaultyBackend()
        rig = Rig(planes, backend=backend, batch_pages=1, store_policy=policy,
                  breaker_failures=100)  # fmt: skip
        key = rig.keys(TOKENS)[bad]
        backend.script("write_from", key, fault)
        for _ in range(2):
            rig.store(TOKENS, evicting=policy is StorePolicy.WRITE_BACK).wait(20)
        rig.settle()
        assert rig.match(TOKENS).num_tokens == 5 * PAGE, what
        rig.check_idle()
        lost = [
            page for page in range(5) if not backend.inner.contains([rig.keys(TOKENS)[page]])[0]
        ]
        assert set(lost) <= {bad}, what
        rig.manager.reset()
        fetch = rig.manager.prefetch(rig.keys(TOKENS))
        fetch.wait(20)
        rig.settle()
        usable = fetch.result().num_tokens // PAGE
        assert usable in (0, bad, 5), what
        loaded = rig.load(rig.match(TOKENS), 20)
        rig.until(lambda loaded=loaded: loaded.done)  # type: ignore[misc]
        assert loaded.usable_tokens == usable * PAGE
        if "raises a" in what:
            assert rig.manager.stats().worker_faults == 1
        rig.check_idle()
        rig.close()


def _side_plane_of_state(backend: FaultyBackend, rig: Rig) -> None:
    key = storage_key(SlotKind.STATE, rig.keys(TOKENS)[4])
    backend.script("read_into", key, Fault(FaultKind.STATUS))


def _say_no(backend: FaultyBackend, rig: Rig) -> None:
    key = storage_key(SlotKind.STATE, rig.keys(TOKENS)[4])
    backend.inner.delete([key])


@pytest.mark.parametrize("spoil", [_side_plane_of_state, _say_no])
def test_a_checkpoint_that_does_not_come(spoil: Callable[[FaultyBackend, Rig], None]) -> None:
    """Without its checkpoint the prefix is no use, and says so."""
    backend = FaultyBackend()
    rig = Rig(PLANE_SETS["full_and_state"], backend=backend)
    rig.stored_in_storage(TOKENS)
    spoil(backend, rig)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    rig.settle()
    assert fetch.result().num_tokens == 0
    assert fetch.reason in (Reason.STORAGE_FAILED, Reason.MISSING)
    rig.check_idle()
    rig.close()


def test_a_worker_outlives_what_it_met() -> None:
    """The third call raises something odd; the job is failed, the thread serves the next."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, batch_pages=1, num_threads=1, breaker_failures=100)
    backend.script("write_from", None, FaultKind.OK, FaultKind.OK, Fault(FaultKind.RAISE, Stop()))
    rig.store(TOKENS).wait(20)
    rig.settle()
    assert rig.manager.stats().worker_faults == 1
    assert backend.inner.stats().objects == 4
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert backend.inner.stats().objects == 5
    assert rig.data.num_threads == 1
    rig.close()


def test_the_breaker_drops_the_tier_and_tries_again() -> None:
    """After so many failures storage is left alone; later trials find out."""
    backend = FaultyBackend()
    rig = Rig(backend=backend, batch_pages=1, breaker_failures=2, breaker_secs=30)
    backend.script("write_from", None, *[Fault(FaultKind.STATUS)] * 3)
    for number in range(4):
        assert rig.store([number] * PAGE).num_stored == 1
        rig.settle()
    calls = len(backend.calls)
    assert rig.manager.stats().breaker == "open"
    assert rig.store([20] * PAGE).num_stored == 1
    rig.settle()
    assert len(backend.calls) == calls
    rig.clock.now += 31
    rig.manager.poll()
    rig.settle()
    assert len(backend.calls) == calls + 1
    assert rig.manager.stats().breaker == "open"  # the trial failed too
    rig.clock.now += 31
    rig.manager.poll()
    rig.settle()
    assert rig.manager.stats().breaker == "closed"
    rig.store([21] * PAGE)
    rig.settle()
    assert backend.count("write_from", rig.keys([21] * PAGE)[0]) == 1
    rig.close()
