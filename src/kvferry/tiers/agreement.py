"""What the ranks of one model replica agree on: which prefix all of them can use.

One agreement a call, whatever a rank has found, so that ranks can never be in different ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.tiers.restore import longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.ranks import Ranks
    from kvferry.tiers.restore import RestoreRule
    from kvferry.tiers.work import LoadWork

__all__ = ["Agreement"]


class Agreement:
    """Agreements of one rank with the others; of nobody with nobody, where `ranks` is None."""

    def __init__(self, ranks: Ranks | None, timeout: float) -> None:
        self._ranks = ranks
        self._timeout = timeout

    def count(self, count: int, timeout: float | None = None) -> int:
        """The smallest of all ranks' numbers. Raises RankError where ranks do not agree in time."""
        if self._ranks is None:
            return count
        seconds = self._timeout if timeout is None else timeout
        return self._ranks.agree_min([count], timeout=seconds)[0]

    def loaded(
        self, load: LoadWork, rule: RestoreRule, page_size: int, timeout: float | None = None
    ) -> int:
        """How many tokens every rank can use of a load: `skip_tokens` at least.

        Where planes are windows or states the smallest number of all ranks will not do: a rank that
        loaded more has the windows, or the state, of another prefix.
        """
        if rule.loads_are_monotone or self._ranks is None or self._ranks.size == 1:
            return self.count(load.usable_tokens, timeout)
        mine = [0] * load.of_pages
        for count in load.usable_prefixes:
            mine[count - 1] = 1
        seconds = self._timeout if timeout is None else timeout
        common = longest([bool(one) for one in self._ranks.agree_min(mine, timeout=seconds)])
        return max(common * page_size, load.skip_tokens)

    def prefix(self, usable: Sequence[bool], num_pages: int) -> int:
        """The longest prefix, in pages, that every rank can use: not the smallest of the longest.

        Args:
            usable: For each number of pages from 1 on, whether this rank can use as many.
            num_pages: Of the whole prompt; the same on every rank.
        """
        if self._ranks is None or self._ranks.size == 1:
            return longest(usable)
        # Ranks may have checkpoints at different pages: only the same one will do.
        mine = [int(one) for one in usable] + [0] * (num_pages - len(usable))
        common = self._ranks.agree_min(mine, timeout=self._timeout)
        return longest([bool(one) for one in common])
