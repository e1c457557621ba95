"""Host memory: how much may be taken, the memory, who owns its page slots, what a GPU reaches."""

from __future__ import annotations

from kvferry.memory.attached import AttachedHostPool
from kvferry.memory.backing import HUGE_PAGE_BYTES, Backing, HugePages, PageKind
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
from kvferry.memory.numa import device_node
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.memory.pinned import is_registered, look_up, register
from kvferry.memory.pool_sizes import (
    DEFAULT_DEVICE_RATIO,
    DEFAULT_STATE_FRACTION,
    PoolSizes,
    split_budget,
)
from kvferry.memory.reading import MemoryReading, read_memory
from kvferry.memory.registered import RegisteredHostPool
from kvferry.memory.registration import PinDriver, PinnedChunk, Registration
from kvferry.memory.slot_owners import SlotOwner, SlotOwners
from kvferry.memory.slot_runs import SlotRun, SlotRunAllocator

__all__ = [
    "DEFAULT_DEVICE_RATIO",
    "DEFAULT_STATE_FRACTION",
    "HUGE_PAGE_BYTES",
    "MAX_DEFAULT_RESERVE_BYTES",
    "AttachedHostPool",
    "Backing",
    "BudgetSource",
    "BudgetVerdict",
    "ContextPinDriver",
    "HostMapping",
    "HostPool",
    "HugePages",
    "MemoryReading",
    "PageKind",
    "PinDriver",
    "PinnedChunk",
    "PoolSizes",
    "RegisteredHostPool",
    "Registration",
    "SlotOwner",
    "SlotOwners",
    "SlotRun",
    "SlotRunAllocator",
    "check_budget",
    "default_reserve_bytes",
    "device_node",
    "format_bytes",
    "is_registered",
    "look_up",
    "read_memory",
    "register",
    "split_budget",
]
