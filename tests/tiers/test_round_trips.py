"""What is stored comes back, whole, where it should, and only as far as every plane allows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.tiers.rig import (
    DRAFT,
    INDEX_KEY,
    PAGE,
    PLANE_SETS,
    STATE,
    WINDOW,
    K,
    Rig,
    V,
    check_loaded,
)

from kvferry.storage import MemoryBackend
from kvferry.tiers import Actor, Reason, StorePolicy
from kvferry.types import SlotKind, Tier

TOKENS = list(range(100, 100 + 5 * PAGE))


@pytest.fixture(params=list(PLANE_SETS.values()), ids=list(PLANE_SETS))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A rig with a backend in memory."""
    made = Rig(request.param, backend=MemoryBackend())
    yield made
    made.close()


def test_from_the_host(rig: Rig) -> None:
    """A stored prompt is matched and loaded, byte for byte, in all planes."""
    was = rig.pages(0, 5)
    stored = rig.store(TOKENS)
    stored.wait(20)
    assert stored.num_stored == 5 + (STATE in rig.geometry.planes)
    rig.wipe(0, 5)
    found = rig.match(TOKENS)
    assert found.num_tokens == 5 * PAGE
    loaded = rig.load(found, 20)
    loaded.wait(20)
    assert loaded.verified
    assert loaded.usable_tokens == 5 * PAGE
    check_loaded(rig, 20, was)
    assert found.release()


def test_from_storage(rig: Rig) -> None:
    """After the host forgot everything, a prefetch brings it back, and a load brings it up."""
    was = rig.pages(0, 5)
    rig.stored_in_storage(TOKENS)
    assert rig.match(TOKENS).num_tokens == 0
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert fetch.result().num_tokens == 5 * PAGE
    assert fetch.reason is Reason.NONE
    rig.wipe(0, 5)
    with rig.match(TOKENS) as found:
        loaded = rig.load(found, 30)
        loaded.wait(20)
    assert loaded.usable_tokens == 5 * PAGE
    check_loaded(rig, 30, was)


@pytest.mark.parametrize("skip", [1, 4])
def test_nothing_is_written_below_the_first_missing_token(skip: int) -> None:
    """A load behind pages that the caller has leaves these, and all else, alone."""
    rig = Rig((K, V))
    was = rig.pages(0, 5)
    rig.store(TOKENS).wait(20)
    before = [[layer.copy() for layer in layers] for layers in rig.tensors.values()]
    loaded = rig.load(rig.match(TOKENS), 40, skip)
    loaded.wait(20)
    assert loaded.num_pages == 5 - skip
    assert loaded.usable_tokens == 5 * PAGE
    check_loaded(rig, 40, was[skip:], skip)
    rows = slice(40 * PAGE, (45 - skip) * PAGE)
    for layers, old in zip(rig.tensors.values(), before, strict=True):
        for layer, old_layer in zip(layers, old, strict=True):
            layer[rows] = old_layer[rows]
            assert (layer == old_layer).all()
    rig.close()


def test_skips_inside_a_page_are_refused() -> None:
    """Pages are loaded whole: a load that would begin inside of one does not begin."""
    rig = Rig()
    rig.store(TOKENS).wait(20)
    found = rig.match(TOKENS)
    handle = rig.manager.load(found, rig.slots(20, 5), skip_tokens=PAGE + 1)
    assert (handle.done, handle.reason) == (True, Reason.UNALIGNED_SKIP)
    assert handle.usable_tokens == PAGE + 1
    rig.close()


@pytest.mark.parametrize("count", [0, 1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE])
def test_only_whole_filled_pages_are_stored(count: int) -> None:
    """What is stored is what is filled, rounded down to pages; the rest is never touched."""
    rig = Rig()
    handle = rig.store(TOKENS[:count])
    assert handle.done
    assert handle.num_stored == count // PAGE
    assert rig.match(TOKENS).num_tokens == count // PAGE * PAGE
    if count < PAGE:
        assert handle.reason is Reason.NO_WHOLE_PAGE
    rig.close()


def test_thresholds() -> None:
    """Fewer tokens than it is worth are neither loaded nor prefetched."""
    backend = MemoryBackend()
    rig = Rig(backend=backend, load_threshold_tokens=3 * PAGE, prefetch_threshold_tokens=6 * PAGE)
    rig.stored_in_storage(TOKENS)
    assert rig.manager.prefetch(rig.keys(TOKENS)).reason is Reason.BELOW_THRESHOLD
    forced = rig.manager.prefetch(rig.keys(TOKENS), forced=True)
    forced.wait(20)
    found = rig.match(TOKENS)
    assert rig.load(found, 20, 3).reason is Reason.BELOW_THRESHOLD
    assert rig.load(found, 20, 2).accepted
    rig.settle()
    rig.close()


def test_only_missing_pages_are_copied() -> None:
    """Each tier gets what it lacks, also when the host has more than storage, and the reverse."""
    backend = MemoryBackend()
    rig = Rig(backend=backend)
    rig.store(TOKENS[: 2 * PAGE]).wait(20)
    again = rig.store(TOKENS)
    again.wait(20)
    assert (again.num_already, again.num_stored) == (2, 3)
    rig.until(lambda: not rig.manager.offer_all())
    rig.settle()
    assert backend.stats().objects == 5
    assert rig.store(TOKENS).reason is Reason.ALREADY_HERE
    rig.close()


def test_selective_stores_at_the_second_hit() -> None:
    """write_through_selective keeps what was offered twice."""
    rig = Rig(store_policy=StorePolicy.WRITE_THROUGH_SELECTIVE)
    first = rig.store(TOKENS[: 3 * PAGE])
    assert (first.done, first.reason, first.num_stored) == (True, Reason.TOO_FEW_HITS, 0)
    second = rig.store(TOKENS)
    second.wait(20)
    assert second.num_stored == 3
    assert rig.index.num_nodes == 3  # nothing is kept of pages that are not stored
    rig.store(TOKENS).wait(20)
    assert rig.match(TOKENS).num_tokens == 5 * PAGE
    rig.close()


def test_write_back_stores_what_is_evicted() -> None:
    """write_back keeps nothing until the engine evicts, and then whatever is not here."""
    rig = Rig(store_policy=StorePolicy.WRITE_BACK)
    offered = rig.store(TOKENS)
    assert (offered.reason, offered.num_stored) == (Reason.NOT_WRITTEN_BACK, 0)
    evicted = rig.store(TOKENS, evicting=True)
    evicted.wait(20)
    assert evicted.num_stored == 5
    assert rig.match(TOKENS).num_tokens == 5 * PAGE
    rig.close()


def test_a_full_host_loses_pages_and_says_so() -> None:
    """Where nothing may be evicted, an eviction's pages are lost: no entry without bytes."""
    rig = Rig(num_slots=5, store_policy=StorePolicy.WRITE_BACK)
    rig.store(TOKENS, evicting=True).wait(20)
    held = rig.match(TOKENS)
    other = [7] * (3 * PAGE)
    lost = rig.store(other, 10, evicting=True)
    assert (lost.done, lost.reason, lost.num_stored) == (True, Reason.HOST_FULL, 0)
    assert rig.match(other).num_tokens == 0
    assert rig.index.num_nodes == 5
    held.release()
    rig.store(other, 10, evicting=True).wait(20)
    assert rig.match(other).num_tokens == 3 * PAGE
    rig.close()


def test_a_host_smaller_than_the_device_goes_on() -> None:
    """With many more pages than the host holds, storage keeps receiving, and prefetch works."""
    backend = MemoryBackend()
    rig = Rig(num_slots=8, backend=backend, device_pages=16)
    for number in range(40):
        prompt = [number] * (4 * PAGE)
        rig.store(prompt).wait(20)
        rig.settle()
        if number % 10 == 9:
            fetch = rig.manager.prefetch(rig.keys([number - 5] * (4 * PAGE)))
            fetch.wait(20)
            assert fetch.result().num_tokens == 4 * PAGE
    assert backend.stats().objects == 160
    rig.close()


def test_leases_keep_pages_and_end_by_themselves() -> None:
    """Matched pages stay while the lease lasts; a thousand forgotten matches leak nothing."""
    rig = Rig(num_slots=6, lease_secs=5)
    rig.store(TOKENS).wait(20)
    for _ in range(1000):
        rig.match(TOKENS)
    other = [9] * (6 * PAGE)
    assert rig.store(other, 10).reason is Reason.HOST_FULL
    rig.clock.now += 6
    rig.store(other, 10).wait(20)
    assert rig.match(other).num_tokens == 6 * PAGE
    rig.clock.now += 6
    rig.manager.poll()
    assert rig.index.num_leases == 0
    rig.close()


def test_a_match_whose_lease_ended_loads_what_is_left() -> None:
    """A load looks again: what was evicted since the match is not loaded."""
    rig = Rig(num_slots=5, lease_secs=5)
    rig.store(TOKENS).wait(20)
    found = rig.match(TOKENS)
    rig.clock.now += 6
    rig.store([9] * (2 * PAGE), 10).wait(20)
    loaded = rig.load(found, 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 3 * PAGE
    assert not found.release()
    rig.manager.reset()
    stale = rig.load(found, 20)
    assert (stale.reason, stale.usable_tokens) == (Reason.STALE_MATCH, 0)
    rig.close()


@pytest.mark.parametrize("missing", range(5))
def test_side_planes_travel_with_the_page(missing: int) -> None:
    """A page has all its planes or none: with one gone, the prefix ends before it."""
    rig = Rig((K, INDEX_KEY, DRAFT), backend=MemoryBackend())
    rig.stored_in_storage(TOKENS)
    rig.data._attachments[1]._backend.delete([rig.keys(TOKENS)[missing]])
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert fetch.result().num_tokens == missing * PAGE
    rig.check_idle()
    assert rig.manager.stats().slots[SlotKind.PAGE]["resident"] == missing  # type: ignore[index]
    rig.close()


def test_a_state_is_used_at_its_own_boundary_only() -> None:
    """With recurrent state, a prefix ends where a checkpoint is, and nowhere else."""
    rig = Rig((K, STATE), backend=MemoryBackend())
    state = rig.page(2)
    rig.store(TOKENS[: 3 * PAGE]).wait(20)
    rig.store(TOKENS, state_page=None).wait(20)
    with rig.match(TOKENS) as found:
        assert found.num_tokens == 3 * PAGE
        loaded = rig.load(found, 20)
        loaded.wait(20)
    assert loaded.usable_tokens == 3 * PAGE
    assert rig.same(22, state, ["state"])
    refused = rig.manager.load(rig.match(TOKENS), rig.slots(20, 3), has_state_slots=False)
    assert refused.reason is Reason.NO_STATE_SLOTS
    rig.close()


def test_states_of_evicted_pages_go() -> None:
    """A checkpoint whose page was evicted is of no use, and makes room."""
    rig = Rig((K, STATE), num_slots=3, num_states=2)
    rig.store(TOKENS[: 3 * PAGE]).wait(20)
    rig.store([5] * (3 * PAGE), 10).wait(20)
    states = rig.manager._control.tiers[SlotKind.STATE]
    assert states.num_in_use == 1
    assert rig.match([5] * (3 * PAGE)).num_tokens == 3 * PAGE
    rig.close()


def test_a_window_needs_its_end_alone() -> None:
    """Where only the last tokens count, early pages may be gone."""
    rig = Rig((WINDOW,), num_slots=4)
    was = rig.pages(0, 6)
    prompt = [*TOKENS, *[1] * PAGE]
    rig.store(prompt[: 4 * PAGE]).wait(20)
    keys = rig.keys(prompt)
    nodes = rig.index.insert(keys)
    rig.index.pin(nodes)
    for page in (0, 1):
        tier = rig.manager._control.tiers[SlotKind.PAGE]
        rig.index.unpin([nodes[page]])
        tier.drop(nodes[page], Actor.EVICTION)
        rig.index.pin([nodes[page]])
    rig.index.unpin(nodes)
    found = rig.match(prompt)
    assert found.num_tokens == 4 * PAGE
    loaded = rig.load(found, 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 4 * PAGE
    assert rig.same(22, was[2])
    assert rig.same(23, was[3])
    rig.close()


def test_matches_tell_each_tier() -> None:
    """Tokens by tier add up to what is known."""
    rig = Rig(num_slots=6, backend=MemoryBackend())
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.store([8] * (3 * PAGE), 10).wait(20)
    rig.settle()
    found = rig.match(TOKENS)
    assert found.tokens_by_tier == {Tier.HOST: 3 * PAGE, Tier.STORAGE: 2 * PAGE}
    rig.close()
