"""Switches of a running cache."""

from __future__ import annotations

import itertools
import threading

import pytest

from kvferry.errors import ConfigError
from kvferry.switches import Switches, SwitchState


@pytest.mark.parametrize("state", list(itertools.product([True, False], repeat=3)))
def test_flips_change_what_is_named_alone(state: tuple[bool, bool, bool]) -> None:
    """Each switch stands for itself, and a flip answers with what was before."""
    switches = Switches(store=state[0], load=state[1], storage=state[2])
    for name in SwitchState._fields:
        before = switches.state
        assert switches.flip(**{name: not getattr(before, name)}) == before
        assert switches.state == before._replace(**{name: not getattr(before, name)})
    assert switches.state == tuple(not one for one in state)
    assert (switches.store, switches.load, switches.storage) == switches.state
    assert switches.flip() == switches.state


@pytest.mark.parametrize("value", ["false", 0, 1, "", [], object()])
def test_what_is_no_truth_value_changes_nothing(value: object) -> None:
    """Text such as "false" is refused, and the other switches of the same call stay too."""
    switches = Switches()
    with pytest.raises(ConfigError, match=r"storage=.* must be True or False"):
        switches.flip(store=False, storage=value)  # type: ignore[arg-type]
    assert switches.state == (True, True, True)
    with pytest.raises(ConfigError, match=r"load=.* must be True or False"):
        Switches(load=value)  # type: ignore[arg-type]


def test_a_reader_sees_all_of_a_flip() -> None:
    """Two switches that are flipped in one call are never seen apart, whatever the threads do."""
    switches = Switches(store=True, load=True)
    begin, stop = threading.Barrier(3), threading.Event()
    torn = []

    def read() -> None:
        begin.wait(60)
        while not stop.is_set():
            state = switches.state
            if state.store != state.load:
                torn.append(state)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    begin.wait(60)
    for number in range(20_000):
        switches.flip(store=bool(number % 2), load=bool(number % 2))
    stop.set()
    for reader in readers:
        reader.join(60)
    assert torn == []


def test_flips_of_different_switches_are_all_kept() -> None:
    """A flip that comes in the middle of another one is not undone by it."""
    switches = Switches(store=True, load=True, storage=True)
    inside, tried, go_on = threading.Event(), threading.Event(), threading.Event()

    class _Slow(SwitchState):
        def _replace(self, **changes: bool) -> SwitchState:  # type: ignore[override]
            inside.set()
            assert go_on.wait(60)
            return super()._replace(**changes)

    class _Watched:
        def __init__(self) -> None:
            self._lock = threading.Lock()

        def __enter__(self) -> None:
            if inside.is_set():
                tried.set()
            self._lock.acquire()

        def __exit__(self, *_args: object) -> None:
            self._lock.release()

    switches._state = _Slow(True, True, True)
    switches._lock = _Watched()  # type: ignore[assignment]
    first = threading.Thread(target=switches.flip, kwargs={"store": False})
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=switches.flip, kwargs={"load": False})
    second.start()
    assert tried.wait(60)
    go_on.set()
    first.join(60)
    second.join(60)
    assert switches.state == (False, False, True)


def test_repr_shows_all() -> None:
    """The three are readable in a log."""
    assert repr(Switches(load=False)) == "Switches(store=True, load=False, storage=True)"
