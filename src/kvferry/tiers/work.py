"""What the control plane keeps of a store, a load or a question in flight.

Callers have a handle on it, which tells them what is theirs to know.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from kvferry.tiers.policy import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LoadWork", "Probe", "StoreWork", "TransferWork", "Waitable", "Work"]


class Waitable(Protocol):
    """A transfer as the data plane of this process hands it out."""

    job: int

    def wait_layer(self, layer: int, stream: int | None = None) -> None: ...

    def wait_all(self, stream: int | None = None) -> None: ...

    def has_layer(self, layer: int) -> bool: ...


@dataclasses.dataclass(eq=False, kw_only=True)
class Work:
    """Whatever ends."""

    done: bool = False
    """Whether all of it is over, well or not."""

    reason: Reason = Reason.NONE
    """Why not all was done."""

    error: str = ""
    """What the transfer, or storage, said where it failed."""


@dataclasses.dataclass(eq=False, kw_only=True)
class TransferWork(Work):
    """Transfers between the device and the host."""

    transfers: list[Waitable] = dataclasses.field(default_factory=list)
    """Those that run, or ran, in this process."""

    num_running: int = 0
    num_pages: int = 0
    """Of a store: whole pages that were offered. Of a load: pages that move."""


@dataclasses.dataclass(eq=False, kw_only=True)
class StoreWork(TransferWork):
    """Pages on their way from the device."""

    num_already: int = 0
    num_submitted: int = 0
    num_stored: int = 0


@dataclasses.dataclass(eq=False, kw_only=True)
class LoadWork(TransferWork):
    """Pages on their way to the device."""

    skip_tokens: int
    of_pages: int
    """Whole pages of the prompt: the same on every rank."""

    first_page: int = 0
    """The first that moves."""

    num_tokens: int = 0
    paths: list[str] = dataclasses.field(default_factory=list)
    bad_pages: tuple[int, ...] = ()
    verified: bool = False
    usable: int = 0
    usable_prefixes: tuple[int, ...] = ()
    """Every number of leading pages that can be used, the greatest first; those that the caller
    had before are not among them. Not each shorter one can, where planes are windows or states:
    what the device has belongs to the end of one prefix."""

    @property
    def usable_tokens(self) -> int:
        """How long a prefix can be used."""
        return self.usable if self.done else self.skip_tokens


@dataclasses.dataclass(eq=False, kw_only=True)
class Probe(Work):
    """A question to storage."""

    keys: Sequence[bytes]
    """Of the pages asked about."""

    found: tuple[bool, ...] = ()
    """For each page asked about, whether storage says that it has it; empty until `done`."""
