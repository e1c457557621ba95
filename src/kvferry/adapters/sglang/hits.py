"""How much of a prefix storage has, when every pool counts by a rule of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["PoolRule", "PrefixHits", "prefix_hits"]

ALL_PAGES = "all_pages"
TRAILING_PAGES = "trailing_pages"
BLOCK_GROUPS = "block_groups"


class PoolRule(NamedTuple):
    """What a pool beside KV must have."""

    policy: str
    """``trailing_pages``: the last `num_trailing` pages of the prefix. ``block_groups``: nothing,
    the pool never shortens a prefix. All else: every page."""

    num_trailing: int = 1


class PrefixHits(NamedTuple):
    """What can be restored."""

    num_pages: int
    """The longest prefix that every pool can serve."""

    by_pool: dict[str, int]
    """The longest prefix that each pool can serve by itself; pools with none are left out."""

    restorable: list[int]
    """All lengths that every pool can serve, ascending: a trailing rule leaves holes."""


def prefix_hits(
    kv: Sequence[bool],
    pools: Mapping[str, tuple[PoolRule, Sequence[bool]]],
    *,
    kv_name: str = "kv",
) -> PrefixHits:
    """Combine what is there.

    Args:
        kv: For each page of the prompt, whether KV is there.
        pools: By name, the pool's rule and which of its pages are there. Shape of each: as `kv`.
        kv_name: What KV is called in the answer.
    """
    num_kv = _leading(kv)
    by_pool = {kv_name: num_kv} if num_kv else {}
    restorable = list(range(1, num_kv + 1))
    for name, (rule, there) in pools.items():
        if rule.policy == BLOCK_GROUPS:
            continue
        if rule.policy == TRAILING_PAGES:
            good = [
                end
                for end in range(1, num_kv + 1)
                if all(there[max(0, end - rule.num_trailing) : end])
            ]
        else:
            good = list(range(1, min(num_kv, _leading(there)) + 1))
        if good:
            by_pool[name] = good[-1]
        allowed = set(good)
        restorable = [end for end in restorable if end in allowed]
    return PrefixHits(restorable[-1] if restorable else 0, by_pool, restorable)


def _leading(there: Sequence[bool]) -> int:
    return next((page for page, is_there in enumerate(there) if not is_there), len(there))
