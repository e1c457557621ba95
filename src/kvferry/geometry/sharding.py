"""What one rank of a model owns: KV heads under tensor parallelism, layers under pipeline stages.

Letters: H = KV heads of the model, tp and pp = the number of ranks. With H ≥ tp each rank keeps
H / tp heads of its own; with H < tp each head is kept by tp / H neighbouring ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvferry.errors import GeometryError

__all__ = ["HeadShard", "StageLayers", "replicated", "shard_heads", "stage_layers"]

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


def stage_layers(num_layers: int, *, pp: int = 1, pp_rank: int = 0) -> StageLayers:
    """The layers of stage `pp_rank` of `pp`, contiguous.

    The first ``num_layers % pp`` stages get one layer more. Raises GeometryError when there are
    more stages than layers, or a rank is out of range.
    """
    _check_rank("pp", pp, pp_rank)
    if pp > num_layers:
        raise GeometryError(
            f"pp={pp} stages for {num_layers} layers leaves a stage empty; choose a smaller pp"
        )
    each, more = divmod(num_layers, pp)
    first = pp_rank * each + min(pp_rank, more)
    return StageLayers(first, first + each + (pp_rank < more), pp_rank == pp - 1)


def _check_rank(name: str, size: Any, rank: Any) -> None:
    for field, value, low, high in (
        (name, size, 1, _MAX_RANKS),
        (f"{name}_rank", rank, 0, size - 1 if isinstance(size, int) else 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise GeometryError(
                f"{field} must be a whole number from {low} to {high}, not {value!r}"
            )
