"""Ranks: how the processes of one model replica agree on numbers, with a deadline.

`SingleRank` is alone, `ThreadRanks` are threads of one process, and `ProcessGroupRanks` are
processes joined by torch.distributed; torch is imported when the first of those is made.
"""

from __future__ import annotations

from kvferry.ranks.agreement import AgreedRanks
from kvferry.ranks.base import Collective, Ranks
from kvferry.ranks.machine import ranks_on_machine
from kvferry.ranks.process_group import GroupCollective, ProcessGroupRanks
from kvferry.ranks.single import SingleRank
from kvferry.ranks.threads import ThreadRanks

__all__ = [
    "AgreedRanks",
    "Collective",
    "GroupCollective",
    "ProcessGroupRanks",
    "Ranks",
    "SingleRank",
    "ThreadRanks",
    "ranks_on_machine",
]
