"""What callers hold of what they asked the tiers for. All of it is plain state; nothing blocks
but `wait`, and that has a deadline."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

from kvferry.errors import CacheError, TransferTimeoutError
from kvferry.tiers.policy import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.index import Lease
    from kvferry.tiers.manager import TierManager
    from kvferry.types import Tier

__all__ = [
    "DEFAULT_TIMEOUT_SECS",
    "EvictHandle",
    "FetchResult",
    "LoadHandle",
    "Match",
    "Pump",
    "StoreHandle",
    "TierHandle",
    "Waitable",
]

DEFAULT_TIMEOUT_SECS = 60.0
"""How long a wait waits unless told otherwise."""


class Waitable(Protocol):
    """A transfer as the data plane of this process hands it out."""

    job: int

    def wait_layer(self, layer: int, stream: int | None = None) -> None: ...

    def wait_all(self, stream: int | None = None) -> None: ...

    def has_layer(self, layer: int) -> bool: ...


class Pump(Protocol):
    """Lets time pass until something may have happened, at most so many seconds; then polls."""

    def __call__(self, timeout: float) -> None: ...


class TierHandle:
    """Base of handles: done or not, and a wait."""

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self.done = False
        """Whether all of it is over, well or not."""

        self.reason = Reason.NONE
        """Why not all was done."""

        self.error = ""
        """What the transfer said, where one failed."""

    def wait(self, timeout: float = DEFAULT_TIMEOUT_SECS) -> None:
        """Block until `done`; TransferTimeoutError after `timeout` seconds, and it goes on."""
        deadline = time.monotonic() + timeout
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(
                    f"{self!r} is not over after {timeout} s; it goes on: wait again, or poll()"
                )
            self._pump(left)

    def pass_time(self, timeout: float) -> None:
        """Let at most `timeout` seconds pass, and take note of what has ended."""
        self._pump(timeout)

    def __repr__(self) -> str:
        told = "done" if self.done else "running"
        return f"{type(self).__name__}({told}{', ' + self.reason if self.reason else ''})"


class _TransferHandle(TierHandle):
    def __init__(self, pump: Pump) -> None:
        super().__init__(pump)
        self.transfers: list[Waitable] = []
        self.num_running = 0
        self.paths: list[str] = []

    @property
    def accepted(self) -> bool:
        """Whether anything moves, or moved."""
        return bool(self.transfers) or self.num_running > 0 or (self.done and self._num_moved > 0)

    _num_moved = 0

    def wait_all(self, stream: int | None = None) -> None:
        """Order later work on `stream` after all bytes. Does not block."""
        for transfer in self.transfers:
            transfer.wait_all(stream)


class StoreHandle(_TransferHandle):
    """Pages on their way from the device. Their device rows are not to be written before it is
    `done`, or, on a GPU, by a stream that did not `wait_all`."""

    def __init__(self, pump: Pump, *, num_pages: int) -> None:
        super().__init__(pump)
        self.num_pages = num_pages
        """Whole pages that were offered."""

        self.num_already = 0
        """Pages that were here, or on their way."""

        self.num_submitted = 0
        """Pages that this store copies."""

        self.num_stored = 0
        """Pages that it brought to the host, so far."""

    @property
    def accepted(self) -> bool:
        """Whether this store copies anything."""
        return self.num_submitted > 0


class EvictHandle(StoreHandle):
    """Pages that the engine is about to evict. Its device slots are held until `done`."""


class LoadHandle(_TransferHandle):
    """Pages on their way to the device.

    `wait_layer` and `wait_all` order streams, and say nothing about what the bytes are. Read
    `usable_tokens`, after `wait`, before anything computed from the load leaves the engine, and
    compute again from there on.
    """

    def __init__(self, pump: Pump, *, skip_tokens: int, of_pages: int = 0) -> None:
        super().__init__(pump)
        self.skip_tokens = skip_tokens
        self.of_pages = of_pages
        """Whole pages of the prompt: the same on every rank."""

        self.usable_prefixes: tuple[int, ...] = ()
        """Every number of leading pages that can be used, the greatest first; those that the caller
        had before are not among them. Not each shorter one can, where planes are windows or states:
        what the device has belongs to the end of one prefix."""

        self.num_tokens = 0
        """How long the prefix is that the load will have made, if all is well."""

        self.num_pages = 0
        """How many pages move."""

        self.bad_pages: tuple[int, ...] = ()
        """Pages of the prompt whose bytes were not what was stored."""

        self.verified = False
        """Whether digests were compared at all."""

        self.usable = 0
        self.manager: TierManager | None = None
        self._agreed: int | None = None

    @property
    def accepted(self) -> bool:
        """Whether this load moves anything."""
        return self.num_pages > 0

    @property
    def usable_tokens(self) -> int:
        """How long a prefix can be used: `skip_tokens` until the load is over."""
        return self.usable if self.done else self.skip_tokens

    @property
    def verified_pages(self) -> int:
        """How many leading pages of those that moved have the right bytes; 0 until it is over, or
        where digests are off."""
        if not self.done or not self.verified or self.error:
            return 0
        if not self.bad_pages:
            return self.num_pages
        return max(0, self.bad_pages[0] - self._first_page)

    _first_page = 0

    def set_first_page(self, page: int) -> None:
        """The first page of the prompt that moves."""
        self._first_page = page

    @property
    def ticket(self) -> tuple[int, ...]:
        """What a `HostPeer` begins the same load by, where ranks share a host copy; may be sent."""
        return tuple(transfer.job for transfer in self.transfers)

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """Order later work on `stream` after the bytes of model layer `layer`. Does not block.

        In a control plane whose data plane is elsewhere there is nothing to wait for: CacheError.
        """
        if self.num_pages and not self.transfers:
            raise CacheError(
                "this load runs in the process that has the data plane: wait for layers there"
            )
        moving = [transfer for transfer in self.transfers if transfer.has_layer(layer)]
        if self.transfers and not moving:
            raise CacheError(f"this load moves nothing of model layer {layer}")
        for transfer in moving:
            transfer.wait_layer(layer, stream)

    def agreed_tokens(self, timeout: float | None = None) -> int:
        """`usable_tokens`, as all ranks have it: one agreement, the same on every rank.

        To be called once the load is over, on every rank, whatever its own outcome.
        """
        if self._agreed is None:
            if not self.done:
                raise CacheError("the load is not over: wait() first, then agree")
            if self.manager is None:
                raise CacheError("this handle came from no cache")
            self._agreed = self.manager.agree_loaded(self, timeout)
        return self._agreed


@dataclasses.dataclass(eq=False)
class Match:
    """What is cached of a prompt. Its pages stay on the host until `release`, or the lease ends."""

    manager: TierManager = dataclasses.field(repr=False)
    keys: Sequence[bytes] = dataclasses.field(repr=False)
    """Of every whole page of the prompt."""

    num_tokens: int
    """How long the prefix is that can be loaded now; whole pages."""

    tokens_by_tier: Mapping[Tier, int]
    """HOST: as `num_tokens`, before ranks agreed. STORAGE: how many more tokens storage is thought
    to have; a prefetch finds out."""

    reason: Reason
    """Why the prefix is not longer."""

    life: int
    """A match from before a `reset` is stale."""

    lease: Lease | None = dataclasses.field(default=None, repr=False)

    def release(self) -> bool:
        """Let the pages go; False if that was done, or the lease had ended."""
        lease, self.lease = self.lease, None
        return lease is not None and self.manager.release(lease)

    def __enter__(self) -> Match:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclasses.dataclass(frozen=True)
class FetchResult:
    """What a prefetch brought by the time its policy, or its caller, ended it."""

    num_tokens: int
    """How long the prefix on the host is now."""

    num_pages: int
    """How many pages this prefetch brought."""

    reason: Reason
    """Why not more; NONE: all that was asked for is here."""
