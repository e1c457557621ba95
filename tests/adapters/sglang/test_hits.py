"""How rules of several pools make one prefix."""

from __future__ import annotations

import itertools

import pytest

from kvferry.adapters.sglang.hits import PoolRule, prefix_hits

_ALL = PoolRule("all_pages")


def _there(pages: int, *, without: tuple[int, ...] = ()) -> list[bool]:
    return [page not in without for page in range(pages)]


def test_a_page_that_a_pool_lacks_ends_the_prefix() -> None:
    """Five indexer pages with a hole in the middle make three, not five."""
    found = prefix_hits(_there(10), {"indexer": (_ALL, _there(10, without=(3,)))})
    assert found == (3, {"kv": 10, "indexer": 3}, [1, 2, 3])


def test_a_trailing_rule_leaves_holes() -> None:
    """Each length that ends in a whole window counts, and no other."""
    states = [False, True, True, False, True, True]
    found = prefix_hits(_there(6), {"swa": (PoolRule("trailing_pages", 2), states)})
    assert found == (6, {"kv": 6, "swa": 6}, [3, 6])


def test_a_short_prefix_needs_no_more_than_it_has() -> None:
    """A window longer than the prefix is the whole prefix."""
    found = prefix_hits(_there(2), {"swa": (PoolRule("trailing_pages", 4), [True, True])})
    assert found.restorable == [1, 2]


def test_block_groups_never_shorten_a_prefix() -> None:
    """Such a pool has no verdict here."""
    found = prefix_hits(_there(4), {"c4": (PoolRule("block_groups"), [False] * 4)})
    assert found == (4, {"kv": 4}, [1, 2, 3, 4])


def test_a_rule_that_is_not_known_needs_every_page() -> None:
    """A newer engine's rule costs hits, not bytes."""
    found = prefix_hits(_there(4), {"new": (PoolRule("of a later engine"), [True, False] * 2)})
    assert found.num_pages == 1


@pytest.mark.parametrize("num_trailing", [1, 2, 3])
def test_rules_against_their_definition(num_trailing: int) -> None:
    """All patterns of five pages of three pools: a length counts where each rule holds."""
    patterns = [list(one) for one in itertools.product([False, True], repeat=5)]
    for kv, states in itertools.product(patterns, patterns):
        found = prefix_hits(kv, {"mamba": (PoolRule("trailing_pages", num_trailing), states)})
        expected = [
            end
            for end in range(1, 6)
            if all(kv[:end]) and all(states[max(0, end - num_trailing) : end])
        ]
        assert found.restorable == expected
        assert found.num_pages == (expected[-1] if expected else 0)
