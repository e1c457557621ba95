"""Faults that caches of this kind had in their copies: sizes, layouts and indices.

One test a kind, on every path. Offsets beyond 32 bits are in tests/transfer/test_offsets.py, and
how fast unusual sizes are is for the benchmarks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.rig import Memory, Rig, each_host_layout, each_path, guarded, own_pool, scattered

from kvferry.errors import GeometryError, PlanError, ViewError
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool
from kvferry.testing import POISON, DeviceLayout
from kvferry.transfer import TransferEngine, TransferPlan, blocks_to_rows
from kvferry.types import Layout

_SIZES = (
    *(*range(1, 9), 12, 13, 16, 24, 40, 48, 64, 72, 96, 100, 128, 131, 132, 144, 192, 255),
    *(256, 320, 512, 528, 576, 584, 640, 656, 1152, 4608, 9216),
)


def _one_plane(element_size: int, *, num_layers: int = 4, page_size: int = 64) -> Geometry:
    plane = Plane(name="latent", num_layers=num_layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=page_size)


@each_path
@pytest.mark.parametrize("host_layout", [None, Layout.LAYER_FIRST], ids=str)
@pytest.mark.parametrize("element_size", _SIZES)
def test_no_element_size_is_refused(
    element_size: int, host_layout: Layout | None, path: str
) -> None:
    """Size rejection: rows of any size travel exactly, and the handle says which way they took."""
    geometry = _one_plane(element_size)
    pages, rows = 8, 8 * 64 + 37
    rig = Rig.make(geometry, num_rows=rows, num_slots=pages + 1, host_layout=host_layout)
    slots = np.random.default_rng(element_size).permutation(pages + 1)[:pages]
    sources = scattered(1, pages=pages, per_page=64, num_rows=rows)
    targets = scattered(2, pages=pages, per_page=64, num_rows=rows)
    stored = rig.store(path, host_slots=slots, device_slots=sources)
    rig.poison_device()
    loaded = rig.load(path, host_slots=slots, device_slots=targets)
    assert (stored.path, loaded.path) == (path, path)


@each_path
@pytest.mark.parametrize("num_layers", [61, 78])
def test_many_chunks_of_an_unusual_size(num_layers: int, path: str) -> None:
    """Crash after a size rejection: 576-byte rows in more pages than a chunk holds.

    Real transfers have 2,048 pages. Nine make one full chunk and a short one on the path that
    works in chunks, and every layer is there.
    """
    geometry = _one_plane(576, num_layers=num_layers)
    most, rows = 9, 9 * 64
    rig = Rig.make(geometry, num_rows=rows, num_slots=most)
    rng = np.random.default_rng(num_layers)
    for pages in (most, 1, 0, 8):
        slots = rng.permutation(most)[:pages]
        seed = int(rng.integers(1 << 30))
        sources = scattered(seed, pages=pages, per_page=64, num_rows=rows)
        targets = scattered(seed + 1, pages=pages, per_page=64, num_rows=rows)
        rig.fill_device(seed)
        rig.round_trip(path, slots, sources, targets)


@each_path
def test_many_random_page_lists_of_an_unusual_size(path: str) -> None:
    """Crash after a size rejection: 200 random page lists, and none with a page named twice."""
    geometry = _one_plane(576, num_layers=2, page_size=4)
    pool, rows = 24, 24 * 4
    rig = Rig.make(geometry, num_rows=rows, num_slots=pool)
    rng = np.random.default_rng(0)
    for seed in range(200):
        pages = int(rng.integers(pool + 1))
        slots = rng.permutation(pool)[:pages]
        sources = scattered(seed, pages=pages, per_page=4, num_rows=rows)
        rig.round_trip(path, slots, sources, np.roll(sources, 1, axis=0))
        if pages > 1:
            with pytest.raises(PlanError, match=f"names {slots[0]} twice"):
                rig.store(path, host_slots=[*slots[:-1], slots[0]], device_slots=sources)


@each_path
@pytest.mark.parametrize("direction", ["store", "load"])
def test_no_pages_is_no_work(direction: str, path: str) -> None:
    """Empty transfer: nothing moves, the handle is done, and every page of none is verified."""
    rig = Rig.make(_one_plane(576), num_rows=128)
    with rig.nothing_moves():
        handle = getattr(rig, direction)(path, host_slots=[], device_slots=[])
    assert handle.done
    assert handle.verified_pages == handle.plan.num_pages == 0


@each_path
def test_656_bytes_take_the_path_of_640(path: str) -> None:
    """Silent slow path: a size that only 16 and 41 divide is moved the way its neighbour is."""
    taken = []
    for element_size in (640, 656):
        rig = Rig.make(_one_plane(element_size, num_layers=2), num_rows=256)
        engine = TransferEngine(rig.device, rig.host, path=path)
        rows = scattered(0, pages=2, per_page=64, num_rows=256)
        plan = TransferPlan.store(rig.geometry, host_slots=[3, 1], device_slots=rows)
        taken.append((engine.path, engine.store(plan).path))
    assert taken[0] == taken[1] == (path, path)


_PAGE_STRIDE = 40960
_GROUPS = {"main": 584, "latent": 576, "index_key": 132}


def _padded_groups(buffer: Any, *, pages: int = 8) -> dict[str, list[Any]]:
    """Three groups of 64-row pages with padding after each page, one after the other."""
    tensors = {}
    for group, (name, size) in enumerate(_GROUPS.items()):
        part = buffer[group * pages * _PAGE_STRIDE :][: pages * _PAGE_STRIDE]
        paged = part.reshape(pages, _PAGE_STRIDE)[:, : 64 * size]
        tensors[name] = [paged.reshape(pages, 64, size) if isinstance(paged, np.ndarray) else None]
        if tensors[name][0] is None:
            tensors[name] = [paged.unflatten(1, (64, size))]
    return tensors


@each_path
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_padded_pages_of_several_groups_in_one_buffer(library: str, path: str) -> None:
    """Layout mismatch: pages with padding, three groups in one buffer; padding stays as it is."""
    planes = tuple(Plane(name=name, num_layers=1, element_size=e) for name, e in _GROUPS.items())
    geometry = Geometry(planes=planes)
    memory = guarded(3 * 8 * _PAGE_STRIDE)
    buffer = memory.inside if library == "numpy" else torch.from_numpy(memory.inside)
    device = PoolView.from_tensors(geometry, _padded_groups(buffer), slot_dims=(0, 1))
    host, host_memory = own_pool(geometry, 4)
    rig = Rig(geometry, device, host, device_memory=[memory], host_memory=[host_memory])
    rig.fill_device()
    token = np.arange(64)
    rig.store(path, host_slots=[2, 0, 3], device_slots=np.array([0, 5, 7])[:, None] * 64 + token)
    rig.poison_device()
    rig.load(path, host_slots=[2, 0, 3], device_slots=np.array([7, 0, 5])[:, None] * 64 + token)
    for number, size in enumerate(_GROUPS.values()):
        part = memory.inside[number * 8 * _PAGE_STRIDE :][: 8 * _PAGE_STRIDE]
        assert (part.reshape(8, _PAGE_STRIDE)[:, 64 * size :] == POISON).all()


def test_a_view_beyond_its_storage_is_refused() -> None:
    """Unchecked pointers: pages that reach past the end of the buffer are refused by dimension."""
    geometry = _one_plane(584, num_layers=1)
    storage = np.zeros(7 * _PAGE_STRIDE + 64 * 584 - 1, dtype=np.uint8)
    pages = np.lib.stride_tricks.as_strided(storage, (8, 64, 584), (_PAGE_STRIDE, 584, 1))
    with pytest.raises(ViewError, match=r"dimension 0 .*40960.*storage of 324095 bytes"):
        PoolView.from_tensors(geometry, {"latent": [pages]}, slot_dims=(0, 1))


@each_path
@pytest.mark.parametrize("kind", ["separate", "packed", "mixed"])
def test_each_tensor_has_its_own_strides(kind: str, path: str) -> None:
    """Stride of the wrong tensor: separate tensors, views into a packed tensor, and both."""
    num_layers, rows, size = 6, 200, 96
    geometry = _one_plane(size, num_layers=num_layers)
    packed = guarded(rows * num_layers * size)
    as_tensor = torch.from_numpy(packed.inside).view(rows, num_layers, size)
    memories, tensors = [packed], []
    for layer in range(num_layers):
        if kind == "packed" or (kind == "mixed" and layer % 2):
            tensors.append(as_tensor[:, layer])
            continue
        memories.append(guarded(rows * (size + 8 * layer)))
        padded = torch.from_numpy(memories[-1].inside).view(rows, size + 8 * layer)
        tensors.append(padded[:, :size])
    device = PoolView.from_tensors(geometry, {"latent": tensors})
    host, host_memory = own_pool(geometry, 4)
    rig = Rig(geometry, device, host, device_memory=memories, host_memory=[host_memory])
    rig.fill_device()
    rig.round_trip(
        path,
        [3, 0, 1],
        scattered(0, pages=3, per_page=64, num_rows=rows),
        scattered(1, pages=3, per_page=64, num_rows=rows),
    )


@each_path
@pytest.mark.parametrize(
    ("page_size", "block_size"), [(64, 16), (64, 64), (16, 64), (48, 528)], ids=str
)
def test_a_page_of_several_blocks_or_a_block_of_several_pages(
    page_size: int, block_size: int, path: str
) -> None:
    """Logical and physical pages: ours are found in the engine's blocks, whichever is larger."""
    geometry = _one_plane(132, num_layers=2, page_size=page_size)
    longest = max(page_size, block_size)
    num_rows = 4 * longest
    blocks = np.random.default_rng(0).permutation(num_rows // block_size)
    slots = blocks_to_rows(blocks, block_size=block_size, page_size=page_size)
    by_hand = [b * block_size + i for b in blocks.tolist() for i in range(block_size)]
    assert slots.ravel().tolist() == by_hand
    pages = num_rows // page_size
    rig = Rig.make(
        geometry,
        num_rows=num_rows,
        num_slots=pages,
        device_layout=DeviceLayout.PAGED_NHD,
        block_rows=block_size,
    )
    rig.round_trip(path, np.arange(pages)[::-1], slots, np.roll(slots, 1, axis=0))


@pytest.mark.parametrize(("page_size", "block_size"), [(64, 48), (528, 49), (10, 4)])
def test_page_and_block_sizes_that_do_not_divide_are_refused(
    page_size: int, block_size: int
) -> None:
    """Logical and physical pages: a ratio that is no whole number is refused, not rounded."""
    with pytest.raises(PlanError, match=f"block_size {block_size} and page_size {page_size}"):
        blocks_to_rows(range(page_size), block_size=block_size, page_size=page_size)


@each_path
def test_a_remainder_is_an_error_on_every_path(path: str) -> None:
    """Dropped remainder: ten blocks are not three pages, and no path rounds them down to three."""
    rig = Rig.make(_one_plane(132, page_size=48), num_rows=160)
    with rig.nothing_moves():
        with pytest.raises(PlanError, match="10 blocks of 16 tokens are no whole number of pages"):
            blocks_to_rows(range(10), block_size=16, page_size=48)
        with pytest.raises(PlanError, match=r"shape \(160,\), but 3 host slots .* \[3, 48\]"):
            rig.store(path, host_slots=[0, 1, 2], device_slots=np.arange(160))
    with pytest.raises(ViewError, match="160 rows are no whole number of pages of 48 rows"):
        RegisteredHostPool(rig.geometry, rig.device)


def _k_and_v(k: int, v: int | None) -> Geometry:
    planes = [Plane(name="k", num_layers=3, element_size=k)]
    if v is not None:
        planes.append(Plane(name="v", num_layers=3, element_size=v))
    return Geometry(planes=tuple(planes), page_size=16)


@each_path
@each_host_layout
@pytest.mark.parametrize(
    ("k", "v"), [(384, 256), (256, 128), (128, 192), (7, 3), (576, None)], ids=str
)
def test_k_and_v_of_different_widths(
    k: int, v: int | None, host_layout: Layout | None, path: str
) -> None:
    """K and V of different width: both exact; a page counts L·P·(Ek + Ev) bytes, not twice K."""
    geometry = _k_and_v(k, v)
    assert geometry.page_bytes == 3 * 16 * (k + (v or 0))
    rig = Rig.make(geometry, num_rows=80, host_layout=host_layout)
    sources = scattered(0, pages=3, per_page=16, num_rows=80)
    targets = scattered(1, pages=3, per_page=16, num_rows=80)
    rig.round_trip(path, [2, 3, 0], sources, targets)


_CONTAINERS = {
    "list": np.ndarray.tolist,
    "nested tuple": lambda rows: tuple(map(tuple, rows.tolist())) if rows.ndim > 1 else tuple(rows),
    "numpy int32": lambda rows: rows.astype(np.int32),
    "numpy int64": lambda rows: rows,
    "numpy uint32": lambda rows: rows.astype(np.uint32),
    "numpy int16, big-endian": lambda rows: rows.astype(">i2"),
    "numpy, every second": lambda rows: np.repeat(rows, 2, axis=-1)[..., ::2],
    "torch int32": lambda rows: torch.from_numpy(rows.astype(np.int32)),
    "torch int64": torch.from_numpy,
    "torch, transposed": lambda rows: torch.from_numpy(np.asfortranarray(rows)),
}


@each_path
@each_host_layout
@pytest.mark.parametrize("container", _CONTAINERS)
def test_every_kind_of_index_in_every_layout(
    container: str, host_layout: Layout | None, path: str
) -> None:
    """Untested fallback: every index container works with every layout on every path."""
    wrap: Any = _CONTAINERS[container]
    rig = Rig.make(_one_plane(100, num_layers=2, page_size=8), num_rows=64, host_layout=host_layout)
    slots = np.array([3, 0, 2])
    sources = scattered(0, pages=3, per_page=8, num_rows=64)
    targets = scattered(1, pages=3, per_page=8, num_rows=64)
    rig.round_trip(path, wrap(slots), wrap(sources), wrap(targets))
    rig.fill_device(1)
    rig.round_trip(path, wrap(slots), wrap(sources.ravel()), wrap(targets.ravel()))


@each_path
def test_planes_of_whole_pages_without_a_main_plane(path: str) -> None:
    """Sizes of extra pools: two planes of one packed row a page, none of token rows."""
    planes = tuple(
        Plane(name=name, num_layers=2, element_size=size, rows_per_page=1)
        for name, size in (("index", 4096), ("summary", 1320))
    )
    geometry = Geometry(planes=planes)
    assert geometry.page_bytes == 2 * (4096 + 1320)
    assert geometry.bytes_per_token == 2 * (4096 + 1320) / 64
    rig = Rig.make(geometry, num_rows=9, num_slots=5)
    slots, sources, targets = [4, 1, 2], [[8], [0], [3]], [[1], [7], [0]]
    rig.store(path, host_slots=slots, plane_slots={"index": sources, "summary": targets})
    rig.poison_device()
    rig.load(path, host_slots=slots, plane_slots={"index": targets, "summary": sources})


def test_a_plane_of_no_bytes_is_left_out_not_divided_by() -> None:
    """Sizes of extra pools: an element of 0 bytes is refused by name, never divided by."""
    with pytest.raises(GeometryError, match=r"'main'.*element_size .* from 1 to .*, not 0"):
        Plane(name="main", num_layers=2, element_size=0)


@each_path
def test_a_pool_is_sized_by_what_is_written_to_it(path: str) -> None:
    """Sizes of extra pools: a transfer fills exactly the payload that the geometry counts."""
    geometry = _k_and_v(384, 256)
    rig = Rig.make(geometry, num_rows=64, num_slots=1)
    assert isinstance(rig.host, HostPool)
    rig.device_memory[0].inside[:] = rig.device_memory[1].inside[:] = 1
    handle = rig.store(path, host_slots=[0], device_slots=np.arange(16))
    written = int((rig.host_memory[0].inside != POISON).sum())
    assert written == geometry.page_bytes == handle.plan.num_bytes == 3 * 16 * (384 + 256)
    assert written <= rig.host.slot_bytes
    last = max(view.end for views in rig.host.view.layers.values() for view in views)
    assert last <= rig.host.address + rig.host.slot_bytes


def test_rig_sees_a_byte_too_many() -> None:
    """The comparison behind these tests notices one byte outside an element."""
    rig = Rig.make(_one_plane(100, num_layers=1, page_size=8), num_rows=32)
    view: LayerView = rig.device.view("latent", 0)
    memory: Memory = rig.device_memory[0]
    assert memory.guarded is not None
    with pytest.raises(AssertionError, match="device, buffer 0"), rig.nothing_moves():
        memory.inside[view.element_size] ^= 1
    expected = memory.inside.copy()
    memory.guarded._whole[-4096] ^= 1
    with pytest.raises(AssertionError, match="0 bytes after its end"):
        memory.check(expected, "pool")
