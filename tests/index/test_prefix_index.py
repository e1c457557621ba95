"""The prefix index, case by case; `test_random_operations` has what nobody thought of."""

from __future__ import annotations

import gc
import hashlib
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvferry.errors import ConfigError, KVFerryError, PrefixIndexError
from kvferry.index import EvictionPolicyName, Lease, Namespace, PrefixIndex, page_keys
from kvferry.types import Tier

if TYPE_CHECKING:
    from _typeshed import TraceFunction

_NAMESPACE = Namespace(model="m", revision="r", dtype="bfloat16", geometry="g")


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def _keys(prompt: str) -> list[bytes]:
    """A key for each letter of a prompt."""
    return page_keys(_NAMESPACE, [ord(letter) for letter in prompt], 1)


def _names(index: PrefixIndex, nodes: list[int], *prompts: str) -> list[str]:
    """For each node the prompt that ends with it."""
    known = {
        key: prompt[:length] for prompt in prompts for length, key in enumerate(_keys(prompt), 1)
    }
    return [known[index.key_of(node)] for node in nodes]


def _host(index: PrefixIndex, prompt: str, *, priority: int = 0) -> list[int]:
    """Put what is not there yet of a prompt on the host."""
    nodes = index.insert(_keys(prompt), priority=priority)
    new = [node for node in nodes if index.host_slot(node) < 0]
    used = {index.host_slot(node) for node in range(index.num_nodes)}
    free = [slot for slot in range(1000) if slot not in used]
    index.set_host(new, free[: len(new)])
    return nodes


# ------------------------------------------------------------------------------ matching, inserting


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 127, 128])
def test_prompts_of_any_length(size: int, count: int) -> None:
    """What is inserted is matched, rounded down to pages; what is no page changes nothing."""
    index = PrefixIndex()
    keys = page_keys(_NAMESPACE, list(range(count)), size)
    nodes = index.insert(keys)
    assert index.num_nodes == len(nodes) == count // size
    assert index.match(keys) == (nodes, 0, 0)
    assert index.insert(keys) == nodes
    longer = page_keys(_NAMESPACE, list(range(200)), size)
    assert index.match(longer).nodes == nodes
    index.check_integrity()


@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 127])
def test_prompts_that_part(size: int, at: int) -> None:
    """Two prompts share the pages before the first other token, and no page behind it."""
    index = PrefixIndex()
    one, other = list(range(128)), [*range(at), 999, *range(at + 1, 128)]
    first = index.insert(page_keys(_NAMESPACE, one, size))
    match = index.match(page_keys(_NAMESPACE, other, size))
    assert match.nodes == first[: at // size]
    second = index.insert(page_keys(_NAMESPACE, other, size))
    assert second[: at // size] == first[: at // size]
    assert index.num_nodes == len({*first, *second}) == 2 * (128 // size) - at // size
    index.check_integrity()


def test_a_match_tells_where_pages_are() -> None:
    """Known, on the host, or in storage by what is known: each as a prefix."""
    index = PrefixIndex()
    nodes = index.insert(_keys("abcdef"))
    index.set_host([nodes[at] for at in (0, 1, 3)], [5, 6, 7])
    index.set_stored([nodes[at] for at in (1, 2, 3, 5)], True)
    assert index.match(_keys("abcdefg")) == (nodes, 2, 4)
    assert index.match(_keys("abx")).nodes == nodes[:2]
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
    (old,), (new,) = _host(index, "a"), _host(index, "b")
    for _ in range(10):
        index.match(_keys("a"))
    assert index.hits_of(old) == 0
    assert index.evict_host(1) == [old]
    index.spare([old])
    index.touch([old])
    assert (index.hits_of(old), index.evict_host(1)) == (1, [new])


def test_the_end_of_a_prompt_is_found_behind_its_beginning_only() -> None:
    """A+B known first, C put behind later: A+B+C is a hit, C alone and B+C are none."""
    index = PrefixIndex()
    start = index.insert(_keys("ab"))
    whole = _keys("abc")
    end = index.insert(whole[2:], first_parent=start[-1])
    assert index.match(whole).nodes == [*start, *end]
    assert index.match(_keys("c")).nodes == []
    assert index.match(_keys("bc")).nodes == []
    assert index.parent_of(end[0]) == start[-1]
    # Keys that were hashed on from what is known are those of the whole prompt.
    assert page_keys(_NAMESPACE, [ord(letter) for letter in "abc"], 1, known=whole[:2]) == whole


def test_keys_that_are_no_chain_are_refused() -> None:
    """A key behind two pages, before its own beginning, or twice: nothing of it is kept."""
    index = PrefixIndex()
    nodes = index.insert(_keys("abc"))
    a, b, c, d, e = _keys("abcde")
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


# -------------------------------------------------------------------------------------- eviction


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", "b d c a e"),
        ("lfu", "c b d a e"),
        ("slru", "c b d a e"),
        ("fifo", "a b d c e"),
        ("mru", "e a c d b"),
        ("priority", "b d a e c"),
    ],
)
def test_policies(policy: str, order: str) -> None:
    """a, b, c and d came, b and d were used, c was cleared before and came again, then came e.

    At last a was used twice and e three times; c has a high priority.
    """
    index = PrefixIndex(policy=policy)
    page = {name: _host(index, name, priority=9 * (name == "c"))[0] for name in "abcd"}
    slot = index.clear_host([page["c"]])
    index.touch([page["b"]])
    index.touch([page["d"]])
    index.set_host([page["c"]], slot)
    page["e"] = _host(index, "e")[0]
    index.touch([page["a"]])
    index.touch([page["a"]])
    for _ in range(3):
        index.touch([page["e"]])
    assert " ".join(_names(index, index.evict_host(9), *"abcde")) == order


@pytest.mark.parametrize("policy", list(EvictionPolicyName))
def test_leaves_go_first(policy: str) -> None:
    """Whatever the policy: a page goes only when no page behind it is on the host."""
    index = PrefixIndex(policy=policy)
    nodes = _host(index, "abcd")
    branch = _host(index, "abx")
    index.touch(nodes)
    index.touch(branch[:1])
    victims = _names(index, index.evict_host(99), "abcd", "abx")
    assert sorted(victims) == sorted(["a", "ab", "abc", "abcd", "abx"])
    for name in victims:
        assert not any(later.startswith(name) for later in victims[victims.index(name) + 1 :])


def test_a_chain_goes_from_its_end() -> None:
    """An old prompt goes as a whole, last page first, before any page of a later one."""
    index = PrefixIndex()
    _host(index, "abc")
    _host(index, "xyz")
    order = ["abc", "ab", "a", "xyz", "xy", "x"]
    assert _names(index, index.evict_host(6), "abc", "xyz") == order


def test_a_shared_beginning_stays_while_it_is_used() -> None:
    """Its own use counts: it is not old because all that came behind it was."""
    index = PrefixIndex()
    for prompt in ("sys1", "sys2"):
        _host(index, prompt)
    _host(index, "old")
    index.touch(index.match(_keys("sys")).nodes)
    names = _names(index, index.evict_host(99), "sys1", "sys2", "old")
    assert names == ["sys1", "sys2", "old", "ol", "o", "sys", "sy", "s"]


def test_victims_are_there_until_they_are_cleared() -> None:
    """Chosen pages are matched and not chosen again; cleared ones are gone, spared ones stay."""
    index = PrefixIndex()
    nodes = _host(index, "abc")
    victims = index.evict_host(2)
    assert victims == [nodes[2], nodes[1]]
    assert index.match(_keys("abc")).num_on_host == 3
    index.spare([nodes[1]])
    assert index.evict_host(99) == [nodes[1], nodes[0]]
    assert index.evict_host(99) == []
    assert index.clear_host(victims) == [2, 1]
    index.check_integrity()
    assert (index.num_on_host, index.match(_keys("abc")).num_on_host) == (1, 1)
    index.spare([nodes[0]])
    assert index.evict_host(1) == [nodes[0]]


def test_a_victim_that_is_wanted_again() -> None:
    """Leased while it is being written to storage: it cannot be cleared, and stays if spared."""
    index = PrefixIndex(clock=_Clock())
    (node,) = _host(index, "a")
    index.pin(index.evict_host(1))
    lease = index.lease([node], seconds=1)
    index.unpin([node])
    with pytest.raises(PrefixIndexError, match=r"leased \(1 leases\): spare"):
        index.clear_host([node])
    index.spare([node])
    assert index.evict_host(1) == []
    index.release(lease)
    assert index.evict_host(1) == [node]


def test_states_go_by_themselves() -> None:
    """States have slots and an order of their own, in which pages behind do not matter."""
    index = PrefixIndex()
    nodes = _host(index, "abc")
    for node, slot in ((nodes[0], 4), (nodes[2], 9)):
        index.set_state(node, slot)
    assert [index.state_slot(node) for node in nodes] == [4, -1, 9]
    index.touch(nodes[:1])
    index.pin([nodes[2]])
    assert index.evict_states(9) == [nodes[0]]
    index.unpin([nodes[2]])
    assert index.evict_states(9) == [nodes[2]]
    assert index.clear_state(nodes[2]) == 9
    index.spare([nodes[0]])
    assert (index.num_states, index.evict_states(1)) == (1, [nodes[0]])
    with pytest.raises(PrefixIndexError, match="state of node 2 is not on the host"):
        index.clear_state(nodes[2])
    with pytest.raises(PrefixIndexError, match="state of node 0 is in slot 4 already"):
        index.set_state(nodes[0], 5)
    index.check_integrity()


def test_an_unknown_policy_is_refused() -> None:
    """With the names of those there are."""
    with pytest.raises(ConfigError, match="no eviction policy 'arc'; there are: lru, lfu, slru"):
        PrefixIndex(policy="arc")


# --------------------------------------------------------------------------------- leases and pins


def test_a_lease_keeps_pages_until_it_is_given_back() -> None:
    """And is given back once: later it is False and takes nothing from anybody."""
    index = PrefixIndex(clock=_Clock())
    nodes = _host(index, "ab")
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
    clock = _Clock()
    index = PrefixIndex(clock=clock)
    nodes = _host(index, "ab")
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
    clock = _Clock()
    index = PrefixIndex(clock=clock)
    nodes = _host(index, "ab")
    index.set_state(nodes[0], 0)
    index.lease(nodes, seconds=2)
    clock.now += 2
    assert index.evict_states(9) == [nodes[0]]
    assert index.evict_host(9) == nodes[::-1]
    assert index.num_expired == 1


def test_leases_that_nobody_gives_back() -> None:
    """A thousand look-ups without a load, some twice: in the end every page can be evicted."""
    clock = _Clock()
    index = PrefixIndex(clock=clock)
    nodes = _host(index, "abcdefgh")
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
    lease = index.lease(_host(index, "ab"), seconds=100)
    index.reset()
    nodes = _host(index, "xy")
    today = index.lease(nodes, seconds=100)
    foreign = other.lease(_host(other, "q"), seconds=100)
    assert not any(index.release(old) for old in (lease, foreign, other.lease([0], seconds=1)))
    assert today.generation > lease.generation
    assert [index.num_leased(node) for node in nodes] == [1, 1]
    assert index.evict_host(9) == []
    assert index.release(today)


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan")])
def test_a_lease_must_end(seconds: float) -> None:
    """And not before it began."""
    index = PrefixIndex()
    nodes = _host(index, "a")
    with pytest.raises(PrefixIndexError, match="must end"):
        index.lease(nodes, seconds=seconds)
    assert index.num_leased(nodes[0]) == 0
    index.check_integrity()


def test_ended_leases_leave_nothing_behind() -> None:
    """Leases of a year that are given back at once do not add up."""
    index = PrefixIndex()
    nodes = _host(index, "ab")
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
    nodes = _host(index, "abc")
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
    nodes = _host(index, "abc")
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


# ------------------------------------------------------------------- slots, forgetting, reset


def test_slots_are_given_once() -> None:
    """A page has one slot, a slot one page of a call, and nothing is done by halves."""
    index = PrefixIndex()
    nodes = index.insert(_keys("abc"))
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
    nodes = index.insert(_keys("abcde"))
    index.set_stored(nodes[1:2], True)
    side = index.insert(_keys("abcx"))
    assert index.forget(nodes[2:3]) == 0
    assert index.forget([nodes[4]]) == 2
    assert index.match(_keys("abcde")).nodes == nodes[:3]
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
    (node,) = _host(index, "a", priority=5)
    index.touch([node])
    index.set_stored([node], True)
    index.clear_host([node])
    index.set_stored([node], False)
    index.forget([node])
    assert index.insert(_keys("b")) == [node]
    assert (index.hits_of(node), index.is_stored(node), index.num_stored) == (0, False, 0)
    assert (index.host_slot(node), index.parent_of(node)) == (-1, -1)


def test_a_reset_keeps_what_is_in_flight() -> None:
    """Pinned pages stay on the host, and those before them known; the other slots are returned."""
    index = PrefixIndex()
    nodes, other = _host(index, "abcd"), _host(index, "xy")
    index.set_state(nodes[3], 70)
    index.set_state(nodes[1], 71)
    index.set_stored(nodes, True)
    index.evict_host(1)
    index.lease(nodes, seconds=100)
    index.pin(nodes[1:2])
    dropped = index.reset()
    assert sorted(dropped.host_slots) == [0, 2, 3, 4, 5]
    assert (dropped.state_slots, dropped.num_stored) == ([70], 3)
    assert index.match(_keys("abcd")) == (nodes[:2], 0, 0)
    assert (index.num_nodes, index.num_on_host, index.num_stored, index.num_states) == (2, 1, 1, 1)
    assert index.match(_keys("xy")).nodes == [] != other
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
    nodes = index.insert(_keys("abc"))
    index.set_host(nodes[:2], [0, 1])
    index.forget(nodes[2:])
    with pytest.raises(PrefixIndexError, match=f"node {node} does not exist"):
        call(index, node)
    assert (index.hits_of(0), index.num_pinned(0), index.num_leased(0)) == (0, 0, 0)
    assert (index.num_on_host, index.num_stored, index.num_nodes) == (2, 0, 2)
    index.check_integrity()


# -------------------------------------------------------------------------------------- integrity


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
    nodes = index.insert(_keys("abcdx"))
    index.set_host(nodes[:4], [0, 1, 2, 3])
    index.forget(nodes[4:])
    index.lease([0], seconds=1e6)
    index.check_integrity()
    damage(index)
    with pytest.raises(KVFerryError, match=says):
        index.check_integrity()


# ------------------------------------------------------------------------------------------- cost


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
                keys = _keys(f"{chr(256 + number)}abc")
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
