"""Functions of the engine's kernel library that its other pools call, with kvferry's kernels.

HiCache's own functions carry K, V and latents. Pages of an indexer and states of recurrent layers
go by these: packed rows of any size, one layer or all, with a host pool that is layer_first or
token_major. Each puts its work into the caller's current stream and returns. `num_warps_...` is
taken and changes nothing.
"""

from __future__ import annotations

from typing import Any

from kvferry.adapters.sglang.row_requests import move_options, move_rows, packed_rows
from kvferry.adapters.sglang.row_tensors import Gpu, Side, gpu_of, row_view
from kvferry.errors import PlanError

__all__ = [
    "transfer_kv_all_layer_mla",
    "transfer_kv_all_layer_mla_lf_pf",
    "transfer_kv_mamba_lf_pf",
    "transfer_kv_mamba_pf_lf",
    "transfer_kv_per_layer_mla",
    "transfer_kv_per_layer_mla_pf_lf",
]


def transfer_kv_per_layer_mla(
    src: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Packed rows of `item_size` bytes of one layer, either way.

    Raises as `transfer_hicache_one_layer`.
    """
    gpu = gpu_of(dst, src)
    sides = [
        gpu.tensors([(name, tensor, packed_rows(name, tensor, item_size))])
        for name, tensor in (("src", src), ("dst", dst))
    ]
    move_rows(gpu, sides, src_indices, dst_indices, move_options(None, block_quota))


def transfer_kv_per_layer_mla_pf_lf(
    src: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """The same out of a token_major pool, whose rows of all layers are `src_layout_dim` bytes."""
    gpu = gpu_of(dst, src)
    source = _layers_of(gpu, "src", src, range(layer_id, layer_id + 1), item_size, src_layout_dim)
    target = gpu.tensors([("dst", dst, packed_rows("dst", dst, item_size))])
    move_rows(gpu, [source, target], src_indices, dst_indices, move_options(None, block_quota))


def transfer_kv_all_layer_mla(
    src_layers: Any,
    dst_layers: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Packed rows of all layers, by tables of addresses as `transfer_hicache_all_layer` takes."""
    gpu = gpu_of(src_layers, dst_layers, src_indices, dst_indices)
    sides = [
        _first_layers(gpu, name, table, item_size, num_layers)
        for name, table in (("src_layers", src_layers), ("dst_layers", dst_layers))
    ]
    move_rows(gpu, sides, src_indices, dst_indices, move_options(None, block_quota))


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """The same into a token_major pool, whose rows of all layers are `dst_layout_dim` bytes."""
    gpu = gpu_of(src_layers, dst, src_indices, dst_indices)
    source = _first_layers(gpu, "src_layers", src_layers, item_size, num_layers)
    target = _layers_of(gpu, "dst", dst, range(num_layers), item_size, dst_layout_dim)
    move_rows(gpu, [source, target], src_indices, dst_indices, move_options(None, block_quota))


def transfer_kv_mamba_pf_lf(
    src: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    num_warps_per_item: int | None = None,
) -> None:
    """States of one layer, as `transfer_kv_per_layer_mla_pf_lf`."""
    transfer_kv_per_layer_mla_pf_lf(
        src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
    )


def transfer_kv_mamba_lf_pf(
    src_ptrs: Any,
    dst: Any,
    src_indices: Any,
    dst_indices: Any,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    num_warps_per_item: int | None = None,
) -> None:
    """States of all layers, as `transfer_kv_all_layer_mla_lf_pf`."""
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


def _first_layers(gpu: Gpu, name: str, table: Any, item_size: int, num_layers: int) -> Side:
    """Packed rows at the first `num_layers` addresses of a table."""
    side = gpu.table(name, table, item_size, item_size)
    if not 1 <= num_layers <= len(side.views):
        raise PlanError(f"{name} has {len(side.views)} addresses, and num_layers is {num_layers}")
    return side._replace(views=side.views[:num_layers])


def _layers_of(
    gpu: Gpu, name: str, tensor: Any, layers: range, item_size: int, row_bytes: int
) -> Side:
    """Some layers of a token_major pool."""
    if not layers or layers[0] < 0 or layers.stop * item_size > row_bytes:
        raise PlanError(
            f"layers {layers.start} to {layers.stop - 1} of {item_size} bytes do not lie in rows "
            f"of {row_bytes} in {name}"
        )
    whole = packed_rows(name, tensor, row_bytes)
    views = [
        row_view(name, whole.address + layer * item_size, whole.num_rows, row_bytes, item_size)
        for layer in layers
    ]
    return gpu.tensors([(name, tensor, view) for view in views])
