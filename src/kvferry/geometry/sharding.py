"""What one rank of a model owns: KV heads under tensor parallelism, layers under pipeline stages.

Letters: H = KV heads of the model, tp and pp = the number of ranks. With H ≥ tp each rank keeps
H / tp heads of its own; with H < tp each head is kept by tp / H neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvferry.errors import GeometryError

__all__ = ["HeadShard", "StageLayers", "replicated", "shard_heads", "split_layers", "stage_layers"]

_MAX_RANKS = 1 << 16


class HeadShard(NamedTuple):
    """The heads of one rank: ``[first_head, first_head + num_heads)`` of the model's."""

    first_head: int
    num_heads: int
    replicas: tuple[int, ...]
    """Every TP rank that holds the same bytes, this one included, ascending."""


class StageLayers(NamedTuple):
    """The model layers of one pipeline stage: ``[first, stop)``."""

    first: int
    stop: int
    is_last: bool


def shard_heads(
    num_heads: int,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    what: str = "num_key_value_heads",
    may_replicate: bool = True,
) -> HeadShard:
    """The heads that `tp_rank` of `tp` ranks keeps.

    Raises GeometryError when neither of `num_heads` and `tp` divides the other, when heads would
    have to be replicated and `may_replicate` is False, or when a rank is out of range.
    """
    _check_rank("tp", tp, tp_rank)
    if num_heads % tp == 0:
        mine = num_heads // tp
        return HeadShard(tp_rank * mine, mine, (tp_rank,))
    if tp % num_heads or not may_replicate:
        rule = "one must divide the other" if may_replicate else "tp must divide the heads"
        raise GeometryError(
            f"{what} {num_heads} cannot be shared out over tp={tp} ranks: {rule}; choose another tp"
        )
    copies = tp // num_heads
    head = tp_rank // copies
    return HeadShard(head, 1, tuple(range(head * copies, (head + 1) * copies)))


def replicated(*, tp: int = 1, tp_rank: int = 0) -> tuple[int, ...]:
    """The TP ranks that hold the same bytes of a plane which TP does not split: all of them."""
    _check_rank("tp", tp, tp_rank)
    return tuple(range(tp))


def split_layers(
    num_layers: int, *, pp: int | None = None, pp_layers: Sequence[int] | None = None
) -> tuple[int, ...]:
    """How many layers each pipeline stage has: `pp_layers` as given, else an even split.

    In an even split the first ``num_layers % pp`` stages get one layer more.

    Raises GeometryError when a stage would be empty, when `pp_layers` are not as many as `pp`, or
    when they are not `num_layers` together.
    """
    if pp_layers is None:
        pp = 1 if pp is None else pp
        _check_rank("pp", pp, 0)
        if pp > num_layers:
            raise GeometryError(
                f"pp={pp} stages for {num_layers} layers leaves a stage empty; choose a smaller pp"
            )
        each, more = divmod(num_layers, pp)
        return (each + 1,) * more + (each,) * (pp - more)
    if not isinstance(pp_layers, Sequence) or isinstance(pp_layers, str | bytes):
        raise GeometryError(
            f"pp_layers must list the layers of each stage, such as (16, 15), not {pp_layers!r}"
        )
    for count in pp_layers:
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise GeometryError(
                f"pp_layers {list(pp_layers)}: each stage has one layer or more, not {count!r}"
            )
    if pp is not None and pp != len(pp_layers):
        raise GeometryError(
            f"pp_layers {list(pp_layers)} are {len(pp_layers)} stages, and pp={pp}; leave pp out"
        )
    if sum(pp_layers) != num_layers:
        raise GeometryError(
            f"pp_layers {list(pp_layers)} are {sum(pp_layers)} layers, and the model has "
            f"{num_layers}; correct one of the two"
        )
    return tuple(pp_layers)


def stage_layers(split: Sequence[int], pp_rank: int = 0) -> StageLayers:
    """The layers of stage `pp_rank`, contiguous, where stages have as many as `split` says.

    Raises GeometryError when the rank is out of range.
    """
    _check_rank("pp", len(split), pp_rank)
    first = sum(split[:pp_rank])
    return StageLayers(first, first + split[pp_rank], pp_rank == len(split) - 1)


def _check_rank(name: str, size: Any, rank: Any) -> None:
    for field, value, low, high in (
        (name, size, 1, _MAX_RANKS),
        (f"{name}_rank", rank, 0, size - 1 if isinstance(size, int) else 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise GeometryError(
                f"{field} must be a whole number from {low} to {high}, not {value!r}"
            )
