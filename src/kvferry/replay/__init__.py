"""What a cache of some size would have found of a recorded stream of requests."""

from __future__ import annotations

from kvferry.replay.plot import text_plot, write_plot
from kvferry.replay.simulation import Replay, ReplayResult, Share, TierResult
from kvferry.replay.trace import BLOCK_TOKENS, TracedRequest, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "Replay",
    "ReplayResult",
    "Share",
    "TierResult",
    "TracedRequest",
    "read_trace",
    "text_plot",
    "write_plot",
]
