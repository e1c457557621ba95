"""Overlap between layers, against a set of every byte; and how much work it takes to tell."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvferry.errors import ViewError
from kvferry.geometry import LayerView, aliasing, runs
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


def _even(address: int, num_rows: int, stride: int, size: int) -> LayerView:
    return _paged(address, 1, 0, num_rows, stride, size)


def _paged(
    address: int, num_blocks: int, block_stride: int, block_rows: int, row_stride: int, size: int
) -> LayerView:
    return LayerView(
        address=address,
        num_rows=num_blocks * block_rows,
        row_stride=row_stride,
        block_rows=block_rows,
        block_stride=block_stride,
        num_pieces=1,
        piece_size=size,
        piece_stride=size,
    )


def _related_view(rng: random.Random, base: int, stride: int) -> LayerView:
    """A view that repeats every `stride` bytes or an even part of it, or a run or two."""
    start = base + rng.randrange(3 * stride)
    kind = rng.randrange(4)
    if kind == 0:  # rows of one size after each other, a whole number of them a step
        period = stride // rng.choice((2, 3, 4))
        return _even(start, rng.randrange(1, 9), period, rng.randrange(1, period // 2))
    if kind == 1:
        return _even(start, rng.randrange(1, 4), stride, rng.randrange(1, stride // 2))
    if kind == 2:
        rows, size = rng.randrange(1, 4), rng.randrange(1, 4)
        return _paged(start, rng.randrange(1, 4), stride, rows, size + rng.randrange(3), size)
    return _even(start, rng.randrange(1, 3), rng.randrange(7, 50), rng.randrange(1, 6))


@pytest.mark.parametrize("window", [1, 5, 1 << 22])
@pytest.mark.parametrize("num_sides", [2, 3, None])
def test_related_strides_agree_with_sets_of_bytes(
    window: int, num_sides: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views that share parts of their steps, with and without sides, in windows of any size."""
    monkeypatch.setattr(runs, "_WINDOW_RUNS", window)
    rng = random.Random(f"{window} {num_sides}")
    seen = {True: 0, False: 0}
    for _ in range(700):
        stride = rng.choice((24, 36, 48))
        views = [_related_view(rng, 4096, stride) for _ in range(rng.randrange(2, 6))]
        sides = None if num_sides is None else [rng.randrange(num_sides) for _ in views]
        sets = [_bytes_of(view) for view in views]
        pairs = {
            (one, other)
            for one in range(len(sets))
            for other in range(one + 1, len(sets))
            if sets[one] & sets[other] and (sides is None or sides[one] != sides[other])
        }
        found = find_overlap(views, sides)
        assert (found in pairs) if pairs else (found is None), views
        seen[bool(pairs)] += 1
    assert min(seen.values()) > 60


def _two_planes(num_blocks: int, num_layers: int = 61) -> list[LayerView]:
    """All layers of two padded planes, with row strides of their own, in pages of 64 tokens."""
    page = num_layers * 64 * (672 + 144)
    index_keys = 4096 + num_layers * 64 * 672
    return [
        view
        for layer in range(num_layers)
        for view in (
            _paged(4096 + layer * 64 * 672, num_blocks, page, 64, 672, 656),
            _paged(index_keys + layer * 64 * 144, num_blocks, page, 64, 144, 132),
        )
    ]


def test_planes_of_different_strides_in_one_page_need_no_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages repeat, so that one page tells; a million of them are told without a run listed."""
    monkeypatch.setattr(aliasing, "find_shared_byte", lambda _: pytest.fail("swept"))
    views = _two_planes(1 << 20)
    random.Random(3).shuffle(views)
    assert find_overlap(views) is None
    # One view runs on through all pages, in a gap between the rows of the other.
    paged = _paged(4096, 1 << 30, 1024, 4, 128, 64)
    assert find_overlap([_even(4096 + 64 + 2 * 1024, 1 << 33, 128, 64), paged]) is None


def test_the_same_planes_with_one_layer_a_byte_too_low_are_found() -> None:
    """A layer that reaches one byte into its neighbour, in the last page alone, is named."""
    views = _two_planes(64)
    page = views[0].block_stride
    late = _even(views[6].address + 63 * page + 655, 1, 672, 16)
    assert find_overlap([*views, late]) == (6, len(views))
    late = _even(views[6].address + 63 * page + 656, 1, 672, 16)
    assert find_overlap([*views, late]) is None


def test_a_sweep_lists_each_run_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work grows with the runs of all views together, not with pairs of views."""
    monkeypatch.setattr(runs, "_WINDOW_RUNS", 1 << 12)
    listed: list[int] = []
    inner = runs._begins

    def counted(one: runs.Runs, begin: int, stop: int) -> Any:
        found = inner(one, begin, stop)
        listed.append(len(found))
        return found

    monkeypatch.setattr(runs, "_begins", counted)
    views = _two_planes(16)
    cluster = [runs.runs_of(view, index, index) for index, view in enumerate(views)]
    num_runs = sum(view.num_rows for view in views)
    assert runs.find_shared_byte(cluster) is None
    assert num_runs <= sum(listed) < 1.1 * num_runs
    # A window has so few runs that its arrays stay small, whatever the size of the pool.
    assert len(listed) >= num_runs / (1 << 12)


def test_what_cannot_be_compared_is_refused() -> None:
    """Views with unrelated strides and too many rows are refused, not guessed at."""
    views = [_even(4096, 1 << 28, 64, 4), _even(4096 + 17, 1 << 28, 60, 2)]
    with pytest.raises(ViewError, match="pools of their own"):
        find_overlap(views)
    huge = [_even(4096, 4, 1 << 61, 4), _even(4104, 5, (1 << 61) - 12, 4)]
    with pytest.raises(ViewError, match="pools of their own"):
        find_overlap(huge)
