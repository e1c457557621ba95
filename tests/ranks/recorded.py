"""A collective that writes down each call before it makes it, and can be told what to do there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.ranks import Collective


class RecordedCollective:
    """`inner`, with a log: the width of each all_min, in order.

    `before(number)` is called before collective `number`, from 0, is made.
    """

    def __init__(self, inner: Collective, before: Callable[[int], None] | None = None) -> None:
        self._inner = inner
        self._before = before
        self.log: list[int] = []
        self.timeouts: list[float] = []
        self.closed = 0

    @property
    def rank(self) -> int:
        return self._inner.rank

    @property
    def size(self) -> int:
        return self._inner.size

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        number = len(self.log)
        self.log.append(len(values))
        self.timeouts.append(timeout)
        if self._before is not None:
            self._before(number)
        return self._inner.all_min(values, timeout=timeout)

    def close(self) -> None:
        self.closed += 1
        self._inner.close()
