"""The pattern and the guards that tests rely on."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import LayerView
from kvferry.testing import (
    GUARD_BYTES,
    POISON,
    GuardedBuffer,
    memory_at,
    mix64,
    moved_view,
    pattern_rows,
    read_rows,
    reference_row,
    write_rows,
)


def test_a_byte_of_a_row_is_a_byte_of_its_word() -> None:
    """Byte i of a row is byte i mod 8 of mix64 over seed, pool, layer, slot and i div 8."""
    rows = pattern_rows(7, pool=1, layer=2, slots=[3, 1 << 40], element_size=29)
    for found, slot in zip(rows, (3, 1 << 40), strict=True):
        for index, byte in enumerate(found.tolist()):
            word = int(mix64(7, 1, 2, slot, index // 8))
            assert byte == word >> 8 * (index % 8) & 0xFF


def test_the_pattern_stays_the_same() -> None:
    """Golden bytes: what one process wrote another can check."""
    assert int(mix64(0)) == 0xE220A8397B1DCDAF
    assert pattern_rows(1, pool=2, layer=3, slots=[4], element_size=11).tobytes().hex() == _GOLDEN


_GOLDEN = "7f0a7a26ffb60d1878f7d8"


@pytest.mark.parametrize("changed", ["seed", "pool", "layer", "slot"])
def test_everything_is_in_the_pattern(changed: str) -> None:
    """Another seed, pool, layer or slot is another row, and no row is another one shifted."""

    def row(seed: int = 0, pool: int = 0, layer: int = 0, slot: int = 0) -> bytes:
        return pattern_rows(seed, pool=pool, layer=layer, slots=[slot], element_size=64).tobytes()

    rows = {row(**{changed: value}) for value in range(100)}
    assert len(rows) == 100
    words = {one[at : at + 8] for one in rows for at in range(0, 64, 8)}
    assert len(words) == 100 * 8


def test_short_rows_are_the_start_of_long_ones() -> None:
    """The element size cuts the pattern off and changes nothing else; no rows are no bytes."""
    long = pattern_rows(0, pool=0, layer=0, slots=range(5), element_size=100)
    for size in (1, 7, 8, 9, 99):
        short = pattern_rows(0, pool=0, layer=0, slots=range(5), element_size=size)
        assert (short == long[:, :size]).all()
    assert pattern_rows(0, pool=0, layer=0, slots=[], element_size=9).shape == (0, 9)


def test_a_new_buffer_is_poison_and_whole() -> None:
    """A buffer starts as poison, and `check` takes it so until its guards or bytes change."""
    buffer = GuardedBuffer(100)
    assert buffer.num_bytes == 100
    assert (buffer.inside == POISON).all()
    buffer.check()
    image = np.arange(100, dtype=np.uint8)
    buffer.fill(image)
    buffer.check(image)
    buffer.fill()
    buffer.check()


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (-GUARD_BYTES, "pool: the guard 4096 bytes before its start"),
        (-1, "pool: the guard 1 bytes before its start"),
        (0, r"pool: 1 of 100 bytes differ, first at byte 0: found 0xa4, expected 0xa5"),
        (99, "first at byte 99"),
        (100, "pool: the guard 0 bytes after its end"),
        (100 + GUARD_BYTES - 1, "pool: the guard 4095 bytes after its end"),
    ],
)
def test_a_damaged_byte_is_found_and_named(offset: int, message: str) -> None:
    """One changed byte anywhere in or around a buffer fails its check, with its place."""
    buffer = GuardedBuffer(100)
    byte = memory_at(buffer.address + offset, 1)
    byte ^= 1
    with pytest.raises(AssertionError, match=message):
        buffer.check(what="pool")
    byte ^= 1
    buffer.check()


def _view(buffer: GuardedBuffer) -> LayerView:
    return LayerView(
        address=buffer.address + 1,
        num_rows=6,
        row_stride=5,
        block_rows=3,
        block_stride=60,
        num_pieces=2,
        piece_size=5,
        piece_stride=20,
    )


def test_rows_are_written_where_the_reference_reads_them() -> None:
    """Rows in blocks and pieces are written and read as the slow reference has it, gaps kept."""
    buffer = GuardedBuffer(120)
    view, rows = _view(buffer), [4, 0, 5]
    elements = pattern_rows(0, pool=0, layer=0, slots=rows, element_size=10)
    write_rows(view, rows, elements)
    assert (read_rows(view, rows) == elements).all()
    for row, element in zip(rows, elements, strict=True):
        assert reference_row(view, row) == element.tobytes()
    assert int((buffer.inside != POISON).sum()) <= elements.size
    for row in (1, 2, 3):
        assert reference_row(view, row) == bytes([POISON]) * 10
    with pytest.raises(IndexError):
        read_rows(view, [6])


def test_a_view_can_be_moved_to_a_copy() -> None:
    """A moved view reads the same bytes from a copy of the memory, and not from the original."""
    buffer = GuardedBuffer(120)
    view = _view(buffer)
    elements = pattern_rows(0, pool=0, layer=0, slots=range(6), element_size=10)
    write_rows(view, range(6), elements)
    copy = buffer.inside.copy()
    buffer.fill()
    moved = moved_view(view, from_address=buffer.address, to_address=int(copy.ctypes.data))
    assert (read_rows(moved, range(6)) == elements).all()
    assert (read_rows(view, range(6)) == POISON).all()
