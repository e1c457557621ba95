"""Leases and pins: what is held, until when, and what nobody gives back."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING

import pytest
from tests.index.index_rig import Clock, put_on_host

from kvferry.errors import PrefixIndexError
from kvferry.index import Lease, PrefixIndex

if TYPE_CHECKING:
    pass


def test_a_lease_keeps_pages_until_it_is_given_back() -> None:
    """And is given back once: later it is False and takes nothing from anybody."""
    index = PrefixIndex(clock=Clock())
    nodes = put_on_host(index, "ab")
    one, other = (index.lease(nodes, seconds=5) for _ in range(2))
    assert index.release(one) is True
    assert (index.release(one), index.holds(one), index.holds(other)) == (False, False, True)
    assert ([index.num_leased(node) for node in nodes], index.num_leases) == ([1, 1], 1)
    assert index.evict_host(9) == []
    assert index.release(other) is True
    assert index.evict_host(9) == nodes[::-1]
    index.check_integrity()


def test_a_lease_ends_by_itself() -> None:
    """At its time, not before; giving it back then is False, whether or not anybody looked."""
    clock = Clock()
    index = PrefixIndex(clock=clock)
    nodes = put_on_host(index, "ab")
    short, long = (index.lease(nodes, seconds=seconds) for seconds in (2, 3))
    clock.now += 1.999
    assert (index.expire(), index.evict_host(9)) == ([], [])
    clock.now += 0.001
    assert (index.holds(short), index.release(short)) == (False, False)
    assert index.expire() == [short]
    assert [index.num_leased(node) for node in nodes] == [1, 1]
    assert index.expire(long.expires_at) == [long]
    assert (index.release(long), index.num_expired) == (False, 2)
    assert index.evict_host(9) == nodes[::-1]


def test_evicting_ends_leases_first() -> None:
    """Nobody has to look for ended leases to have their pages back."""
    clock = Clock()
    index = PrefixIndex(clock=clock)
    nodes = put_on_host(index, "ab")
    index.set_state(nodes[0], 0)
    index.lease(nodes, seconds=2)
    clock.now += 2
    assert index.evict_states(9) == [nodes[0]]
    assert index.evict_host(9) == nodes[::-1]
    assert index.num_expired == 1


def test_leases_that_nobody_gives_back() -> None:
    """A thousand look-ups without a load, some twice: in the end every page can be evicted."""
    clock = Clock()
    index = PrefixIndex(clock=clock)
    nodes = put_on_host(index, "abcdefgh")
    leases: list[Lease] = []
    for number in range(1000):
        leases.append(index.lease(nodes[: number % 9], seconds=30))
        clock.now += 0.1
        if number % 3 == 0:
            old = leases[number // 2]
            assert index.holds(old) == index.release(old)
        index.expire()
        index.check_integrity()
        assert min(index.num_leased(node) for node in nodes) >= 0
    clock.now += 30
    assert index.evict_host(99) == nodes[::-1]
    assert index.num_leases == 0
    assert [index.num_leased(node) for node in nodes] == [0] * 8


def test_leases_from_before_a_reset_or_of_another_index() -> None:
    """They are False, also when a page of today has the number of one of theirs."""
    index, other = PrefixIndex(), PrefixIndex()
    lease = index.lease(put_on_host(index, "ab"), seconds=100)
    index.reset()
    nodes = put_on_host(index, "xy")
    today = index.lease(nodes, seconds=100)
    foreign = other.lease(put_on_host(other, "q"), seconds=100)
    assert not any(index.release(old) for old in (lease, foreign, other.lease([0], seconds=1)))
    assert today.generation > lease.generation
    assert [index.num_leased(node) for node in nodes] == [1, 1]
    assert index.evict_host(9) == []
    assert index.release(today)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_lease_must_end(seconds: float) -> None:
    """And not before it began."""
    index = PrefixIndex()
    nodes = put_on_host(index, "a")
    with pytest.raises(PrefixIndexError, match="must end"):
        index.lease(nodes, seconds=seconds)
    assert index.num_leased(nodes[0]) == 0
    index.check_integrity()


def test_ended_leases_leave_nothing_behind() -> None:
    """Leases of a year that are given back at once do not add up."""
    index = PrefixIndex()
    nodes = put_on_host(index, "ab")
    tracemalloc.start()
    try:
        for _ in range(2_000):
            index.release(index.lease(nodes, seconds=3e7))
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(20_000):
            index.release(index.lease(nodes, seconds=3e7))
        assert tracemalloc.get_traced_memory()[0] < before + 20_000
    finally:
        tracemalloc.stop()


def test_unpinning_what_is_not_pinned_raises() -> None:
    """Nothing is changed then, not even for the pages of the call that were pinned."""
    index = PrefixIndex()
    nodes = put_on_host(index, "abc")
    index.pin(nodes[:2])
    for bad, says in [
        (nodes, "node 2 has 0 pins, and 1 were"),
        ([nodes[0]] * 2, "node 0 has 1 pins, and 2 were"),
    ]:
        with pytest.raises(PrefixIndexError, match=says):
            index.unpin(bad)
        assert [index.num_pinned(node) for node in nodes] == [1, 1, 0]
    index.unpin(nodes[:2])
    with pytest.raises(PrefixIndexError, match="0 pins"):
        index.unpin(nodes[:1])
    index.check_integrity()


def test_what_is_held_cannot_be_cleared() -> None:
    """Pinned pages never, leased ones only when told so; one of many stops all."""
    index = PrefixIndex()
    nodes = put_on_host(index, "abc")
    index.pin(nodes[:1])
    lease = index.lease(nodes[1:2], seconds=100)
    for kept in (nodes, nodes[:1], nodes[1:]):
        with pytest.raises(PrefixIndexError, match=r"in flight|leased"):
            index.clear_host(kept)
    with pytest.raises(PrefixIndexError, match="in flight"):
        index.clear_host(nodes, even_if_leased=True)
    assert index.num_on_host == 3
    assert index.clear_host(nodes[1:2], even_if_leased=True) == [1]
    assert index.host_prefix(nodes) == 1
    assert index.release(lease)
    index.check_integrity()
