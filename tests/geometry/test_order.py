"""Layouts as arithmetic, against tensors that numpy lays out."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import Geometry, Plane, host_pool_view, layer_order
from kvferry.types import Layout, SlotKind

_LAYERS, _PAGES, _ROWS, _SIZE = 3, 4, 8, 5


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("layer", range(_LAYERS))
def test_layouts_place_rows_as_their_names_say(layout: Layout, layer: int) -> None:
    """Row r of a layer lies where an array with the layout's dimensions keeps it."""
    where = np.arange(_LAYERS * _PAGES * _ROWS * _SIZE)
    by_name = {
        Layout.LAYER_FIRST: where.reshape(_LAYERS, _PAGES * _ROWS, _SIZE)[layer],
        Layout.TOKEN_MAJOR: where.reshape(_PAGES * _ROWS, _LAYERS, _SIZE)[:, layer],
        Layout.PAGE_MAJOR: where.reshape(_PAGES, _LAYERS, _ROWS, _SIZE)[:, layer].reshape(
            _PAGES * _ROWS, _SIZE
        ),
    }
    plane = Plane(name="k", num_layers=_LAYERS, element_size=_SIZE)
    order = layer_order(layout, plane, layer, rows_per_page=_ROWS, num_pages=_PAGES)
    assert order.pool_bytes == where.size
    for row in range(_PAGES * _ROWS):
        block, within = divmod(row, order.block_rows)
        found = order.offset + block * order.block_stride + within * order.row_stride
        assert found == by_name[layout][row, 0]


def test_host_pool_view_follows_the_spans() -> None:
    """Rows of our own pool start at slot, span and row offsets, for every kind of slot."""
    geometry = Geometry(
        planes=(
            Plane(name="k", num_layers=2, element_size=7),
            Plane(name="packed", num_layers=1, element_size=99, rows_per_page=1),
        ),
        page_size=4,
    )
    pool = host_pool_view(geometry, SlotKind.PAGE, base=1 << 45, num_slots=3)
    for span in geometry.spans():
        view = pool.view(span.plane.name, span.layer)
        for slot in range(3):
            for row in range(span.rows):
                expected = (
                    (1 << 45)
                    + slot * geometry.slot_bytes()
                    + span.offset
                    + row * span.plane.element_size
                )
                assert view.row_address(slot * span.rows + row) == expected
