"""From a tensor's shape and strides to rows, blocks and pieces of an element."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any

from kvferry.errors import ViewError
from kvferry.geometry.storage import Storage

__all__ = ["Pieces", "SlotDims", "Slots", "split_dims"]

SlotDims = Sequence[int]
"""The dimensions of a layer's tensor that count rows, slowest first: one or two of them."""


@dataclasses.dataclass(frozen=True)
class Slots:
    """Where rows lie; strides are bytes."""

    rows: int
    row_stride: int
    block_rows: int
    block_stride: int


@dataclasses.dataclass(frozen=True)
class Pieces:
    """How the bytes of one row lie; sizes and strides are bytes."""

    count: int
    size: int
    stride: int


def split_dims(storage: Storage, slot_dims: SlotDims, what: str) -> tuple[Slots, Pieces]:
    """The rows that `slot_dims` of a tensor count, and the element that its other dimensions are.

    Raises ViewError, naming the dimension, when they are not evenly spaced.
    """
    rank = len(storage.shape)
    dims = [dim + rank if dim < 0 else dim for dim in _whole_numbers(slot_dims, what)]
    if (
        len(dims) not in (1, 2)
        or len(set(dims)) != len(dims)
        or not all(0 <= d < rank for d in dims)
    ):
        raise ViewError(
            f"{what}: slot_dims {tuple(slot_dims)} must name one or two different dimensions of "
            f"shape {storage.shape}"
        )
    for dim, (size, stride) in enumerate(zip(storage.shape, storage.strides, strict=True)):
        if size < 1:
            raise ViewError(f"{what}: dimension {dim} of shape {storage.shape} is empty")
        if size > 1 and stride <= 0:
            raise ViewError(
                f"{what}: dimension {dim} of shape {storage.shape} has stride {stride}; an "
                f"expanded or flipped tensor has no rows of its own: pass contiguous storage"
            )
    sizes = [storage.shape[dim] for dim in dims]
    strides = [storage.strides[dim] for dim in dims]
    element = [
        (storage.shape[dim], storage.strides[dim], dim) for dim in range(rank) if dim not in dims
    ]
    return _slots_of(sizes, strides), _pieces_of(element, storage, what)


def _whole_numbers(slot_dims: Any, what: str) -> list[int]:
    try:
        return [operator.index(dim) for dim in slot_dims]
    except TypeError as bad:
        raise ViewError(
            f"{what}: slot_dims must be a tuple of dimensions such as (0,) or (0, 2), "
            f"not {slot_dims!r}"
        ) from bad


def _slots_of(sizes: list[int], strides: list[int]) -> Slots:
    rows = math.prod(sizes)
    if len(sizes) == 2 and sizes[0] > 1 and sizes[1] > 1:
        evenly_spaced = strides[0] == sizes[1] * strides[1]
        if not evenly_spaced:
            return Slots(rows, strides[1], sizes[1], strides[0])
        return Slots(rows, strides[1], rows, rows * strides[1])
    stride = next((t for s, t in zip(sizes, strides, strict=True) if s > 1), strides[-1])
    return Slots(rows, stride, rows, rows * stride)


def _pieces_of(element: list[tuple[int, int, int]], storage: Storage, what: str) -> Pieces:
    size = storage.item_size
    kept = [dim for dim in element if dim[0] > 1]
    while kept and kept[-1][1] == size:
        size *= kept.pop()[0]
    if not kept:
        return Pieces(1, size, size)
    count, stride, _ = kept.pop()
    while kept:
        outer_count, outer_stride, dim = kept.pop()
        if outer_stride != count * stride:
            raise ViewError(
                f"{what}: dimension {dim} of shape {storage.shape} (stride {outer_stride}) breaks "
                f"the even spacing of an element's pieces (expected {count * stride}); register "
                f"its parts as planes of their own"
            )
        count *= outer_count
    return Pieces(count, size, stride)
