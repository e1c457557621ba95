"""A pool's memory: the budget is asked, then the system; for huge pages first, if those may be."""

from __future__ import annotations

import dataclasses
import mmap
from typing import Literal

from kvferry.errors import BudgetError
from kvferry.memory.backing import Backing, HugePages, check_huge_pages, is_wasteful, whole_pages
from kvferry.memory.budget import BudgetVerdict, check_budget, format_bytes
from kvferry.memory.mapping import HostMapping
from kvferry.memory.numa import choose_node
from kvferry.memory.reading import MemoryReading, read_memory

__all__ = ["PoolMapping", "PoolPages"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolPages:
    """What kind of memory a pool wants; see `HostPool` for each."""

    huge_pages: HugePages
    numa_node: int | Literal["auto"] | None
    device_bus_id: str | None
    shared: bool
    locked: bool
    threads: int | None


class PoolMapping:
    """The mapping, the verdict that allowed it, and what was got.

    Raises BudgetError, which names the pool as `what`, when there is not that much memory.
    """

    def __init__(
        self,
        what: str,
        num_bytes: int,
        wanted: PoolPages,
        *,
        alignment: int,
        reserve_bytes: int | None,
        reading: MemoryReading | None,
        processes: int,
        unchecked_budget: bool,
    ) -> None:
        check_huge_pages(wanted.huge_pages)
        self._what, self._num_bytes, self._wanted = what, num_bytes, wanted
        self._alignment = max(alignment, mmap.PAGESIZE)
        self._choice = choose_node(wanted.numa_node, wanted.device_bus_id)
        self._reading = read_memory() if reading is None else reading
        self._processes = processes
        self._notes = [self._choice.note] * bool(self._choice.note)
        self.verdict: BudgetVerdict
        self.mapping = self._huge(unchecked_budget) or self._ordinary(
            reserve_bytes, unchecked_budget
        )
        got = self.mapping.backing
        self.backing: Backing = dataclasses.replace(got, notes=(*self._notes, *got.notes))

    def _huge(self, unchecked_budget: bool) -> HostMapping | None:
        """In reserved huge pages; None: not those, and there may be others."""
        huge, asked = self._reading.huge_page_bytes, self._wanted.huge_pages
        if asked not in ("always", "auto"):
            return None
        rounded = whole_pages(self._num_bytes, huge)
        self.verdict = check_budget(
            rounded, self._reading, locked=self._wanted.locked, huge=True, processes=self._processes
        )
        if asked == "always":
            self._check(unchecked_budget)
            return self._map("always")
        if is_wasteful(self._num_bytes, huge):
            self._notes.append(
                f"no reserved huge pages: whole ones would take {format_bytes(rounded)}"
            )
        elif not self.verdict.allowed:
            self._notes.append(
                f"no reserved huge pages: {format_bytes(self._reading.huge_free_bytes)} of them "
                f"are free"
            )
        else:
            try:
                return self._map("always")
            except BudgetError as gone:
                # Somebody else took them since they were counted.
                self._notes.append(f"no reserved huge pages: {gone}")
        return None

    def _ordinary(self, reserve_bytes: int | None, unchecked_budget: bool) -> HostMapping:
        self.verdict = check_budget(
            self._num_bytes,
            self._reading,
            reserve_bytes=reserve_bytes,
            locked=self._wanted.locked,
            processes=self._processes,
        )
        self._check(unchecked_budget)
        return self._map("never" if self._wanted.huge_pages == "never" else "transparent")

    def _check(self, unchecked_budget: bool) -> None:
        if not self.verdict.allowed and not unchecked_budget:
            raise BudgetError("; ".join([f"{self._what}: {self.verdict.message}", *self._notes]))

    def _map(self, huge_pages: HugePages) -> HostMapping:
        return HostMapping(
            self._num_bytes,
            alignment=self._alignment,
            locked=self._wanted.locked,
            huge_pages=huge_pages,
            huge_page_bytes=self._reading.huge_page_bytes,
            numa_node=self._choice.node,
            shared=self._wanted.shared,
            threads=self._wanted.threads,
        )
