"""Views as runs of bytes, and an exact look for two runs that share one.

A *run* is bytes in a row without a gap. Many views are looked at together, in windows of
addresses, so that the work is the number of runs and not the number of pairs of views, and the
memory is that of one window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import ViewError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry.view import LayerView

    Int64s = NDArray[np.int64]

__all__ = ["Runs", "find_shared_byte", "runs_of"]

# Sorting this many runs takes about ten seconds; a pool beyond it is refused, not guessed at.
_MAX_RUNS = 1 << 28
# Runs sorted at once: enough to make numpy worth it, few enough for 100 MB.
_WINDOW_RUNS = 1 << 22
# Beyond it, byte offsets would not fit the 64 bits they are sorted in.
_MAX_REACH = 1 << 62


class Runs(NamedTuple):
    """A view as runs of bytes: each `size` long, stepped over by `levels`, widest first.

    Each level steps over all that the levels inside it cover, as `LayerView` makes sure.
    """

    view: int
    """Position among the views that are compared."""

    side: int
    """Views of one side are not compared; the sides of two that are differ."""

    start: int
    size: int
    levels: tuple[tuple[int, int], ...]
    """(stride, count) of every level that steps."""

    @property
    def num_runs(self) -> int:
        """How many runs there are."""
        return math.prod(count for _, count in self.levels)

    @property
    def reach(self) -> int:
        """Bytes from the first to the end of the last, gaps included."""
        return self.size + sum((count - 1) * stride for stride, count in self.levels)

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.start + self.reach

    def holds(self, address: int) -> bool:
        """Whether the byte at `address` is in a run."""
        left = address - self.start
        for stride, count in self.levels:
            left -= stride * min(max(left // stride, 0), count - 1)
        return 0 <= left < self.size

    def num_begun(self, address: int) -> int:
        """How many runs begin below `address`."""
        left, inner, begun = address - self.start, self.num_runs, 0
        if left <= 0:
            return 0
        for stride, count in self.levels:
            inner //= count
            steps = min((left - 1) // stride, count - 1)
            begun += steps * inner
            left -= steps * stride
        return begun + 1


def runs_of(view: LayerView, index: int, side: int) -> Runs:
    """The runs of `view`; pieces, rows and blocks that touch become one."""
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
    return Runs(index, side, view.address, size, tuple(reversed(levels)))


def find_shared_byte(cluster: Sequence[Runs]) -> tuple[int, int] | None:
    """The indices of two views of different sides that share a byte, or None. Exact.

    Raises ViewError when there are more runs than can be compared.
    """
    num_runs = sum(runs.num_runs for runs in cluster)
    low = min(runs.start for runs in cluster)
    high = max(runs.end for runs in cluster)
    if num_runs > _MAX_RUNS or high - low >= _MAX_REACH:
        raise ViewError(
            f"{len(cluster)} layers interleave in memory with different strides, in {num_runs} "
            f"runs of bytes over {high - low} bytes; no more than {_MAX_RUNS} runs can be "
            f"compared. Register them as pools of their own, or give them the same strides"
        )
    many_sides = len({runs.side for runs in cluster}) < len(cluster)
    for begin, stop in _windows(cluster, low, high):
        here = [runs for runs in cluster if runs.start < stop and runs.end > begin]
        found = _shared_by_sides(here, begin, stop) if many_sides else _shared(here, begin, stop)
        if found is not None:
            pair = _views_at(here, found + begin)
            return min(pair), max(pair)
    return None


def _windows(cluster: Sequence[Runs], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Splits ``[low, high)`` into windows, ascending, in each of which few enough runs begin."""
    waiting = [(low, high)]
    while waiting:
        begin, stop = waiting.pop()
        num_runs = sum(runs.num_begun(stop) - runs.num_begun(begin) for runs in cluster)
        if num_runs <= max(_WINDOW_RUNS, len(cluster)) or stop - begin == 1:
            if num_runs:
                yield begin, stop
            continue
        middle = (begin + stop) // 2
        waiting += [(middle, stop), (begin, middle)]


def _begins(runs: Runs, begin: int, stop: int) -> Int64s:
    """Where the runs that reach into ``[begin, stop)`` begin, counted from `begin`."""
    import numpy as np

    begins = np.array([runs.start - begin], dtype=np.int64)
    width = stop - begin
    reach = runs.reach
    for stride, count in runs.levels:
        reach -= (count - 1) * stride
        # Of each, the steps whose bytes end above the window's begin and begin below its stop.
        first = np.clip(-((begins + (reach - 1)) // stride), 0, count)
        last = np.clip((width - 1 - begins) // stride + 1, 0, count)
        steps = np.maximum(last - first, 0)
        before = np.cumsum(steps) - steps
        begins = np.repeat(begins + (first - before) * stride, steps)
        begins += np.arange(len(begins), dtype=np.int64) * stride
    return begins[(begins < width) & (begins > -runs.size)]


def _shared(here: Sequence[Runs], begin: int, stop: int) -> int | None:
    """A byte in two runs, counted from `begin`. The runs of one view never meet."""
    return _first_double(*_sorted_ends(here, begin, stop))


def _sorted_ends(here: Sequence[Runs], begin: int, stop: int) -> tuple[Int64s, Int64s]:
    import numpy as np

    parts = [(_begins(runs, begin, stop), runs.size) for runs in here]
    begins = np.concatenate([part for part, _ in parts])
    ends = np.concatenate([part + size for part, size in parts])
    begins.sort()
    ends.sort()
    return begins, ends


def _first_double(begins: Int64s, ends: Int64s) -> int | None:
    # Sorted apart, the n-th end lies above the (n+1)-th begin exactly where two runs are open.
    double = ends[:-1] > begins[1:]
    return int(begins[1:][double.argmax()]) if double.any() else None


def _shared_by_sides(here: Sequence[Runs], begin: int, stop: int) -> int | None:
    """A byte in runs of two sides, counted from `begin`. Runs of one side may meet."""
    import numpy as np

    for side in sorted({runs.side for runs in here}):
        mine = [runs for runs in here if runs.side == side]
        others = [runs for runs in here if runs.side != side]
        if not others:
            break
        at = np.concatenate([_begins(runs, begin, stop) for runs in mine])
        begins, ends = _sorted_ends(others, begin, stop)
        # Where a run of this side begins, how many of the others are open? The later of two runs
        # that meet begins inside the earlier one, so that looking at begins is enough.
        at.sort()
        is_open = np.searchsorted(begins, at, "right") > np.searchsorted(ends, at, "right")
        if is_open.any():
            return int(at[is_open.argmax()])
    return None


def _views_at(here: Sequence[Runs], address: int) -> tuple[int, int]:
    holders = [runs for runs in here if runs.holds(address)]
    other = next(runs for runs in holders if runs.side != holders[0].side)
    return holders[0].view, other.view
