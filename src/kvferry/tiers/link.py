"""The control plane's side of a storage attachment: may it be used, and what did it promise?"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvferry.tiers.breaker import Breaker, BreakerState
from kvferry.tiers.policy import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.switches import Switches
    from kvferry.tiers.policy import TierOptions

__all__ = ["LinkState", "MissMemory", "StorageLink"]

_MAX_MISSES = 1 << 16
_MAX_WHY = 500


class LinkState(enum.StrEnum):
    """Where an attachment stands."""

    NONE = "none"
    ATTACHED = "attached"
    DETACHING = "detaching"
    """Nothing new is started; what is in flight ends, or is given up."""


class MissMemory:
    """Pages that storage said it had, and had not: not asked for again for a while. Bounded."""

    def __init__(self, *, seconds: float, clock: Callable[[], float]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def add(self, key: bytes) -> None:
        """A read of `key` found nothing, or nothing good."""
        self._until[key] = self._clock() + self._seconds
        self._until.move_to_end(key)
        while len(self._until) > _MAX_MISSES:
            self._until.popitem(last=False)

    def clear(self, key: bytes) -> None:
        """`key` was written."""
        self._until.pop(key, None)

    def first_missing(self, keys: Sequence[bytes]) -> int:
        """Position of the first of `keys` that is not to be asked for; their number if none is."""
        if not self._until:
            return len(keys)
        now = self._clock()
        for position, key in enumerate(keys):
            until = self._until.get(key)
            if until is not None:
                if until > now:
                    return position
                del self._until[key]
        return len(keys)


class StorageLink:
    """One backend at a time, by generation; jobs of an earlier one are known by their number."""

    def __init__(
        self, options: TierOptions, switches: Switches, *, clock: Callable[[], float]
    ) -> None:
        self._options = options
        self._switches = switches
        self._clock = clock
        self.state = LinkState.NONE
        self.generation = 0
        self.breaker = self._new_breaker()
        self.misses = MissMemory(seconds=options.miss_memory_secs, clock=clock)
        self.num_late = 0
        """Jobs that passed their deadline."""

        self._last_failure = ""

    def _new_breaker(self) -> Breaker:
        return Breaker(
            failures=self._options.breaker_failures,
            seconds=self._options.breaker_secs,
            clock=self._clock,
        )

    def attach(self, generation: int) -> None:
        """A backend is there."""
        self.state = LinkState.ATTACHED
        self.generation = generation
        self.breaker = self._new_breaker()
        self.misses = MissMemory(seconds=self._options.miss_memory_secs, clock=self._clock)

    def begin_detach(self) -> None:
        """Start nothing new."""
        if self.state is LinkState.ATTACHED:
            self.state = LinkState.DETACHING

    def detached(self, generation: int) -> None:
        """The backend is gone, or given up."""
        if generation == self.generation:
            self.state = LinkState.NONE

    def is_current(self, generation: int) -> bool:
        """Whether `generation` is the attachment that is there: what it says of storage holds.

        One that was given up may still answer, and says nothing of the next.
        """
        return generation == self.generation and self.state is not LinkState.NONE

    def refusal(self) -> Reason:
        """Why storage cannot be used just now; NONE if it can."""
        if self.state is not LinkState.ATTACHED:
            return Reason.NO_STORAGE
        if not self._switches.storage:
            return Reason.SWITCHED_OFF
        if not self.breaker.is_usable:
            return Reason.STORAGE_DOWN
        return Reason.NONE

    @property
    def is_trial_due(self) -> bool:
        """Whether storage is down, and it is time to find out whether it still is."""
        return (
            self.state is LinkState.ATTACHED
            and self._switches.storage
            and self.breaker.state is BreakerState.TRYING
        )

    @property
    def trouble(self) -> str:
        """Why storage is down, in words; empty if it is not."""
        if self.state is not LinkState.ATTACHED or self.breaker.is_usable:
            return ""
        last = f", the last: {self._last_failure}" if self._last_failure else ""
        left = self.breaker.seconds_left
        tried = f"it is tried again in {left:.3g} s" if left else "it is being tried"
        return f"{self.breaker.num_failures} failures in a row{last}; {tried}"

    def judge(self, generation: int, *, ok: bool, why: str) -> None:
        """An operation of this generation is over: the backend works, or it does not."""
        if not self.is_current(generation):
            return
        if ok:
            self.breaker.succeeded()
        else:
            self.breaker.failed()
            self._last_failure = why[:_MAX_WHY]
