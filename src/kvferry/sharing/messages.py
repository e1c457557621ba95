"""What a keeper and its peers say to each other. Plain frozen dataclasses that can be pickled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvferry.tiers import Moved, MovePages, Verify
from kvferry.types import SlotKind

__all__ = ["PROTOCOL", "Answer", "Bye", "Hello", "Load", "Message", "Refused", "Welcome"]

PROTOCOL = 1
"""Goes up when a message changes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hello:
    """A process asks to be a peer."""

    rank: int
    geometry: str
    """The fingerprint of its own."""

    protocol: int = PROTOCOL


@dataclasses.dataclass(frozen=True, slots=True)
class Welcome:
    """It is one. The descriptors of the pools come with this message, in the order of `slots`."""

    generation: int
    slots: Mapping[SlotKind, int]
    """How many slots each pool has."""

    verify: Verify


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """It is none, and this is why. The keeper closes the connection."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """A peer is to load this when its engine asks for it, and to answer when it is over."""

    command: MovePages


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A load is over on a peer."""

    moved: Moved


@dataclasses.dataclass(frozen=True, slots=True)
class Bye:
    """A peer reads nothing any more, and will not: whatever it owes is not owed."""


Message = Bye | Hello | Welcome | Refused | Load | Answer
