"""How much host memory may be taken: a verdict on numbers that were read once. Reads nothing."""

from __future__ import annotations

import dataclasses
import enum

from kvferry.errors import ConfigError
from kvferry.memory.reading import MemoryReading

__all__ = [
    "MAX_DEFAULT_RESERVE_BYTES",
    "BudgetSource",
    "BudgetVerdict",
    "check_budget",
    "default_reserve_bytes",
    "format_bytes",
]

MAX_DEFAULT_RESERVE_BYTES = 4 << 30
_DEFAULT_RESERVE_SHARE = 16


class BudgetSource(enum.StrEnum):
    """What can limit host memory."""

    MACHINE = "machine"
    CGROUP = "cgroup"
    MEMLOCK = "memlock"
    HUGE_PAGES = "huge_pages"


_WORDS = {
    BudgetSource.MACHINE: "the machine",
    BudgetSource.CGROUP: "the cgroup (container)",
    BudgetSource.MEMLOCK: "the lock limit (ulimit -l)",
    BudgetSource.HUGE_PAGES: "the huge pages",
}
_NEXT_STEPS = {
    BudgetSource.MACHINE: "free some memory, or lower reserve_bytes",
    BudgetSource.CGROUP: "raise the cgroup's memory limit, or lower reserve_bytes",
    BudgetSource.MEMLOCK: "raise it with ulimit -l, or grant CAP_IPC_LOCK",
    BudgetSource.HUGE_PAGES: "reserve more of them (vm.nr_hugepages), or use ordinary pages",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BudgetVerdict:
    """Whether each process may take `asked_bytes`, by the limit that leaves the least."""

    asked_bytes: int
    """What one process asks for."""

    processes: int
    """How many processes ask for that much of the same free bytes."""

    free_bytes: int
    """Free by the nearest limit, before the reserve, for all processes together."""

    reserve_bytes: int
    """Of the free bytes, those left to others; 0 for limits that no one else draws on."""

    limit_bytes: int
    """The most one process may take: (free - reserve) / processes, not below 0."""

    limited_by: BudgetSource

    total_bytes: int | None
    """The size of what limits: the machine's memory, the cgroup's limit… None: not known."""

    @property
    def allowed(self) -> bool:
        """Whether what was asked for is within the limit."""
        return self.asked_bytes <= self.limit_bytes

    @property
    def message(self) -> str:
        """Asked, free, reserve and limit in words; after a refusal the next step too."""
        each = f" by each of {self.processes} processes" if self.processes > 1 else ""
        total = "" if self.total_bytes is None else f" of {format_bytes(self.total_bytes)}"
        text = (
            f"{format_bytes(self.asked_bytes)} of host memory were asked for{each}; "
            f"{_WORDS[self.limited_by]} has {format_bytes(self.free_bytes)} free{total}, which "
            f"after a reserve of {format_bytes(self.reserve_bytes)} allows "
            f"{format_bytes(self.limit_bytes)}{each}"
        )
        if self.allowed:
            return text
        return (
            f"{text}. Ask for less, {_NEXT_STEPS[self.limited_by]}, or pass "
            f"unchecked_budget=True to take it regardless"
        )


def default_reserve_bytes(reading: MemoryReading) -> int:
    """The bytes left free unless told otherwise: 1/16 of the memory there is, at most 4 GiB.

    The memory there is: the machine's, or the cgroup's limit where that is smaller.
    """
    total = reading.total_bytes
    if reading.cgroup_limit_bytes is not None:
        total = min(total, reading.cgroup_limit_bytes)
    return min(MAX_DEFAULT_RESERVE_BYTES, total // _DEFAULT_RESERVE_SHARE)


def check_budget(
    asked_bytes: int,
    reading: MemoryReading,
    *,
    reserve_bytes: int | None = None,
    locked: bool = False,
    huge: bool = False,
    processes: int = 1,
) -> BudgetVerdict:
    """Whether `processes` processes may each take `asked_bytes` of host memory.

    `reserve_bytes` stay free of the machine's and the cgroup's memory; None takes
    `default_reserve_bytes`. `locked` also checks the lock limit, which each process has to itself.
    `huge` counts free huge pages instead of ordinary memory, without a reserve: nothing else can
    use them. Raises ConfigError for negative bytes or less than one process.
    """
    if asked_bytes < 0 or processes < 1 or (reserve_bytes is not None and reserve_bytes < 0):
        raise ConfigError(
            f"asked_bytes={asked_bytes}, reserve_bytes={reserve_bytes}, processes={processes}: "
            f"give bytes from 0 on and processes from 1 on"
        )
    reserve = default_reserve_bytes(reading) if reserve_bytes is None else reserve_bytes

    def verdict(
        source: BudgetSource, free: int, reserve: int, total: int | None, share: int = processes
    ) -> BudgetVerdict:
        return BudgetVerdict(
            asked_bytes=asked_bytes,
            processes=processes,
            free_bytes=free,
            reserve_bytes=reserve,
            limit_bytes=max(free - reserve, 0) // share,
            limited_by=source,
            total_bytes=total,
        )

    verdicts: list[BudgetVerdict] = []
    if huge:
        verdicts.append(verdict(BudgetSource.HUGE_PAGES, reading.huge_free_bytes, 0, None))
    else:
        verdicts.append(
            verdict(BudgetSource.MACHINE, reading.available_bytes, reserve, reading.total_bytes)
        )
        if (limit := reading.cgroup_limit_bytes) is not None:
            free = max(limit - reading.cgroup_used_bytes, 0)
            verdicts.append(verdict(BudgetSource.CGROUP, free, reserve, limit))
    if locked and (limit := reading.memlock_limit_bytes) is not None:
        free = max(limit - reading.memlock_used_bytes, 0)
        verdicts.append(verdict(BudgetSource.MEMLOCK, free, 0, limit, share=1))
    return min(verdicts, key=lambda found: found.limit_bytes)


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for people, exact beside the rounded figure: ``1.50 GiB (1610612736 B)``."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << power:
            return f"{num_bytes / (1 << power):.2f} {unit} ({num_bytes} B)"
    return f"{num_bytes} B"
