"""Attaching storage that hangs: it ends in time, requests go on, and nothing is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.cache.ferry_rig import TOKENS, Engine

from kvferry.cache.opening import BackendOpening
from kvferry.cache.steps import drive
from kvferry.errors import ConfigError, StorageError
from kvferry.storage import Buffers, ItemResult, MemoryBackend, StorageBackend
from kvferry.tiers import LinkState

_HERE = __name__
_DEADLINE_SECS = 60


class Slow(MemoryBackend):
    """Blocks at one step until it is let go, and has a file descriptor while it is open."""

    begun: ClassVar[threading.Event]
    release: ClassVar[threading.Event]
    made: ClassVar[list[Slow]]

    def __init__(self, *, at: str = "open") -> None:
        super().__init__()
        self.at = at
        self.closed = threading.Event()
        self._descriptor = os.open(os.devnull, os.O_RDONLY)
        self.made.append(self)
        self._step("open")

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        self._step("write")
        return super().write_from(keys, buffers)

    def close(self) -> None:
        if not self.closed.is_set():
            os.close(self._descriptor)
        super().close()
        self.closed.set()
        self._step("close")

    def _step(self, name: str) -> None:
        if self.at == name == "close":
            raise OSError("as told")
        if self.at == name:
            self.begun.set()
            assert self.release.wait(_DEADLINE_SECS)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing has begun, and whatever blocks goes on in the end."""
    Slow.begun, Slow.release, Slow.made = threading.Event(), threading.Event(), []
    yield
    Slow.release.set()
    for thread in threading.enumerate():
        if thread.name == "kvferry-attach":
            thread.join(_DEADLINE_SECS)
            assert not thread.is_alive()


@pytest.mark.parametrize("at", ["open", "write"])
def test_a_backend_that_hangs_as_it_is_attached(at: str, engine: Engine) -> None:
    """There is an error in time, another backend may come, and the late one is closed."""
    with engine.cache() as cache:
        with pytest.raises(StorageError, match=r"not open and tried out after 0\.05 s"):
            cache.attach_storage(f"{_HERE}:Slow?at={at}", timeout=0.05)
        assert cache.stats().storage is LinkState.NONE
        cache.attach_storage("memory://")
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        assert cache.flush(20).complete
        (late,) = Slow.made
        assert not late.closed.is_set()
        Slow.release.set()
        assert late.closed.wait(_DEADLINE_SECS)
        assert cache.flush(20).complete


def test_one_that_was_open_is_left_to_its_owner(engine: Engine) -> None:
    """Who opened it closes it."""
    backend = Slow(at="write")
    with engine.cache() as cache, pytest.raises(StorageError, match="see to what it waits for"):
        cache.attach_storage(backend, timeout=0.05)
    Slow.release.set()
    for thread in threading.enumerate():
        if thread.name == "kvferry-attach":
            thread.join(_DEADLINE_SECS)
    assert not backend.closed.is_set()
    backend.close()


def test_requests_go_on_meanwhile(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends while a backend opens is noted, and it opens after all."""
    with engine.cache() as cache:
        polls, poll = 0, cache.poll

        def counted() -> int:
            nonlocal polls
            polls += Slow.begun.is_set()
            if polls == 3:
                Slow.release.set()
            return poll()

        monkeypatch.setattr(cache, "poll", counted)
        cache.attach_storage(f"{_HERE}:Slow")
        assert polls >= 3
        assert cache.stats().storage is LinkState.ATTACHED
        assert cache.detach_storage(20)


def test_ctrl_c_while_a_backend_opens(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is closed when it is open, as nobody waits for it."""
    with engine.cache() as cache:

        def interrupted() -> int:
            raise KeyboardInterrupt

        monkeypatch.setattr(cache, "poll", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.attach_storage(f"{_HERE}:Slow")
        monkeypatch.undo()
        Slow.release.set()
        assert Slow.begun.wait(_DEADLINE_SECS)
        assert Slow.made[0].closed.wait(_DEADLINE_SECS)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_seconds_that_are_none(timeout: float, engine: Engine) -> None:
    """They are refused before anything is opened."""
    with engine.cache() as cache, pytest.raises(ConfigError, match="timeout"):
        cache.attach_storage(f"{_HERE}:Slow", timeout=timeout)
    assert Slow.made == []


def test_the_last_moment() -> None:
    """A backend that is open as it is given up is closed, once, by whoever comes second."""
    backend = Slow(at="never")

    def at_the_deadline() -> StorageBackend:
        return backend

    opening = BackendOpening(at_the_deadline, probe=False, owned=True, wake=threading.Event().set)
    # The thread has ended, and the waiter gives up all the same.
    opening._thread.start()
    opening._thread.join(_DEADLINE_SECS)
    assert not backend.closed.is_set()
    opening._give_up()
    assert backend.closed.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("error", "words"), [(SystemExit, "was ended"), (StorageError, "as told")])
def test_an_opening_that_ends_badly(error: type[BaseException], words: str) -> None:
    """Whatever ends the thread is an error here, and no wait without end."""

    def make() -> Any:
        raise error("as told")

    woken = threading.Event()
    opening = BackendOpening(make, probe=True, owned=True, wake=woken.set)
    with pytest.raises(StorageError, match=words):
        drive(opening.steps(_DEADLINE_SECS), lambda: woken.wait(_DEADLINE_SECS))


def test_one_that_cannot_be_closed_either(engine: Engine) -> None:
    """What is told is why it was not attached."""
    made: Callable[[], StorageBackend] = lambda: Slow(at="close")  # noqa: E731
    opening = BackendOpening(made, probe=False, owned=True, wake=threading.Event().set)
    opening._thread.start()
    opening._thread.join(_DEADLINE_SECS)
    opening._give_up()
    assert Slow.made[0].closed.is_set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["open", "probe"])
def test_a_backend_that_ends_its_thread(where: str) -> None:
    """By what is no error: that is no backend that does what it should, and it is closed."""
    made: list[Slow] = []

    class Leaving(Slow):
        def _step(self, name: str) -> None:
            if name == "write":
                raise GeneratorExit

    def make() -> StorageBackend:
        if where == "open":
            raise GeneratorExit
        made.append(Leaving(at="never"))
        return made[0]

    woken = threading.Event()
    opening = BackendOpening(make, probe=True, owned=True, wake=woken.set)
    with pytest.raises(StorageError, match="the thread that opened storage was ended"):
        drive(opening.steps(_DEADLINE_SECS), lambda: woken.wait(_DEADLINE_SECS))
    assert all(one.closed.is_set() for one in made)
    assert len(made) == (where == "probe")
