"""Plans in pieces: which pages go through staging at once, and which copies they are."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.transfer.staging import (
    Group,
    Piece,
    Run,
    cut_copy,
    pieces_of,
    run_table,
    runs_of,
    wants_one_call,
)

_KIB = 1024


def _group(pitch: int) -> Group:
    """A group of which nothing but the size of a page in staging is known."""
    return Group((), (), (), (), pitch)


def _pieces(
    pitches: Sequence[int], num_pages: int, *, capacity: int, smallest: int, store: bool
) -> list[Piece]:
    groups = [_group(pitch) for pitch in pitches]
    return list(
        pieces_of(groups, num_pages, capacity=capacity, smallest=smallest, first_is_short=store)
    )


def _counts(pieces: Sequence[Piece], group: int) -> list[int]:
    return [piece.num_pages for piece in pieces if piece.group == group]


# ------------------------------------------------------------------------------------ pieces_of


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("seed", range(60))
def test_random_pieces(seed: int, store: bool) -> None:
    """Each page of each group comes once and in order, and no piece takes too much."""
    rng = random.Random(seed)
    pitches = [256 * rng.randint(1, 64) for _ in range(rng.randint(1, 5))]
    capacity = rng.randint(256, 1 << 18)
    smallest = rng.choice((1, rng.randint(1, capacity), 2 * capacity))
    num_pages = rng.choice((1, 2, 3, rng.randint(4, 300)))
    pieces = _pieces(pitches, num_pages, capacity=capacity, smallest=smallest, store=store)
    moved = [
        (piece.group, piece.first_page + page)
        for piece in pieces
        for page in range(piece.num_pages)
    ]
    assert moved == list(itertools.product(range(len(pitches)), range(num_pages)))
    for piece in pieces:
        assert piece.num_pages == 1 or piece.num_pages * pitches[piece.group] <= capacity
    ends = [piece.group for piece in pieces if piece.ends_group]
    assert ends == list(range(len(pitches)))
    assert all(
        piece.ends_group == (piece.first_page + piece.num_pages == num_pages) for piece in pieces
    )


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_no_pages_are_no_pieces(store: bool) -> None:
    """An empty plan has nothing to stage."""
    assert _pieces([256, 512], 0, capacity=_KIB, smallest=1, store=store) == []


def test_a_load_ends_with_short_pieces() -> None:
    """The last group halves down to the smallest; groups before it go in the fewest pieces."""
    pieces = _pieces([_KIB] * 3, 100, capacity=32 * _KIB, smallest=4 * _KIB, store=False)
    assert _counts(pieces, 0) == _counts(pieces, 1) == [32, 32, 32, 4]
    assert _counts(pieces, 2) == [32, 32, 18, 9, 4, 4, 1]


def test_a_store_begins_with_short_pieces() -> None:
    """The first group grows from the smallest, and what comes after it goes in the fewest."""
    pieces = _pieces([_KIB] * 3, 100, capacity=32 * _KIB, smallest=4 * _KIB, store=True)
    assert _counts(pieces, 0) == [1, 4, 4, 9, 18, 32, 32]
    assert _counts(pieces, 1) == _counts(pieces, 2) == [32, 32, 32, 4]


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
def test_a_single_group_is_the_first_and_the_last(store: bool) -> None:
    """Its pieces are short on the side where nothing runs beside them."""
    pieces = _pieces([_KIB], 64, capacity=64 * _KIB, smallest=8 * _KIB, store=store)
    expected = [32, 16, 8, 8]
    assert _counts(pieces, 0) == (expected[::-1] if store else expected)


@pytest.mark.parametrize("store", [False, True], ids=["load", "store"])
@pytest.mark.parametrize("seed", range(20))
def test_short_pieces_are_halves(seed: int, store: bool) -> None:
    """None is more than half of what comes after it in a load, or below the smallest but one."""
    rng = random.Random(seed)
    pitch, num_pages = 256 * rng.randint(1, 9), rng.randint(1, 400)
    most = rng.randint(1, 100)
    least = rng.randint(1, most)
    pieces = _pieces([pitch], num_pages, capacity=most * pitch, smallest=least * pitch, store=store)
    counts = _counts(pieces, 0)
    left = num_pages
    for count in reversed(counts) if store else counts:
        assert count == left or count <= max(least, left // 2)
        assert count >= least or count == left
        left -= count
    assert left == 0
    assert counts[0 if store else -1] <= max(least, 1)


def test_a_smallest_piece_above_the_capacity() -> None:
    """Then every piece is as large as may be."""
    pieces = _pieces([256], 10, capacity=4 * 256, smallest=1 << 20, store=False)
    assert _counts(pieces, 0) == [4, 4, 2]


def test_a_page_above_the_capacity_goes_alone() -> None:
    """One page is the least that a piece can be."""
    pieces = _pieces([4096], 3, capacity=4095, smallest=1, store=False)
    assert _counts(pieces, 0) == [1, 1, 1]


# -------------------------------------------------------------------------------------- runs_of


@pytest.mark.parametrize(
    ("slots", "runs"),
    [
        ([], []),
        ([7], [Run(0, 7, 1)]),
        ([3, 4, 5], [Run(0, 3, 3)]),
        ([5, 4, 3], [Run(0, 5, 1), Run(1, 4, 1), Run(2, 3, 1)]),
        ([1, 2, 9, 10, 0], [Run(0, 1, 2), Run(2, 9, 2), Run(4, 0, 1)]),
        ([4, 4, 5], [Run(0, 4, 1), Run(1, 4, 2)]),
        ([2, 4, 6], [Run(0, 2, 1), Run(1, 4, 1), Run(2, 6, 1)]),
    ],
)
def test_runs(slots: list[int], runs: list[Run]) -> None:
    """Slots that ascend one by one are one run; a loaded slot may come twice."""
    assert runs_of(run_table(np.array(slots, np.int64))) == runs


@pytest.mark.parametrize("seed", range(20))
def test_random_runs(seed: int) -> None:
    """Laid out again they are the slots, and no two of them could be one."""
    rng = random.Random(seed)
    slots = rng.sample(range(60), rng.randint(1, 50))
    if seed % 2:
        slots.sort()
    runs = runs_of(run_table(np.array(slots, np.int64)))
    assert [run.first_slot + page for run in runs for page in range(run.num_pages)] == slots
    starts = itertools.accumulate((run.num_pages for run in runs), initial=0)
    assert [run.first_page for run in runs] == list(starts)[:-1]
    for before, after in itertools.pairwise(runs):
        assert before.first_slot + before.num_pages != after.first_slot
    assert all(type(number) is int for run in runs for number in run)


# ------------------------------------------------------------------------------------- cut_copy


def _cut(
    host: int, pitch: int, width: int, rows: int, borders: Sequence[int]
) -> list[tuple[int, int, int, int]]:
    """With registrations that end at `borders`."""
    return list(
        cut_copy(host, pitch, width, rows, lambda at: borders[bisect.bisect_right(borders, at)])
    )


@pytest.mark.parametrize("seed", range(200))
def test_cut_copies_against_single_bytes(seed: int) -> None:
    """Each byte of each row once and in order, each part in one chunk; gaps count for nothing."""
    rng = random.Random(seed)
    width = rng.randint(1, 40)
    pitch = width + rng.choice((0, rng.randint(0, 50)))
    rows, host = rng.randint(1, 30), rng.randint(0, 500)
    end = host + rows * pitch
    inside = rng.sample(range(1, end), min(rng.choice((0, 1, 5, 60)), end - 1))
    borders = sorted({*inside, end + rng.randint(0, 9)})
    moved = []
    for row, count, offset, part in _cut(host, pitch, width, rows, borders):
        assert count >= 1
        assert part >= 1
        first = host + row * pitch + offset
        last = first + (count - 1) * pitch + part - 1
        assert bisect.bisect_right(borders, first) == bisect.bisect_right(borders, last)
        moved += [
            host + (row + step) * pitch + offset + byte
            for step in range(count)
            for byte in range(part)
        ]
    assert moved == [host + row * pitch + byte for row in range(rows) for byte in range(width)]


def test_no_more_parts_than_there_must_be() -> None:
    """Rows that lie in one chunk go together; only a row on a border is cut."""
    assert _cut(100, 20, 10, 8, [10_000]) == [(0, 8, 0, 10)]
    assert _cut(100, 20, 10, 8, [150, 10_000]) == [(0, 3, 0, 10), (3, 5, 0, 10)]
    assert _cut(100, 20, 10, 8, [155, 10_000]) == [(0, 3, 0, 10), (3, 5, 0, 10)]
    assert _cut(100, 20, 10, 8, [163, 10_000]) == [
        (0, 3, 0, 10),
        (3, 1, 0, 3),
        (3, 1, 3, 7),
        (4, 4, 0, 10),
    ]
    assert _cut(100, 10, 10, 1, [103, 106, 10_000]) == [(0, 1, 0, 3), (0, 1, 3, 3), (0, 1, 6, 4)]


def test_no_rows_are_no_parts() -> None:
    """Nothing is copied of nothing."""
    assert _cut(100, 20, 10, 0, [10_000]) == []


# ------------------------------------------------------------------------------- wants_one_call


def test_many_calls_for_few_parts_are_one_call() -> None:
    """Each call stands for 60 parts or it is not worth its pause; a single one stays what it is."""
    enough = 60
    assert not wants_one_call(1, 1)
    assert not wants_one_call(2, 2 * enough)
    assert wants_one_call(2, 2 * enough - 1)
    assert not wants_one_call(100, 100 * enough)
    assert wants_one_call(100, 99 * enough)
