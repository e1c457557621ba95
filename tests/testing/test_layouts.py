"""The layouts that the self-test places, against tensors that are indexed."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.testing import (
    DeviceLayout,
    num_pool_bytes,
    place_device_layers,
    place_host_layers,
    read_rows,
)
from kvferry.types import Layout

_PLANE = Plane(name="k", num_layers=3, element_size=12)
_ROWS, _BLOCK = 24, 4
_BLOCKS = _ROWS // _BLOCK

# By layout: the shape of a pool, and its slot dimensions and layer dimension.
_TENSORS = {
    DeviceLayout.FLAT: ((3, _ROWS, 12), (0,), 0),
    DeviceLayout.PAGED_HND: ((3, _BLOCKS, 6, _BLOCK, 2), (0, 2), 0),
    DeviceLayout.PACKED: ((_ROWS, 3, 12), (0,), 1),
}


@pytest.mark.parametrize("layout", _TENSORS)
def test_dense_layouts_are_those_of_tensors(layout: DeviceLayout) -> None:
    """Flat, HND and packed pools read the rows that indexing a tensor gives."""
    shape, slot_dims, layer_dim = _TENSORS[layout]
    pool = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    geometry = Geometry(planes=(_PLANE,))
    expected = PoolView.from_tensors(
        geometry, {"k": pool}, slot_dims=slot_dims, layer_dim=layer_dim
    )
    placed = place_device_layers(
        layout, _PLANE, num_rows=_ROWS, block_rows=_BLOCK, base=int(pool.ctypes.data)
    )
    for layer, view in enumerate(placed):
        found = read_rows(view, range(_ROWS))
        assert (found == read_rows(expected.view("k", layer), range(_ROWS))).all()


@pytest.mark.parametrize("layout", list(DeviceLayout))
@pytest.mark.parametrize("size", [1, 7, 12, 131])
def test_placed_layers_make_a_pool(layout: DeviceLayout, size: int) -> None:
    """In every layout the layers start at the base, share no byte and end where the pool does."""
    plane = Plane(name="k", num_layers=3, element_size=size)
    placed = place_device_layers(layout, plane, num_rows=_ROWS, block_rows=_BLOCK, base=0)
    pool = PoolView(Geometry(planes=(plane,)), {"k": placed})
    assert min(view.address for view in placed) == 0
    assert num_pool_bytes(placed) >= 3 * _ROWS * size
    moved = place_device_layers(layout, plane, num_rows=_ROWS, block_rows=_BLOCK, base=1000)
    assert num_pool_bytes(moved) == num_pool_bytes(placed) + 1000
    assert pool.device == "cpu"


def test_only_padded_layouts_have_padding() -> None:
    """Rows or blocks are apart where the name says so, and heads are pieces in HND alone."""
    sizes = {}
    for layout in DeviceLayout:
        placed = place_device_layers(layout, _PLANE, num_rows=_ROWS, block_rows=_BLOCK, base=0)
        sizes[layout] = num_pool_bytes(placed) - 3 * _ROWS * 12
        assert (placed[0].num_pieces > 1) == (layout is DeviceLayout.PAGED_HND)
    padded = {layout for layout, padding in sizes.items() if padding}
    assert padded == {DeviceLayout.PADDED, DeviceLayout.PAGED_NHD}


@pytest.mark.parametrize(
    ("layout", "shape", "slot_dims", "layer_dim"),
    [
        (Layout.LAYER_FIRST, (3, 24, 12), (0,), 0),
        (Layout.TOKEN_MAJOR, (24, 3, 12), (0,), 1),
        (Layout.PAGE_MAJOR, (6, 3, 4, 12), (0, 1), 1),
    ],
)
def test_host_layouts_are_those_of_tensors(
    layout: Layout, shape: tuple[int, ...], slot_dims: tuple[int, ...], layer_dim: int
) -> None:
    """An engine's host pool reads the rows that indexing its tensor gives, in each layout."""
    pool = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
    expected = PoolView.from_tensors(
        Geometry(planes=(_PLANE,)), {"k": pool}, slot_dims=slot_dims, layer_dim=layer_dim
    )
    placed = place_host_layers(
        layout, _PLANE, rows_per_page=4, num_pages=6, base=int(pool.ctypes.data)
    )
    for layer, view in enumerate(placed):
        found = read_rows(view, range(24))
        assert (found == read_rows(expected.view("k", layer), range(24))).all()
    assert num_pool_bytes(placed) == pool.size + int(pool.ctypes.data)
