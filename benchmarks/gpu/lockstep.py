"""Engines that work side by side, step by step, so that a percent between them can be told.

A round of a small engine is thousands of launches by one thread, and how fast that thread is
changes by tens of percent within seconds: clocks, neighbours on the host, the collector of Python.
Rounds one after the other compare such moments. Here the engines take turns step by step, each with
the same prompts, and who is first changes with every step: whatever slows one slows the others.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Counted", "Interval", "Spent", "in_lockstep", "median_interval", "quiet"]

_Clock = Callable[[], float]


class Interval(NamedTuple):
    """Where the median lies."""

    median: float
    low: float
    high: float
    """The median is between `low` and `high` with 95 %, whatever the distribution; below six
    values, no two of them promise that, and these are the least and the largest."""


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median of at least one value, and the narrowest pair of ranks that encloses it so surely.

    Each value is as likely above the median as below, so how many are below is binomial.
    """
    ranked = sorted(values)
    count, outside, rank = len(ranked), 0.0, 0
    for below in range((count - 1) // 2):
        outside += 2 * math.comb(count, below) / 2**count
        if outside > 1 - confidence:
            break
        rank = below
    return Interval(statistics.median(ranked), ranked[rank], ranked[count - 1 - rank])


class Spent:
    """Seconds inside of calls."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Add what passes inside."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began
            self.calls += 1


class Counted:
    """An object of kvferry that counts the time of its calls, and of those of what they return."""

    def __init__(self, inner: Any, spent: Spent) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Any:
        with self._spent.counting():
            found = getattr(self._inner, name)
        return self._called(found) if callable(found) else found

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **given: Any) -> Any:
            plain = [one._inner if isinstance(one, Counted) else one for one in args]
            with self._spent.counting():
                found = call(*plain, **given)
            return self._wrapped(found)

        return counted

    def _wrapped(self, found: Any) -> Any:
        is_ours = type(found).__module__.split(".")[0] == "kvferry"
        return Counted(found, self._spent) if is_ours else found

    def __enter__(self) -> Any:
        with self._spent.counting():
            return self._wrapped(self._inner.__enter__())

    def __exit__(self, *about: Any) -> Any:
        with self._spent.counting():
            return self._inner.__exit__(*about)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No collection inside: it would stop whoever happens to allocate."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def in_lockstep(
    engines: Mapping[str, Any],
    prompts: Sequence[list[int]],
    max_new: int,
    *,
    turn: int = 0,
    clock: _Clock = time.perf_counter,
) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Every engine serves all prompts; they take turns, and each order of them comes equally often.

    Args:
        engines: By name.
        prompts: The same for all.
        max_new: Tokens that each of them is answered with.
        turn: Which round it is: the first step is the longest, as it computes prompts, and the
            order in it changes with the round.
        clock: Tells seconds.

    Returns:
        Seconds of each engine, and its requests.
    """
    seconds = dict.fromkeys(engines, 0.0)
    asked: dict[str, list[Any]] = {}
    every = list(itertools.permutations(engines))
    first = turn % len(every)
    orders = itertools.cycle(every[first:] + every[:first])
    with quiet():
        for way in next(orders):
            began = clock()
            asked[way] = [engines[way].submit(prompt, max_new) for prompt in prompts]
            seconds[way] += clock() - began
        while any(busy(engine) for engine in engines.values()):
            for way in next(orders):
                if busy(engines[way]):
                    began = clock()
                    engines[way].step()
                    seconds[way] += clock() - began
    return seconds, asked


def busy(engine: Any) -> bool:
    """Whether it has a request."""
    return bool(engine.waiting or engine.running or engine.leaving)
