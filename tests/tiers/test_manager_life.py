"""A manager that is switched off and on, closed, followed by another, and given bad plans."""

from __future__ import annotations

import pytest
from tests.tiers.rig import (
    PAGE,
    STATE,
    K,
    Rig,
    V,
    check_loaded,
)

from kvferry.errors import CacheError, PlanError
from kvferry.geometry import Plane
from kvferry.storage import MemoryBackend
from kvferry.tiers import Reason, Verify

TOKENS = list(range(100, 100 + 5 * PAGE))


@pytest.mark.parametrize("planes", [(K, V), (K, STATE)])
def test_a_plan_that_does_not_fit_changes_nothing(planes: tuple[Plane, ...]) -> None:
    """Rows that do not fit raise before a byte moves, and everything is given back."""
    rig = Rig(planes)
    keys = rig.keys(TOKENS)
    with pytest.raises(PlanError):
        rig.manager.store(keys, rig.slots(0, 3))
    rig.check_idle()
    assert rig.index.num_nodes == 0
    rig.store(TOKENS).wait(20)
    with pytest.raises(PlanError):
        rig.manager.load(rig.match(TOKENS), rig.slots(0, 2), has_state_slots=True)
    with pytest.raises(PlanError):  # outside the device pool
        rig.load(rig.match(TOKENS), 1000)
    rig.settle()
    rig.check_idle()
    rig.close()


def test_switches_stop_what_begins_later() -> None:
    """Each switch refuses with a reason, and nothing else changes."""
    rig = Rig(backend=MemoryBackend())
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.manager.switches.flip(store=False, load=False, storage=False)
    assert rig.store([3] * PAGE).reason is Reason.SWITCHED_OFF
    assert rig.load(rig.match(TOKENS), 20).reason is Reason.SWITCHED_OFF
    assert rig.manager.prefetch(rig.keys([3] * PAGE)).reason is Reason.SWITCHED_OFF
    rig.manager.switches.flip(store=True, load=True, storage=True)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 5 * PAGE
    rig.close()


@pytest.mark.parametrize("verify", [Verify.STORAGE, Verify.OFF])
def test_without_digests_loads_say_that_they_checked_nothing(verify: Verify) -> None:
    """Bytes come back; nobody vouches for them."""
    rig = Rig(verify=verify, backend=MemoryBackend())
    was = rig.pages(0, 5)
    rig.stored_in_storage(TOKENS)
    rig.manager.prefetch(rig.keys(TOKENS)).wait(20)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    check_loaded(rig, 20, was)
    assert (loaded.verified, loaded.verified_pages, loaded.usable_tokens) == (False, 0, 5 * PAGE)
    rig.close()


def test_pages_stored_without_digests_get_them() -> None:
    """What a cache without digests left in storage can be used by one with them."""
    backend = MemoryBackend()
    writer = Rig(verify=Verify.STORAGE, backend=backend, seed=5)
    was = writer.pages(0, 5)
    writer.stored_in_storage(TOKENS)
    reader = Rig(seed=6)
    reader.attach(backend)
    reader.manager.prefetch(reader.keys(TOKENS)).wait(20)
    loaded = reader.load(reader.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.verified_pages == 5
    check_loaded(reader, 20, was)
    reader.close()
    writer.close()


def test_a_new_life_finds_what_the_last_one_stored() -> None:
    """Keys, formats and rules are the same in the next process, which knows nothing yet."""
    backend = MemoryBackend()
    first = Rig(backend=backend, seed=1)
    was = first.pages(0, 5)
    first.stored_in_storage(TOKENS)
    second = Rig(backend=backend, seed=2)
    second.manager.prefetch(second.keys(TOKENS)).wait(20)
    loaded = second.load(second.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.verified_pages == 5
    check_loaded(second, 20, was)
    second.close()
    first.close()


def test_a_chain_stored_before_storage_came_has_its_own_keys() -> None:
    """Pages that were there before storage was attached are found by whole prompts only."""
    rig = Rig()
    rig.store(TOKENS[: 3 * PAGE]).wait(20)
    rig.attach(MemoryBackend())
    rig.stored_in_storage(TOKENS)
    tail = rig.manager.prefetch(rig.keys(TOKENS[3 * PAGE :]))
    tail.wait(20)
    assert tail.result().num_tokens == 0
    whole = rig.manager.prefetch(rig.keys(TOKENS))
    whole.wait(20)
    assert whole.result().num_tokens == 5 * PAGE
    rig.close()


def test_a_poll_with_nothing_under_way_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what engines do in every step; whatever is under way ends the rest."""
    rig = Rig()
    rig.store(TOKENS).wait(20)
    rig.settle()
    asked = []

    def poll() -> list[object]:
        asked.append(1)
        return []

    monkeypatch.setattr(rig.data, "poll", poll)
    assert rig.manager.poll() == 0
    assert not asked
    found = rig.match(TOKENS)  # keeps its pages, and for a while alone
    rig.manager.poll()
    assert len(asked) == 1
    rig.clock.now += 3600
    rig.manager.poll()
    assert not found.release()
    assert rig.index.num_leases == 0
    asked.clear()
    rig.manager.poll()
    assert not asked
    monkeypatch.undo()
    told: list[object] = []
    rig.events.subscribe(told.extend)
    rig.store([*TOKENS[:PAGE], *range(900, 900 + PAGE)], 30)
    rig.until(lambda: bool(told))
    rig.close()


def test_a_closed_manager_refuses() -> None:
    """After close nothing begins."""
    rig = Rig()
    rig.manager.close()
    with pytest.raises(CacheError, match="closed"):
        rig.match(TOKENS)
    rig.close()
