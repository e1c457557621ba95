"""One load over the links of several ranks, whose device pools are to hold the same bytes.

Each rank loads its share of the pages over its own link, and the ranks exchange them.
"""

from __future__ import annotations

from kvferry.exchange.sharded_load import ShardedLoad, WholeLoad
from kvferry.exchange.sharded_loader import DEFAULT_EXCHANGE_BYTES, ShardedLoader
from kvferry.exchange.shares import Round, cut_shares, rounds_of
from kvferry.exchange.way import Way, choose_way

__all__ = [
    "DEFAULT_EXCHANGE_BYTES",
    "Round",
    "ShardedLoad",
    "ShardedLoader",
    "Way",
    "WholeLoad",
    "choose_way",
    "cut_shares",
    "rounds_of",
]
