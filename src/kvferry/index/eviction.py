"""In which order pages leave the host: six policies, and the queue they share.

A policy gives each page a *rank*, a whole number, and the page with the lowest one goes first; of
equal ranks, the lower node. Ranks come from *stamps*, numbers of a counter that only grows.
"""

from __future__ import annotations

import enum
import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from kvferry.errors import ConfigError

__all__ = ["EvictionPolicyName", "EvictionQueue", "Policy", "policy_called"]

# Room for a million stamps a second for nine years.
_STAMP_BITS: Final = 48
# Nodes are array indices, far below this.
_NODE_BITS: Final = 32
_NODE_MASK: Final = (1 << _NODE_BITS) - 1
# How many neighbouring ranks share a bucket: so many that buckets cost little memory, so few that
# moving entries within one costs nothing beside the call.
_BUCKET_BITS: Final = _NODE_BITS + 8
# Numbers of buckets that are gone are cleared away when they are more than the others and this.
_MAX_GONE: Final = 64


class EvictionPolicyName(enum.StrEnum):
    """Which of the pages that may go is the first to go."""

    LRU = "lru"
    """The one that was used longest ago."""

    LFU = "lfu"
    """The one that was used least often; of those, longest ago."""

    SLRU = "slru"
    """One that was never used since it came, if there is one; of those, or else, longest ago."""

    FIFO = "fifo"
    """The one that came to the host first."""

    MRU = "mru"
    """The one that was used last: for scans that go round through more than fits."""

    PRIORITY = "priority"
    """The one with the lowest priority; of those, used longest ago."""


class Policy(NamedTuple):
    """How a policy ranks a page."""

    rank: Callable[[int, int, int], int]
    """From stamp, hits and priority."""

    stamps_hits: bool
    """Whether a hit gives a page a new stamp, or only its coming to the host does."""


def _classed(what: int, stamp: int) -> int:
    return (what << _STAMP_BITS) + stamp


_POLICIES: Final = {
    EvictionPolicyName.LRU: Policy(lambda stamp, _hits, _priority: stamp, True),
    EvictionPolicyName.LFU: Policy(lambda stamp, hits, _priority: _classed(hits, stamp), True),
    EvictionPolicyName.SLRU: Policy(lambda stamp, hits, _priority: _classed(hits > 0, stamp), True),
    EvictionPolicyName.FIFO: Policy(lambda stamp, _hits, _priority: stamp, False),
    EvictionPolicyName.MRU: Policy(lambda stamp, _hits, _priority: -stamp, True),
    EvictionPolicyName.PRIORITY: Policy(
        lambda stamp, _hits, priority: _classed(priority, stamp), True
    ),
}


def policy_called(name: str) -> Policy:
    """The policy of that name. Raises ConfigError, with the names there are."""
    try:
        return _POLICIES[EvictionPolicyName(name)]
    except ValueError as bad:
        known = ", ".join(EvictionPolicyName)
        raise ConfigError(f"there is no eviction policy {name!r}; there are: {known}") from bad


class EvictionQueue:
    """Nodes by rank; what a call costs does not depend on how many there are.

    Neighbouring ranks share a bucket, a short sorted list. Buckets are found by their number, and
    the lowest by a heap of numbers. A node that moves leaves nothing behind in its old bucket, so
    evicting one page never has to pass over all that were touched since the last time.
    """

    def __init__(self) -> None:
        self._buckets: dict[int, list[int]] = {}
        # Of every bucket, and of some that are gone; never twice the same number.
        self._numbers: list[int] = []
        self._listed: set[int] = set()
        self._num_nodes = 0

    def __len__(self) -> int:
        return self._num_nodes

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Rank and node of each, lowest rank first; costs O(n log n)."""
        for number in sorted(self._buckets):
            for entry in self._buckets[number]:
                yield entry >> _NODE_BITS, entry & _NODE_MASK

    def add(self, rank: int, node: int) -> None:
        """Put in a node that is not there."""
        entry = (rank << _NODE_BITS) | node
        number = entry >> _BUCKET_BITS
        bucket = self._buckets.get(number)
        if bucket is None:
            self._buckets[number] = [entry]
            if number not in self._listed:
                self._list(number)
        elif entry > bucket[-1]:
            bucket.append(entry)
        else:
            insort(bucket, entry)
        self._num_nodes += 1

    def remove(self, rank: int, node: int) -> None:
        """Take out a node that was put in with this rank."""
        entry = (rank << _NODE_BITS) | node
        number = entry >> _BUCKET_BITS
        bucket = self._buckets[number]
        del bucket[bisect_left(bucket, entry)]
        if not bucket:
            del self._buckets[number]
        self._num_nodes -= 1

    def pop(self) -> int:
        """Take out the node with the lowest rank; there must be one."""
        numbers, buckets = self._numbers, self._buckets
        while (number := numbers[0]) not in buckets:
            heapq.heappop(numbers)
            self._listed.remove(number)
        bucket = buckets[number]
        entry = bucket.pop(0)
        if not bucket:
            del buckets[number]
        self._num_nodes -= 1
        return entry & _NODE_MASK

    def _list(self, number: int) -> None:
        if len(self._numbers) > 2 * len(self._buckets) + _MAX_GONE:
            self._numbers = list(self._buckets)
            heapq.heapify(self._numbers)
            self._listed = set(self._numbers)
        else:
            self._listed.add(number)
            heapq.heappush(self._numbers, number)
