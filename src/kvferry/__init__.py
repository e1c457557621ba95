"""kvferry carries an LLM's KV cache between device memory and host memory, exactly.

Importing this package loads nothing else: each name below is looked up when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.cache import HostPeer, KVFerry
    from kvferry.errors import KVFerryError
    from kvferry.geometry import Geometry, HitRule, LayerView, Plane, PoolView
    from kvferry.index import ContentSpan, Namespace
    from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
    from kvferry.sharing import SharedHost
    from kvferry.transfer import TransferEngine, TransferHandle, TransferPlan, blocks_to_rows
    from kvferry.types import Direction, Layout, SlotKind

__all__ = [
    "ContentSpan",
    "Direction",
    "Geometry",
    "HitRule",
    "HostPeer",
    "HostPool",
    "KVFerry",
    "KVFerryError",
    "LayerView",
    "Layout",
    "Namespace",
    "Plane",
    "PoolView",
    "RegisteredHostPool",
    "SharedHost",
    "SlotKind",
    "SlotOwner",
    "TransferEngine",
    "TransferHandle",
    "TransferPlan",
    "__version__",
    "blocks_to_rows",
]

__version__ = "0.1.0"

_HOMES = {
    "kvferry.cache": ("HostPeer", "KVFerry"),
    "kvferry.index": ("ContentSpan", "Namespace"),
    "kvferry.errors": ("KVFerryError",),
    "kvferry.geometry": ("Geometry", "HitRule", "LayerView", "Plane", "PoolView"),
    "kvferry.memory": ("HostPool", "RegisteredHostPool", "SlotOwner"),
    "kvferry.sharing": ("SharedHost",),
    "kvferry.transfer": ("TransferEngine", "TransferHandle", "TransferPlan", "blocks_to_rows"),
    "kvferry.types": ("Direction", "Layout", "SlotKind"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
