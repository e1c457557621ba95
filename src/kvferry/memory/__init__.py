"""Host memory: how much may be taken, the memory, who owns its page slots, what a GPU reaches."""

from __future__ import annotations

from kvferry.memory.budget import (
    MAX_DEFAULT_RESERVE_BYTES,
    BudgetSource,
    BudgetVerdict,
    check_budget,
    default_reserve_bytes,
    format_bytes,
)
from kvferry.memory.host_pool import HostPool
from kvferry.memory.mapping import HostMapping
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.memory.pinned import is_registered, look_up, register
from kvferry.memory.reading import MemoryReading, read_memory
from kvferry.memory.registered import RegisteredHostPool
from kvferry.memory.registration import PinDriver, PinnedChunk, Registration
from kvferry.memory.slot_owners import SlotOwner, SlotOwners
from kvferry.memory.slot_runs import SlotRun, SlotRunAllocator

__all__ = [
    "MAX_DEFAULT_RESERVE_BYTES",
    "BudgetSource",
    "BudgetVerdict",
    "ContextPinDriver",
    "HostMapping",
    "HostPool",
    "MemoryReading",
    "PinDriver",
    "PinnedChunk",
    "RegisteredHostPool",
    "Registration",
    "SlotOwner",
    "SlotOwners",
    "SlotRun",
    "SlotRunAllocator",
    "check_budget",
    "default_reserve_bytes",
    "format_bytes",
    "is_registered",
    "look_up",
    "read_memory",
    "register",
]
