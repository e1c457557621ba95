"""Ranks: how the processes of one replica agree on numbers, with a deadline, and exchange bytes.

`SingleRank` is alone, `ThreadRanks` are threads of one process, and `ProcessGroupRanks` are
processes joined by torch.distributed; torch is imported when the first of those is made. What
carries bytes between them is `GlooExchange` in host memory and `NcclExchange` between GPUs.
"""

from __future__ import annotations

from kvferry.ranks.agreement import AgreedRanks
from kvferry.ranks.base import Collective, Ranks
from kvferry.ranks.byte_exchange import (
    ByteExchange,
    ExchangeBuffer,
    ExchangeRates,
    Gathering,
    GlooExchange,
)
from kvferry.ranks.machine import ranks_on_machine
from kvferry.ranks.nccl_exchange import NcclExchange
from kvferry.ranks.process_group import GroupCollective, ProcessGroupRanks
from kvferry.ranks.process_watch import ProcessWatch
from kvferry.ranks.single import SingleRank
from kvferry.ranks.threads import ThreadRanks

__all__ = [
    "AgreedRanks",
    "ByteExchange",
    "Collective",
    "ExchangeBuffer",
    "ExchangeRates",
    "Gathering",
    "GlooExchange",
    "GroupCollective",
    "NcclExchange",
    "ProcessGroupRanks",
    "ProcessWatch",
    "Ranks",
    "SingleRank",
    "ThreadRanks",
    "ranks_on_machine",
]
