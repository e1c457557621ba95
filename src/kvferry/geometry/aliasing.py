"""Whether two layers of a pool share a byte.

Layers may interleave without sharing anything (token_major keeps all layers between two rows of
one), so address ranges alone do not tell. Three questions, cheapest first: do the ranges meet; if
both step alike, does any step bring a piece of one onto a piece of the other; if they step
differently, do their pieces, written out and sorted, meet.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import ViewError

if TYPE_CHECKING:
    from kvferry.geometry.view import LayerView

__all__ = ["find_overlap"]

# Sorting this many runs of bytes takes about a second; a pool beyond it is refused, not guessed at.
_MAX_RUNS = 1 << 23


class _Shape(NamedTuple):
    """A view as runs of bytes: each `size` long, stepped over by `levels`, widest first."""

    size: int
    levels: tuple[tuple[int, int], ...]
    """(stride, count) of every level that steps."""

    @property
    def num_runs(self) -> int:
        return math.prod(count for _, count in self.levels)


def find_overlap(
    views: Sequence[LayerView], sides: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """The positions of two views that share at least one byte, or None.

    With `sides`, a number for each view, only views of different sides are compared.

    Raises ViewError when two views interleave with different strides and more rows than can be
    compared.
    """
    shapes = [_shape(view) for view in views]
    apart = _groups_apart(views, shapes)
    open_views: list[int] = []
    for index in sorted(range(len(views)), key=lambda index: views[index].address):
        start = views[index].address
        open_views = [other for other in open_views if views[other].end > start]
        for other in open_views:
            if sides is not None and sides[other] == sides[index]:
                continue
            if shapes[other].levels == shapes[index].levels in apart:
                continue
            if _share_a_byte(start - views[other].address, shapes[other], shapes[index]):
                return (other, index) if other < index else (index, other)
        open_views.append(index)
    return None


def _shape(view: LayerView) -> _Shape:
    levels = sorted(
        (stride, count)
        for stride, count in (
            (view.block_stride, view.num_blocks),
            (view.row_stride, view.block_rows),
            (view.piece_stride, view.num_pieces),
        )
        if count > 1
    )
    size = view.piece_size
    while levels and levels[0][0] == size:
        size *= levels.pop(0)[1]
    return _Shape(size, tuple(reversed(levels)))


def _groups_apart(
    views: Sequence[LayerView], shapes: Sequence[_Shape]
) -> set[tuple[tuple[int, int], ...]]:
    """The levels whose views all fit side by side into one step: the usual case, told quickly."""
    groups: dict[tuple[tuple[int, int], ...], list[tuple[int, int]]] = {}
    for view, shape in zip(views, shapes, strict=True):
        groups.setdefault(shape.levels, []).append((view.address, view.address + shape.size))
    apart = set()
    for levels, runs in groups.items():
        runs.sort()
        if any(ended[1] > begun[0] for ended, begun in itertools.pairwise(runs)):
            continue
        # All of them together step like one view; that view must not reach into its next step.
        covered = runs[-1][1] - runs[0][0]
        for stride, count in reversed(levels):
            if stride < covered:
                break
            covered += (count - 1) * stride
        else:
            apart.add(levels)
    return apart


def _share_a_byte(distance: int, lower: _Shape, upper: _Shape) -> bool:
    if lower.levels == upper.levels:
        return _meets(distance, lower.levels, lower.size, upper.size)
    return _runs_meet(distance, lower, upper)


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


def _runs_meet(distance: int, lower: _Shape, upper: _Shape) -> bool:
    import numpy as np

    if lower.num_runs + upper.num_runs > _MAX_RUNS:
        raise ViewError(
            f"two layers interleave in memory with different strides and {lower.num_runs} + "
            f"{upper.num_runs} runs of bytes, more than the {_MAX_RUNS} that can be compared; "
            f"register them as pools of their own, or give them the same strides"
        )
    starts, ends = [], []
    for first, shape in ((0, lower), (distance, upper)):
        begin = np.array([first], dtype=np.int64)
        for stride, count in shape.levels:
            begin = (begin[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        starts.append(begin)
        ends.append(begin + shape.size)
    begin, end = np.concatenate(starts), np.concatenate(ends)
    order = np.argsort(begin, kind="stable")
    return bool((end[order][:-1] > begin[order][1:]).any())
