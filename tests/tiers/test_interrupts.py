"""Ctrl-C at any line of the cache's bookkeeping: the books stay whole, and the cache goes on."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from tests.tiers.rig import PAGE, PLANE_SETS, Rig

import kvferry
from kvferry.errors import KVFerryError
from kvferry.storage import MemoryBackend
from kvferry.tiers import Match
from kvferry.tiers.interrupts import _Later, undivided

_SOURCES = tuple(
    str(Path(kvferry.__file__).parent / folder) + "/"
    for folder in ("tiers", "index", "memory", "metrics")
)
PROMPT = list(range(5 * PAGE))
OTHER = list(range(1000, 1000 + 5 * PAGE))
_MOST_LINES = 250
"""Of an operation; of more, every second or third is tried."""


@pytest.fixture(autouse=True)
def python_s_handler() -> Iterator[None]:
    """Python's own, also where the tests were started with Ctrl-C ignored, as in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class _Lines:
    """Counts lines of the cache's code, and sends SIGINT at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.seen = 0
        self._at = at

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_SOURCES):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self._at:
                signal.raise_signal(signal.SIGINT)
        return self._trace

    def __enter__(self) -> _Lines:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


def _make(planes: str) -> Rig:
    rig = Rig(PLANE_SETS[planes], num_slots=8, num_states=2, backend=MemoryBackend(), num_threads=1)
    rig.stored_in_storage(OTHER, at=10)
    rig.store(PROMPT).wait(20)
    rig.settle()
    return rig


def _poll_what_came(rig: Rig) -> None:
    rig.manager.store(rig.keys(PROMPT[: 3 * PAGE] + OTHER), rig.slots(30, 8))
    rig.data.wait(5)
    rig.manager.poll()


def _prefetch(rig: Rig) -> None:
    fetch = rig.manager.prefetch(rig.keys(OTHER), forced=True)
    rig.until(lambda: fetch.num_pages > 0)
    fetch.look()
    fetch.cancel()


def _match(rig: Rig) -> Match:
    return rig.match(PROMPT)


_OPERATIONS: dict[str, Callable[[Rig], object]] = {
    "match": lambda rig: rig.match(PROMPT).release(),
    "load": lambda rig: rig.load(_match(rig), 20),
    "store_with_eviction": lambda rig: rig.store(OTHER, at=10),
    "poll": _poll_what_came,
    "prefetch": _prefetch,
    "reset": lambda rig: (rig.load(_match(rig), 20), rig.manager.reset()),
    "detach": lambda rig: rig.manager.detach_storage(force=True),
}


def _interrupted(rig: Rig, operation: Callable[[Rig], object], line: int) -> bool:
    """Whether SIGINT at this line came through as KeyboardInterrupt, as it must."""
    try:
        with _Lines(line):
            operation(rig)
    except KeyboardInterrupt:
        return True
    return False


def _goes_on(rig: Rig) -> None:
    """Nothing is held when all has ended, and prompts are stored and loaded as before."""
    rig.settle()
    rig.clock.now += 1000  # leases and prefetches of which nobody has the handle
    rig.settle()
    rig.check_idle()
    tokens = list(range(5000, 5000 + 2 * PAGE))
    was = rig.pages(40, 2)
    stored = rig.store(tokens, at=40)
    stored.wait(20)
    rig.settle()
    rig.wipe(50, 2)
    with rig.match(tokens) as found:
        loaded = rig.load(found, 50)
    loaded.wait(20)
    assert loaded.usable_tokens == 2 * PAGE
    assert all(rig.same(50 + page, was[page]) for page in range(2))
    rig.close()


def _lines_of(planes: str, operation: Callable[[Rig], object]) -> Iterator[int]:
    rig = _make(planes)
    with _Lines() as lines:
        operation(rig)
    rig.settle()
    assert lines.seen > 20
    step = -(-lines.seen // _MOST_LINES)
    yield from range(1, lines.seen + 1, step)


@pytest.mark.parametrize("planes", ["kv", "full_and_state"])
@pytest.mark.parametrize("name", _OPERATIONS)
def test_an_interrupt_at_any_line(name: str, planes: str) -> None:
    """It comes through, at the end of the bookkeeping, and nothing is lost by it."""
    operation = _OPERATIONS[name]
    came = tried = 0
    for line in _lines_of(planes, operation):
        rig = _make(planes)
        came += _interrupted(rig, operation, line)
        tried += 1
        _goes_on(rig)
    # How many lines a poll has depends on what a thread was done with by then.
    assert came > tried // 2


def test_without_the_delay_it_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where interrupts come between the lines of a store."""
    monkeypatch.setattr(_Later, "hold", lambda _: None)
    operation = _OPERATIONS["store_with_eviction"]
    for line in _lines_of("kv", operation):
        rig = _make("kv")
        _interrupted(rig, operation, line)
        try:
            _goes_on(rig)
        except (KVFerryError, AssertionError):
            return
    pytest.fail("no line was found at which an interrupt does harm")


def test_the_handler_of_the_program_is_called_and_stays() -> None:
    """Once, after the method, also where the method raises; one that is set meanwhile stays."""
    told: list[str] = []
    before = signal.signal(signal.SIGINT, lambda *_: told.append("handler"))
    try:
        mine = signal.getsignal(signal.SIGINT)

        @undivided
        def inner() -> None:
            signal.raise_signal(signal.SIGINT)
            told.append("inner")

        @undivided
        def outer(error: Exception | None = None) -> int:
            inner()
            signal.raise_signal(signal.SIGINT)
            told.append("outer")
            if error is not None:
                raise error
            return 5

        assert outer() == 5
        assert told == ["inner", "outer", "handler"]
        with pytest.raises(ValueError, match="mine"):
            outer(ValueError("mine"))
        assert told[3:] == ["inner", "outer", "handler"]
        assert signal.getsignal(signal.SIGINT) is mine

        @undivided
        def replacing() -> None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        replacing()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        inner()  # nobody listens, and nothing is held back
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
