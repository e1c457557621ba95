"""Events: types, chains, the log and its subscribers."""

from __future__ import annotations

import collections
import dataclasses
import pickle
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.events import (
    Event,
    EventLog,
    PagesEvicted,
    PagesLoaded,
    PagesQuarantined,
    PagesStored,
    chains_of,
)
from kvferry.types import Tier


def _stored(number: int) -> PagesStored:
    return PagesStored(keys=(number.to_bytes(4, "little"),), parent_key=None, tier=Tier.HOST)


@pytest.mark.parametrize(
    "event",
    [
        PagesStored(keys=(b"a", b"b"), parent_key=None, tier=Tier.STORAGE),
        PagesEvicted(keys=(b"a",), parent_key=b"p", tier=Tier.HOST),
        PagesEvicted(keys=(b"a",), parent_key=b"p", tier=Tier.HOST, reason="reset"),
        PagesLoaded(keys=(b"a",), parent_key=b"p", tier=Tier.HOST),
        PagesQuarantined(keys=(b"a",), parent_key=None, tier=Tier.STORAGE, reason="checksum"),
    ],
)
def test_events_are_values(event: Event) -> None:
    """They have keys, parent and tier, cannot be changed, compare, hash and pickle."""
    assert event.keys
    assert event.parent_key in (None, b"p")
    assert isinstance(event.tier, Tier)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.tier = Tier.DEVICE  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(event)) == event  # noqa: S301  our own bytes
    assert hash(dataclasses.replace(event)) == hash(event)


def test_events_of_different_types_are_different() -> None:
    """An event that stored pages is not equal to one that loaded the same."""
    same = {"keys": (b"a",), "parent_key": None, "tier": Tier.HOST}
    assert PagesStored(**same) != PagesLoaded(**same)  # type: ignore[arg-type]


def test_drain_takes_what_waits_in_order() -> None:
    """Each event is drained once, oldest first."""
    log = EventLog()
    for number in range(3):
        log.record(_stored(number))
    assert log.drain() == [_stored(number) for number in range(3)]
    assert log.drain() == []
    log.record(_stored(3))
    assert log.drain() == [_stored(3)]
    assert log.num_dropped == 0


def test_a_full_log_drops_the_oldest_and_counts() -> None:
    """A log that nobody drains stays as small as it was told, and says what it lost."""
    log = EventLog(max_events=4)
    for number in range(10):
        log.record(_stored(number))
    assert log.num_dropped == 6
    assert log.drain() == [_stored(number) for number in range(6, 10)]
    log.record(_stored(10))
    assert log.num_dropped == 6


def test_a_log_that_is_off_keeps_nothing() -> None:
    """With 0 events and no subscriber there is nobody to tell, and nothing counts as dropped."""
    log = EventLog(max_events=0)
    assert not log.active
    log.record(_stored(0))
    assert (log.drain(), log.num_dropped, log._undelivered) == ([], 0, [])
    told: list[Event] = []
    unsubscribe = log.subscribe(told.extend)
    assert log.active
    log.record(_stored(1))
    log.dispatch()
    assert told == [_stored(1)]
    assert (log.drain(), log.num_dropped) == ([], 0)
    unsubscribe()
    assert not log.active
    assert EventLog(max_events=1).active
    with pytest.raises(ConfigError, match="max_events=-1 must be 0 or more"):
        EventLog(max_events=-1)


def test_subscribers_are_told_in_dispatch_only() -> None:
    """Recording calls nobody; dispatch tells everybody what there is, once, in one batch."""
    log = EventLog()
    log.record(_stored(0))
    first: list[Sequence[Event]] = []
    second: list[Sequence[Event]] = []
    log.subscribe(first.append)
    unsubscribe = log.subscribe(second.append)
    log.record(_stored(1))
    log.record(_stored(2))
    assert first == second == []
    log.dispatch()
    assert first == second == [(_stored(1), _stored(2))]
    log.dispatch()
    assert len(first) == 1
    unsubscribe()
    log.record(_stored(3))
    log.dispatch()
    assert first[1:] == [(_stored(3),)]
    assert len(second) == 1
    assert log.drain() == [_stored(number) for number in range(4)]


def test_the_same_callback_may_subscribe_twice() -> None:
    """Each subscription ends by its own answer, once, and the other one stays."""
    log = EventLog()
    told: list[Event] = []
    ends = [log.subscribe(told.extend), log.subscribe(told.extend)]
    log.record(_stored(0))
    log.dispatch()
    ends[0]()
    ends[0]()
    log.record(_stored(1))
    log.dispatch()
    assert told == [_stored(0), _stored(0), _stored(1)]


def test_what_is_not_delivered_is_not_kept_for_nobody() -> None:
    """When the last subscriber goes, what was to be told to it goes too."""
    log = EventLog()
    told: list[Event] = []
    unsubscribe = log.subscribe(told.extend)
    log.record(_stored(0))
    unsubscribe()
    log.subscribe(told.extend)
    log.dispatch()
    assert told == []


def test_a_subscriber_that_raises_does_not_silence_others() -> None:
    """All others are told, the error reaches whoever dispatches, and nobody is told twice."""
    log = EventLog()
    order: list[str] = []

    def bad(_events: Sequence[Event]) -> None:
        order.append("bad")
        raise ZeroDivisionError("of the subscriber")

    log.subscribe(lambda _events: order.append("first"))
    log.subscribe(bad)
    log.subscribe(lambda _events: order.append("last"))
    log.record(_stored(0))
    with pytest.raises(ZeroDivisionError, match="of the subscriber"):
        log.dispatch()
    log.dispatch()
    assert order == ["first", "bad", "last"]
    assert log.drain() == [_stored(0)]


def test_a_subscriber_may_record() -> None:
    """An event that a subscriber records is told in the next dispatch, not in this one."""
    log = EventLog()
    told: list[int] = []

    def follow(events: Sequence[Event]) -> None:
        told.append(len(events))
        if len(told) == 1:
            log.record(_stored(1))

    log.subscribe(follow)
    log.record(_stored(0))
    log.dispatch()
    assert told == [1]
    log.dispatch()
    assert told == [1, 1]


def test_threads_lose_nothing() -> None:
    """What several threads record while another drains is all there once, in each one's order."""
    log = EventLog(max_events=100_000)
    each, begin = 3000, threading.Barrier(4)

    def write(writer: int) -> None:
        begin.wait(60)
        for number in range(each):
            log.record(_stored(writer * each + number))

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(3)]
    for thread in writers:
        thread.start()
    begin.wait(60)
    drained: list[Event] = []
    while any(thread.is_alive() for thread in writers):
        drained += log.drain()
    for thread in writers:
        thread.join(60)
    drained += log.drain()
    numbers = [int.from_bytes(event.keys[0], "little") for event in drained]
    assert sorted(numbers) == list(range(3 * each))
    for writer in range(3):
        own = [number for number in numbers if number // each == writer]
        assert own == sorted(own)
    assert log.num_dropped == 0


def test_nothing_is_recorded_between_taking_and_forgetting() -> None:
    """Draining holds the lock until what it took is gone, so that no later event goes with it."""
    log = EventLog()
    held = []

    class _Watched(collections.deque[Event]):
        def clear(self) -> None:
            held.append(log._lock.locked())
            super().clear()

    log._waiting = _Watched(maxlen=10)
    log.record(_stored(0))
    assert log.drain() == [_stored(0)]
    assert held == [True]


def test_pages_of_many_prompts_become_chains() -> None:
    """Leaves first and mixed, as an eviction has them: each chain is in order, with its parent."""
    pages: list[tuple[bytes, bytes | None]] = [
        (b"c", b"b"), (b"z", b"y"), (b"b", b"a"), (b"x", None), (b"y", b"x"), (b"q", b"gone"),
    ]  # fmt: skip
    assert sorted(chains_of(pages)) == [
        ((b"b", b"c"), b"a"),
        ((b"q",), b"gone"),
        ((b"x", b"y", b"z"), None),
    ]
    assert chains_of([]) == []


@given(st.lists(st.integers(-1, 30), max_size=40), st.randoms(use_true_random=False))
def test_chains_have_every_page_once(parents: list[int], shuffle: random.Random) -> None:
    """Whatever the tree and the order: every page once, each behind its own parent."""
    parent_of = {
        str(page).encode(): str(parent).encode() if 0 <= parent < page else None
        for page, parent in enumerate(parents)
    }
    pages = list(parent_of.items())
    shuffle.shuffle(pages)
    chains = chains_of(pages)
    assert sorted(key for chain in chains for key in chain.keys) == sorted(parent_of)
    for chain in chains:
        behind = chain.parent_key
        for key in chain.keys:
            assert parent_of[key] == behind
            behind = key
    # As few as can be: a chain that ends at a page with children here would have gone on.
    ends = {chain.keys[-1] for chain in chains}
    assert not ends & {parent for parent in parent_of.values() if parent is not None}
