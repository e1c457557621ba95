"""How long a prefix can be used, when some of its pages and checkpoints are there.

Restoring is transactional: all that the planes need, each by its hit rule, or a shorter prefix that
has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.geometry import HitKind
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvferry.geometry import Geometry

__all__ = ["RestoreRule", "leading", "longest"]


class RestoreRule:
    """What the planes of one geometry need of a prefix, taken together."""

    def __init__(self, geometry: Geometry) -> None:
        self._page_size = geometry.page_size
        pages = [plane for plane in geometry.planes if plane.slot_kind is SlotKind.PAGE]
        self._rules = [plane.hit_rule for plane in pages]
        self.needs_pages = bool(pages)
        """Whether anything follows the tokens; False: checkpoints alone make a prefix."""

        self.needs_state = bool(geometry.spans(SlotKind.STATE))
        """Whether a prefix ends only where a checkpoint is."""

        self._all_pages = any(rule.kind is HitKind.ALL_PAGES for rule in self._rules)
        self.is_monotone = self._all_pages and not self.needs_state
        """Whether every shorter prefix of a usable one can be used too."""

        self.windows = {
            plane.name: plane.hit_rule
            for plane in pages
            if plane.hit_rule.kind is HitKind.LAST_TOKENS
        }
        """Planes that only the end of a prefix needs."""

        self.whole_planes = tuple(
            plane.name for plane in pages if plane.hit_rule.kind is HitKind.ALL_PAGES
        )

        self.loads_are_monotone = not self.windows and not self.needs_state
        """Whether every shorter prefix of one that was loaded can be used: windows and the state
        of a load belong to its end."""

    def pages_needed(self, num_pages: int) -> int:
        """How many pages at the end of a prefix of `num_pages` must be there."""
        return max(
            (rule.pages_needed(num_pages, self._page_size) for rule in self._rules), default=0
        )

    def window_start(self, num_pages: int) -> int:
        """The first page of such a prefix that any window plane needs."""
        needed = max(
            (rule.pages_needed(num_pages, self._page_size) for rule in self.windows.values()),
            default=0,
        )
        return num_pages - needed

    def usable_pages(self, pages: Sequence[bool], states: Sequence[bool] = ()) -> int:
        """The longest prefix that can be used.

        Args:
            pages: For each page from the first on, whether it is there.
            states: For each page, whether a checkpoint at its end is there.
        """
        return longest(self.usable_prefixes(pages, states))

    def usable_prefixes(self, pages: Sequence[bool], states: Sequence[bool] = ()) -> list[bool]:
        """For each number of pages from 1 on, whether a prefix that long can be used."""
        usable = []
        run = 0
        for count, is_there in enumerate(pages, start=1):
            run = run + 1 if is_there else 0
            # With no window, `run` is either all of `count` or too short: no need to ask planes.
            enough = run == count or (not self._all_pages and run >= self.pages_needed(count))
            usable.append(enough and (not self.needs_state or bool(states[count - 1])))
        return usable

    def loaded_prefixes(
        self, whole: Sequence[bool], windows: Sequence[bool], *, has_state: bool
    ) -> Iterator[int]:
        """Each number of pages, the greatest first, that can be used of what a load brought.

        A load brings window planes of its last pages only. So when one of those is bad, a shorter
        prefix may lack, at its own end, what the longer one did not need.

        Args:
            whole: For each page, whether the planes that all of a prefix needs are there.
            windows: For each page, whether the window planes are.
            has_state: There is a checkpoint at the end of the last page.
        """
        longest_whole = leading(whole) if self._all_pages else len(whole)
        if self.needs_state:
            # The one state that was loaded belongs to the end of the last page.
            if not has_state or longest_whole < len(whole):
                return
            shortest = len(whole)
        else:
            shortest = 1
        for count in range(longest_whole, shortest - 1, -1):
            if not self.windows or all(windows[self.window_start(count) : count]):
                yield count


def leading(found: Sequence[bool]) -> int:
    """How many are true, from the first on."""
    return next((count for count, is_there in enumerate(found) if not is_there), len(found))


def longest(usable: Sequence[bool]) -> int:
    """The greatest number of pages of which `usable`, from one page on, says that they will do."""
    return next((count for count in range(len(usable), 0, -1) if usable[count - 1]), 0)
