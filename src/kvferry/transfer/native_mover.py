"""The mover for device pools in host memory: the compiled kernel, a call a span."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.kernels import NativeMove, NativeView, native_library, span_seeds
from kvferry.types import Direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView
    from kvferry.transfer.span_move import SpanMove

__all__ = ["move_span_native"]


def move_span_native(move: SpanMove, direction: Direction, *, verify: bool) -> NDArray[np.bool_]:
    """As `numpy_mover.move_span`, to the bit; needs `native_library()`."""
    library = native_library()
    if library is None:
        raise RuntimeError("the engine chose the compiled path, but it is not installed")
    span = move.span
    pages, per_page = move.device_rows.shape
    seeds = span_seeds(
        move.page_seeds,
        plane_index=span.plane_index,
        layer=span.layer,
        num_bytes=span.num_bytes,
    )
    good = np.empty(pages, dtype=np.bool_)
    scratch = np.empty(span.num_bytes, dtype=np.uint8)
    device_rows, host_slots = _contiguous(move.device_rows), _contiguous(move.host_slots)
    library.kvferry_move_span(
        ctypes.byref(
            NativeMove(
                device=_native_view(move.device),
                host=_native_view(move.host),
                device_rows=device_rows.ctypes.data,
                host_slots=host_slots.ctypes.data,
                seeds=seeds.ctypes.data,
                digests=move.digests.ctypes.data,
                digest_stride=move.digests.strides[0] // move.digests.itemsize,
                num_pages=pages,
                rows_per_page=per_page,
                scratch=scratch.ctypes.data,
                good=good.ctypes.data,
                is_load=direction is Direction.LOAD,
                verify=verify,
            )
        )
    )
    return good


def _contiguous(indices: NDArray[np.int64]) -> NDArray[Any]:
    return np.ascontiguousarray(indices, dtype=np.int64)


def _native_view(view: LayerView) -> NativeView:
    return NativeView(
        base=view.address,
        row_stride=view.row_stride,
        block_rows=view.block_rows,
        block_stride=view.block_stride,
        num_pieces=view.num_pieces,
        piece_size=view.piece_size,
        piece_stride=view.piece_stride,
    )
