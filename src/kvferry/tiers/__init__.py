"""The tiers: what is where, what moves when, who carries it: `TierManager` and `DataPlane`."""

from __future__ import annotations

from kvferry.tiers.breaker import Breaker, BreakerState
from kvferry.tiers.commands import (
    Checked,
    CheckPages,
    Command,
    Completion,
    DetachStorage,
    Found,
    Moved,
    MovePages,
    ProbeStorage,
    Quarantine,
    ReadPages,
    StorageAttached,
    StorageDetached,
    StorageDone,
    TryStorage,
    WorkerFault,
    WritePages,
)
from kvferry.tiers.data_plane import DataPlane, RunningTransfer
from kvferry.tiers.fetch import FetchHandle
from kvferry.tiers.handles import (
    EvictHandle,
    FetchResult,
    LoadHandle,
    Match,
    ProbeHandle,
    StoreHandle,
)
from kvferry.tiers.host_tier import HostTier, SlotPool
from kvferry.tiers.link import LinkState
from kvferry.tiers.manager import TierManager
from kvferry.tiers.policy import (
    HitCounter,
    PrefetchPolicy,
    Reason,
    StorePolicy,
    TierOptions,
    Verify,
)
from kvferry.tiers.restore import RestoreRule
from kvferry.tiers.rows import DeviceSlots, check_whole
from kvferry.tiers.split import CommandQueue
from kvferry.tiers.state import TRANSITIONS, Actor, PageState, SlotLedger
from kvferry.tiers.stats import TierStats
from kvferry.tiers.storage_workers import storage_key
from kvferry.tiers.waits import check_seconds

__all__ = [
    "TRANSITIONS",
    "Actor",
    "Breaker",
    "BreakerState",
    "CheckPages",
    "Checked",
    "Command",
    "CommandQueue",
    "Completion",
    "DataPlane",
    "DetachStorage",
    "DeviceSlots",
    "EvictHandle",
    "FetchHandle",
    "FetchResult",
    "Found",
    "HitCounter",
    "HostTier",
    "LinkState",
    "LoadHandle",
    "Match",
    "MovePages",
    "Moved",
    "PageState",
    "PrefetchPolicy",
    "ProbeHandle",
    "ProbeStorage",
    "Quarantine",
    "ReadPages",
    "Reason",
    "RestoreRule",
    "RunningTransfer",
    "SlotLedger",
    "SlotPool",
    "StorageAttached",
    "StorageDetached",
    "StorageDone",
    "StoreHandle",
    "StorePolicy",
    "TierManager",
    "TierOptions",
    "TierStats",
    "TryStorage",
    "Verify",
    "WorkerFault",
    "WritePages",
    "check_seconds",
    "check_whole",
    "storage_key",
]
