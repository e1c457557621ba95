"""Which rows go through which half of staging."""

from __future__ import annotations

import pytest

from kvferry.transfer.row_rooms import rooms_of

_AT = 1 << 20


@pytest.mark.parametrize("row_bytes", [1, 66, 128, 132, 576, 1728, 3 * 8192 + 6])
@pytest.mark.parametrize("staging_rows", [1, 2, 7, 64, 129])
@pytest.mark.parametrize("count", [1, 5, 64, 65, 300])
def test_rooms_have_all_rows_and_do_not_overlap(
    row_bytes: int, staging_rows: int, count: int
) -> None:
    """Every row once, in order; rooms lie inside of staging, apart, and begin on 128 bytes."""
    rooms = list(rooms_of(_AT, staging_rows, row_bytes, count))
    rows = [row for room in rooms for row in range(room.first, room.first + room.num_rows)]
    assert rows == list(range(count))
    places = dict[int, tuple[int, int]]()
    for room in rooms:
        assert room.address % 128 == 0
        end = room.address + room.num_rows * row_bytes
        assert _AT <= room.address < end <= _AT + staging_rows * row_bytes
        begin, before = places.get(room.number, (room.address, 0))
        assert begin == room.address
        places[room.number] = (begin, max(before, end))
    if len(places) == 2:
        assert places[0][1] <= places[1][0]
    assert [room.number for room in rooms] == [piece % len(places) for piece in range(len(rooms))]


def test_two_rooms_only_where_they_help() -> None:
    """What has room at once goes at once; halves that cannot begin on 128 bytes are none."""
    assert [(room.number, room.num_rows) for room in rooms_of(_AT, 64, 576, 64)] == [(0, 64)]
    assert [(room.number, room.num_rows) for room in rooms_of(_AT, 64, 576, 70)] == [
        (0, 32),
        (1, 32),
        (0, 6),
    ]
    # 66 bytes: only every 64th row begins on 128.
    assert {room.number for room in rooms_of(_AT, 100, 66, 300)} == {0}
    assert [room.address - _AT for room in rooms_of(_AT, 129, 66, 150)] == [0, 64 * 66, 0]
