"""An agreement: two collectives, whatever the values are and whatever happened on a rank.

The first has a fixed size. In it each rank tells how many values it brings, or why it brings none,
so that all ranks find the same fault, and none waits for one that has given up. The second has the
size that the first agreed on.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from kvferry.errors import ConfigError, RankError, RankMismatchError, RankTimeoutError
from kvferry.ranks.base import Collective

__all__ = ["AgreedRanks"]

_MAX_TIMEOUT_SECS = 86_400.0
# A rank without time still meets the others for this long: they learn that it gave up.
_LEAST_SECS = 0.001

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
# What a rank puts in the place of the others' headers: any header is smaller.
_NOT_MINE = _HIGHEST
_HEADER_VERSION = 1

_NO_FAULT, _BAD_VALUES, _BAD_TIMEOUT, _NO_TIME = range(4)
_FAULTS = {
    _BAD_VALUES: "brought values that are no integers of 64 bits",
    _BAD_TIMEOUT: "has no timeout that can be used",
    _NO_TIME: "came with no time left",
}


class _Header(NamedTuple):
    """What a rank tells the others before its values."""

    version: int
    agreement: int
    length: int
    fault: int


class _Offer(NamedTuple):
    """What a rank brings, and the error that it will raise itself."""

    values: list[int]
    timeout: float
    fault: int = _NO_FAULT
    error: RankError | ConfigError | None = None


class AgreedRanks:
    """`Ranks` that meet in `collective`, which nothing else may use."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self._agreements = 0
        self._failure: str | None = None
        self._closed = False
        self._entry = threading.Lock()

    @property
    def rank(self) -> int:
        """Which rank this is, from 0."""
        return self._collective.rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._collective.size

    def agree_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        """The smallest of each value over all ranks; see `Ranks.agree_min`."""
        if not self._entry.acquire(blocking=False):
            # Which of two calls meets which of another rank would be chance.
            self._failure = self._failure or "two threads called agree_min at once"
            raise self._error("two threads called agree_min at once; let one thread do it")
        try:
            if self._closed:
                raise self._error("agree_min was called after close(); make new ranks")
            if self._failure is not None:
                raise self._error(
                    f"an earlier agreement failed, so ranks may be out of step; make new ranks. "
                    f"The failure was: {self._failure}"
                )
            return self._agree(_offer(values, timeout))
        except BaseException as bad:
            # An interrupt too: the others may be one collective further.
            self._failure = self._failure or str(bad) or type(bad).__name__
            raise
        finally:
            self._entry.release()

    def close(self) -> None:
        """Take no more part; a second call does nothing."""
        self._closed = True
        self._collective.close()

    def _agree(self, offer: _Offer) -> list[int]:
        deadline = time.monotonic() + offer.timeout
        self._agreements += 1
        own = _Header(_HEADER_VERSION, self._agreements, len(offer.values), offer.fault)
        try:
            found = _fault_in(self._exchange(own, offer.timeout))
            # Also after a fault, which all ranks have seen: there are always two collectives.
            length = own.length if found is None else 0
            padded = [*offer.values[:length], *[0] * (length == 0)]
            left = max(deadline - time.monotonic(), _LEAST_SECS)
            agreed = self._collective.all_min(padded, timeout=left)
        except RankError as bad:
            if offer.error is None:
                raise
            raise offer.error from bad
        if offer.error is not None:
            raise offer.error
        if found is not None:
            raise found
        return agreed[:length]

    def _exchange(self, own: _Header, timeout: float) -> list[_Header]:
        width = len(own)
        table = [_NOT_MINE] * (width * self.size)
        table[self.rank * width : (self.rank + 1) * width] = own
        told = self._collective.all_min(table, timeout=timeout)
        return [_Header(*told[at : at + width]) for at in range(0, len(table), width)]

    def _error(self, text: str) -> RankError:
        return RankError(f"rank {self.rank} of {self.size}: {text}")


def _offer(values: Sequence[int], timeout: float) -> _Offer:
    """What to bring; never raises for a wrong argument, since the others have to be told of it."""
    if not isinstance(timeout, int | float) or not math.isfinite(timeout):
        bad = f"timeout={timeout!r} is no number of seconds"
    elif timeout > _MAX_TIMEOUT_SECS:
        bad = f"timeout={timeout!r} is longer than a day ({_MAX_TIMEOUT_SECS:.0f} seconds)"
    elif timeout <= 0:
        late = RankTimeoutError(
            f"timeout={timeout!r}: no time was left for the agreement; begin with more than 0 "
            f"seconds"
        )
        return _Offer([], _LEAST_SECS, _NO_TIME, late)
    else:
        return _examined(values, float(timeout))
    error = ConfigError(f"{bad}: give more than 0 and at most {_MAX_TIMEOUT_SECS:.0f}")
    return _Offer([], _LEAST_SECS, _BAD_TIMEOUT, error)


def _examined(values: Sequence[int], timeout: float) -> _Offer:
    numbers: list[int] = []
    try:
        for value in values:
            number = operator.index(value)
            if not _LOWEST <= number <= _HIGHEST:
                raise OverflowError("it has more than 64 bits")
            numbers.append(number)
    except (TypeError, OverflowError) as bad:
        error = ConfigError(
            f"value {len(numbers)} of an agreement cannot be used ({bad}): give integers from "
            f"{_LOWEST} to {_HIGHEST}"
        )
        error.__cause__ = bad
        return _Offer([], timeout, _BAD_VALUES, error)
    return _Offer(numbers, timeout)


def _fault_in(headers: list[_Header]) -> RankError | None:
    """What is wrong with the agreement; the same on every rank, as all have the same headers."""
    if any(header.version != _HEADER_VERSION for header in headers):
        return RankMismatchError(
            f"ranks speak {_by_rank([header.version for header in headers])} for the version of an "
            f"agreement: run one version of kvferry on all of them, and let nothing else use their "
            f"group"
        )
    if len({header.agreement for header in headers}) > 1:
        return RankMismatchError(
            f"ranks are in agreement number {_by_rank([header.agreement for header in headers])}: "
            f"make the same calls on every rank"
        )
    for rank, header in enumerate(headers):
        if header.fault:
            what = _FAULTS.get(header.fault, f"has fault {header.fault}")
            return RankError(f"rank {rank} of {len(headers)} {what}: see the error there")
    if len({header.length for header in headers}) > 1:
        return RankMismatchError(
            f"ranks brought {_by_rank([header.length for header in headers])} values: bring as "
            f"many on every rank"
        )
    return None


def _by_rank(numbers: list[int]) -> str:
    """``3 (ranks 0, 2) and 4 (rank 1)``."""
    ranks_of: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        ranks_of.setdefault(number, []).append(rank)
    return " and ".join(
        f"{number} (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
        for number, ranks in sorted(ranks_of.items())
    )
