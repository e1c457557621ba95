"""HiCache's transfer functions, under their own names and keywords, with kvferry's kernels.

Each puts its work into the caller's current stream and returns. Element sizes are any, strides are
those of the tensors, index lists are int32 or int64, on the GPU or in host memory. `unroll` takes
the kernel in which threads share an element, as it is given; without it the best is taken.
`block_quota` is the number of thread blocks. `page_size` is taken and changes nothing: every index
is followed as it is.
"""

from __future__ import annotations

import logging
from typing import Any

from kvferry.adapters.sglang.row_requests import (
    StagedPlane,
    both_planes,
    element_size_of,
    move_options,
    move_rows,
    write_back,
)
from kvferry.adapters.sglang.row_tensors import gpu_at, gpu_of, rows_of
from kvferry.errors import KVFerryError
from kvferry.kernels import refused_paths, resolve_copy
from kvferry.transfer import disabled_gpu_paths, why_no_gpu

__all__ = [
    "can_use_hicache_jit_kernel",
    "can_use_write_back_jit_kernel",
    "transfer_hicache_all_layer",
    "transfer_hicache_all_layer_mla",
    "transfer_hicache_all_layer_mla_staged_lf_pf",
    "transfer_hicache_all_layer_staged_lf_pf",
    "transfer_hicache_one_layer",
    "transfer_hicache_one_layer_mla",
    "why_not",
]

_logger = logging.getLogger(__name__)


def transfer_hicache_one_layer(
    k_cache_dst: Any,
    v_cache_dst: Any,
    indices_dst: Any,
    k_cache_src: Any,
    v_cache_src: Any,
    indices_src: Any,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Rows of K and V of one layer. V may have another width than K.

    Args:
        k_cache_dst: Where K goes; any shape that can be seen as rows of `element_dim` numbers.
        v_cache_dst: Where V goes, with as many rows.
        indices_dst: Rows there. Shape ``[rows]``.
        k_cache_src: Where K is.
        v_cache_src: Where V is.
        indices_src: Rows there, as many.
        element_dim: Numbers a row of K; None: the last dimension of `k_cache_dst`.
        unroll: See the module.
        block_quota: See the module.
        page_size: See the module.

    Raises:
        PlanError, ViewError, PinError: The arguments do not fit, or memory cannot be reached;
            nothing was enqueued.
        DriverError, JITError, MissingDependencyError: The GPU or a kernel cannot be had.
    """
    gpu = gpu_of(k_cache_dst, k_cache_src)
    dim = element_dim or k_cache_dst.size(-1)
    pairs = []
    for k_name, k, v_name, v in (
        ("k_cache_src", k_cache_src, "v_cache_src", v_cache_src),
        ("k_cache_dst", k_cache_dst, "v_cache_dst", v_cache_dst),
    ):
        k_rows = rows_of(k_name, k, element_dim=dim)
        v_rows = rows_of(v_name, v, rows=k_rows.num_rows)
        pairs.append(gpu.tensors([(k_name, k, k_rows), (v_name, v, v_rows)]))
    move_rows(gpu, pairs, indices_src, indices_dst, move_options(unroll, block_quota))


def transfer_hicache_all_layer(
    k_ptr_dst: Any,
    v_ptr_dst: Any,
    indices_dst: Any,
    k_ptr_src: Any,
    v_ptr_src: Any,
    indices_src: Any,
    *,
    kv_cache_src_stride_bytes: int,
    kv_cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
    v_cache_src_stride_bytes: int | None = None,
    v_cache_dst_stride_bytes: int | None = None,
    v_element_size: int | None = None,
) -> None:
    """Rows of K and V of all layers, by tables of addresses, one a layer.

    Args:
        k_ptr_dst: Where K of each layer goes. Shape ``[layers]``, uint64; the host as the GPU
            calls it. A table is read when it is new, which waits for the stream.
        v_ptr_dst: The same of V.
        indices_dst: Rows there. Shape ``[rows]``.
        k_ptr_src: Where K of each layer is.
        v_ptr_src: The same of V.
        indices_src: Rows there, as many.
        kv_cache_src_stride_bytes: From a row to the next.
        kv_cache_dst_stride_bytes: The same.
        element_size: Bytes of a row; None: both strides, which must be equal then.
        unroll: See the module.
        block_quota: See the module.
        page_size: See the module.
        v_cache_src_stride_bytes: Of V, where it is not that of K.
        v_cache_dst_stride_bytes: The same.
        v_element_size: Bytes of a row of V, where they are not those of K.

    Raises as `transfer_hicache_one_layer`.
    """
    gpu = gpu_of(k_ptr_dst, k_ptr_src, indices_dst, indices_src)
    src, dst = kv_cache_src_stride_bytes, kv_cache_dst_stride_bytes
    size = element_size_of(element_size, src, dst)
    v_size = v_element_size or size
    v_src, v_dst = v_cache_src_stride_bytes or src, v_cache_dst_stride_bytes or dst
    source = both_planes(
        gpu.table("k_ptr_src", k_ptr_src, src, size),
        gpu.table("v_ptr_src", v_ptr_src, v_src, v_size),
    )
    target = both_planes(
        gpu.table("k_ptr_dst", k_ptr_dst, dst, size),
        gpu.table("v_ptr_dst", v_ptr_dst, v_dst, v_size),
    )
    move_rows(gpu, [source, target], indices_src, indices_dst, move_options(unroll, block_quota))


def transfer_hicache_one_layer_mla(
    cache_dst: Any,
    indices_dst: Any,
    cache_src: Any,
    indices_src: Any,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """`transfer_hicache_one_layer` for one plane."""
    gpu = gpu_of(cache_dst, cache_src)
    dim = element_dim or cache_dst.size(-1)
    sides = [
        gpu.tensors([(name, cache, rows_of(name, cache, element_dim=dim))])
        for name, cache in (("cache_src", cache_src), ("cache_dst", cache_dst))
    ]
    move_rows(gpu, sides, indices_src, indices_dst, move_options(unroll, block_quota))


def transfer_hicache_all_layer_mla(
    ptr_dst: Any,
    indices_dst: Any,
    ptr_src: Any,
    indices_src: Any,
    *,
    cache_src_stride_bytes: int,
    cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """`transfer_hicache_all_layer` for one plane."""
    gpu = gpu_of(ptr_dst, ptr_src, indices_dst, indices_src)
    size = element_size_of(element_size, cache_src_stride_bytes, cache_dst_stride_bytes)
    source = gpu.table("ptr_src", ptr_src, cache_src_stride_bytes, size)
    target = gpu.table("ptr_dst", ptr_dst, cache_dst_stride_bytes, size)
    move_rows(gpu, [source, target], indices_src, indices_dst, move_options(unroll, block_quota))


def transfer_hicache_all_layer_staged_lf_pf(
    k_ptr_src: Any,
    v_ptr_src: Any,
    src_indices: Any,
    dst_indices: Any,
    staging_k: Any,
    staging_v: Any,
    dst_k: Any,
    dst_v: Any,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """Write back K and V of all layers to token_major host pools, by way of staging.

    Args:
        k_ptr_src: Where K of each layer is: rows of packed elements. Shape ``[layers]``, uint64.
        v_ptr_src: The same of V.
        src_indices: Rows there. Shape ``[rows]``.
        dst_indices: Rows of the host pools, as many. On the host: bytes go through staging, and
            neighbours are copied in one piece. On the GPU: kernels write to the host themselves.
        staging_k: Memory of the GPU. Shape ``[tokens, layers, *element]``; any number of tokens.
        staging_v: The same for V, of any width.
        dst_k: Pinned. Shape ``[tokens, layers, *element]``.
        dst_v: The same for V.
        page_size: See the module.
        element_size: Bytes of an element of K; None: as staging has it.
        unroll: See the module.
        block_quota: See the module.

    Raises as `transfer_hicache_one_layer`.
    """
    options = move_options(unroll, block_quota)
    # All is looked at before anything of it moves.
    planes = [
        StagedPlane("k", k_ptr_src, staging_k, dst_k, element_size),
        StagedPlane("v", v_ptr_src, staging_v, dst_v, None),
    ]
    write_back(planes, src_indices, dst_indices, options)


def transfer_hicache_all_layer_mla_staged_lf_pf(
    ptr_src: Any,
    src_indices: Any,
    dst_indices: Any,
    staging: Any,
    dst: Any,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """`transfer_hicache_all_layer_staged_lf_pf` for one plane."""
    planes = [StagedPlane("plane", ptr_src, staging, dst, element_size)]
    write_back(planes, src_indices, dst_indices, move_options(unroll, block_quota))


def why_not(*, element_size: int, unroll: int | None = None, block_quota: int | None = None) -> str:
    """Why rows of so many bytes cannot be moved so, either way; empty where they can."""
    if block_quota is not None and block_quota < 1:
        return f"block_quota is {block_quota}; it takes a thread block at least"
    try:
        options = move_options(unroll, block_quota)
        decision = resolve_copy(
            element_size,
            path=options.path,
            unroll=options.unroll,
            refused=refused_paths(element_size, disabled=disabled_gpu_paths(), verify=False),
        )
        if decision.chosen is None:
            return decision.reason
        absent = why_no_gpu()
        if absent:
            return absent
        gpu_at().mover.load(decision.chosen)
    except KVFerryError as bad:
        return str(bad)
    return ""


def can_use_hicache_jit_kernel(
    *,
    element_size: int,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> bool:
    """Whether rows of `element_size` bytes can be moved; the log says why not.

    It is the same answer for loads and for write-back. Kernels are compiled meanwhile, so that the
    first move does not.
    """
    reason = why_not(element_size=element_size, unroll=unroll, block_quota=block_quota)
    if reason:
        _logger.warning("no kernel for rows of %s bytes: %s", element_size, reason)
    return not reason


def can_use_write_back_jit_kernel(
    *, element_size: int, unroll: int | None = None, block_quota: int | None = None
) -> bool:
    """As `can_use_hicache_jit_kernel`."""
    return can_use_hicache_jit_kernel(
        element_size=element_size, unroll=unroll, block_quota=block_quota
    )
