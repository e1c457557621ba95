"""What callers hold of what they asked the tiers for. All of it is plain state; nothing blocks
but `wait`, and that has a deadline."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Protocol

from kvferry.errors import CacheError, TransferTimeoutError
from kvferry.tiers.rows import check_whole
from kvferry.tiers.waits import check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvferry.tiers.policy import Reason
    from kvferry.tiers.work import LoadWork, Probe, StoreWork, Work
    from kvferry.types import Tier

__all__ = [
    "DEFAULT_TIMEOUT_SECS",
    "EvictHandle",
    "FetchResult",
    "LoadHandle",
    "Match",
    "ProbeHandle",
    "Pump",
    "StoreHandle",
    "TierHandle",
]

DEFAULT_TIMEOUT_SECS = 60.0
"""How long a wait waits unless told otherwise."""


class Pump(Protocol):
    """Lets time pass until something may have happened, at most so many seconds; then polls."""

    def __call__(self, timeout: float) -> None: ...


class Agree(Protocol):
    """How many tokens of a load all ranks can use."""

    def __call__(self, load: LoadWork, timeout: float | None) -> int: ...


class TierHandle:
    """Base of handles: done or not, and a wait."""

    def __init__(self, work: Work, pump: Pump) -> None:
        self._work = work
        self._pump = pump

    @property
    def done(self) -> bool:
        """Whether all of it is over, well or not."""
        return self._work.done

    @property
    def reason(self) -> Reason:
        """Why not all was done."""
        return self._work.reason

    @property
    def error(self) -> str:
        """What the transfer said, where one failed."""
        return self._work.error

    def wait(self, timeout: float = DEFAULT_TIMEOUT_SECS) -> None:
        """Block until `done`; TransferTimeoutError after `timeout` seconds, and it goes on."""
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        while not self.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(
                    f"{self!r} is not over after {timeout} s; it goes on: wait again, or poll()"
                )
            self._pump(left)

    def pass_time(self, timeout: float) -> None:
        """Let at most `timeout` seconds pass, and take note of what has ended."""
        self._pump(check_seconds("timeout", timeout))

    def __repr__(self) -> str:
        told = "done" if self.done else "running"
        return f"{type(self).__name__}({told}{', ' + self.reason if self.reason else ''})"


class StoreHandle(TierHandle):
    """Pages on their way from the device. Their device rows are not to be written before it is
    `done`, or, on a GPU, by a stream that did not `wait_all`."""

    _work: StoreWork

    @property
    def num_pages(self) -> int:
        """Whole pages that were offered."""
        return self._work.num_pages

    @property
    def num_already(self) -> int:
        """Pages that were here, or on their way."""
        return self._work.num_already

    @property
    def num_submitted(self) -> int:
        """Pages that this store copies."""
        return self._work.num_submitted

    @property
    def num_stored(self) -> int:
        """Pages that it brought to the host, so far."""
        return self._work.num_stored

    @property
    def accepted(self) -> bool:
        """Whether this store copies anything."""
        return self.num_submitted > 0

    def wait_all(self, stream: int | None = None) -> None:
        """Order later work on `stream` after all bytes. Does not block."""
        for transfer in self._work.transfers:
            transfer.wait_all(stream)


class EvictHandle(StoreHandle):
    """Pages that the engine is about to evict. Its device slots are held until `done`."""


class LoadHandle(TierHandle):
    """Pages on their way to the device.

    `wait_layer` and `wait_all` order streams, and say nothing about what the bytes are. Read
    `usable_tokens`, after `wait`, before anything computed from the load leaves the engine, and
    compute again from there on.
    """

    _work: LoadWork

    def __init__(self, work: LoadWork, pump: Pump, agree: Agree) -> None:
        super().__init__(work, pump)
        self._agree = agree
        self._agreed: int | None = None

    @property
    def skip_tokens(self) -> int:
        """What the caller had already."""
        return self._work.skip_tokens

    @property
    def num_tokens(self) -> int:
        """How long the prefix is that the load will have made, if all is well."""
        return self._work.num_tokens

    @property
    def num_pages(self) -> int:
        """How many pages move."""
        return self._work.num_pages

    @property
    def accepted(self) -> bool:
        """Whether this load moves anything."""
        return self.num_pages > 0

    @property
    def paths(self) -> tuple[str, ...]:
        """What carried it, of each transfer that is over."""
        return tuple(self._work.paths)

    @property
    def bad_pages(self) -> tuple[int, ...]:
        """Pages of the prompt whose bytes were not what was stored."""
        return self._work.bad_pages

    @property
    def verified(self) -> bool:
        """Whether digests were compared at all."""
        return self._work.verified

    @property
    def usable_tokens(self) -> int:
        """How long a prefix can be used: `skip_tokens` until the load is over."""
        return self._work.usable_tokens

    @property
    def verified_pages(self) -> int:
        """How many leading pages of those that moved have the right bytes; 0 until it is over, or
        where digests are off."""
        if not self.done or not self.verified or self.error:
            return 0
        if not self.bad_pages:
            return self.num_pages
        return max(0, self.bad_pages[0] - self._work.first_page)

    @property
    def ticket(self) -> tuple[int, ...]:
        """What a `HostPeer` begins the same load by, where ranks share a host copy; may be sent."""
        return tuple(transfer.job for transfer in self._work.transfers)

    def wait_all(self, stream: int | None = None) -> None:
        """Order later work on `stream` after all bytes. Does not block."""
        for transfer in self._work.transfers:
            transfer.wait_all(stream)

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """Order later work on `stream` after the bytes of model layer `layer`. Does not block.

        In a control plane whose data plane is elsewhere there is nothing to wait for: CacheError.
        """
        transfers = self._work.transfers
        if self.num_pages and not transfers:
            raise CacheError(
                "this load runs in the process that has the data plane: wait for layers there"
            )
        moving = [transfer for transfer in transfers if transfer.has_layer(layer)]
        if transfers and not moving:
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
            self._agreed = self._agree(self._work, timeout)
        return self._agreed


class ProbeHandle(TierHandle):
    """A question to storage."""

    _work: Probe

    @property
    def found(self) -> tuple[bool, ...]:
        """For each page asked about, whether storage says that it has it; empty until `done`."""
        return self._work.found


class Match:
    """What is cached of a prompt. Its pages stay on the host until `release`, or the lease ends."""

    def __init__(
        self,
        keys: Sequence[bytes],
        num_tokens: int,
        *,
        tokens_by_tier: Mapping[Tier, int],
        reason: Reason,
        is_stale: Callable[[], bool],
        release: Callable[[], bool] | None,
    ) -> None:
        self.keys = keys
        """Of every whole page of the prompt."""

        self.num_tokens = num_tokens
        """How long the prefix is that can be loaded now; whole pages."""

        self.tokens_by_tier = tokens_by_tier
        """HOST: as `num_tokens`, before ranks agreed. STORAGE: how many more tokens storage is
        thought to have; a prefetch finds out."""

        self.reason = reason
        """Why the prefix is not longer."""

        self._is_stale = is_stale
        self._release = release

    @property
    def is_stale(self) -> bool:
        """Whether the cache was reset since: nothing is loaded of it then."""
        return self._is_stale()

    def up_to(self, num_tokens: int) -> Match:
        """The same, and no more than its first `num_tokens`. The pages stay this one's to release.

        Raises PlanError for more than there are.
        """
        return Match(
            self.keys,
            check_whole("num_tokens", num_tokens, self.num_tokens),
            tokens_by_tier=self.tokens_by_tier,
            reason=self.reason,
            is_stale=self._is_stale,
            release=None,
        )

    def release(self) -> bool:
        """Let the pages go; False if that was done, or the lease had ended."""
        release, self._release = self._release, None
        return release is not None and release()

    def __repr__(self) -> str:
        return f"Match({self.num_tokens} tokens of {len(self.keys)} pages)"

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
