"""What storage is thought to have. Hints only, and bounded: storage drops pages without a word."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.index import PrefixIndex

__all__ = ["StorageHints"]

_MOST_TRIES = 4
"""Entries that are looked at for each that must go."""


class StorageHints:
    """Which pages and checkpoints need not be written, as storage has them, or is thought to.

    A page that only storage has is a node of the index. So that these do not become more for as
    long as a process runs, the hints that were given first are dropped, and their nodes with them:
    storage is asked in any case before it is read from, and at worst a page is offered to it twice.

    Args:
        index: Has the hints of pages.
        max_hints: How many of each kind are kept.
    """

    def __init__(self, index: PrefixIndex, max_hints: int) -> None:
        self._index = index
        self._max_hints = max_hints
        # Some pages may be in it twice, and some not be stored any more.
        self._pages: deque[bytes] = deque()
        self._states: OrderedDict[bytes, None] = OrderedDict()

    def is_stored(self, kind: SlotKind, node: int) -> bool:
        """Whether storage has it, as far as is known."""
        if kind is SlotKind.PAGE:
            return self._index.is_stored(node)
        return self._index.key_of(node) in self._states

    def note(self, kind: SlotKind, keys: Iterable[bytes]) -> None:
        """Storage has these, the first pages of a chain first; keys that nobody knows are passed
        over."""
        index = self._index
        if kind is SlotKind.STATE:
            for key in keys:
                self._states[key] = None
                self._states.move_to_end(key)
            while len(self._states) > self._max_hints:
                self._states.popitem(last=False)
            return
        known = [(key, node) for key in keys if (node := index.node_of(key)) is not None]
        new = [(key, node) for key, node in known if not index.is_stored(node)]
        index.set_stored([node for _, node in new], True)
        # Pages are dropped from the end of a chain on, as those before lead to them.
        self._pages.extend(key for key, _ in reversed(new))
        self._trim()

    def drop(self, kind: SlotKind, keys: Sequence[bytes]) -> None:
        """Storage does not have these. What nothing else holds is forgotten."""
        index = self._index
        nodes = [node for key in keys if (node := index.node_of(key)) is not None]
        if kind is SlotKind.PAGE:
            index.set_stored(nodes, False)
        else:
            for key in keys:
                self._states.pop(key, None)
        for key in reversed(keys):
            node = index.node_of(key)
            if node is not None:  # The one behind it may have taken it along.
                index.forget([node])

    def correct(self, kind: SlotKind, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        """Storage was asked. What it dropped is to be written again."""
        self.note(kind, [key for key, is_there in zip(keys, found, strict=True) if is_there])
        self.drop(kind, [key for key, is_there in zip(keys, found, strict=True) if not is_there])

    def reset(self) -> None:
        """Reset the index, and with it what is known of pages."""
        self._index.reset()
        self._pages.clear()

    def forget(self) -> None:
        """Another backend, or none: nothing is known of what it has."""
        self._index.clear_stored()
        self._pages.clear()
        self._states.clear()

    def _trim(self) -> None:
        index, pages = self._index, self._pages
        tries = _MOST_TRIES * max(0, len(pages) - self._max_hints)
        while len(pages) > self._max_hints and tries:
            tries -= 1
            key = pages.popleft()
            node = index.node_of(key)
            if node is None or not index.is_stored(node):
                continue
            if index.host_slot(node) < 0:
                index.set_stored([node], False)
                if index.forget([node]):
                    continue
                index.set_stored([node], True)
            pages.append(key)  # It is on the host, held, or leads to others: its turn comes again.
