"""What follows from when transfers and steps of compute began and ended: numbers only."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Span = tuple[float, float]
"""Begin and end on the GPU's clock, in milliseconds since the gate opened."""


class Loss(NamedTuple):
    """What transfers cost compute."""

    alone_ms: float
    """Of a step."""

    beside_ms: float
    window_ms: float
    """From the first transfer's begin to the last one's end."""

    @property
    def slowdown(self) -> float:
        """0.05: a step takes 5 % longer."""
        return self.beside_ms / self.alone_ms - 1

    def extra_ms_per_gb(self, num_bytes: int) -> float:
        """Compute time lost for 10^9 bytes, where `num_bytes` were moved in the window."""
        return self.window_ms * (1 - self.alone_ms / self.beside_ms) / (num_bytes / 1e9)


def inside(marks: Sequence[float], begin: float, end: float) -> list[float]:
    """How long each step took that lies wholly between `begin` and `end`."""
    return [
        after - before
        for before, after in itertools.pairwise(marks)
        if begin <= before and after <= end
    ]


def lost(
    alone: Sequence[Sequence[float]], beside: Sequence[float], spans: Sequence[Span]
) -> Loss | None:
    """What the steps between marks lose to transfers at `spans`; None: the compute ended before.

    Of each run alone the same steps count, as a GPU that gets hot slows down.
    """
    begin, end = spans[0][0], spans[-1][1]
    of_both = inside(beside, begin, end)
    if end > beside[-1] or not of_both:
        return None
    steps = [index for index, mark in enumerate(beside) if begin <= mark <= end]
    of_one = [took for marks in alone for took in inside(marks, marks[steps[0]], marks[steps[-1]])]
    return Loss(statistics.fmean(of_one), statistics.fmean(of_both), end - begin)


def moved_until(spans: Sequence[Span], until: float) -> float:
    """How many transfers were carried out by `until`, the last of them in part."""
    return sum(min(max((until - begin) / (end - begin), 0.0), 1.0) for begin, end in spans)


def rates_of_both(spans: Mapping[str, Sequence[Span]], num_bytes: int) -> dict[str, float]:
    """GB/s of each direction while both are at it."""
    begin = max(each[0][0] for each in spans.values())
    end = min(each[-1][1] for each in spans.values())
    return {
        name: (moved_until(each, end) - moved_until(each, begin)) * num_bytes / (end - begin) / 1e6
        for name, each in spans.items()
    }


def rate(spans: Sequence[Span], num_bytes: int) -> float:
    """The median of the transfers, GB/s."""
    return num_bytes / statistics.median(end - begin for begin, end in spans) / 1e6
