"""Random geometries in random tensors with random page lists, against the plain references."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.rig import Memory, Rig, each_path, guarded, own_pool

from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.kernels import page_seed
from kvferry.memory import RegisteredHostPool
from kvferry.testing import (
    POISON,
    assert_bytes_equal,
    memory_at,
    read_rows,
    reference_digest,
    reference_row,
    reference_transfer,
)
from kvferry.transfer import TransferEngine, TransferPlan
from kvferry.types import Direction, Layout

_CASES = 400
_DTYPES = (torch.uint8, torch.float16, torch.float32, torch.float64)
_LAYOUTS = ("list", "layer_dim", "padded", "nhd", "hnd", "packed", "kv_pairs")
_WHOLE_PAGE = 0
# Blocks of an engine's host pool that are no page of ours: pages may lie across them.
_ODD_BLOCKS = "blocks that are no pages"
_HOST_LAYOUTS = (*(layout.value for layout in Layout), _ODD_BLOCKS)


@dataclasses.dataclass
class _Shape:
    """An element as heads times values of a dtype."""

    heads: int
    values: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.heads * self.values * self.dtype.itemsize


def _tensors(
    rng: np.random.Generator, shape: _Shape, num_layers: int, num_rows: int, block: int
) -> tuple[list[Memory], dict[str, Any], str]:
    """One plane's tensors as some engine would keep them, over guarded memory."""
    layout = str(rng.choice(_LAYOUTS))
    head, value, item = shape.heads, shape.values, shape.dtype.itemsize
    blocks = num_rows // block

    def dense(*sizes: int) -> tuple[Memory, torch.Tensor]:
        memory = guarded(int(np.prod(sizes)) * item)
        return memory, torch.from_numpy(memory.inside).view(shape.dtype).view(*sizes)

    options: dict[str, Any] = {}
    given: Any
    if layout == "list":
        made = [dense(num_rows, head, value) for _ in range(num_layers)]
        return [memory for memory, _ in made], {"given": [tensor for _, tensor in made]}, layout
    if layout == "layer_dim":
        memory, given = dense(num_rows, num_layers, head, value)
        options["layer_dim"] = 1
    elif layout == "padded":
        memory, tensor = dense(num_layers, num_rows, head, value + 3)
        given = tensor[..., :value]
    elif layout == "nhd":
        memory, tensor = dense(num_layers, blocks, block + 1, head, value)
        given, options["slot_dims"] = tensor[:, :, :block], (0, 1)
    elif layout == "hnd":
        memory, given = dense(num_layers, blocks, head, block, value)
        options["slot_dims"] = (0, 2)
    elif layout == "packed":
        memory, tensor = dense(num_rows, num_layers * head * value + 5)
        parts = [tensor[:, i * head * value :][:, : head * value] for i in range(num_layers)]
        given = parts
    else:
        # One half of a tensor that keeps two planes side by side, blocks not the slowest dimension.
        memory, tensor = dense(blocks, num_layers, 2, block, head, value)
        half = int(rng.integers(2))
        given = [tensor[:, layer, half] for layer in range(num_layers)]
        options["slot_dims"] = (0, 1)
    return [memory], {"given": given, **options}, layout


def _random_rig(rng: np.random.Generator) -> tuple[Rig, list[str]]:
    page_size = int(rng.choice([1, 2, 3, 4, 8]))
    block = int(rng.choice([1, 2, 4, 8]))
    num_slots = int(rng.integers(1, 7))
    planes: list[Plane] = []
    views: dict[str, tuple[LayerView, ...]] = {}
    memories: list[Memory] = []
    told: list[str] = []
    for number in range(int(rng.integers(1, 4))):
        dtype = _DTYPES[int(rng.integers(len(_DTYPES)))]
        shape = _Shape(int(rng.integers(1, 4)), int(rng.integers(1, 12)), dtype)
        num_layers = int(rng.integers(1, 4))
        plane = Plane(
            name=f"plane_{number}",
            num_layers=num_layers,
            element_size=shape.num_bytes,
            rows_per_page=[None, None, 1, 5][int(rng.integers(4))],
            layer_ids=tuple(sorted(rng.permutation(6)[:num_layers].tolist())),
        )
        rows_per_page = plane.rows_per_page or page_size
        num_rows = -(-rows_per_page * num_slots // block) * block + block
        found, given, layout = _tensors(rng, shape, num_layers, num_rows, block)
        options = {name: value for name, value in given.items() if name != "given"}
        pool = PoolView.from_tensors(
            Geometry(planes=(plane,), page_size=page_size), {plane.name: given["given"]}, **options
        )
        planes.append(plane)
        views.update(pool.layers)
        memories += found
        told.append(f"{layout} of {shape}")
    geometry = Geometry(
        planes=tuple(planes),
        page_size=page_size,
        span_alignment=int(rng.choice([1, 16])),
        slot_alignment=int(rng.choice([16, 64, 4096])),
    )
    for memory in memories:
        memory.inside[:] = rng.integers(256, size=memory.inside.size, dtype=np.uint8)
    device = PoolView(geometry, views)
    host: Any
    if rng.integers(2):
        host, memory = own_pool(geometry, num_slots)
        host_memory = [memory]
        told.append("our own host pool")
    else:
        name = str(rng.choice(_HOST_LAYOUTS))
        host, host_memory = _engine_pool(rng, geometry, name, num_slots)
        told.append(f"host {name}")
    rig = Rig(geometry, device, host, device_memory=memories, host_memory=host_memory)
    return rig, told


def _engine_pool(
    rng: np.random.Generator, geometry: Geometry, layout: str, num_slots: int
) -> tuple[RegisteredHostPool, list[Memory]]:
    tensors, memories, slot_dims = {}, [], {}
    for plane in geometry.planes:
        rows, size = geometry.rows_per_page(plane), plane.element_size
        memory = guarded(plane.num_layers * num_slots * rows * size)
        memories.append(memory)
        block = rows
        if layout == _ODD_BLOCKS:
            block = int(rng.choice([b for b in range(1, 20) if num_slots * rows % b == 0]))
        in_blocks = layout in (_ODD_BLOCKS, Layout.PAGE_MAJOR)
        slot_dims[plane.name] = (0, 1) if in_blocks else (0,)
        shape: tuple[int, ...] = (num_slots * rows, plane.num_layers, size)
        if layout == Layout.LAYER_FIRST:
            shape = (plane.num_layers, num_slots * rows, size)
        elif in_blocks:
            shape = (num_slots * rows // block, plane.num_layers, block, size)
        tensors[plane.name] = memory.inside.reshape(shape)
    layer_dim = 0 if layout == Layout.LAYER_FIRST else 1
    pool = RegisteredHostPool.from_tensors(
        geometry, tensors, slot_dims=slot_dims, layer_dim=layer_dim
    )
    return pool, memories


def _random_plan(
    rng: np.random.Generator, rig: Rig, direction: Direction, host_slots: npt.NDArray[np.int64]
) -> TransferPlan:
    """Rows in runs of a random length; a plan of all planes and layers."""
    slots: dict[str, Any] = {}
    how_long = int(rng.choice([1, 2, 4, _WHOLE_PAGE]))
    for plane in rig.geometry.planes:
        per_page = rig.geometry.rows_per_page(plane)
        wanted, rows = len(host_slots) * per_page, rig.device.num_rows(plane.name)
        run = per_page if how_long == _WHOLE_PAGE else how_long
        length = run if rows // run * run >= wanted else 1
        starts = rng.permutation(rows // length) * length
        slots[plane.name] = (starts[:, None] + np.arange(length)).ravel()[:wanted]
    return TransferPlan.build(
        rig.geometry,
        direction,
        host_slots=host_slots,
        plane_slots=slots,
        page_keys=[f"page {slot}".encode() for slot in host_slots],
    )


def _against_reference(rig: Rig, plan: TransferPlan, path: str) -> None:
    """Carry out `plan`; all memory must be as the reference leaves copies of it."""
    device_images, device = rig.copies(rig.device_memory, rig.device)
    host_images, host = rig.copies(rig.host_memory, rig.host.view)
    host_copy: Any = types.SimpleNamespace(view=host)
    reference_transfer(plan, device, host_copy)
    engine = TransferEngine(rig.device, rig.host, path=path)
    handle = engine.load(plan) if plan.direction is Direction.LOAD else engine.store(plan)
    handle.wait()
    assert handle.verified_pages == plan.num_pages
    rig.compare(rig.device_memory, device_images, f"device after the {plan.direction}")
    rig.compare(rig.host_memory, host_images, f"host after the {plan.direction}")


def _check_digests(rig: Rig, plan: TransferPlan) -> None:
    for span in plan.spans:
        view = rig.host.view.view(span.plane.name, span.layer)
        for slot in plan.host_slots.tolist():
            rows = range(slot * span.rows, (slot + 1) * span.rows)
            expected = reference_digest(
                b"".join(reference_row(view, row) for row in rows),
                page_seed=page_seed(f"page {slot}".encode()),
                plane_index=span.plane_index,
                layer=span.layer,
            )
            assert int(rig.host.digests[slot, span.index]) == expected


def _flip_one_byte(rng: np.random.Generator, rig: Rig, plan: TransferPlan, path: str) -> None:
    """Any one byte of any stored page: that page alone is bad, and its rows are left alone."""
    span = plan.spans[int(rng.integers(len(plan.spans)))]
    page = int(rng.integers(plan.num_pages))
    view = rig.host.view.view(span.plane.name, span.layer)
    row = int(plan.host_slots[page]) * span.rows + int(rng.integers(span.rows))
    piece, within = divmod(int(rng.integers(view.element_size)), view.piece_size)
    byte = memory_at(view.row_address(row) + piece * view.piece_stride + within, 1)
    good_rows = {
        (one.plane.name, one.layer): read_rows(
            rig.device.view(one.plane.name, one.layer), plan.device_rows[one.plane.name]
        )
        for one in plan.spans
    }
    byte ^= rng.integers(1, 256, dtype=np.uint8)
    rig.poison_device()
    handle = TransferEngine(rig.device, rig.host, path=path).load(plan)
    handle.wait()
    assert handle.bad_pages == (page,)
    assert handle.verified_pages == page
    for one in plan.spans:
        found = read_rows(
            rig.device.view(one.plane.name, one.layer), plan.device_rows[one.plane.name]
        )
        expected = good_rows[one.plane.name, one.layer].reshape(plan.num_pages, -1)
        if one == span:
            expected[page] = POISON
        assert_bytes_equal(found.reshape(expected.shape), expected, str(one), ["page", "byte"])


@each_path
@pytest.mark.parametrize("block", range(10))
def test_random_transfers_are_what_the_reference_makes(block: int, path: str) -> None:
    """Planes, strides and page lists at random: same bytes and digests as the plain references."""
    for case in range(block * _CASES // 10, (block + 1) * _CASES // 10):
        rng = np.random.default_rng(case)
        rig, told = _random_rig(rng)
        pages = int(rng.integers(1, rig.host.num_slots + 1))
        host_slots = rng.permutation(rig.host.num_slots)[:pages]
        try:
            store = _random_plan(rng, rig, Direction.STORE, host_slots)
            _against_reference(rig, store, path)
            _check_digests(rig, store)
            rig.poison_device()
            load = _random_plan(rng, rig, Direction.LOAD, host_slots)
            _against_reference(rig, load, path)
            _flip_one_byte(rng, rig, load, path)
        except AssertionError as wrong:
            wrong.add_note(f"case {case}: {'; '.join(told)}")
            raise


def test_the_cases_are_of_every_kind() -> None:
    """The random cases above have every layout on either side, and views of every shape."""
    told: set[str] = set()
    pieces: set[bool] = set()
    blocks: set[bool] = set()
    for case in range(_CASES):
        rig, words = _random_rig(np.random.default_rng(case))
        told.update(word.split(" of ")[0] for word in words)
        views: list[LayerView] = [v for views in rig.device.layers.values() for v in views]
        pieces.update(view.num_pieces > 1 for view in views)
        blocks.update(view.num_blocks > 1 for view in views)
    assert told == {*_LAYOUTS, "our own host pool", *(f"host {name}" for name in _HOST_LAYOUTS)}
    assert pieces == blocks == {True, False}
