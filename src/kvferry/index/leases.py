"""Leases: who asked for pages to stay, and until when."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Final

from kvferry.errors import PrefixIndexError
from kvferry.index.host_order import HostOrder
from kvferry.index.nodes import NodeTable

__all__ = ["Lease", "LeaseBook"]

# Leases that were given back early are cleared away when they are more than the others and this.
_MAX_ENDED: Final = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Lease:
    """Pages that stay on the host until the lease is given back or its time is up."""

    generation: int
    """No other lease of this index had it or will have it, also after a reset."""

    nodes: tuple[int, ...]
    expires_at: float
    """By the clock of the index, in seconds."""


class LeaseBook:
    """Leases that are out, by generation and by the time they end, and their count on each node."""

    def __init__(self, nodes: NodeTable, order: HostOrder) -> None:
        self._nodes = nodes
        self._order = order
        self._out: dict[int, Lease] = {}
        # Of every lease that is out, and of some that ended early.
        self._ends: list[tuple[float, int]] = []
        self._num_written = 0
        self.num_expired = 0
        """How many ended because their time was up."""

    def __len__(self) -> int:
        return len(self._out)

    def all(self) -> list[Lease]:
        """Every lease that is out."""
        return list(self._out.values())

    def write(self, nodes: tuple[int, ...], now: float, seconds: float) -> Lease:
        """A new lease on nodes that exist. Raises PrefixIndexError for a time that is none."""
        if not (math.isfinite(seconds) and seconds > 0):
            raise PrefixIndexError(
                f"a lease of {seconds} seconds; it must end, and not before it began: give more "
                f"than 0 seconds, or pin what is in flight"
            )
        self._num_written += 1
        lease = Lease(self._num_written, nodes, now + seconds)
        if len(self._ends) > 2 * len(self._out) + _MAX_ENDED:
            self._ends = [(lease.expires_at, lease.generation) for lease in self._out.values()]
            heapq.heapify(self._ends)
        self._out[lease.generation] = lease
        heapq.heappush(self._ends, (lease.expires_at, lease.generation))
        for node in nodes:
            self._order.withdraw(node)
            self._nodes.leases[node] += 1
        return lease

    def holds(self, lease: Lease, now: float) -> bool:
        """Whether it is out and its time not up; one of another index, or ended by a reset, is not.

        A lease whose time is up is not out, whether or not `expire` was called since.
        """
        return self._out.get(lease.generation) is lease and now < lease.expires_at

    def strike(self, lease: Lease) -> None:
        """End a lease that is out."""
        del self._out[lease.generation]
        leases = self._nodes.leases
        for node in lease.nodes:
            leases[node] -= 1
            if not leases[node]:
                self._order.enter(node)

    def expire(self, now: float) -> list[Lease]:
        """End all whose time is up, and return them, first ended first."""
        ended = []
        while self._ends and self._ends[0][0] <= now:
            lease = self._out.get(heapq.heappop(self._ends)[1])
            if lease is not None:
                self.strike(lease)
                ended.append(lease)
        self.num_expired += len(ended)
        return ended

    def forget_all(self) -> None:
        """End every lease and leave its nodes to the caller.

        Generations go on, so that none can be taken for a later one.
        """
        self._out.clear()
        self._ends.clear()
