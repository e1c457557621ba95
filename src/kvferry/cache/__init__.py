"""`KVFerry`, the tiered cache: everything below put together, as an engine uses it.

An engine whose planes are in two processes makes its parts itself, from the same config.
"""

from __future__ import annotations

from kvferry.cache.ferry import KVFerry
from kvferry.cache.parts import (
    backend_options,
    make_engines,
    make_pools,
    resolved_config,
    tier_options,
)
from kvferry.cache.peer import HostPeer, PeerLoad
from kvferry.cache.reports import CloseReport, Explanation, FlushReport

__all__ = [
    "CloseReport",
    "Explanation",
    "FlushReport",
    "HostPeer",
    "KVFerry",
    "PeerLoad",
    "backend_options",
    "make_engines",
    "make_pools",
    "resolved_config",
    "tier_options",
]
