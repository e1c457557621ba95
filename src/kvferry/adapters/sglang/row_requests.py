"""What HiCache's functions have in common: look at everything, then put it into a stream."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvferry.adapters.sglang.row_tensors import (
    Gpu,
    Side,
    gpu_of,
    index_list,
    row_view,
    rows_of,
)
from kvferry.errors import PlanError
from kvferry.geometry import LayerView
from kvferry.kernels import UNROLLS, CopyPath
from kvferry.transfer import RowMove, RowOptions, check_rows
from kvferry.types import Direction

__all__ = [
    "StagedPlane",
    "both_planes",
    "element_size_of",
    "move_options",
    "move_rows",
    "packed_rows",
    "write_back",
]


def move_options(unroll: int | None, block_quota: int | None) -> RowOptions:
    """What `unroll` and `block_quota` ask for; 0 and None ask for nothing. Raises PlanError."""
    if unroll and unroll not in UNROLLS:
        raise PlanError(f"unroll={unroll}: it is one of {', '.join(map(str, UNROLLS))}, or None")
    path = CopyPath.GROUPED if unroll else None
    return RowOptions(path=path, unroll=unroll or None, num_blocks=block_quota or None)


def element_size_of(given: int | None, source: int, target: int) -> int:
    """Bytes of a row; without `given` those from a row to the next. Raises PlanError."""
    if given is None and source != target:
        raise PlanError(
            f"rows are {source} and {target} bytes from each other; give element_size too"
        )
    return source if given is None else given


def both_planes(k: Side, v: Side) -> Side:
    """K and V as one side. Raises PlanError where they are not in memory of one kind."""
    if k.on_host != v.on_host:
        raise PlanError("K and V of one side are on the host and on the GPU")
    return Side((*k.views, *v.views), k.on_host, None)


def move_rows(
    gpu: Gpu,
    sides: Sequence[Side],
    indices_src: Any,
    indices_dst: Any,
    options: RowOptions,
) -> None:
    """Look at everything, then put it into the caller's stream."""
    source, target = sides
    if len(source.views) != len(target.views):
        raise PlanError(
            f"{len(source.views)} layers on one side and {len(target.views)} on the other"
        )
    for one, other in zip(source.views, target.views, strict=True):
        if one.element_size != other.element_size:
            raise PlanError(
                f"rows of {one.name} have {one.element_size} bytes, those of {other.name} "
                f"{other.element_size}"
            )
    if source.on_host and target.on_host:
        raise PlanError("both sides are in host memory; one side of a move is on the GPU")
    # Between two pools on a GPU the one that is written stands for the host.
    is_load = source.on_host
    device, host = (target, source) if is_load else (source, target)
    lists = {
        "indices_src": index_list("indices_src", indices_src, gpu, for_host=is_load),
        "indices_dst": index_list("indices_dst", indices_dst, gpu, for_host=not is_load),
    }
    check_rows("indices_src", lists["indices_src"], source.num_rows, written=False)
    check_rows("indices_dst", lists["indices_dst"], target.num_rows, written=True)
    of_device, of_host = (
        ("indices_dst", "indices_src") if is_load else ("indices_src", "indices_dst")
    )
    gpu.mover.move(
        [RowMove(*pair) for pair in zip(device.views, host.views, strict=True)],
        lists[of_device],
        lists[of_host],
        Direction.LOAD if is_load else Direction.STORE,
        int(gpu.stream().cuda_stream),
        options,
    )


class StagedPlane:
    """One plane of a staged write-back: L layers of E bytes a token."""

    def __init__(
        self, name: str, table: Any, staging: Any, dst: Any, element_size: int | None
    ) -> None:
        self.gpu = gpu_of(staging, table)
        self.num_layers = int(dst.shape[1])
        width = math.prod(dst.shape[1:])
        self.size = width // self.num_layers * dst.element_size()
        self.staging = None
        if staging.shape[0]:
            self.staging = rows_of(f"staging of {name}", staging, element_dim=width)
        if element_size is not None and element_size != self.size:
            raise PlanError(
                f"element_size is {element_size}, and dst of {name} has elements of {self.size}"
            )
        self.dst = rows_of(f"dst of {name}", dst, element_dim=width)
        self.row_bytes = self.num_layers * self.size
        dense = [self.dst] if self.staging is None else [self.dst, self.staging]
        if {view.row_stride for view in dense} != {self.row_bytes}:
            raise PlanError(
                f"staging and dst of {name} must be dense: tokens of {self.row_bytes} bytes"
            )
        self.source = self.gpu.table(f"ptr_src of {name}", table, self.size, self.size)
        if len(self.source.views) != self.num_layers or self.source.on_host:
            raise PlanError(
                f"ptr_src of {name} must have one address on the GPU for each of "
                f"{self.num_layers} layers"
            )
        if dst.is_cuda:
            raise PlanError(f"dst of {name} is on {dst.device}; write-back is to the host")
        size = self.dst.end - self.dst.address
        self.on_gpu = self.gpu.pinned_address(f"dst of {name}", self.dst.address, size)

    def layers(self, address: int, num_rows: int) -> list[RowMove]:
        """Moves of every layer to tokens that begin at `address`."""
        return [
            RowMove(
                view,
                row_view(
                    view.name, address + layer * self.size, num_rows, self.row_bytes, self.size
                ),
            )
            for layer, view in enumerate(self.source.views)
        ]


def write_back(
    planes: Sequence[StagedPlane], src_indices: Any, dst_indices: Any, options: RowOptions
) -> None:
    """Look at everything, then put the write-back of all planes into the caller's stream."""
    gpu = planes[0].gpu
    stream = int(gpu.stream().cuda_stream)
    source = index_list("src_indices", src_indices, gpu, for_host=False)
    target = index_list("dst_indices", dst_indices, gpu, for_host=True)
    check_rows("src_indices", source, None, written=False)
    for plane in planes:
        check_rows("dst_indices", target, plane.dst.num_rows, written=True)
    if source.count != target.count:
        raise PlanError(f"{source.count} src_indices and {target.count} dst_indices")
    for plane in planes:
        # The copy engine needs to be told where to, and so the list on the host.
        staging = plane.staging
        if target.on_host is None or staging is None or staging.address % 128:
            moves = plane.layers(plane.on_gpu, plane.dst.num_rows)
            gpu.mover.move(moves, source, target, Direction.STORE, stream, options)
            continue
        addresses = plane.dst.address + target.on_host * np.int64(plane.row_bytes)
        gpu.mover.store_staged(
            plane.layers(0, staging.num_rows),
            source,
            addresses,
            plane.row_bytes,
            staging.address,
            staging.num_rows,
            stream,
            options,
        )


def packed_rows(name: str, tensor: Any, row_bytes: int) -> LayerView:
    """Dense rows of so many bytes; what is left over behind the last whole one is none."""
    if row_bytes < 1 or row_bytes % tensor.element_size():
        raise PlanError(f"rows of {row_bytes} bytes are no whole numbers of {name}")
    count = tensor.numel() * tensor.element_size() // row_bytes
    if count and tensor.is_contiguous():
        return row_view(name, tensor.data_ptr(), count, row_bytes, row_bytes)
    return rows_of(name, tensor, element_dim=row_bytes // tensor.element_size())
