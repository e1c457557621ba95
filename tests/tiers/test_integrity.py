"""One bit flipped wherever a page passes: no wrong page is ever vouched for."""

from __future__ import annotations

import numpy as np
import pytest
from tests.tiers.rig import PAGE, PLANE_SETS, STATE, WINDOW, K, Rig, quarantined

from kvferry.geometry import Plane
from kvferry.storage import ItemResult, ItemStatus, MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason, storage_key
from kvferry.types import SlotKind, Tier

TOKENS = list(range(5 * PAGE))


def flip_object(backend: MemoryBackend, key: bytes, bit: int) -> None:
    """Flip a bit of a stored object, header or page."""
    found = backend._objects[key]
    found.setflags(write=True)
    found[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("bad", [0, 2, 4])
@pytest.mark.parametrize("planes", list(PLANE_SETS.values()), ids=list(PLANE_SETS))
def test_on_the_host(planes: tuple[Plane, ...], bad: int) -> None:
    """A bit of each span of a page in turn: the usable prefix ends before the page, which goes."""
    geometry = Rig(planes).geometry
    for span in geometry.spans(SlotKind.PAGE):
        rig = Rig(planes, backend=MemoryBackend())
        rig.store(TOKENS).wait(20)
        rig.settle()
        rig.flip_host(TOKENS, bad, span.offset + span.num_bytes - 1)
        found = rig.match(TOKENS)
        loaded = rig.load(found, 20)
        loaded.wait(20)
        rule = rig.manager._control.rule
        if bad >= 5 - rule.pages_needed(5) and not _outside_window(rig, span.plane, bad):
            good = [page != bad for page in range(5)]
            states = [False] * 4 + [True]
            expected = rule.usable_pages(good, states) if not rule.windows else None
            if expected is not None:
                assert loaded.usable_tokens == expected * PAGE
            assert loaded.usable_tokens < 5 * PAGE
            assert (loaded.reason, loaded.bad_pages) == (Reason.BAD_PAGES, (bad,))
            rig.settle()
            key = rig.keys(TOKENS)[bad]
            assert key in quarantined(rig, Tier.HOST)
            assert rig.slot_of(TOKENS, bad) < 0
            # What was written before the bit flipped is good, and stays.
            backend = rig.data._attachments[1]._backend
            assert backend.contains([key]) == [True]
        found.release()
        rig.settle()
        rig.check_idle()
        rig.close()


def _outside_window(rig: Rig, plane: Plane, page: int) -> bool:
    """A window plane of an early page is not even loaded."""
    return page < 5 - plane.hit_rule.pages_needed(5, PAGE)


@pytest.mark.parametrize("span", range(6))
def test_in_a_digest(span: int) -> None:
    """A flipped digest is as bad as a flipped byte."""
    rig = Rig()
    rig.store(TOKENS).wait(20)
    rig.pools[SlotKind.PAGE].digests[rig.slot_of(TOKENS, 1), span] ^= np.uint64(1 << 17)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.usable_tokens == PAGE
    rig.settle()
    assert rig.match(TOKENS).num_tokens == PAGE
    rig.close()


def test_in_a_state() -> None:
    """A checkpoint with a flipped bit makes the whole prefix unusable, and goes."""
    rig = Rig((K, STATE), backend=MemoryBackend())
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.flip_host(TOKENS, 4, 71, SlotKind.STATE)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    assert (loaded.usable_tokens, loaded.verified_pages) == (0, 4)
    rig.settle()
    assert rig.match(TOKENS).num_tokens == 0
    backend = rig.data._attachments[1]._backend
    assert backend.contains([storage_key(SlotKind.STATE, rig.keys(TOKENS)[4])]) == [True]
    rig.close()


def test_a_good_copy_in_storage_is_brought_back() -> None:
    """Only the host's was bad: a prefetch brings the page, and the prompt is whole again."""
    backend = MemoryBackend()
    rig = Rig(backend=backend)
    was = rig.pages(0, 5)
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.flip_host(TOKENS, 2, 5)
    with rig.match(TOKENS) as found:
        rig.load(found, 20).wait(20)
    rig.settle()
    assert quarantined(rig, Tier.STORAGE) == []
    assert backend.stats().quarantined == 0
    rig.wipe(20, 5)
    fetch = rig.manager.prefetch(rig.keys(TOKENS), forced=True)
    fetch.wait(20)
    assert (fetch.num_pages, fetch.result().num_tokens) == (1, 5 * PAGE)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 5 * PAGE
    assert all(rig.same(20 + page, was[page]) for page in range(5))
    rig.close()


@pytest.mark.parametrize("how", ["written", "flipped", "gone", "unreadable"])
def test_a_bad_copy_in_storage_goes_too(how: str) -> None:
    """Bytes that were wrong when they were written have the right checksum, and wrong digests."""
    inner = MemoryBackend()
    backend = FaultyBackend(inner)
    rig = Rig(backend=backend)
    key = rig.keys(TOKENS)[2]
    rig.manager.switches.flip(storage=how != "written")
    rig.store(TOKENS).wait(20)
    rig.settle()
    rig.flip_host(TOKENS, 2, 5)
    if how == "written":
        rig.manager.switches.flip(storage=True)
        rig.until(lambda: not rig.manager.offer_all())
        rig.settle()
    elif how == "flipped":
        flip_object(inner, key, 8 * 4096)
    elif how == "gone":
        inner.delete([key])
    else:
        backend.script(
            "read_into",
            key,
            Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.FAILED)),
            always=True,
        )
    assert inner.contains([key]) == [how != "gone"]
    with rig.match(TOKENS) as found:
        loaded = rig.load(found, 20)
        loaded.wait(20)
    assert loaded.usable_tokens == 2 * PAGE
    rig.settle()
    told = quarantined(rig, Tier.STORAGE)
    assert told == ([key] if how in ("written", "flipped") else [])
    assert inner.contains([key]) == [how == "unreadable"]
    # Whatever it was, it is asked for no more, and stored anew.
    fetch = rig.manager.prefetch(rig.keys(TOKENS), forced=True)
    fetch.wait(20)
    assert (fetch.num_pages, fetch.reason) == (0, Reason.MISSING)
    rig.store(TOKENS).wait(20)
    rig.settle()
    assert inner.contains([key]) == [True]
    rig.close()


@pytest.mark.parametrize("where", [0, 9, 40, 70, 90, 130, 160, 4096, 4200, 5000])
@pytest.mark.parametrize("bad", [0, 3])
def test_in_storage(bad: int, where: int) -> None:
    """A bit of header, digests, page or padding: a miss from there on, put away, an event."""
    backend = MemoryBackend()
    rig = Rig(backend=backend)
    was = rig.pages(0, 5)
    rig.stored_in_storage(TOKENS)
    key = rig.keys(TOKENS)[bad]
    flip_object(backend, key, where * 8 + 3)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert (fetch.result().num_tokens, fetch.reason) == (bad * PAGE, Reason.CORRUPT)
    rig.settle()
    assert backend.contains([key]) == [False]
    loaded = rig.load(rig.match(TOKENS), 20)
    if bad:
        loaded.wait(20)
        assert all(rig.same(20 + page, was[page]) for page in range(bad))
    assert loaded.usable_tokens == bad * PAGE
    rig.check_idle()
    rig.close()


def test_before_it_was_written_to_storage() -> None:
    """Storage's checksum covers what it was given; the digest of the device finds what came
    before."""
    backend = MemoryBackend()
    rig = Rig(backend=backend, max_queue_pages=100)
    rig.manager.switches.flip(storage=False)
    rig.store(TOKENS).wait(20)
    rig.flip_host(TOKENS, 2, 5)
    rig.manager.switches.flip(storage=True)
    rig.stored_in_storage(TOKENS)
    fetch = rig.manager.prefetch(rig.keys(TOKENS))
    fetch.wait(20)
    assert fetch.result().num_tokens == 5 * PAGE  # the checksum fits
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 2 * PAGE
    rig.settle()
    assert backend.contains([rig.keys(TOKENS)[2]]) == [False]
    rig.close()


def test_swapped_objects() -> None:
    """An object under another one's key is no hit."""
    backend = MemoryBackend()
    rig = Rig(backend=backend)
    rig.stored_in_storage(TOKENS)
    keys = rig.keys(TOKENS)
    backend._objects[keys[1]], backend._objects[keys[2]] = (
        backend._objects[keys[2]],
        backend._objects[keys[1]],
    )
    fetch = rig.manager.prefetch(keys)
    fetch.wait(20)
    assert fetch.result().num_tokens == PAGE
    rig.settle()
    rig.close()


def test_a_bad_page_moves_the_window() -> None:
    """When the last page is bad, the shorter prefix needs window rows that were not loaded."""
    rig = Rig((K, WINDOW))
    was = rig.pages(0, 5)
    rig.store(TOKENS).wait(20)
    rig.wipe(20, 5)
    rig.flip_host(TOKENS, 4, 0)
    loaded = rig.load(rig.match(TOKENS), 20)
    loaded.wait(20)
    # Windows of pages 3 and 4 travelled: of prefixes of 4 and of 3 pages the window is not there.
    assert loaded.bad_pages == (4,)
    assert loaded.usable_tokens == 0
    assert rig.same(20, was[0], ["k"])
    rig.settle()
    again = rig.load(rig.match(TOKENS), 20)
    again.wait(20)
    assert again.usable_tokens == 4 * PAGE
    assert all(rig.same(20 + page, was[page], ["window"]) for page in (2, 3))
    rig.close()
