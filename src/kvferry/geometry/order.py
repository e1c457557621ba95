"""Layouts as arithmetic: where each layer of a plane lies in a pool of a given layout.

Letters: L layers, N pages, P rows a page, E element bytes. All results are bytes and rows, never
memory: the caller adds a base address.
"""

from __future__ import annotations

from typing import NamedTuple

from kvferry.geometry.spec import Geometry, Plane
from kvferry.geometry.view import LayerView, PoolView
from kvferry.types import Layout, SlotKind

__all__ = ["LayerOrder", "host_pool_view", "layer_order"]


class LayerOrder(NamedTuple):
    """Where one layer lies in a pool that keeps one plane alone."""

    offset: int
    """Of row 0 from the pool's first byte."""

    row_stride: int
    block_rows: int
    block_stride: int
    pool_bytes: int
    """The bytes of the whole pool, all layers."""


def layer_order(
    layout: Layout, plane: Plane, layer: int, *, rows_per_page: int, num_pages: int
) -> LayerOrder:
    """Where `layer` of `plane` lies in an engine's host pool of `num_pages` pages.

    The three layouts keep the same L·N·P·E bytes in different orders; none has padding.
    """
    size, layers, rows = plane.element_size, plane.num_layers, rows_per_page * num_pages
    pool_bytes = layers * rows * size
    if layout is Layout.LAYER_FIRST:
        return LayerOrder(layer * rows * size, size, rows, rows * size, pool_bytes)
    if layout is Layout.TOKEN_MAJOR:
        stride = layers * size
        return LayerOrder(layer * size, stride, rows, rows * stride, pool_bytes)
    page = rows_per_page * size
    return LayerOrder(layer * page, size, rows_per_page, layers * page, pool_bytes)


def host_pool_view(geometry: Geometry, kind: SlotKind, *, base: int, num_slots: int) -> PoolView:
    """Every span of kvferry's own host pool: `num_slots` slots of `kind`, slot 0 at `base`."""
    layers: dict[str, list[LayerView]] = {}
    for span in geometry.spans(kind):
        size = span.plane.element_size
        layers.setdefault(span.plane.name, []).append(
            LayerView(
                address=base + span.offset,
                num_rows=span.rows * num_slots,
                row_stride=size,
                block_rows=span.rows,
                block_stride=geometry.slot_bytes(kind),
                num_pieces=1,
                piece_size=size,
                piece_stride=size,
                name=f"plane {span.plane.name!r}, layer {span.layer} (host pool)",
            )
        )
    return PoolView(geometry, {name: tuple(views) for name, views in layers.items()})
