"""What the control plane asks of the data plane, and what comes back.

Plain frozen dataclasses of numbers, bytes and arrays: they can be pickled, so that the two planes
may live in one process or in two. A command carries a job number; its completion names it again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from kvferry.storage import ItemStatus
from kvferry.types import Direction, SlotKind

__all__ = [
    "CheckPages",
    "Checked",
    "Command",
    "Completion",
    "DetachStorage",
    "Found",
    "MovePages",
    "Moved",
    "ProbeStorage",
    "Quarantine",
    "ReadPages",
    "StorageAttached",
    "StorageDetached",
    "StorageDone",
    "TryStorage",
    "WorkerFault",
    "WritePages",
]


@dataclasses.dataclass(frozen=True, slots=True)
class MovePages:
    """Move pages between host slots and device rows."""

    job: int
    direction: Direction
    kind: SlotKind
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    device_slots: Any = None
    """Shape ``[pages, P]``: as `TransferPlan.build` takes them. Host arrays, where pickled."""

    plane_slots: Mapping[str, Any] | None = None
    planes: tuple[str, ...] | None = None
    device_run: int = 1
    stream: int | None = None
    """A stream of the process that has the data plane; None: its current one."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckPages:
    """Read host pages once more and compare them with their digests."""

    job: int
    kind: SlotKind
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProbeStorage:
    """Which of these pages does storage say it has?"""

    job: int
    generation: int
    """Which attachment of a backend is meant."""

    kind: SlotKind
    keys: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReadPages:
    """Read pages from storage into host slots."""

    job: int
    generation: int
    kind: SlotKind
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WritePages:
    """Write pages from host slots to storage."""

    job: int
    generation: int
    kind: SlotKind
    keys: tuple[bytes, ...]
    host_slots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Quarantine:
    """Look at pages of storage whose copies had wrong bytes: those that have them too go.

    Of the answer OK is a page that is whole, and stays; CORRUPT one that was put away; MISS one
    that is not there; FAILED one that could not be read, and stays.
    """

    job: int
    generation: int
    kind: SlotKind
    keys: tuple[bytes, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TryStorage:
    """Write, read and remove a small object: does a backend that kept failing work again?

    The answer is of one item: OK, or FAILED.
    """

    job: int
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class DetachStorage:
    """Start nothing new on this attachment, and close its backend when its workers are done."""

    job: int
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A transfer is over."""

    job: int
    error: str = ""
    """Why it failed as a whole; none of its pages may be used then."""

    bad_pages: tuple[int, ...] = ()
    """Positions whose digests do not match."""

    verified: bool = False
    """Whether digests were made or checked at all."""

    path: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    """From its first to its last byte by the GPU's clock, where that was noted; else from its
    submission to when its end was seen."""

    link_seconds: tuple[float, float] | None = None
    """When its bytes were on the link, by the GPU's clock; None where that was not noted."""

    mover: str = ""
    """What carried it on a GPU, and why that; empty in host memory."""

    route_reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Checked:
    """Which host pages, read once more, have the bytes that their digests say."""

    job: int
    good: tuple[bool, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """Answer to a probe. `error` where the backend could not say."""

    job: int
    found: tuple[bool, ...]
    error: str = ""
    refused: bool = False
    """Nobody asked the backend: it is not its fault."""


@dataclasses.dataclass(frozen=True, slots=True)
class StorageDone:
    """A read, write, quarantine or trial is over, item by item."""

    job: int
    statuses: tuple[ItemStatus, ...]
    reason: str = ""
    """Of the first item that is not OK."""

    num_bytes: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerFault:
    """A storage job raised; its own completion says so too. The worker goes on."""

    kind: str
    """The class of what was raised."""

    message: str
    job: int = -1


@dataclasses.dataclass(frozen=True, slots=True)
class StorageAttached:
    """A backend may be used, under this generation."""

    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class StorageDetached:
    """A backend's workers are done and it was closed."""

    generation: int
    job: int = -1
    error: str = ""
    """What closing it raised."""


Command: TypeAlias = (
    MovePages
    | CheckPages
    | ProbeStorage
    | ReadPages
    | WritePages
    | Quarantine
    | TryStorage
    | DetachStorage
)
Completion: TypeAlias = (
    Moved | Checked | Found | StorageDone | WorkerFault | StorageAttached | StorageDetached
)
