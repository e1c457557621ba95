"""Whether a load is cut into shares or done whole by each rank: one pure function of numbers."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.ranks import ExchangeRates

__all__ = ["Way", "choose_way"]

# What is faster by less than this is not worth depending on others.
_CLOSE = 1.02
# One before anything moves, and one on what came of it.
_AGREEMENTS = 2


@dataclasses.dataclass(frozen=True)
class Way:
    """How a load is carried, and why."""

    sharded: bool
    reason: str
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What ``sharded`` and ``whole`` were estimated to take; empty where no estimate was made."""


def choose_way(
    *,
    num_bytes: int,
    num_pages: int,
    size: int,
    num_steps: int,
    rates: ExchangeRates,
    agree_seconds: float,
    wanted: str | None = None,
) -> Way:
    """The faster way, the same on all ranks for the same numbers.

    Shares cross the links at the same time, and what was loaded is exchanged beside the load of
    the next step: the slower of the two is what it takes, and the other for one step.

    Args:
        num_bytes: Of the load.
        num_pages: N.
        size: How many ranks.
        num_steps: How many all-gathers.
        rates: The slowest of all ranks.
        agree_seconds: What one agreement takes.
        wanted: ``sharded`` or ``whole``, whatever is faster; None: the faster.
    """
    if size < 2:
        return Way(False, "there is one rank")
    if not num_pages:
        return Way(False, "there are no pages")
    whole = num_bytes / (rates.link * 1e9)
    loading = whole / size
    exchanging = num_bytes * (size - 1) / size / (rates.gather * 1e9)
    sharded = (
        max(loading, exchanging)
        + min(loading, exchanging) / num_steps
        + num_steps * rates.gather_seconds
        + _AGREEMENTS * agree_seconds
    )
    seconds = MappingProxyType({"sharded": sharded, "whole": whole})
    if wanted is not None:
        return Way(wanted == "sharded", "asked for", seconds)
    told = f"{sharded * 1e3:.3g} ms in shares, {whole * 1e3:.3g} ms whole"
    if sharded * _CLOSE < whole:
        return Way(True, f"{size} links and an exchange are faster: {told}", seconds)
    return Way(False, f"an exchange does not pay: {told}", seconds)
