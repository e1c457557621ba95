"""Ranks that are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvferry.errors import ConfigError, RankError, RankTimeoutError
from kvferry.ranks.agreement import AgreedRanks

__all__ = ["ThreadRanks"]


class _Meeting:
    """Where threads bring their values. Broken for good once somebody gave up."""

    def __init__(self, size: int) -> None:
        self._brought: list[Sequence[int] | None] = [None] * size
        self._result: list[int] = []
        self._held = 0
        self._failure: type[RankError] | None = None
        self._reason = ""
        self._changed = threading.Condition()

    def all_min(self, rank: int, values: Sequence[int], timeout: float) -> list[int]:
        with self._changed:
            self._check()
            held = self._held
            self._brought[rank] = values
            if None not in self._brought:
                # Nobody brings anything to the next meeting before it has this result.
                self._result = [min(column) for column in zip(*self._brought, strict=True)]
                self._brought = [None] * len(self._brought)
                self._held += 1
                self._changed.notify_all()
                return list(self._result)
            self._changed.wait_for(lambda: self._held != held or self._failure, timeout)
            if self._held != held:
                return list(self._result)
            if self._failure is None:
                away = [str(who) for who, what in enumerate(self._brought) if what is None]
                self._failure = RankTimeoutError
                self._reason = (
                    f"rank{'s' * (len(away) > 1)} {', '.join(away)} of {len(self._brought)} did "
                    f"not come while rank {rank} waited {timeout:.3g} s: look there"
                )
                self._changed.notify_all()
            raise self._failure(self._reason)

    def leave(self, rank: int) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = RankError
                self._reason = f"rank {rank} of {len(self._brought)} has closed: make new ranks"
                self._changed.notify_all()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure(self._reason)


class _ThreadCollective:
    """A seat in a meeting."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting = meeting
        self._rank = rank
        self._size = size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        return self._meeting.all_min(self._rank, values, timeout)

    def close(self) -> None:
        self._meeting.leave(self._rank)


class ThreadRanks(AgreedRanks):
    """A rank that is a thread. Closing one is an error, at once, on all others."""

    @classmethod
    def make(cls, size: int) -> list[ThreadRanks]:
        """Ranks 0 to `size` - 1, one for each thread. Raises ConfigError for less than 1."""
        if size < 1:
            raise ConfigError(f"size={size}: there is at least 1 rank")
        meeting = _Meeting(size)
        return [cls(_ThreadCollective(meeting, rank, size)) for rank in range(size)]
