"""Ctrl-C while the books of the cache are being written: it waits until they are whole.

Index, ledger, pool and jobs change together, line by line. An exception that comes between two of
these lines would leave a slot that nobody owns. So the handler of SIGINT, which raises
KeyboardInterrupt as a rule, is called when the bookkeeping is done: nothing in there waits.
"""

from __future__ import annotations

import functools
import signal
import threading
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["undivided"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class _Later:
    """Holds SIGINT back. Of the main thread alone: no other runs handlers of signals."""

    def __init__(self) -> None:
        self._is_held = False
        self._came = False
        self._frame: FrameType | None = None

    def hold(self) -> Callable[[int, FrameType | None], object] | None:
        """Begin; the handler that `let_go` takes. None: there is nothing to hold, or it is held."""
        if self._is_held or threading.get_ident() != threading.main_thread().ident:
            return None
        handler = signal.getsignal(signal.SIGINT)
        if not callable(handler):  # SIG_IGN, SIG_DFL, or one that is not Python's
            return None
        self._came = False
        signal.signal(signal.SIGINT, self._note)
        # Nothing is raised by that signal from here on.
        self._is_held = True
        return handler

    def let_go(self, handler: Callable[[int, FrameType | None], object]) -> None:
        """End, and call `handler` where the signal came meanwhile."""
        self._is_held = False
        if signal.getsignal(signal.SIGINT) == self._note:
            signal.signal(signal.SIGINT, handler)
        if self._came:
            frame, self._frame = self._frame, None
            handler(signal.SIGINT, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self._came, self._frame = True, frame


_later = _Later()


def undivided(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """`method`, done as a whole before SIGINT is told of. It must not wait for anything."""

    @functools.wraps(method)
    def called(*args: _P.args, **given: _P.kwargs) -> _R:
        handler = _later.hold()
        if handler is None:
            return method(*args, **given)
        try:
            return method(*args, **given)
        finally:
            _later.let_go(handler)

    return called
