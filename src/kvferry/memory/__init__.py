"""Host memory: how much may be taken, the memory itself, and who owns which page slot of it."""

from __future__ import annotations

from kvferry.memory.budget import (
    MAX_DEFAULT_RESERVE_BYTES,
    BudgetSource,
    BudgetVerdict,
    check_budget,
    default_reserve_bytes,
)
from kvferry.memory.host_pool import HostPool
from kvferry.memory.mapping import HostMapping
from kvferry.memory.reading import MemoryReading, read_memory
from kvferry.memory.registered import RegisteredHostPool
from kvferry.memory.slot_owners import SlotOwner, SlotOwners
from kvferry.memory.slot_runs import SlotRun, SlotRunAllocator

__all__ = [
    "MAX_DEFAULT_RESERVE_BYTES",
    "BudgetSource",
    "BudgetVerdict",
    "HostMapping",
    "HostPool",
    "MemoryReading",
    "RegisteredHostPool",
    "SlotOwner",
    "SlotOwners",
    "SlotRun",
    "SlotRunAllocator",
    "check_budget",
    "default_reserve_bytes",
    "read_memory",
]
