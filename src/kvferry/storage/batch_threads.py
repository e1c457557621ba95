"""One batch over several threads, the caller's among them."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["BatchThreads"]

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class BatchThreads:
    """At most `num_threads` calls of a batch at a time. Threads start with the first batch."""

    def __init__(self, num_threads: int) -> None:
        self._num_others = num_threads - 1
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._closed = False

    def map(self, work: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
        """``work(item)`` for each, in any order; results in the order of `items`.

        Returns, or raises what `work` raised, when no call of it is running any more: the memory
        that it works on is then the caller's again. So there is no deadline here.
        """
        results: list[_Result | None] = [None] * len(items)
        numbers = itertools.count()

        def drain() -> None:
            while (number := next(numbers)) < len(items):
                results[number] = work(items[number])

        others = [
            future
            for _ in range(min(self._num_others, len(items) - 1))
            if (future := self._submit(drain)) is not None
        ]
        try:
            drain()
        finally:
            # Of those that wait behind another batch nothing is left to do.
            concurrent.futures.wait([one for one in others if not one.cancel()])
        for one in others:
            if not one.cancelled():
                one.result()
        return results  # type: ignore[return-value]  # each was set, or one raised

    def close(self) -> None:
        """Let the threads go; batches that still come run in their caller's."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def _submit(self, work: Callable[[], None]) -> concurrent.futures.Future[None] | None:
        with self._lock:
            if self._closed:
                return None
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(
                    self._num_others, thread_name_prefix="kvferry-storage"
                )
            return self._pool.submit(work)
