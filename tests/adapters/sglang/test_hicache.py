"""HiCache's functions against copies made row by row, over a GPU made of host memory."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.sglang.fake_world import KINDS, LAYERS, ROWS, CudaTensor, World
from tests.adapters.sglang.hicache_rig import Plane, scattered, table

import kvferry.adapters.sglang as adapter
from kvferry.adapters.sglang import row_tensors
from kvferry.errors import PinError, PlanError, TransferError, ViewError

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 40, 66, 96, 128, 132, 144, 512, 576, 584, 656, 1024, 1152, 4608)


def _one_layer_mla(
    world: World, plane: Plane, layer: int, load: bool, rows: Any, **more: Any
) -> None:
    device, host = plane.device_tensors[layer], plane.host_tensors[layer]
    of_device, of_host = rows
    adapter.transfer_hicache_one_layer_mla(
        cache_dst=device if load else host,
        indices_dst=of_device if load else of_host,
        cache_src=host if load else device,
        indices_src=of_host if load else of_device,
        **more,
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("token_major", [False, True], ids=["layer_first", "token_major"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_one_layer_of_one_plane(world: World, size: int, token_major: bool, load: bool) -> None:
    """Any element size, either layout and direction, and no byte beside the rows."""
    plane = world.plane(size, token_major=token_major)
    device_rows, host_rows = scattered(1, 37, ROWS[0]), scattered(2, 37, ROWS[1])
    expected = plane.after(load, device_rows, host_rows, [1])
    rows = (world.rows(device_rows, KINDS[1]), world.rows(host_rows, KINDS[1]))
    _one_layer_mla(world, plane, 1, load, rows, page_size=1)
    plane.check(expected, f"{size} bytes")


@pytest.mark.parametrize(("of_device", "of_host"), list(itertools.product(KINDS, KINDS)))
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_index_lists_of_every_kind(world: World, of_device: str, of_host: str, load: bool) -> None:
    """On the GPU or the host, of 32 or 64 bits, each side for itself."""
    plane = world.plane(576, token_major=True)
    device_rows, host_rows = scattered(3, 50, ROWS[0]), scattered(4, 50, ROWS[1])
    expected = plane.after(load, device_rows, host_rows, [0])
    rows = (world.rows(device_rows, of_device), world.rows(host_rows, of_host))
    _one_layer_mla(world, plane, 0, load, rows)
    plane.check(expected, f"{of_device}, {of_host}")


@pytest.mark.parametrize(("k_size", "v_size"), [(256, 256), (384, 256), (66, 132), (16, 1)])
@pytest.mark.parametrize("token_major", [False, True], ids=["layer_first", "token_major"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
def test_one_layer_of_k_and_v(
    world: World, k_size: int, v_size: int, token_major: bool, load: bool
) -> None:
    """Both move, also where V has another width."""
    k = world.plane(k_size, token_major=token_major)
    v = world.plane(v_size, token_major=token_major, seed=500)
    device_rows, host_rows = scattered(5, 40, ROWS[0]), scattered(6, 40, ROWS[1])
    expected = [plane.after(load, device_rows, host_rows, [2]) for plane in (k, v)]
    sides = {
        "device": (k.device_tensors[2], v.device_tensors[2], world.rows(device_rows, KINDS[0])),
        "host": (k.host_tensors[2], v.host_tensors[2], world.rows(host_rows, KINDS[0])),
    }
    k_dst, v_dst, indices_dst = sides["device" if load else "host"]
    k_src, v_src, indices_src = sides["host" if load else "device"]
    adapter.transfer_hicache_one_layer(k_dst, v_dst, indices_dst, k_src, v_src, indices_src)
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "K and V")


def test_tensors_with_heads_and_a_type(world: World) -> None:
    """Rows of heads and dimensions of bfloat16, with `element_dim` as the engine gives it."""
    plane = world.plane(2 * 4 * 8, token_major=False)
    device_rows, host_rows = scattered(7, 20, ROWS[0]), scattered(8, 20, ROWS[1])
    expected = plane.after(True, device_rows, host_rows, [0])
    device, host = (
        one.view(torch.bfloat16).view(len(one), 4, 8)
        for one in (plane.device_tensors[0], plane.host_tensors[0])
    )
    rows = [world.rows(one, KINDS[1]) for one in (device_rows, host_rows)]
    adapter.transfer_hicache_one_layer_mla(device, rows[0], host, rows[1], element_dim=32)
    plane.check(expected, "heads")


@pytest.mark.parametrize("size", [4, 66, 128, 576, 656, 1152])
@pytest.mark.parametrize("token_major", [False, True], ids=["layer_first", "token_major"])
@pytest.mark.parametrize("load", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("pair", [False, True], ids=["one plane", "K and V"])
def test_all_layers(world: World, size: int, token_major: bool, load: bool, pair: bool) -> None:
    """By tables of addresses, with the strides of either layout."""
    planes = [world.plane(size, token_major=token_major)]
    if pair:
        planes.append(world.plane(size, token_major=token_major, seed=500))
    device_rows, host_rows = scattered(9, 33, ROWS[0]), scattered(10, 33, ROWS[1])
    layers = list(range(LAYERS))
    expected = [plane.after(load, device_rows, host_rows, layers) for plane in planes]
    sides = {}
    for name, rows in (("device", device_rows), ("host", host_rows)):
        tables = [world.table(getattr(plane, f"{name}_tensors")) for plane in planes]
        sides[name] = (tables, world.rows(rows, KINDS[0]))
    (dst, indices_dst), (src, indices_src) = (
        (sides["device"], sides["host"]) if load else (sides["host"], sides["device"])
    )
    strides = (planes[0].host_stride, size) if load else (size, planes[0].host_stride)
    if pair:
        adapter.transfer_hicache_all_layer(
            dst[0],
            dst[1],
            indices_dst,
            src[0],
            src[1],
            indices_src,
            kv_cache_src_stride_bytes=strides[0],
            kv_cache_dst_stride_bytes=strides[1],
            element_size=size,
        )
    else:
        adapter.transfer_hicache_all_layer_mla(
            dst[0], indices_dst, src[0], indices_src, cache_src_stride_bytes=strides[0],
            cache_dst_stride_bytes=strides[1], element_size=size,
        )  # fmt: skip
    for plane, images in zip(planes, expected, strict=True):
        plane.check(images, "all layers")


def test_all_layers_of_v_with_another_width(world: World) -> None:
    """K of 192 numbers and V of 128, each with strides of its own."""
    k, v = world.plane(384, token_major=True), world.plane(256, token_major=True, seed=500)
    device_rows, host_rows = scattered(11, 24, ROWS[0]), scattered(12, 24, ROWS[1])
    expected = [plane.after(False, device_rows, host_rows, range(LAYERS)) for plane in (k, v)]
    adapter.transfer_hicache_all_layer(
        world.table(k.host_tensors),
        world.table(v.host_tensors),
        world.rows(host_rows, KINDS[1]),
        world.table(k.device_tensors),
        world.table(v.device_tensors),
        world.rows(device_rows, KINDS[1]),
        kv_cache_src_stride_bytes=384,
        kv_cache_dst_stride_bytes=k.host_stride,
        element_size=384,
        v_cache_src_stride_bytes=256,
        v_cache_dst_stride_bytes=v.host_stride,
        v_element_size=256,
    )
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "V of another width")


@pytest.mark.parametrize("size", [16, 66, 132, 576, 656])
@pytest.mark.parametrize("of_host", KINDS)
@pytest.mark.parametrize("staging_tokens", [0, 8, 12, 96])
@pytest.mark.parametrize("stream", ["legacy", "a stream"])
def test_staged_write_back(
    world: World, size: int, of_host: str, staging_tokens: int, stream: str
) -> None:
    """Whole pages in many pieces with a short last one, by copies or by kernels alone."""
    if stream != "legacy":
        world.stream = world.gpu._cu_stream_create_with_priority(0, 0)
    plane = world.plane(size, token_major=True)
    device_rows = scattered(13, 40, ROWS[0], page=8)
    host_rows = scattered(14, 40, ROWS[1], page=8)
    expected = plane.after(False, device_rows, host_rows, range(LAYERS))
    staging = world.on_device(staging_tokens * LAYERS * size)
    adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
        world.table(plane.device_tensors),
        world.rows(device_rows, KINDS[1]),
        world.rows(host_rows, of_host),
        staging.view(staging_tokens, LAYERS, size),
        plane.host_tensor,
        page_size=8,
    )
    plane.check(expected, "staged")
    is_staged = staging_tokens > 0 and "GPU" not in of_host
    copies = {"cuMemcpyBatchAsync", "cuMemcpyDtoHAsync"} & set(world.gpu.calls)
    assert bool(copies) is is_staged
    if is_staged and staging_tokens > 8:
        assert "cuMemcpyBatchAsync" in copies


def test_staged_write_back_of_k_and_v(world: World) -> None:
    """Each through its own staging, of its own width."""
    k, v = world.plane(384, token_major=True), world.plane(256, token_major=True, seed=500)
    device_rows, host_rows = scattered(15, 32, ROWS[0], 4), scattered(16, 32, ROWS[1], 4)
    expected = [plane.after(False, device_rows, host_rows, range(LAYERS)) for plane in (k, v)]
    staging = [world.on_device(12 * LAYERS * one.size).view(12, LAYERS, one.size) for one in (k, v)]
    adapter.transfer_hicache_all_layer_staged_lf_pf(
        world.table(k.device_tensors), world.table(v.device_tensors),
        world.rows(device_rows, KINDS[0]), world.rows(host_rows, KINDS[3]),
        staging[0], staging[1], k.host_tensor, v.host_tensor, page_size=4, element_size=384,
    )  # fmt: skip
    for plane, images in zip((k, v), expected, strict=True):
        plane.check(images, "K and V")


def test_neighbours_are_copied_in_one_piece(world: World) -> None:
    """Four pages in a row on the host are one copy."""
    plane = world.plane(64, token_major=True)
    staging = world.on_device(64 * LAYERS * 64).view(64, LAYERS, 64)
    adapter.transfer_hicache_all_layer_mla_staged_lf_pf(
        world.table(plane.device_tensors), world.rows(scattered(17, 32, ROWS[0], 8), KINDS[1]),
        torch.arange(16, 48), staging, plane.host_tensor, page_size=8,
    )  # fmt: skip
    assert world.gpu.calls.count("cuMemcpyDtoHAsync") == 1


@pytest.mark.parametrize(
    ("size", "unroll", "kernel"),
    [(576, None, "flat"), (66, None, "realign"), (576, 2, "grouped"), (656, 8, "grouped")],
)
def test_options_are_honoured(world: World, size: int, unroll: int | None, kernel: str) -> None:
    """An unroll takes the kernel it is of; the quota is the number of thread blocks."""
    plane = world.plane(size)
    rows = [world.rows(scattered(20, 16, 80), KINDS[1])] * 2
    same = scattered(20, 16, 80)
    expected = plane.after(True, same, same, [0])
    _one_layer_mla(world, plane, 0, True, rows, unroll=unroll, block_quota=3, page_size=64)
    plane.check(expected, "options")
    assert world.gpu.kernels == [kernel]
    assert {work.blocks for work in world.gpu.time.done if work.blocks} == {3}


def test_nothing_is_a_move_of_nothing(world: World) -> None:
    """No rows: no launch, no fault."""
    plane = world.plane(576)
    none = torch.zeros(0, dtype=torch.int64)
    _one_layer_mla(world, plane, 0, True, (world.to_device(none), none))
    assert world.gpu.kernels == []


def test_work_is_in_the_callers_stream_and_nothing_is_waited_for(world: World) -> None:
    """Held back, nothing has moved when calls return, lists may go, and then each is followed."""
    plane = world.plane(576, token_major=True)
    device_rows, host_rows = scattered(21, 60, ROWS[0]), scattered(22, 60, ROWS[1])
    _one_layer_mla(world, plane, 0, True, (torch.arange(1), torch.arange(1)))  # tables are there
    before = plane.images()
    expected = plane.after(True, device_rows, host_rows, [0])
    calls = len(world.gpu.calls)
    with world.gpu.held(0):
        for part in (slice(0, 30), slice(30, 60)):
            lists = [torch.from_numpy(rows[part].copy()) for rows in (device_rows, host_rows)]
            _one_layer_mla(world, plane, 0, True, lists)
            for one in lists:
                one.fill_(-1)
        plane.check(before, "held")
        assert "cuStreamSynchronize" not in world.gpu.calls[calls:]
    plane.check(expected, "released")


def test_lists_on_the_gpu_are_kept_for_the_stream(world: World) -> None:
    """Those that were given, and what was made of them: torch is told which stream reads them."""
    plane = world.plane(576)
    CudaTensor.kept.clear()
    lists = [world.rows(scattered(23, 30, 80), KINDS[0]) for _ in range(2)]
    _one_layer_mla(world, plane, 0, True, lists)
    of_device, of_host = sorted(CudaTensor.kept, key=lambda one: one.element_size())
    assert of_device.data_ptr() == lists[0].data_ptr()
    assert of_host.dtype == torch.int64
    assert torch.equal(of_host.cpu(), lists[1].cpu().to(torch.int64))


def test_lists_on_the_host_use_their_room_again(world: World) -> None:
    """A thousand moves hold as much memory as two do."""
    plane = world.plane(64)
    rows = torch.arange(50)
    held = []
    for turn in range(100):
        _one_layer_mla(world, plane, 0, turn % 2 == 0, (rows, rows))
        held.append(dict(world.gpu.holdings))
    assert held[4] == held[-1]


def test_a_table_is_read_once(world: World) -> None:
    """And again when it is written to, or when it is another one."""
    plane = world.plane(64)
    tables = [world.table(plane.device_tensors), world.table(plane.host_tensors)]
    rows = torch.arange(8)

    def load() -> None:
        adapter.transfer_hicache_all_layer_mla(
            tables[0], rows, tables[1], rows, cache_src_stride_bytes=64, cache_dst_stride_bytes=64
        )

    load()
    known = len(world.gpu.calls)
    load()
    assert "cuPointerGetAttribute" not in world.gpu.calls[known:]
    other = world.plane(64, seed=900)
    tables[0].copy_(table(other.device_tensors, lambda one: one))
    expected = other.images()
    for layer, host in enumerate(plane.host_tensors):
        device = expected[layer][4096:-4096].reshape(ROWS[0], 64)
        device[:8] = host[:8].numpy()
    load()
    other.check(expected, "another table")


@pytest.mark.parametrize("on_gpu", [True, False], ids=["list on the GPU", "list on the host"])
def test_rows_beyond_the_pool_move_nothing(world: World, on_gpu: bool) -> None:
    """On the host they are refused; on the GPU they are left out, and can be asked for."""
    plane = world.plane(576)
    device_rows, host_rows = np.array([3, ROWS[0], 5]), np.array([0, 1, 2])
    expected = plane.after(True, device_rows[[0, 2]], host_rows[[0, 2]], [0])
    before = plane.images()
    rows = (
        world.rows(device_rows, KINDS[1] if on_gpu else KINDS[3]),
        world.rows(host_rows, KINDS[1]),
    )
    if on_gpu:
        _one_layer_mla(world, plane, 0, True, rows)
        mover = row_tensors.gpu_at(0).mover
        assert mover.first_fault(0) == 1
        assert mover.first_fault(0) is None
    else:
        with pytest.raises(PlanError, match="rows 0 to 95"):
            _one_layer_mla(world, plane, 0, True, rows)
        expected = before
    plane.check(expected, "beyond")


def test_bad_arguments_move_nothing(world: World) -> None:
    """Each is refused with what is wrong, before anything is enqueued."""
    plane, narrow = world.plane(576), world.plane(512, seed=300)
    device, host = plane.device_tensors[0], plane.host_tensors[0]
    rows = torch.arange(4)
    before = plane.images()
    pageable = torch.zeros(ROWS[1], 576, dtype=torch.uint8)
    move = adapter.transfer_hicache_one_layer_mla
    cases: list[tuple[type[Exception], str, Any]] = [
        (PinError, "not pinned", lambda: move(device, rows, pageable, rows)),
        (PlanError, "in host memory", lambda: move(host, rows, host, rows)),
        (ViewError, "cannot be seen", lambda: move(device, rows, narrow.host_tensors[0], rows)),
        (PlanError, "4 rows on the device and 3", lambda: move(device, rows, host, rows[:3])),
        (PlanError, "twice", lambda: move(device, torch.tensor([1, 1]), host, rows[:2])),
        (PlanError, "-1", lambda: move(device, rows - 1, host, rows)),
        (PlanError, "whole numbers", lambda: move(device, rows.float(), host, rows)),
        (PlanError, "shape", lambda: move(device, rows.view(2, 2), host, rows)),
        (PlanError, "int32 or int64", lambda: move(
            device, world.to_device(rows.to(torch.int16)), host, rows)),
        (PlanError, "unroll", lambda: move(device, rows, host, rows, unroll=3)),
        (PlanError, "cannot move", lambda: move(
            narrow.device_tensors[0].view(-1, 1024), rows, narrow.host_tensors[0].view(-1, 1024),
            rows, unroll=8)),
        (ViewError, "gaps|apart|rows", lambda: move(device[:, ::2], rows, host[:, ::2], rows)),
        (PlanError, "element_size", lambda: adapter.transfer_hicache_all_layer_mla(
            world.table([device]), rows, world.table([host]), rows, cache_src_stride_bytes=576,
            cache_dst_stride_bytes=640)),
        (PinError, "neither", lambda: adapter.transfer_hicache_all_layer_mla(
            world.table([device]), rows, world.table([pageable]), rows, cache_src_stride_bytes=576,
            cache_dst_stride_bytes=576)),
        (PlanError, "layers", lambda: adapter.transfer_hicache_all_layer_mla(
            world.table([device]), rows, world.table([host, host]), rows,
            cache_src_stride_bytes=576, cache_dst_stride_bytes=576)),
    ]  # fmt: skip
    for error, words, call in cases:
        with pytest.raises(error, match=words):
            call()
    assert world.gpu.kernels == []
    plane.check(before, "refused")


def test_a_graph_takes_lists_on_the_gpu_alone(world: World) -> None:
    """A replay would read a list of the host as it is by then."""
    plane = world.plane(576)
    world.gpu._cu_stream_is_capturing = lambda _: 1  # type: ignore[method-assign]
    on_gpu = world.rows(np.arange(4), KINDS[1])
    _one_layer_mla(world, plane, 0, True, (on_gpu, on_gpu))
    with pytest.raises(TransferError, match="captured"):
        _one_layer_mla(world, plane, 0, True, (torch.arange(4), on_gpu))
    assert world.gpu.kernels == ["flat"]


@pytest.mark.parametrize("size", SIZES)
def test_one_answer_for_both_directions(
    world: World, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every size can be moved, both ways."""
    monkeypatch.setattr(adapter.hicache, "why_no_gpu", lambda: "")
    assert adapter.can_use_hicache_jit_kernel(element_size=size, page_size=64)
    assert adapter.can_use_write_back_jit_kernel(element_size=size)


def test_no_comes_with_a_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the log, and from `why_not`: an unroll that does not tile, a quota of nothing, no GPU."""
    monkeypatch.setattr(adapter.hicache, "why_no_gpu", lambda: "")
    assert not adapter.can_use_hicache_jit_kernel(element_size=1024, unroll=8)
    assert "1024" in caplog.text
    assert not adapter.can_use_hicache_jit_kernel(element_size=1024, block_quota=-1)
    assert "block_quota" in adapter.why_not(element_size=64, block_quota=-1)
    assert adapter.why_not(element_size=0)
    monkeypatch.setattr(adapter.hicache, "why_no_gpu", lambda: "no GPU here")
    assert adapter.why_not(element_size=64) == "no GPU here"
