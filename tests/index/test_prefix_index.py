"""The prefix index, case by case; `test_random_operations` has what nobody thought of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.index.index_rig import NAMESPACE, keys_of, put_on_host

from kvferry.errors import PrefixIndexError
from kvferry.index import PrefixIndex, page_keys
from kvferry.types import Tier

if TYPE_CHECKING:
    pass


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128])
def test_prompts_of_any_length(size: int, count: int) -> None:
    """What is inserted is matched, rounded down to pages; what is no page changes nothing."""
    index = PrefixIndex()
    keys = page_keys(NAMESPACE, list(range(count)), size)
    nodes = index.insert(keys)
    assert index.num_nodes == len(nodes) == count // size
    assert index.match(keys) == (nodes, 0, 0)
    assert index.insert(keys) == nodes
    longer = page_keys(NAMESPACE, list(range(200)), size)
    assert index.match(longer).nodes == nodes
    index.check_integrity()


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 127])
def test_prompts_that_part(size: int, at: int) -> None:
    """Two prompts share the pages before the first other token, and no page behind it."""
    index = PrefixIndex()
    one, other = list(range(128)), [*range(at), 999, *range(at + 1, 128)]
    first = index.insert(page_keys(NAMESPACE, one, size))
    match = index.match(page_keys(NAMESPACE, other, size))
    assert match.nodes == first[: at // size]
    second = index.insert(page_keys(NAMESPACE, other, size))
    assert second[: at // size] == first[: at // size]
    assert index.num_nodes == len({*first, *second}) == 2 * (128 // size) - at // size
    index.check_integrity()


def test_a_match_tells_where_pages_are() -> None:
    """Known, on the host, or in storage by what is known: each as a prefix."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abcdef"))
    index.set_host([nodes[at] for at in (0, 1, 3)], [5, 6, 7])
    index.set_stored([nodes[at] for at in (1, 2, 3, 5)], True)
    assert index.match(keys_of("abcdefg")) == (nodes, 2, 4)
    assert index.match(keys_of("abx")).nodes == nodes[:2]
    assert index.match([]) == ([], 0, 0)
    assert [index.tiers_of(node) for node in nodes[:3]] == [
        {Tier.HOST},
        {Tier.HOST, Tier.STORAGE},
        {Tier.STORAGE},
    ]
    assert index.host_slots(nodes).tolist() == [5, 6, -1, 7, -1, -1]
    assert index.host_slots(nodes).dtype == np.int64
    assert index.host_prefix(nodes[3:]) == 1
    assert (index.num_on_host, index.num_stored) == (3, 4)


def test_matching_changes_nothing() -> None:
    """Neither the order of eviction nor a count: only `touch` does."""
    index = PrefixIndex()
    (old,), (new,) = put_on_host(index, "a"), put_on_host(index, "b")
    for _ in range(10):
        index.match(keys_of("a"))
    assert index.hits_of(old) == 0
    assert index.evict_host(1) == [old]
    index.spare([old])
    index.touch([old])
    assert (index.hits_of(old), index.evict_host(1)) == (1, [new])


def test_the_end_of_a_prompt_is_found_behind_its_beginning_only() -> None:
    """A+B known first, C put behind later: A+B+C is a hit, C alone and B+C are none."""
    index = PrefixIndex()
    start = index.insert(keys_of("ab"))
    whole = keys_of("abc")
    end = index.insert(whole[2:], first_parent=start[-1])
    assert index.match(whole).nodes == [*start, *end]
    assert index.match(keys_of("c")).nodes == []
    assert index.match(keys_of("bc")).nodes == []
    assert index.parent_of(end[0]) == start[-1]
    # Keys that were hashed on from what is known are those of the whole prompt.
    assert page_keys(NAMESPACE, [ord(letter) for letter in "abc"], 1, known=whole[:2]) == whole


def test_keys_that_are_no_chain_are_refused() -> None:
    """A key behind two pages, before its own beginning, or twice: nothing of it is kept."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abc"))
    a, b, c, d, e = keys_of("abcde")
    refused: list[tuple[list[Any], int, str]] = [
        ([b, c], -1, "key 0 is known behind node 0, and was to be put behind node -1"),
        ([c], nodes[0], "key 0 is known behind node 1"),
        ([a, c], -1, "key 1 is known behind node 1"),
        ([d, a], nodes[2], "key 1 is known, but key 0"),
        ([d, e, d], nodes[2], "comes 2 times"),
        ([d, "e"], nodes[2], "key 1 is 'e'"),
        ([d], 77, "node 77 does not exist"),
        ([d], -2, "node -2 does not exist"),
    ]
    for keys, parent, says in refused:
        with pytest.raises(PrefixIndexError, match=says):
            index.insert(keys, first_parent=parent)
        assert index.num_nodes == 3
    index.check_integrity()


def test_slots_are_given_once() -> None:
    """A page has one slot, a slot one page of a call, and nothing is done by halves."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abc"))
    index.set_host(nodes[:1], np.array([8]))
    for bad, slots, says in [
        (nodes, [1, 2, 3], "page of node 0 is in slot 8 already"),
        (nodes[1:], [1], "2 nodes and 1 slots"),
        (nodes[1:], [1, 1], "slot 1 is named 2 times"),
        ([nodes[1]] * 2, [1, 2], "node 1 is named 2 times"),
        (nodes[1:], [1, -1], "slot 1 is -1"),
        (nodes[1:], [1, 2**31], "slot 1 is 2147483648"),
        (nodes[1:], [1, 2.0], r"slot 1 is 2\.0"),
        ([nodes[1], 3], [1, 2], "node 3 does not exist"),
    ]:
        with pytest.raises(PrefixIndexError, match=says):
            index.set_host(bad, slots)  # type: ignore[arg-type]
        assert index.num_on_host == 1
    for bad, says in [(nodes, "node 1 is not on the host"), (nodes[:1] * 2, "named 2 times")]:
        with pytest.raises(PrefixIndexError, match=says):
            index.clear_host(bad)
    assert index.clear_host(nodes[:1]) == [8]
    index.check_integrity()


def test_forgetting_goes_up_as_far_as_nothing_is_left() -> None:
    """Pages that a tier has, that are held, or that lead to others, stay."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abcde"))
    index.set_stored(nodes[1:2], True)
    side = index.insert(keys_of("abcx"))
    assert index.forget(nodes[2:3]) == 0
    assert index.forget([nodes[4]]) == 2
    assert index.match(keys_of("abcde")).nodes == nodes[:3]
    index.pin(side[3:])
    assert index.forget(side) == 0
    index.unpin(side[3:])
    assert index.forget([*side[3:], *side[2:3]]) == 2
    index.set_stored(nodes[1:2], False)
    assert index.forget(nodes[1:2]) == 2
    assert index.num_nodes == 0
    with pytest.raises(PrefixIndexError, match="node 0 does not exist; what is not pinned"):
        index.forget(nodes[:1])
    index.check_integrity()


def test_forgotten_numbers_start_afresh() -> None:
    """A page that gets the number of a forgotten one has none of its hits, flags or priority."""
    index = PrefixIndex(policy="lfu")
    (node,) = put_on_host(index, "a", priority=5)
    index.touch([node])
    index.set_stored([node], True)
    index.clear_host([node])
    index.set_stored([node], False)
    index.forget([node])
    assert index.insert(keys_of("b")) == [node]
    assert (index.hits_of(node), index.is_stored(node), index.num_stored) == (0, False, 0)
    assert (index.host_slot(node), index.parent_of(node)) == (-1, -1)


def test_a_reset_keeps_what_is_in_flight() -> None:
    """Pinned pages stay on the host, and those before them known; the other slots are returned."""
    index = PrefixIndex()
    nodes, other = put_on_host(index, "abcd"), put_on_host(index, "xy")
    index.set_state(nodes[3], 70)
    index.set_state(nodes[1], 71)
    index.set_stored(nodes, True)
    index.evict_host(1)
    index.lease(nodes, seconds=100)
    index.pin(nodes[1:2])
    dropped = index.reset()
    assert sorted(dropped.host_slots) == [0, 2, 3, 4, 5]
    assert (dropped.state_slots, dropped.num_stored) == ([70], 3)
    assert index.match(keys_of("abcd")) == (nodes[:2], 0, 0)
    assert (index.num_nodes, index.num_on_host, index.num_stored, index.num_states) == (2, 1, 1, 1)
    assert index.match(keys_of("xy")).nodes == [] != other
    index.check_integrity()
    index.unpin(nodes[1:2])
    assert index.evict_host(9) == nodes[1:2]
    assert index.reset().host_slots == [1]
    assert index.num_nodes == 0
    index.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda index, node: index.key_of(node),
        lambda index, node: index.parent_of(node),
        lambda index, node: index.hits_of(node),
        lambda index, node: index.host_slot(node),
        lambda index, node: index.state_slot(node),
        lambda index, node: index.is_stored(node),
        lambda index, node: index.tiers_of(node),
        lambda index, node: index.num_leased(node),
        lambda index, node: index.num_pinned(node),
        lambda index, node: index.touch([0, node]),
        lambda index, node: index.host_slots([0, node]),
        lambda index, node: index.host_prefix([0, node]),
        lambda index, node: index.set_stored([0, node], True),
        lambda index, node: index.set_state(node, 5),
        lambda index, node: index.lease([0, node], seconds=1),
        lambda index, node: index.pin([0, node]),
        lambda index, node: index.unpin([0, node]),
        lambda index, node: index.spare([0, node]),
        lambda index, node: index.forget([0, node]),
        lambda index, node: index.clear_host([0, node]),
    ],
)
@pytest.mark.parametrize("node", [-1, -2, 2, 3, 1_000_000, 2**40])
def test_nodes_that_do_not_exist(call: Callable[[PrefixIndex, int], Any], node: int) -> None:
    """Each call names it and changes nothing: not for the page that does exist, either."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abc"))
    index.set_host(nodes[:2], [0, 1])
    index.forget(nodes[2:])
    with pytest.raises(PrefixIndexError, match=f"node {node} does not exist"):
        call(index, node)
    assert (index.hits_of(0), index.num_pinned(0), index.num_leased(0)) == (0, 0, 0)
    assert (index.num_on_host, index.num_stored, index.num_nodes) == (2, 0, 2)
    index.check_integrity()
