"""Engines in lockstep: what is compared, what is counted, and how sure a median is."""

from __future__ import annotations

import collections
import gc
import itertools
from typing import Any

import pytest

from lockstep import Counted, Spent, in_lockstep, median_interval, quiet


class _Engine:
    """Takes as many steps as it is told tokens, and notes each."""

    def __init__(self, name: str, log: list[str], clock: _Hands, step_secs: int) -> None:
        self.name, self.log, self.clock, self.step_secs = name, log, clock, step_secs
        self.waiting, self.running, self.leaving = (list[int]() for _ in range(3))
        self.most = 100

    def submit(self, prompt: list[int], max_new: int) -> list[int]:
        self.running = [min(max_new, self.most)]
        return prompt

    def step(self) -> None:
        assert not gc.isenabled()
        self.log.append(self.name)
        self.clock.now += self.step_secs
        self.running = [left - 1 for left in self.running if left > 1]


class _Hands:
    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> float:
        return self.now


def test_each_order_comes_equally_often() -> None:
    """Three engines, six orders: in every place of a step each engine is as often as the others."""
    clock, log = _Hands(), list[str]()
    engines = {
        name: _Engine(name, log, clock, secs) for name, secs in (("a", 1), ("b", 2), ("c", 4))
    }
    seconds, asked = in_lockstep(engines, [[7]], 12, clock=clock)
    assert seconds == {"a": 12, "b": 24, "c": 48}
    assert asked == {name: [[7]] for name in engines}
    steps = [tuple(log[at : at + 3]) for at in range(0, len(log), 3)]
    assert set(collections.Counter(steps).values()) == {2}
    assert len(set(steps)) == 6


def test_the_order_of_the_first_step_changes_with_the_round() -> None:
    """It is the longest step, and no engine is always the first in it."""
    firsts = set()
    for turn in range(6):
        clock, log = _Hands(), list[str]()
        engines = {name: _Engine(name, log, clock, 1) for name in "abc"}
        in_lockstep(engines, [[7]], 1, turn=turn, clock=clock)
        firsts.add(tuple(log))
    assert firsts == set(itertools.permutations("abc"))


def test_an_engine_that_is_done_is_left_alone() -> None:
    """One that needs fewer steps does not count those of the others."""
    clock, log = _Hands(), list[str]()
    engines = {name: _Engine(name, log, clock, 1) for name in "ab"}
    engines["b"].most = 2
    seconds, _ = in_lockstep(engines, [[7]], 5, clock=clock)
    assert seconds == {"a": 5, "b": 2}


def test_nothing_is_collected_inside() -> None:
    """The collector is off, and on again after an error."""
    before = gc.get_freeze_count()

    def fails() -> None:
        assert not gc.isenabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), quiet():
        fails()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before


@pytest.mark.parametrize(
    ("count", "low", "high"), [(1, 0, 0), (5, 0, 4), (6, 0, 5), (9, 1, 7), (15, 3, 11), (24, 6, 17)]
)
def test_between_which_ranks_a_median_lies(count: int, low: int, high: int) -> None:
    """The ranks of tables of the sign test, whatever order the values come in."""
    found = median_interval(list(reversed(range(count))))
    assert found == ((count - 1) / 2, low, high)


class _Handle:
    __module__ = "kvferry.double"
    num_tokens = 3

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *about: object) -> None:
        pass

    def wait(self) -> int:
        return 5


class _Cache:
    __module__ = "kvferry.double"

    def match(self, tokens: list[int]) -> _Handle:
        assert tokens
        return _Handle()

    def load(self, found: Any) -> _Handle:
        assert type(found) is _Handle
        return found

    def fails(self) -> None:
        raise ZeroDivisionError


def test_calls_are_counted_with_those_of_what_they_return() -> None:
    """A handle counts too, and kvferry gets back what it gave; other objects are left alone."""
    spent = Spent()
    cache = Counted(_Cache(), spent)
    with cache.match([1]) as found:
        handle = cache.load(found)
    before = spent.calls
    assert (handle.wait(), handle.num_tokens) == (5, 3)
    assert spent.calls > before
    assert isinstance(handle, Counted)
    with pytest.raises(ZeroDivisionError):
        cache.fails()
    assert spent.seconds > 0
