"""Policies, the breaker, hit rules and device slots, each by itself."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tests.tiers.rig import DRAFT, STATE, WINDOW, K, V

from kvferry.errors import CacheError, PlanError
from kvferry.geometry import Geometry, Plane
from kvferry.tiers import (
    Breaker,
    BreakerState,
    CommandQueue,
    DeviceSlots,
    Found,
    Moved,
    PrefetchPolicy,
    RestoreRule,
    TierOptions,
)
from kvferry.tiers.jobs import Jobs, answer
from kvferry.tiers.link import MissMemory
from kvferry.tiers.policy import HitCounter


@pytest.mark.parametrize(
    ("policy", "tokens", "seconds"),
    [
        (PrefetchPolicy.BEST_EFFORT, 1 << 20, 0.0),
        (PrefetchPolicy.WAIT_COMPLETE, 1, 60.0),
        (PrefetchPolicy.TIMEOUT, 0, 1.0),
        (PrefetchPolicy.TIMEOUT, 4096, 2.0),
        (PrefetchPolicy.TIMEOUT, 1 << 20, 60.0),
    ],
)
def test_how_long_a_request_waits(policy: PrefetchPolicy, tokens: int, seconds: float) -> None:
    """By policy and tokens, and never longer than the upper bound."""
    assert TierOptions(prefetch_policy=policy).fetch_seconds(tokens) == seconds


def test_hits_are_counted_by_page_and_forgotten_when_there_are_too_many() -> None:
    """The leading pages that were offered often enough; memory is bounded."""
    keys = [bytes([number]) for number in range(6)]
    hits = HitCounter(capacity=4)
    assert hits.count(keys[:2], 2) == 0
    assert hits.count(keys[:4], 2) == 2
    assert hits.count(keys[:4], 2) == 4
    hits.count(keys, 2)
    assert len(hits._hits) == 4
    hits.forget()
    assert hits.count(keys[:1], 2) == 0


def test_the_breaker() -> None:
    """Closed until so many failures in a row; then a trial is due after each while."""
    now = [0.0]
    breaker = Breaker(failures=2, seconds=10, clock=lambda: now[0])
    breaker.failed()
    breaker.succeeded()
    breaker.failed()
    assert breaker.is_usable
    assert breaker.seconds_left == 0
    breaker.failed()
    assert (breaker.state, breaker.is_usable, breaker.times_opened) == (BreakerState.OPEN, False, 1)
    now[0] = 4
    assert (breaker.seconds_left, breaker.num_failures) == (6, 2)
    now[0] = 10
    assert breaker.state is BreakerState.TRYING
    assert not breaker.is_usable  # to nobody but the trial
    breaker.failed()
    assert breaker.state is BreakerState.OPEN
    now[0] = 20
    assert breaker.state is BreakerState.TRYING
    breaker.succeeded()
    assert (breaker.state, breaker.times_opened) == (BreakerState.CLOSED, 1)


def test_misses_are_remembered_for_a_while() -> None:
    """A key is passed over until its time is up, or it was written."""
    now = [0.0]
    misses = MissMemory(seconds=5, clock=lambda: now[0])
    keys = [b"a", b"b", b"c"]
    misses.add(b"b")
    assert misses.first_missing(keys) == 1
    misses.clear(b"b")
    assert misses.first_missing(keys) == 3
    misses.add(b"c")
    now[0] = 6
    assert misses.first_missing(keys) == 3
    assert len(misses) == 0


def slow_usable(planes: tuple[Plane, ...], pages: list[bool], states: list[bool]) -> int:
    """The longest prefix, by trying each plane at each length."""
    best = 0
    for count in range(1, len(pages) + 1):
        ok = True
        for plane in planes:
            if plane is STATE:
                ok &= states[count - 1]
            else:
                needed = plane.hit_rule.pages_needed(count, 4)
                ok &= all(pages[count - needed : count])
        if ok:
            best = count
    return best


@pytest.mark.parametrize(
    "planes", [(K, V), (K, DRAFT), (K, WINDOW), (WINDOW,), (K, STATE), (WINDOW, STATE), (STATE,)]
)
def test_usable_prefixes_against_trying_all(planes: tuple[Plane, ...]) -> None:
    """Each combination of pages that are there, and random checkpoints."""
    rule = RestoreRule(Geometry(planes=planes, page_size=4))
    rng = random.Random(0)
    for pages in itertools.product([False, True], repeat=7):
        states = [rng.random() < 0.5 for _ in pages]
        there = list(pages) if rule.needs_pages else [True] * 7
        assert rule.usable_pages(there, states) == slow_usable(planes, there, states)


@pytest.mark.parametrize("pages", [[0, 1, 2], [1, 2], [0, 2], [2], []])
def test_device_slots_of_some_pages(pages: list[int]) -> None:
    """Neighbours are a slice, others are picked; the first entry belongs to the first page."""
    geometry = Geometry(planes=(K, STATE), page_size=4)
    given = np.arange(100, 120)
    rows = DeviceSlots(geometry, given, {"state": [5, 6, 7, 8, 9]}, first_page=10)
    expected = given.reshape(-1, 4)[pages] if pages else given[:0].reshape(0, 4)
    assert (rows.tokens([10 + page for page in pages]) == expected).all()
    found = rows.planes([10 + page for page in pages], None)
    assert found is not None
    assert found["state"].ravel().tolist() == [5 + page for page in pages]
    assert rows.planes([10], ["k"]) is None
    with pytest.raises(PlanError, match="give 24"):
        rows.tokens([15])
    with pytest.raises(PlanError):
        rows.tokens([9])


def test_answers_that_nobody_waits_for_are_counted() -> None:
    """A completion that comes twice changes nothing; one of the wrong kind is an error."""
    jobs = Jobs(CommandQueue().submit)
    jobs.finish(77, Moved(77))
    assert jobs.num_strays == 1
    with pytest.raises(CacheError, match="one version"):
        answer(Found(1, ()), Moved)
