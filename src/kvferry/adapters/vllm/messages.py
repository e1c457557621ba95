"""What passes between the scheduler's side and the workers' sides. All of it can be pickled.

These classes know no engine; the connector tells vLLM that they are its kinds of metadata.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvferry.tiers import Command, Completion

__all__ = ["LoadTicket", "RankHandshake", "RankReport", "StepMetadata"]


@dataclasses.dataclass(frozen=True)
class LoadTicket:
    """Whose load a command is part of, and into which blocks each of its pages goes."""

    request_id: str
    blocks_of_page: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class StepMetadata:
    """From the scheduler's side to every worker, once a step."""

    commands: list[Command] = dataclasses.field(default_factory=list)
    tickets: dict[int, LoadTicket] = dataclasses.field(default_factory=dict)
    """By job number, of the loads among the commands."""

    lost_blocks: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """By request: blocks that were promised and cannot be loaded at all."""


@dataclasses.dataclass
class RankReport:
    """From the workers to the scheduler's side: what is over, by rank."""

    completions: dict[int, list[Completion]]

    def aggregate(self, other: RankReport) -> RankReport:
        """Both reports as one, as vLLM does it for the workers of one step."""
        merged = {rank: list(done) for rank, done in self.completions.items()}
        for rank, done in other.completions.items():
            merged.setdefault(rank, []).extend(done)
        return RankReport(merged)


@dataclasses.dataclass(frozen=True)
class RankHandshake:
    """What a worker found when it got its KV tensors."""

    rank: int
    num_ranks: int
    geometry: dict[str, Any]
    """As `Geometry.to_dict` tells it; the same on all ranks."""

    layout: str
    """How the bytes of a block are to be read: shapes, strides, types, and who wrote them."""

    num_slots: int
    storage_generation: int
    """The attachment of storage that is there from the start; 0: none."""

    groups_of_plane: dict[str, int]
    """Which of the engine's block tables a plane goes by."""
