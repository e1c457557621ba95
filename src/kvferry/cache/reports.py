"""What a cache says of itself: how a flush or a close went, and why a prompt hits or does not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.index import Namespace
    from kvferry.types import Tier

__all__ = ["CloseReport", "Explanation", "FlushReport"]


@dataclasses.dataclass(frozen=True)
class FlushReport:
    """What `KVFerry.flush` came to."""

    complete: bool
    """Every page of the host is in storage, as storage itself says, and every one before it."""

    num_left: int
    """Pages that still wait or are being written."""

    num_unstored: int
    """Pages of the host that storage does not have, those that wait among them."""

    num_holes: int
    """Pages that storage has, but not all before them: of no use after a restart."""


@dataclasses.dataclass(frozen=True)
class CloseReport:
    """What `KVFerry.close` came to."""

    clean: bool
    """Everything has ended and all memory was given back."""

    jobs: int
    """Commands without an answer."""

    parked_slots: int
    """Host slots that a read or a store still writes to; their memory is kept."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Why a prompt hits as far as it does, and no further."""

    namespace: Namespace
    num_pages: int
    """Whole pages of the prompt."""

    tokens_by_tier: Mapping[Tier, int]
    """How many leading tokens each tier can serve by itself."""

    first_missing_key: str
    """Hex of the key of the first page that the host lacks; empty if it has all."""

    stops: Mapping[Tier, str]
    """The first reason for stopping, by tier."""

    def __str__(self) -> str:
        lines = [f"{self.num_pages} whole pages in {self.namespace}"]
        for tier, tokens in self.tokens_by_tier.items():
            lines.append(f"{tier}: {tokens} tokens; {self.stops[tier]}")
        if self.first_missing_key:
            lines.append(f"first page that the host lacks: {self.first_missing_key}")
        return "\n".join(lines)
