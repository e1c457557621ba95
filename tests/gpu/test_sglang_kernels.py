"""HiCache's functions on a GPU, against copies made row by row. No engine is needed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, new_stream
from tests.adapters.sglang.hicache_rig import Plane, Rows, scattered, table

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang.row_tensors import gpu_at
from kvferry.errors import PinError, PlanError

pytestmark = pytest.mark.gpu

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 40, 48, 64, 66, 72, 96, 100, 128, 132, 144, 192, 256, 320, 512,
         528, 576, 584, 640, 656, 1024, 1152, 4608, 9216)  # fmt: skip
KINDS = tuple(itertools.product((torch.int32, torch.int64), ("cuda", "pinned", "cpu")))
LAYERS = 5
ROWS = (700, 900)
COUNT = 384


def _on_gpu(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _plane(size: int, token_major: bool, seed: int = 0, **more: Any) -> Plane:
    given = {"layers": LAYERS, "rows": ROWS, **more}
    made = Plane(size, token_major=token_major, places=(_on_gpu, _pinned), seed=seed, **given)
    torch.cuda.synchronize()
    return made


def _rows(rows: Rows, kind: tuple[torch.dtype, str] = (torch.int64, "cuda")) -> torch.Tensor:
    tensor = torch.from_numpy(rows.copy()).to(kind[0])
    if kind[1] == "pinned":
        return tensor.pin_memory()
    return tensor.to(DEVICE) if kind[1] == "cuda" else tensor


def _table(tensors: list[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = table(tensors, lambda one: one.to(DEVICE))
    return made


def _one_layer(
    plane: Plane, layer: int, load: bool, of_device: Any, of_host: Any, **more: Any
) -> None:
    device, host = plane.device_tensors[layer], plane.host_tensors[layer]
    adapter.transfer_hicache_one_layer_mla(
        cache_dst=device if load else host,
        indices_dst=of_device if load else of_host,
        cache_src=host if load else device,
        indices_src=of_host if load else of_device,
        **more,
    )


def _all_layers(plane: Plane, load: bool, of_device: Any, of_host: Any, **more: Any) -> None:
    device, host = _table(plane.device_tensors), _table(plane.host_tensors)
    strides = (plane.host_stride, plane.size) if load else (plane.size, plane.host_stride)
    adapter.transfer_hicache_all_layer_mla(
        ptr_dst=device if load else host,
        indices_dst=of_device if load else of_host,
        ptr_src=host if load else device,
        indices_src=of_host if load else of_device,
        cache_src_stride_bytes=strides[0],
        cache_dst_stride_bytes=strides[1],
        element_size=plane.size,
        **more,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("token_major", [False, True], ids=["layer_first", "token_major"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("page", [1, 64], ids=["scattered", "pages"])
def test_one_and_all_layers(size: int, token_major: bool, load: bool, page: int) -> None:
    """Every size, layout and direction; no byte beside the rows on either side."""
    plane = _plane(size, token_major)
    device_rows, host_rows = (scattered(n, COUNT, ROWS[n], page) for n in (0, 1))
    for move, layers in (
        (functools.partial(_one_layer, plane, 2), [2]),
        (functools.partial(_all_layers, plane), list(range(LAYERS))),
    ):
        expected = plane.after(load, device_rows, host_rows, layers)
        move(load, _rows(device_rows), _rows(host_rows), page_size=page)
        torch.cuda.synchronize()
        plane.check(expected, f"{size} bytes, layers {layers}")


@pytest.mark.parametrize(("of_device", "of_host"), list(itertools.product(KINDS, KINDS)), ids=str)
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("size", [66, 656])
def test_index_lists(of_device: Any, of_host: Any, load: bool, size: int) -> None:
    """Of 32 and 64 bits, on the GPU, pinned or not."""
    plane = _plane(size, True)
    device_rows, host_rows = (scattered(10 + n, COUNT, ROWS[n]) for n in (0, 1))
    expected = plane.after(load, device_rows, host_rows, [0])
    _one_layer(plane, 0, load, _rows(device_rows, of_device), _rows(host_rows, of_host))
    torch.cuda.synchronize()
    plane.check(expected, "index lists")


@pytest.mark.parametrize(("k_size", "v_size"), [(1024, 1024), (384, 256), (66, 132), (16, 1)])
@pytest.mark.parametrize("token_major", [False, True], ids=["layer_first", "token_major"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_k_and_v(k_size: int, v_size: int, token_major: bool, load: bool) -> None:
    """Of one width or two, by tensors and by tables."""
    k, v = _plane(k_size, token_major), _plane(v_size, token_major, 500)
    device_rows, host_rows = (scattered(20 + n, COUNT, ROWS[n]) for n in (0, 1))
    sides = [
        ([k.device_tensors[1], v.device_tensors[1]], _rows(device_rows)),
        ([k.host_tensors[1], v.host_tensors[1]], _rows(host_rows)),
    ]
    expected = [plane.after(load, device_rows, host_rows, [1]) for plane in (k, v)]
    (dst, to), (src, at) = sides if load else reversed(sides)
    adapter.transfer_hicache_one_layer(dst[0], dst[1], to, src[0], src[1], at)
    torch.cuda.synchronize()
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "one layer")
    tables = [
        [_table(k.device_tensors), _table(v.device_tensors)],
        [_table(k.host_tensors), _table(v.host_tensors)],
    ]
    expected = [plane.after(load, device_rows, host_rows, range(LAYERS)) for plane in (k, v)]
    dst, src = tables if load else reversed(tables)
    strides = [(k_size, v_size), (k.host_stride, v.host_stride)]
    to_stride, at_stride = strides if load else reversed(strides)
    adapter.transfer_hicache_all_layer(
        dst[0], dst[1], to, src[0], src[1], at,
        kv_cache_src_stride_bytes=at_stride[0], kv_cache_dst_stride_bytes=to_stride[0],
        element_size=k_size, v_element_size=v_size, v_cache_src_stride_bytes=at_stride[1],
        v_cache_dst_stride_bytes=to_stride[1],
    )  # fmt: skip
    torch.cuda.synchronize()
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "all layers")


@pytest.mark.parametrize("size", [1, 16, 66, 132, 528, 576, 584, 656, 1152])
@pytest.mark.parametrize("of_host", KINDS, ids=str)
@pytest.mark.parametrize("staging_pages", [0, 1, 7, 30])
def test_staged_write_back(size: int, of_host: Any, staging_pages: int) -> None:
    """Many pieces with a short last one, in a stream of the caller's and in the legacy one."""
    page = 16
    plane = _plane(size, True)
    staging = _on_gpu(staging_pages * page * LAYERS * size).view(-1, LAYERS, size)
    for seed, stream in ((0, new_stream()), (1, torch.cuda.default_stream())):
        device_rows, host_rows = (scattered(30 + seed + n, COUNT, ROWS[n], page) for n in (0, 1))
        expected = plane.after(False, device_rows, host_rows, range(LAYERS))
        lists = _rows(device_rows), _rows(host_rows, of_host)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
                _table(plane.device_tensors), *lists, staging, plane.host_tensor, page_size=page
            )
        torch.cuda.synchronize()
        plane.check(expected, "staged")


@pytest.mark.parametrize("size", [576, 656, 66])
@pytest.mark.parametrize("legacy", [False, True])
def test_staging_is_free_behind_a_write_back(size: int, legacy: bool) -> None:
    """Copies run in a stream of their own; the caller's is behind them all, and may use staging."""
    page, num_pages = 64, 8
    plane = _plane(size, True)
    staging = _on_gpu(num_pages * page * LAYERS * size).view(-1, LAYERS, size)
    stream = torch.cuda.default_stream() if legacy else new_stream()
    for seed in range(20):
        device_rows, host_rows = (scattered(700 + seed + n, 640, ROWS[n], page) for n in (0, 1))
        expected = plane.after(False, device_rows, host_rows, range(LAYERS))
        lists = _rows(device_rows), _rows(host_rows, (torch.int64, "cpu"))
        addresses = _table(plane.device_tensors)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
                addresses, *lists, staging, plane.host_tensor, page_size=page
            )
            staging.fill_(seed)
        stream.synchronize()
        plane.check(expected, "staged")


def test_a_long_write_back_through_little_staging() -> None:
    """2,048 pages of 576 bytes and many layers through 7 pages, again and again, then 1, then 0."""
    page, layers, pages = 16, 61, 2048
    plane = _plane(576, True, layers=layers, rows=(page * pages, page * pages))
    staging = _on_gpu(7 * page * layers * 576).view(-1, layers, 576)
    pointers = _table(plane.device_tensors)
    host = plane.host_tensor
    for turn, count in ((0, pages), (1, pages), (2, 1), (3, 0)):
        rows = [scattered(40 + turn * 2 + n, count * page, page * pages, page) for n in (0, 1)]
        before = host.clone()
        adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
            pointers, _rows(rows[0]), _rows(rows[1], (torch.int64, "cpu")), staging, host,
            page_size=page,
        )  # fmt: skip
        torch.cuda.synchronize()
        for layer, tensor in enumerate(plane.device_tensors):
            before[torch.from_numpy(rows[1]), layer] = tensor[torch.from_numpy(rows[0])].cpu()
        assert torch.equal(host, before)


def test_staged_k_and_v_of_two_widths() -> None:
    """Each through staging of its own."""
    k, v = _plane(384, True), _plane(256, True, 500)
    device_rows, host_rows = (scattered(50 + n, COUNT, ROWS[n], 4) for n in (0, 1))
    expected = [plane.after(False, device_rows, host_rows, range(LAYERS)) for plane in (k, v)]
    staging = [_on_gpu(40 * LAYERS * one.size).view(40, LAYERS, one.size) for one in (k, v)]
    adapter.transfer_hicache_all_layer_staged_lf_pf(
        _table(k.device_tensors), _table(v.device_tensors), _rows(device_rows),
        _rows(host_rows, (torch.int64, "cpu")), staging[0], staging[1], k.host_tensor,
        v.host_tensor, page_size=4,
    )  # fmt: skip
    torch.cuda.synchronize()
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "K and V")


@pytest.mark.parametrize(("size", "unroll"), [(576, 2), (656, 8), (512, 4), (1024, 2), (1152, 1)])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_an_unroll_that_is_asked_for(size: int, unroll: int, load: bool) -> None:
    """The scheme in which threads share an element, with a quota of one block and of many."""
    plane = _plane(size, True)
    device_rows, host_rows = (scattered(60 + n, COUNT, ROWS[n]) for n in (0, 1))
    expected = plane.after(load, device_rows, host_rows, range(LAYERS))
    for quota in (1, 40):
        _all_layers(plane, load, _rows(device_rows), _rows(host_rows), unroll=unroll,
                    block_quota=quota)  # fmt: skip
    torch.cuda.synchronize()
    plane.check(expected, "grouped")


@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_order_with_the_callers_stream(load: bool, slow: Callable[[Any], None]) -> None:
    """What is before in the stream is done first; lists that are dropped at once are followed."""
    plane = _plane(576, True)
    device_rows, host_rows = (scattered(70 + n, COUNT, ROWS[n]) for n in (0, 1))
    warm = _rows(host_rows, (torch.int32, "cpu"))
    _one_layer(plane, 0, load, _rows(device_rows), warm)  # kernels and room are there
    torch.cuda.synchronize()
    fresh = torch.randint(0, 256, (ROWS[0], 576), dtype=torch.uint8, device=DEVICE)
    stream = new_stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        lists = _rows(device_rows), _rows(host_rows, (torch.int32, "cpu"))
        slow(stream)
        plane.device_tensors[0].copy_(fresh)
        _one_layer(plane, 0, load, *lists)
        del lists
        # What would take their memory if nobody kept it.
        spoil = [torch.zeros(COUNT, dtype=torch.int64, device=DEVICE) for _ in range(8)]
        assert not stream.query(), "the call waited"
    torch.cuda.synchronize()
    assert spoil
    found, other = plane.device_tensors[0], plane.host_tensors[0]
    at, there = torch.from_numpy(device_rows), torch.from_numpy(host_rows)
    assert torch.equal(found[at.to(DEVICE)].cpu(), other[there])
    if load:
        rest = np.setdiff1d(np.arange(ROWS[0]), device_rows)
        assert torch.equal(found[rest], fresh[rest])
    else:
        assert torch.equal(found, fresh)


def test_replayed_from_a_graph() -> None:
    """Every replay follows the lists as they are by then."""
    plane = _plane(656, False)
    lists = [_rows(scattered(80 + n, COUNT, ROWS[n])) for n in (0, 1)]
    _one_layer(plane, 1, True, *lists)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _one_layer(plane, 1, True, *lists)
    for seed in (82, 84):
        rows = [scattered(seed + n, COUNT, ROWS[n]) for n in (0, 1)]
        for tensor, new in zip(lists, rows, strict=True):
            tensor.copy_(torch.from_numpy(new))
        expected = plane.after(True, rows[0], rows[1], [1])
        graph.replay()
        torch.cuda.synchronize()
        plane.check(expected, "a replay")


# Pages of an indexer, a size that 8 does not divide, states of a convolution and a recurrence.
@pytest.mark.parametrize("size", [132 * 64, 66, 3 * 8192 + 6, 1 << 20])
@pytest.mark.parametrize("of_host", [KINDS[3], KINDS[5]], ids=str)
def test_pages_of_an_indexer_and_states(size: int, of_host: Any) -> None:
    """Packed rows: a layer out of either layout, and all layers back into it."""
    first, second = _plane(size, False, rows=(40, 60)), _plane(size, True, 9, rows=(40, 60))
    rows = [scattered(90 + n, 24, (40, 60)[n]) for n in (0, 1)]
    of_device, host = _rows(rows[0]), _rows(rows[1], of_host)
    for layer in (0, LAYERS - 1):
        expected = [plane.after(True, rows[0], rows[1], [layer]) for plane in (first, second)]
        lists: dict[str, Any] = {"src_indices": host, "dst_indices": of_device}
        adapter.transfer_kv_per_layer_mla(
            first.host_tensors[layer], first.device_tensors[layer], item_size=size, **lists
        )
        for call in (adapter.transfer_kv_per_layer_mla_pf_lf, adapter.transfer_kv_mamba_pf_lf):
            call(
                second.host_tensor, second.device_tensors[layer], layer_id=layer, item_size=size,
                src_layout_dim=LAYERS * size, **lists,
            )  # fmt: skip
        torch.cuda.synchronize()
        first.check(expected[0], "layer_first")
        second.check(expected[1], "token_major")
    for plane, layout in ((first, "layer_first"), (second, "token_major")):
        for tensor in plane.device_tensors:
            tensor.random_(0, 256)
        torch.cuda.synchronize()
        expected = [plane.after(False, rows[0], rows[1], range(LAYERS))]
        lists = {"src_indices": of_device, "dst_indices": host}
        if plane is first:
            adapter.transfer_kv_all_layer_mla(
                _table(plane.device_tensors), _table(plane.host_tensors), item_size=size,
                num_layers=LAYERS, **lists,
            )  # fmt: skip
        else:
            adapter.transfer_kv_all_layer_mla_lf_pf(
                _table(plane.device_tensors), plane.host_tensor, item_size=size,
                dst_layout_dim=LAYERS * size, num_layers=LAYERS, **lists,
            )  # fmt: skip
        torch.cuda.synchronize()
        plane.check(expected[0], layout)


def test_between_two_pools_of_the_gpu() -> None:
    """Neither side on the host."""
    one, other = (torch.randint(0, 256, (300, 576), dtype=torch.uint8, device=DEVICE) for _ in "ab")
    rows = [torch.from_numpy(scattered(n, 100, 300)).to(DEVICE) for n in (1, 2)]
    expected = other.clone()
    expected[rows[1]] = one[rows[0]]
    adapter.transfer_hicache_one_layer_mla(other, rows[1], one, rows[0])
    torch.cuda.synchronize()
    assert torch.equal(other, expected)


def test_what_cannot_be_reached_is_refused() -> None:
    """Pageable memory, and rows beyond the pool: on the host refused, on the GPU left out."""
    plane = _plane(576, False)
    pageable = torch.zeros(ROWS[1], 576, dtype=torch.uint8)
    rows = torch.arange(8)
    with pytest.raises(PinError, match="not pinned"):
        adapter.transfer_hicache_one_layer_mla(plane.device_tensors[0], rows, pageable, rows)
    with pytest.raises(PinError, match="neither"):
        adapter.transfer_hicache_all_layer_mla(
            _table(plane.device_tensors[:1]), rows, _table([pageable]), rows,
            cache_src_stride_bytes=576, cache_dst_stride_bytes=576,
        )  # fmt: skip
    with pytest.raises(PlanError, match="rows 0 to"):
        _one_layer(plane, 0, True, rows + ROWS[0], rows)
    device_rows = np.array([3, ROWS[0], -1, 5])
    expected = plane.after(True, device_rows[[0, 3]], np.array([0, 3]), [0])
    _one_layer(plane, 0, True, _rows(device_rows), _rows(np.arange(4)))
    assert gpu_at(0).mover.first_fault(torch.cuda.current_stream().cuda_stream) == 1
    plane.check(expected, "beyond")


def test_eligibility() -> None:
    """Every size, both ways; an unroll that does not tile is none."""
    for size in SIZES:
        assert adapter.can_use_hicache_jit_kernel(element_size=size, page_size=64)
        assert adapter.can_use_write_back_jit_kernel(element_size=size)
    assert not adapter.can_use_hicache_jit_kernel(element_size=1024, unroll=8)
