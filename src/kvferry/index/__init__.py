"""The prefix index: keys of pages, which tiers hold each page, what leaves the host next."""

from __future__ import annotations

from kvferry.index.eviction import EvictionPolicyName
from kvferry.index.hashing import KEY_BYTES, KEY_VERSION, ContentSpan, Namespace, page_keys
from kvferry.index.leases import Lease
from kvferry.index.prefix_index import Match, PrefixIndex
from kvferry.index.reset import Dropped

__all__ = [
    "KEY_BYTES",
    "KEY_VERSION",
    "ContentSpan",
    "Dropped",
    "EvictionPolicyName",
    "Lease",
    "Match",
    "Namespace",
    "PrefixIndex",
    "page_keys",
]
