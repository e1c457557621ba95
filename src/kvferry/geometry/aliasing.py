"""Whether two layers of a pool share a byte.

Layers may interleave without sharing anything (token_major keeps all layers between two rows of
one), so address ranges alone do not tell. Layers whose ranges meet form a cluster, and of a cluster
the cheap question comes first: layers that step alike repeat one pattern, so one step of it tells
whether they keep apart. Only where that does not settle it are all runs of the cluster looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvferry.geometry.runs import Runs, find_shared_byte, runs_of

if TYPE_CHECKING:
    from kvferry.geometry.view import LayerView

__all__ = ["find_overlap"]


def find_overlap(
    views: Sequence[LayerView], sides: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """The positions of two views that share at least one byte, or None.

    With `sides`, a number for each view, only views of different sides are compared.

    Raises ViewError when views interleave in a way that takes more runs of bytes to compare than
    can be.
    """
    told = range(len(views)) if sides is None else sides
    every = [runs_of(view, index, told[index]) for index, view in enumerate(views)]
    for cluster in _clusters(every):
        suspects = _suspects(cluster)
        if suspects is None:
            continue
        first, second = sorted(suspects, key=lambda runs: runs.view)
        first, second = every[first.view], every[second.view]
        same_steps = first.levels == second.levels
        if same_steps and _meets(second.start - first.start, first.levels, first.size, second.size):
            return first.view, second.view
        found = find_shared_byte(cluster)
        if found is not None:
            return found
    return None


def _clusters(every: Sequence[Runs]) -> Iterator[list[Runs]]:
    """Groups of views of more than one side whose address ranges meet, one with the next."""
    cluster: list[Runs] = []
    reached = 0
    for runs in sorted(every, key=lambda runs: runs.start):
        if cluster and runs.start >= reached:
            if len({one.side for one in cluster}) > 1:
                yield cluster
            cluster, reached = [], runs.end
        cluster.append(runs)
        reached = max(reached, runs.end)
    if len({one.side for one in cluster}) > 1:
        yield cluster


def _suspects(cluster: Sequence[Runs]) -> tuple[Runs, Runs] | None:
    """None if no two views share a byte; otherwise two of different sides that may."""
    unsettled = next((cluster[0], runs) for runs in cluster if runs.side != cluster[0].side)
    stride = max((runs.levels[0][0] for runs in cluster if runs.levels), default=0)
    if not stride:
        return unsettled
    step = _one_step(cluster, stride)
    if step is None:
        return unsettled
    for inner in _clusters(step):
        found = _suspects(inner)
        if found is not None:
            return found
    return None


def _one_step(cluster: Sequence[Runs], stride: int) -> list[Runs] | None:
    """Every view as it lies in one step of `stride`, or None if some view crosses every boundary.

    What a view covers in any step is part of what is returned for it. So views apart in that step
    are apart in all steps; those that meet there might do so in steps that one of them has not.
    """
    folded = [_folded(runs, stride) for runs in cluster]
    # A boundary of steps may lie anywhere that no view crosses. Runs that fill less than a step
    # come around to its begin; that must be left behind first.
    boundary = _boundary(
        [(one.start % stride, one.reach) for one, period in folded if period == stride], stride
    )
    if boundary is None:
        return None
    placed = []
    for one, period in folded:
        within = (one.start - boundary) % period
        if within + one.reach > stride:
            return None
        placed.append(one._replace(start=within))
    return placed


def _folded(runs: Runs, stride: int) -> tuple[Runs, int]:
    """`runs` in one step of `stride`, and the period at which it repeats: `stride` or a part."""
    if runs.levels and runs.levels[0][0] == stride:
        return runs._replace(levels=runs.levels[1:]), stride
    if runs.reach > stride and runs.levels and stride % runs.levels[0][0] == 0:
        period = runs.levels[0][0]
        return runs._replace(levels=((period, stride // period), *runs.levels[1:])), period
    return runs, stride


def _boundary(parts: Sequence[tuple[int, int]], stride: int) -> int | None:
    if any(reach > stride for _, reach in parts):
        return None
    reached = max((start + reach for start, reach in parts), default=0) - stride
    for start, reach in sorted(parts):
        if start >= reached:
            return start
        reached = max(reached, start + reach)
    return None if parts else 0


def _meets(
    distance: int, levels: Sequence[tuple[int, int]], lower_size: int, upper_size: int
) -> bool:
    """Whether some steps bring a run of the upper view, `distance` further on, onto a lower one."""
    if not levels:
        return -upper_size < distance < lower_size
    stride, count = levels[0]
    nearest = distance // stride
    # Inner levels cover less than one stride, so only the steps on either side can reach.
    return any(
        _meets(distance - steps * stride, levels[1:], lower_size, upper_size)
        for steps in (nearest - 1, nearest, nearest + 1, nearest + 2)
        if abs(steps) < count
    )
