"""The nodes of the prefix index as columns: one array a field, one place a node."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final

from kvferry.errors import PrefixIndexError

__all__ = [
    "NO_NODE",
    "NO_SLOT",
    "QUEUED",
    "STATE_QUEUED",
    "STATE_TAKEN",
    "STORED",
    "TAKEN",
    "NodeTable",
]

NO_NODE: Final = -1
"""The parent of a first page."""
NO_SLOT: Final = -1
_UNUSED: Final = -2
"""The parent of a place where there is no node."""

# Flags of a node.
STORED: Final = 1
"""Storage has the page, as far as is known."""
QUEUED: Final = 2
"""The page may be evicted from the host: it is in the queue."""
TAKEN: Final = 4
"""The page was chosen to be evicted from the host, and is still there."""
STATE_QUEUED: Final = 8
STATE_TAKEN: Final = 16

_MIN_GROWTH: Final = 1024
_MAX_NODES: Final = (1 << 31) - 1


class NodeTable:
    """Fields of every node, and which places are free. A million nodes are 50 MB of columns.

    The columns are read and written by the index itself: a call for each field would cost more
    than all the rest. A free place has `_UNUSED` as its parent and is zero otherwise.
    """

    def __init__(self) -> None:
        self.parents = array("i")
        self.keys: list[bytes] = []
        """Empty at a free place."""
        self.node_of: dict[bytes, int] = {}
        self.children = array("i")
        """How many nodes have this one as their parent."""
        self.blockers = array("i")
        """How many of them keep it on the host: they are there, and not taken."""
        self.host_slots = array("i")
        self.state_slots = array("i")
        self.leases = array("i")
        self.pins = array("i")
        self.stamps = array("q")
        # A first page that every request shares gets to 2³¹ hits within weeks.
        self.hits = array("q")
        self.priorities = array("i")
        self.flags = bytearray()
        self._free: list[int] = []
        self._num_used = 0
        """Places from here on were never used."""

    def __len__(self) -> int:
        return len(self.node_of)

    @property
    def num_places(self) -> int:
        """Nodes are numbers below this."""
        return self._num_used

    def exists(self, node: int) -> bool:
        """Whether there is such a node."""
        return 0 <= node < self._num_used and self.parents[node] != _UNUSED

    def check(self, nodes: Sequence[int]) -> None:
        """Raises PrefixIndexError for a node that does not exist."""
        if not len(nodes):
            return
        in_range = min(nodes) >= 0 and max(nodes) < self._num_used
        if in_range and min(map(self.parents.__getitem__, nodes)) != _UNUSED:
            return
        bad = next(node for node in nodes if not self.exists(node))
        raise PrefixIndexError(
            f"node {bad} does not exist; what is not pinned or leased may be forgotten between two "
            f"calls: look keys up again"
        )

    def leading(self, keys: Sequence[bytes]) -> list[int]:
        """The nodes of the leading keys that are known."""
        found: list[Any] = list(map(self.node_of.get, keys))
        return found[: found.index(None)] if None in found else found

    def add(self, key: bytes, parent: int, stamp: int, priority: int) -> int:
        """A new node; `key` must be new, and `parent` exist or be `NO_NODE`."""
        if self._free:
            node = self._free.pop()
        else:
            node = self._num_used
            if node == len(self.flags):
                self._grow()
            self._num_used += 1
        self.parents[node] = parent
        self.keys[node] = key
        self.node_of[key] = node
        self.stamps[node] = stamp
        self.priorities[node] = priority
        if parent >= 0:
            self.children[parent] += 1
        return node

    def drop_useless(self, node: int) -> int:
        """Drop the node, and those before it, as far as they are of no use; returns how many.

        Of no use is what is in no tier, not held, and has no node behind it.
        """
        dropped = 0
        while node != NO_NODE and self.parents[node] != _UNUSED:
            if (
                self.children[node]
                or self.host_slots[node] != NO_SLOT
                or self.flags[node] & STORED
                or self.state_slots[node] != NO_SLOT
                or self.leases[node]
                or self.pins[node]
            ):
                break
            node = self._drop(node)
            dropped += 1
        return dropped

    def _drop(self, node: int) -> int:
        parent = self.parents[node]
        del self.node_of[self.keys[node]]
        self.keys[node] = b""
        self.parents[node] = _UNUSED
        self.stamps[node] = self.hits[node] = self.priorities[node] = 0
        if parent >= 0:
            self.children[parent] -= 1
        self._free.append(node)
        return parent

    def free_places(self) -> list[int]:
        """Places that were used and are free; the list itself."""
        return self._free

    def _grow(self) -> None:
        """An eighth more: growing costs each node the same, and little is unused."""
        more = max(_MIN_GROWTH, len(self.flags) // 8)
        if len(self.flags) + more > _MAX_NODES:
            raise PrefixIndexError(
                f"the index has {len(self)} pages and holds {_MAX_NODES} at most; use larger pages"
            )
        zeros = bytes(more)
        self.flags.extend(zeros)
        self.keys.extend([b""] * more)
        for column in (self.children, self.blockers, self.leases, self.pins, self.hits,
                       self.priorities):  # fmt: skip
            column.frombytes(zeros * column.itemsize)
        self.stamps.frombytes(zeros * self.stamps.itemsize)
        self.parents.extend(array("i", [_UNUSED]) * more)
        self.host_slots.extend(array("i", [NO_SLOT]) * more)
        self.state_slots.extend(array("i", [NO_SLOT]) * more)
