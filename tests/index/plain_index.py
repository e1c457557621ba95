"""The index as anybody would write it who has all day: dicts by key, and nothing kept twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Page:
    """What is known of one page. Times are numbers of calls."""

    key: bytes
    parent: bytes | None
    priority: int
    used: int
    hits: int = 0
    slot: int = -1
    state: int = -1
    stored: bool = False
    is_taken: bool = False
    is_state_taken: bool = False
    pins: int = 0
    leases: set[int] = dataclasses.field(default_factory=set)


class PlainIndex:
    """Every question is answered by looking at all pages."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.pages: dict[bytes, Page] = {}
        self.lease_ends: dict[int, float] = {}
        self._calls = 0

    def rank(self, page: Page) -> tuple[int, int]:
        """The lower, the sooner it goes; what was used in one call may go in any order."""
        if self.policy == "mru":
            return 0, -page.used
        what = {"lfu": page.hits, "slru": int(page.hits > 0), "priority": page.priority}
        return what.get(self.policy, 0), page.used

    def may_leave(self) -> list[Page]:
        """Pages that may be evicted now."""
        blocked = {
            page.parent for page in self.pages.values() if page.slot >= 0 and not page.is_taken
        }
        return [
            page
            for page in self.pages.values()
            if page.slot >= 0
            and not (page.is_taken or page.pins or page.leases or page.key in blocked)
        ]

    def states_may_leave(self) -> list[Page]:
        """Pages whose states may be evicted now."""
        return [
            page
            for page in self.pages.values()
            if page.state >= 0 and not (page.is_state_taken or page.pins or page.leases)
        ]

    def insert(self, keys: Sequence[bytes], parent: bytes | None, priority: int) -> None:
        """Make a chain known."""
        self._calls += 1
        for key in keys:
            if key in self.pages:
                page = self.pages[key]
                page.priority = max(page.priority, priority)
            else:
                self.pages[key] = Page(key, parent, priority, self._calls)
            parent = key

    def touch(self, keys: Sequence[bytes]) -> None:
        """A hit on each."""
        self._calls += 1
        for key in keys:
            self.pages[key].hits += 1
            if self.policy != "fifo":
                self.pages[key].used = self._calls

    def set_host(self, keys: Sequence[bytes], slots: Sequence[int]) -> None:
        """Pages come."""
        self._calls += 1
        for key, slot in zip(keys, slots, strict=True):
            self.pages[key].slot = slot
            self.pages[key].used = self._calls

    def clear_host(self, keys: Sequence[bytes]) -> list[int]:
        """Pages go."""
        slots = [self.pages[key].slot for key in keys]
        for key in keys:
            self.pages[key].slot = -1
            self.pages[key].is_taken = False
        return slots

    def clear_state(self, key: bytes) -> int:
        """A state goes."""
        page = self.pages[key]
        slot, page.state, page.is_state_taken = page.state, -1, False
        return slot

    def end_lease(self, generation: int) -> None:
        """It was given back, or its time was up."""
        del self.lease_ends[generation]
        for page in self.pages.values():
            page.leases.discard(generation)

    def forget(self, keys: Sequence[bytes]) -> int:
        """Drop what is of no use; returns how many."""
        before = len(self.pages)
        for start in keys:
            key: bytes | None = start
            while key is not None and key in self.pages:
                page = self.pages[key]
                is_used = page.slot >= 0 or page.state >= 0 or page.stored
                if is_used or page.pins or page.leases or self.children(key):
                    break
                del self.pages[key]
                key = page.parent
        return before - len(self.pages)

    def children(self, key: bytes) -> list[Page]:
        """Pages right behind one."""
        return [page for page in self.pages.values() if page.parent == key]

    def reset(self) -> tuple[list[int], list[int]]:
        """Drop all that is not pinned; returns the slots."""
        self.lease_ends.clear()
        host, states = [], []
        for page in self.pages.values():
            page.leases.clear()
            page.is_taken = page.is_state_taken = False
            if not page.pins:
                host.append(page.slot)
                states.append(page.state)
                page.slot = page.state = -1
                page.stored = False
        self.forget(list(self.pages))
        return [slot for slot in host if slot >= 0], [slot for slot in states if slot >= 0]
