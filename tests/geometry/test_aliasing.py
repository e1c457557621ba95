"""Overlap between layers, against a set of every byte."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvferry.errors import ViewError
from kvferry.geometry import LayerView
from kvferry.geometry.aliasing import find_overlap


def _bytes_of(view: LayerView) -> set[int]:
    return {
        view.row_address(row) + piece * view.piece_stride + byte
        for row in range(view.num_rows)
        for piece in range(view.num_pieces)
        for byte in range(view.piece_size)
    }


def _random_view(rng: random.Random, base: int) -> LayerView:
    piece_size = rng.choice((1, 2, 3, 4))
    num_pieces = rng.choice((1, 1, 2, 3))
    piece_stride = piece_size + rng.choice((0, 0, 1, 5))
    extent = (num_pieces - 1) * piece_stride + piece_size
    block_rows = rng.choice((1, 2, 4))
    row_stride = extent + rng.choice((0, 0, 2, 7, 20))
    num_blocks = rng.choice((1, 2, 3))
    block_stride = (block_rows - 1) * row_stride + extent + rng.choice((0, 3, 20))
    return LayerView(
        address=base + rng.randrange(60),
        num_rows=block_rows * num_blocks,
        row_stride=row_stride,
        block_rows=block_rows,
        block_stride=block_stride,
        num_pieces=num_pieces,
        piece_size=piece_size,
        piece_stride=piece_stride,
    )


def test_random_pairs_agree_with_a_set_of_bytes() -> None:
    """Two views overlap exactly where their sets of bytes meet; both outcomes occur often."""
    rng = random.Random(11)
    seen = {True: 0, False: 0}
    for _ in range(6000):
        views = [_random_view(rng, 1000), _random_view(rng, 1000)]
        if rng.random() < 0.5:  # the same strides, moved
            moved = rng.randrange(60)
            views[1] = LayerView(
                **{
                    name: getattr(views[0], name)
                    for name in LayerView.__dataclass_fields__
                    if name != "address"
                },
                address=1000 + moved,
            )
        meet = bool(_bytes_of(views[0]) & _bytes_of(views[1]))
        assert (find_overlap(views) is not None) == meet, views
        seen[meet] += 1
    assert min(seen.values()) > 500


def test_random_groups_agree_with_sets_of_bytes() -> None:
    """Among many views, a pair is found exactly where one meets, and it is one that does."""
    rng = random.Random(5)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        template = _random_view(rng, 0)
        views = []
        for _ in range(rng.randrange(2, 6)):
            fields = {
                name: getattr(template, name)
                for name in LayerView.__dataclass_fields__
                if name != "address"
            }
            views.append(LayerView(**fields, address=1000 + 4 * rng.randrange(60)))
        sets = [_bytes_of(view) for view in views]
        pairs = {
            (one, other)
            for one in range(len(sets))
            for other in range(one + 1, len(sets))
            if sets[one] & sets[other]
        }
        found = find_overlap(views)
        assert (found in pairs) if pairs else (found is None)
        seen[bool(pairs)] += 1
    assert min(seen.values()) > 100


def test_token_major_layers_interleave_without_overlap() -> None:
    """Hundreds of layers between two rows of each other are told apart; one too many is found."""
    layers, size = 300, 656
    fields: dict[str, Any] = {
        "num_rows": 100_000,
        "row_stride": layers * size,
        "block_rows": 100_000,
        "block_stride": 0,
        "num_pieces": 1,
        "piece_size": size,
        "piece_stride": size,
    }
    views = [LayerView(address=1 << 20 | layer * size, **fields) for layer in range(layers)]
    assert find_overlap(views) is None
    late = LayerView(address=views[-1].address + 50_000 * layers * size + 1, **fields)
    assert find_overlap([*views, late]) is not None


def test_what_cannot_be_compared_is_refused() -> None:
    """Interleaved views with different strides and too many rows are refused, not guessed at."""
    views = [
        LayerView(
            address=4096 + start,
            num_rows=1 << 23,
            row_stride=stride,
            block_rows=1 << 23,
            block_stride=0,
            num_pieces=1,
            piece_size=8,
            piece_stride=8,
        )
        for start, stride in ((0, 64), (16, 48))
    ]
    with pytest.raises(ViewError, match="pools of their own"):
        find_overlap(views)
