"""The ways in which engines lay out their pools, as views over memory at any address.

Nothing is allocated here: place the layers at base 0 to learn how many bytes they need, then at the
address where the memory is. Letters: L layers, E element bytes.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from kvferry.geometry import LayerView, layer_order

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.geometry import Plane
    from kvferry.types import Layout

__all__ = ["DeviceLayout", "num_pool_bytes", "place_device_layers", "place_host_layers"]

# Odd, so that rows and blocks start on every alignment there is.
_ROW_PADDING = 13
_BLOCK_PADDING = 95
_MOST_HEADS = 8


class DeviceLayout(enum.StrEnum):
    """How an engine keeps the layers of one plane."""

    FLAT = "flat"
    """(layer, token, element)."""

    PADDED = "padded"
    """(layer, token, element) with unused bytes after each element."""

    PAGED_NHD = "paged_nhd"
    """(layer, block, token, element) with unused bytes after each block."""

    PAGED_HND = "paged_hnd"
    """(layer, block, head, token, dimension): an element lies in pieces."""

    PACKED = "packed"
    """(token, layer, element) in one tensor."""


def place_device_layers(
    layout: DeviceLayout,
    plane: Plane,
    *,
    num_rows: int,
    block_rows: int,
    base: int,
    device: str = "cpu",
) -> tuple[LayerView, ...]:
    """The views of each layer of `plane` in a device pool whose first byte is at `base`.

    Args:
        layout: How the layers lie.
        plane: Its layers and element size.
        num_rows: Rows a layer; for the paged layouts a multiple of `block_rows`.
        block_rows: Rows a block of the paged layouts; the others have none.
        base: An address, or 0.
        device: Where the memory is.
    """
    size, heads = plane.element_size, 1
    row_stride, layer_stride, blocks_of = size, num_rows * size, num_rows
    block_stride = num_rows * size
    if layout is DeviceLayout.PADDED:
        row_stride = size + _ROW_PADDING
        block_stride = layer_stride = num_rows * row_stride
    elif layout is DeviceLayout.PAGED_NHD:
        blocks_of, block_stride = block_rows, block_rows * size + _BLOCK_PADDING
        layer_stride = num_rows // block_rows * block_stride
    elif layout is DeviceLayout.PAGED_HND:
        heads = _num_heads(size)
        blocks_of, block_stride, row_stride = block_rows, block_rows * size, size // heads
    elif layout is DeviceLayout.PACKED:
        row_stride, layer_stride = plane.num_layers * size, size
        block_stride = num_rows * row_stride
    return tuple(
        LayerView(
            address=base + layer * layer_stride,
            num_rows=num_rows,
            row_stride=row_stride,
            block_rows=blocks_of,
            block_stride=block_stride,
            num_pieces=heads,
            piece_size=size // heads,
            piece_stride=blocks_of * (size // heads),
            device=device,
            name=f"plane {plane.name!r}, layer {layer} ({layout.value})",
        )
        for layer in range(plane.num_layers)
    )


def place_host_layers(
    layout: Layout, plane: Plane, *, rows_per_page: int, num_pages: int, base: int
) -> tuple[LayerView, ...]:
    """The views of each layer of `plane` in an engine's host pool whose first byte is at `base`."""
    size, views = plane.element_size, []
    for layer in range(plane.num_layers):
        order = layer_order(layout, plane, layer, rows_per_page=rows_per_page, num_pages=num_pages)
        views.append(
            LayerView(
                address=base + order.offset,
                num_rows=rows_per_page * num_pages,
                row_stride=order.row_stride,
                block_rows=order.block_rows,
                block_stride=order.block_stride,
                num_pieces=1,
                piece_size=size,
                piece_stride=size,
                name=f"plane {plane.name!r}, layer {layer} ({layout.value})",
            )
        )
    return tuple(views)


def num_pool_bytes(views: Sequence[LayerView]) -> int:
    """The bytes from address 0 to the end of the last view: the pool's size if `base` was 0."""
    return max(view.end for view in views)


def _num_heads(element_size: int) -> int:
    """More than one head wherever the element can be split."""
    few = [heads for heads in range(2, _MOST_HEADS + 1) if element_size % heads == 0]
    return few[-1] if few else element_size
