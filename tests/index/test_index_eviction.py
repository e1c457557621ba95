"""Which pages leave the host first, and what they leave behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.index.index_rig import Clock, keys_of, names_of, put_on_host

from kvferry.errors import ConfigError, PrefixIndexError
from kvferry.index import EvictionPolicyName, PrefixIndex

if TYPE_CHECKING:
    pass


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
    page = {name: put_on_host(index, name, priority=9 * (name == "c"))[0] for name in "abcd"}
    slot = index.clear_host([page["c"]])
    index.touch([page["b"]])
    index.touch([page["d"]])
    index.set_host([page["c"]], slot)
    page["e"] = put_on_host(index, "e")[0]
    index.touch([page["a"]])
    index.touch([page["a"]])
    for _ in range(3):
        index.touch([page["e"]])
    assert " ".join(names_of(index, index.evict_host(9), *"abcde")) == order


@pytest.mark.parametrize("policy", list(EvictionPolicyName))
def test_leaves_go_first(policy: str) -> None:
    """Whatever the policy: a page goes only when no page behind it is on the host."""
    index = PrefixIndex(policy=policy)
    nodes = put_on_host(index, "abcd")
    branch = put_on_host(index, "abx")
    index.touch(nodes)
    index.touch(branch[:1])
    victims = names_of(index, index.evict_host(99), "abcd", "abx")
    assert sorted(victims) == sorted(["a", "ab", "abc", "abcd", "abx"])
    for name in victims:
        assert not any(later.startswith(name) for later in victims[victims.index(name) + 1 :])


def test_a_chain_goes_from_its_end() -> None:
    """An old prompt goes as a whole, last page first, before any page of a later one."""
    index = PrefixIndex()
    put_on_host(index, "abc")
    put_on_host(index, "xyz")
    order = ["abc", "ab", "a", "xyz", "xy", "x"]
    assert names_of(index, index.evict_host(6), "abc", "xyz") == order


@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_behind_a_hole_goes_first(is_used: bool) -> None:
    """Of pages that came, or were used, in one call the later ones of the prompt are older."""
    index = PrefixIndex()
    nodes = index.insert(keys_of("abcde"))
    if is_used:
        for node in reversed(nodes[::2]):
            index.set_host([node], [node])
        index.touch(nodes)
    else:
        index.set_host(nodes[::2], [0, 1, 2])
    assert index.evict_host(3) == nodes[::-2]


def test_a_shared_beginning_stays_while_it_is_used() -> None:
    """Its own use counts: it is not old because all that came behind it was."""
    index = PrefixIndex()
    for prompt in ("sys1", "sys2"):
        put_on_host(index, prompt)
    put_on_host(index, "old")
    index.touch(index.match(keys_of("sys")).nodes)
    names = names_of(index, index.evict_host(99), "sys1", "sys2", "old")
    assert names == ["sys1", "sys2", "old", "ol", "o", "sys", "sy", "s"]


def test_victims_are_there_until_they_are_cleared() -> None:
    """Chosen pages are matched and not chosen again; cleared ones are gone, spared ones stay."""
    index = PrefixIndex()
    nodes = put_on_host(index, "abc")
    victims = index.evict_host(2)
    assert victims == [nodes[2], nodes[1]]
    assert index.match(keys_of("abc")).num_on_host == 3
    index.spare([nodes[1]])
    assert index.evict_host(99) == [nodes[1], nodes[0]]
    assert index.evict_host(99) == []
    assert index.clear_host(victims) == [2, 1]
    index.check_integrity()
    assert (index.num_on_host, index.match(keys_of("abc")).num_on_host) == (1, 1)
    index.spare([nodes[0]])
    assert index.evict_host(1) == [nodes[0]]


def test_a_victim_that_is_wanted_again() -> None:
    """Leased while it is being written to storage: it cannot be cleared, and stays if spared."""
    index = PrefixIndex(clock=Clock())
    (node,) = put_on_host(index, "a")
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
    nodes = put_on_host(index, "abc")
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
