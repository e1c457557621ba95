"""What calls of the index cost, in steps and in memory, however large it is."""

from __future__ import annotations

import gc
import hashlib
import sys
import tracemalloc
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from tests.index.index_rig import keys_of

from kvferry.index import EvictionPolicyName, PrefixIndex

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def _chains(index: PrefixIndex, count: int, length: int) -> list[list[int]]:
    """Chains of pages on the host, with keys that cost nothing to make."""
    chains = []
    for number in range(count):
        names = (f"{number} {at}".encode() for at in range(length))
        nodes = index.insert([hashlib.blake2b(name, digest_size=32).digest() for name in names])
        index.set_host(nodes, range(number * length, (number + 1) * length))
        chains.append(nodes)
    return chains


@pytest.mark.parametrize("policy", list(EvictionPolicyName))
def test_no_call_costs_more_in_a_large_index(policy: str) -> None:
    """The lines of Python that are run do not grow with pages that a call is not about.

    All that is used before is used by a call of its own, in an order that has nothing to do with
    that of arrival: evicting must not have to pass over it.
    """

    def lines_of(count: int) -> float:
        index = PrefixIndex(policy=policy)
        chains = _chains(index, count, 4)
        for at in range(count):
            index.touch(chains[at * 7919 % count])
        lines = 0

        def trace(_frame: FrameType, _event: str, _arg: object) -> TraceFunction:
            nonlocal lines
            lines += 1
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for number in range(50):
                victims = index.evict_host(4)
                slots = index.clear_host(victims)
                index.forget(victims)
                keys = keys_of(f"{chr(256 + number)}abc")
                assert index.match(keys).nodes == []
                nodes = index.insert(keys)
                index.set_host(nodes, slots)
                index.touch(nodes)
                index.release(index.lease(nodes, seconds=1e6))
        finally:
            sys.settrace(previous)
        index.check_integrity()
        return lines

    assert lines_of(20_000) <= lines_of(200) * 1.1


@pytest.mark.parametrize(("count", "length"), [(50_000, 1), (500, 100)])
def test_a_page_takes_little_memory(count: int, length: int) -> None:
    """400 bytes at most, with its key and all that grows with use: leaves alone, and long chains.

    No table is larger for each page in a large index than in this one, but for a step of growth.
    """
    gc.collect()
    tracemalloc.start()
    try:
        index = PrefixIndex()
        chains = _chains(index, count, length)
        for nodes in reversed(chains):
            index.touch(nodes)
        del chains, nodes
        gc.collect()
        found = tracemalloc.get_traced_memory()[0] / index.num_nodes
    finally:
        tracemalloc.stop()
    assert 100 < found <= 400


def test_use_leaves_nothing_behind() -> None:
    """One page that is used over and over does not make the queue grow."""
    index = PrefixIndex()
    chains = _chains(index, 3, 2)
    tracemalloc.start()
    try:
        for _ in range(40_000):
            index.touch(chains[0])
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(60_000):
            index.touch(chains[0])
        assert tracemalloc.get_traced_memory()[0] < before + 10_000
    finally:
        tracemalloc.stop()
    assert index.evict_host(6) == [*chains[1][::-1], *chains[2][::-1], *chains[0][::-1]]
