"""What a rank owns: heads, their replicas, and the layers of a stage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import GeometryError
from kvferry.geometry.sharding import HeadShard, replicated, shard_heads, split_layers, stage_layers


def test_heads_of_a_rank() -> None:
    """Eight heads over four ranks: two each, held by nobody else."""
    assert [shard_heads(8, tp=4, tp_rank=rank) for rank in range(4)] == [
        HeadShard(0, 2, (0,)),
        HeadShard(2, 2, (1,)),
        HeadShard(4, 2, (2,)),
        HeadShard(6, 2, (3,)),
    ]


def test_fewer_heads_than_ranks_are_replicated() -> None:
    """Two heads over eight ranks: each is held by four neighbours."""
    found = [shard_heads(2, tp=8, tp_rank=rank) for rank in range(8)]
    assert found == [HeadShard(0, 1, (0, 1, 2, 3))] * 4 + [HeadShard(1, 1, (4, 5, 6, 7))] * 4


@given(heads=st.integers(1, 256), tp=st.integers(1, 64))
def test_every_head_is_held_and_replicas_agree(heads: int, tp: int) -> None:
    """All ranks together hold every head, and ranks with equal heads name each other."""
    if heads % tp and tp % heads:
        with pytest.raises(GeometryError, match=rf"{heads} .* tp={tp}"):
            shard_heads(heads, tp=tp)
        return
    shards = [shard_heads(heads, tp=tp, tp_rank=rank) for rank in range(tp)]
    held: set[int] = set()
    for shard in shards:
        held.update(range(shard.first_head, shard.first_head + shard.num_heads))
        same = [rank for rank, other in enumerate(shards) if other[:2] == shard[:2]]
        assert shard.replicas == tuple(same)
    assert held == set(range(heads))


def test_planes_that_tp_does_not_split_are_equal_everywhere() -> None:
    """A latent is held by every rank."""
    assert replicated(tp=4, tp_rank=2) == (0, 1, 2, 3)


def test_heads_that_may_not_be_replicated() -> None:
    """State heads are split only: fewer of them than ranks is refused."""
    assert shard_heads(16, tp=8, tp_rank=1, may_replicate=False).num_heads == 2
    with pytest.raises(GeometryError, match=r"state heads 4 .* tp=8"):
        shard_heads(4, tp=8, what="state heads", may_replicate=False)


@given(layers=st.integers(1, 200), pp=st.integers(1, 32))
def test_stages_cover_the_layers_in_order(layers: int, pp: int) -> None:
    """Stages follow each other without gap, differ by one layer at most, the longer ones first."""
    if pp > layers:
        with pytest.raises(GeometryError, match=f"pp={pp}"):
            split_layers(layers, pp=pp)
        return
    stages = [stage_layers(split_layers(layers, pp=pp), rank) for rank in range(pp)]
    assert [layer for s in stages for layer in range(s.first, s.stop)] == list(range(layers))
    lengths = [s.stop - s.first for s in stages]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1
    assert [s.is_last for s in stages] == [False] * (pp - 1) + [True]


def test_stages_as_an_engine_splits_them() -> None:
    """A split that is given is taken as it is, with or without the number of stages."""
    split = split_layers(61, pp_layers=[15, 15, 16, 15])
    assert split == split_layers(61, pp=4, pp_layers=(15, 15, 16, 15)) == (15, 15, 16, 15)
    assert [stage_layers(split, rank)[:2] for rank in range(4)] == [
        (0, 15),
        (15, 30),
        (30, 46),
        (46, 61),
    ]
    assert split_layers(61, pp=4) == (16, 15, 15, 15)
    assert split_layers(61) == (61,)


@pytest.mark.parametrize(
    ("pp", "pp_layers", "said"),
    [
        (None, (30, 30), "are 60 layers, and the model has 61"),
        (3, (30, 31), "are 2 stages, and pp=3"),
        (1, (30, 31), "are 2 stages, and pp=1"),
        (None, (61, 0), "one layer or more, not 0"),
        (None, (60, True), "one layer or more, not True"),
        (None, (), "are 0 layers"),
        (None, 61, "must list the layers"),
        (None, "61", "must list the layers"),
    ],
)
def test_a_split_that_cannot_be_is_refused(pp: int | None, pp_layers: Any, said: str) -> None:
    """The message has the split, and what it does not fit."""
    with pytest.raises(GeometryError, match=said):
        split_layers(61, pp=pp, pp_layers=pp_layers)


@pytest.mark.parametrize("value", [0, -1, True, "2", 1.0, None, 1 << 20])
def test_bad_rank_counts_are_named(value: Any) -> None:
    """A count of ranks that is no positive whole number is refused with its name."""
    with pytest.raises(GeometryError, match="tp must"):
        shard_heads(8, tp=value)
    if value is None:  # one stage
        return
    with pytest.raises(GeometryError, match="pp must"):
        split_layers(8, pp=value)


@pytest.mark.parametrize("rank", [2, -1, False, "0"])
def test_bad_ranks_are_named(rank: Any) -> None:
    """A rank outside of its group is refused."""
    with pytest.raises(GeometryError, match="tp_rank must"):
        replicated(tp=2, tp_rank=rank)
    with pytest.raises(GeometryError, match="pp_rank must"):
        stage_layers((4, 4), rank)
