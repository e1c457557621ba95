"""Damage of the index that its own check sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from tests.index.index_rig import keys_of

from kvferry.errors import KVFerryError
from kvferry.index import PrefixIndex

if TYPE_CHECKING:
    pass


def _damage(name: str, at: int, value: Any) -> Callable[[Any], None]:
    def do(index: Any) -> None:
        getattr(index._nodes, name)[at] = value

    return do


def _swap_keys(index: Any) -> None:
    keys = index._nodes.keys
    keys[0], keys[1] = keys[1], keys[0]


def _drop_parent(index: Any) -> None:
    table = index._nodes
    table.node_of.pop(table.keys[0])
    table.parents[0], table.keys[0] = -2, b""
    table._free.append(0)


def _steal_from_queue(index: Any) -> None:
    index._order.pages.pop()


def _new_stamp_in_place(index: Any) -> None:
    index._nodes.stamps[3] += 1


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_swap_keys, "not what its key stands for"),
        (lambda index: index._nodes.node_of.pop(index._nodes.keys[1]), "keys stand for"),
        (_drop_parent, "not empty|must be a node"),
        (_damage("parents", 0, 2), "circle"),
        (_damage("parents", 3, 0), "children is"),
        (_damage("children", 1, 2), "children is 2, and must be 1"),
        (_damage("blockers", 1, 0), "blockers is 0, and must be 1"),
        (_damage("pins", 3, -1), "pins is -1"),
        (_damage("leases", 3, 1), "queued page|leases"),
        (_damage("host_slots", 2, 1), "host slot 1 belongs to two nodes"),
        (_damage("host_slots", 3, -1), "blockers is|queued"),
        (_damage("flags", 3, 0), "queued page is False, and must be True"),
        (_damage("flags", 0, 2), "queued page is True, and must be False"),
        (_damage("flags", 0, 16), "place is nowhere"),
        (_damage("flags", 0, 1), "0 stored pages were counted, and there are 1"),
        (_steal_from_queue, "eviction queue"),
        (_new_stamp_in_place, "by their ranks of today"),
        (lambda index: index._nodes._free.append(4), "free places"),
        (lambda index: index._nodes._free.clear(), "free places"),
        (_damage("hits", 0, -1), "hits is -1"),
        (_damage("children", 4, 1), "free place 4 is not empty"),
        (lambda index: setattr(index, "_num_on_host", 5), "5 pages on the host were counted"),
        (lambda index: setattr(index, "_num_states", 5), "5 states were counted"),
        (lambda index: index._leases._out.clear(), "leases is 1, and must be 0"),
    ],
)
def test_damage_is_seen(damage: Callable[[PrefixIndex], None], says: str) -> None:
    """Every kind of thing that can be wrong inside, found by the next check."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abcdx"))
    index.set_host(nodes[:4], [0, 1, 2, 3])
    index.forget(nodes[4:])
    index.lease([0], seconds=1e6)
    index.check_integrity()
    damage(index)
    with pytest.raises(KVFerryError, match=says):
        index.check_integrity()
