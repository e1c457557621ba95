"""Calls into the store's library: bounded in time where that is possible, never after the end."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["CallError", "Calls"]

_Result = TypeVar("_Result")
_MAX_LATE = 2
"""So many calls past their deadline are enough to start no more until one returns."""


class CallError(Exception):
    """A call was not made, or not waited for to its end; the text says why."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        """By which it is counted."""


class Calls:
    """Runs calls of a library that may hang, on any thread, and ends the library when none runs.

    The library waits for its master as long as it likes, and using it after its end is a crash. So
    it is counted what runs, and the end comes behind the last.

    Args:
        deadline_secs: A call that takes longer is late. While `_MAX_LATE` are, no other begins.
        finish: Ends the library; called once.
        clock: Seconds that never go back.
    """

    def __init__(
        self,
        deadline_secs: float,
        finish: Callable[[], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._deadline_secs = deadline_secs
        self._finish = finish
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}
        self._closed = threading.Event()
        self._finishing = False
        self._ended = threading.Event()

    @property
    def num_running(self) -> int:
        """Calls that have not returned."""
        with self._lock:
            return len(self._begun)

    def pause(self, seconds: float) -> bool:
        """Wait between two tries; False at once when the library is being closed."""
        return not self._closed.wait(seconds)

    def here(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on this thread, to its end, however long it takes.

        For calls that use memory of the caller: it is theirs until they return.

        Raises CallError if it was not started.
        """
        number = self._begin()
        try:
            return work()
        finally:
            self._end(number)

    def aside(
        self, work: Callable[[], _Result], when_late: Callable[[], object] = lambda: None
    ) -> _Result:
        """Run `work` on a thread of its own and wait for it until the deadline.

        It must use no memory of the caller. `when_late` is called when a call that was given up
        returns after all, to give back what it used.

        Raises CallError if it was not started, or is late.
        """
        number = self._begin()
        done: concurrent.futures.Future[_Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                result = work()
            except BaseException as bad:  # noqa: BLE001  raised again where it is waited for
                self._end(number)
                done.set_exception(bad)
            else:
                self._end(number)
                done.set_result(result)

        # A daemon: a call that never returns must not keep the process.
        threading.Thread(target=run, name="kvferry-mooncake-call", daemon=True).start()
        try:
            return done.result(self._deadline_secs)
        except concurrent.futures.TimeoutError:
            if done.done():  # it returned just now, or raised a TimeoutError of its own
                return done.result()
        done.add_done_callback(lambda _: when_late())
        raise CallError("late", f"no answer within {self._deadline_secs} s; see to the master")

    def close(self) -> None:
        """Start no more, and end the library: now, or behind the last call that runs.

        Waits for that as long as a call may take, and no longer.
        """
        self._closed.set()
        self._finish_if_idle()
        self._ended.wait(self._deadline_secs)

    def _begin(self) -> int:
        with self._lock:
            if self._closed.is_set():
                raise CallError("closed", "the backend is closed")
            now = self._clock()
            late = sum(now - begun > self._deadline_secs for begun in self._begun.values())
            if late >= _MAX_LATE:
                raise CallError(
                    "stuck",
                    f"{late} calls have not returned for more than {self._deadline_secs} s, so no "
                    f"other is started; see to the master",
                )
            number = next(self._numbers)
            self._begun[number] = now
            return number

    def _end(self, number: int) -> None:
        with self._lock:
            del self._begun[number]
        self._finish_if_idle()

    def _finish_if_idle(self) -> None:
        with self._lock:
            if self._finishing or self._begun or not self._closed.is_set():
                return
            self._finishing = True
        threading.Thread(target=self._end_library, name="kvferry-mooncake-end", daemon=True).start()

    def _end_library(self) -> None:
        try:
            self._finish()
        finally:
            self._ended.set()
