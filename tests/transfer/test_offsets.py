"""Addresses beyond 2^31, 2^32 and 2^40 bytes, and indices beyond 2^31 and 2^32, on every path.

The pools are reserved address space in which only the rows in question exist, so an offset that
wrapped would not go unnoticed: it ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.rig import each_path

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.memory import RegisteredHostPool
from kvferry.testing import (
    POISON,
    ReservedSpace,
    assert_bytes_equal,
    memory_at,
    pattern_rows,
    read_rows,
    write_rows,
)
from kvferry.transfer import HostPages, TransferEngine, TransferPlan
from kvferry.types import SlotKind

# 2^40 bytes and more for every pool: 128 TiB are to be had.
_SPACE_BYTES = 6 << 40
_MARGIN = 4096
_LIMITS = {
    "2^31": 1 << 31,
    "2^32": 1 << 32,
    "2^40": 1 << 40,
    "5 TiB": 5 << 40,
}


@pytest.fixture(name="space")
def _space() -> Iterator[ReservedSpace]:
    with ReservedSpace(_SPACE_BYTES) as space:
        yield space


def _commit(space: ReservedSpace, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """The bytes at `address` and some on either side, all poison; the array is without them."""
    first = max(address - _MARGIN, space.address)
    space.commit(first - space.address, address + num_bytes + _MARGIN - first)
    memory_at(first, address + num_bytes + _MARGIN - first)[:] = POISON
    return memory_at(address, num_bytes)


def _check_surroundings(rows: npt.NDArray[np.uint8]) -> None:
    address = int(rows.ctypes.data)
    for start in (address - _MARGIN, address + rows.size):
        assert (memory_at(start, _MARGIN) == POISON).all()


def _layer(address: int, *, num_rows: int, size: int, stride: int = 0, **blocks: int) -> LayerView:
    stride = stride or size
    return LayerView(
        address=address,
        num_rows=num_rows,
        row_stride=stride,
        block_rows=blocks.get("block_rows", num_rows),
        block_stride=blocks.get("block_stride", num_rows * stride),
        num_pieces=1,
        piece_size=size,
        piece_stride=size,
        name="huge layer",
    )


def _geometry(size: int, page_size: int) -> Geometry:
    plane = Plane(name="kv", num_layers=1, element_size=size)
    return Geometry(planes=(plane,), page_size=page_size)


def _host(geometry: Geometry, num_slots: int) -> tuple[RegisteredHostPool, npt.NDArray[np.uint8]]:
    size = geometry.page_bytes
    memory = np.full(num_slots * size, POISON, dtype=np.uint8)
    layer = _layer(
        int(memory.ctypes.data),
        num_rows=num_slots * geometry.page_size,
        size=geometry.planes[0].element_size,
    )
    return RegisteredHostPool(geometry, PoolView(geometry, {"kv": (layer,)})), memory


@each_path
@pytest.mark.parametrize("size", [576, 656, 1])
@pytest.mark.parametrize("limit", _LIMITS.values(), ids=list(_LIMITS))
def test_device_rows_around_a_limit(limit: int, size: int, path: str, space: ReservedSpace) -> None:
    """Rows whose offset is just below, across and just above a limit, both ways and exact."""
    page_size = 4
    geometry = _geometry(size, page_size)
    middle = limit // size
    rows = np.arange(middle - 4, middle + 4).reshape(2, page_size)
    assert rows[0, 0] * size < limit <= (rows[-1, -1] + 1) * size
    device = _layer(space.address, num_rows=_SPACE_BYTES // size - _MARGIN, size=size)
    # An offset cut to 32 bits would land on row 0 or so: there it finds poison, not the pattern.
    low = _commit(space, space.address + _MARGIN, 8 * size)
    here = _commit(space, device.row_address(int(rows[0, 0])), 8 * size)
    pattern = pattern_rows(limit, pool=0, layer=0, slots=rows, element_size=size)
    here[:] = pattern.ravel()
    host, memory = _host(geometry, 3)
    engine = TransferEngine(PoolView(geometry, {"kv": (device,)}), host, path=path)
    slots = [2, 0]
    engine.store(TransferPlan.store(geometry, host_slots=slots, device_slots=rows)).wait()
    pages = pattern.reshape(2, -1)
    stored = memory.reshape(3, -1)
    assert_bytes_equal(stored[slots], pages, "stored", ["page", "byte"])
    assert (stored[1] == POISON).all()
    assert_bytes_equal(here, pattern.ravel(), "device")
    here[:] = POISON
    swapped = TransferPlan.load(geometry, host_slots=slots[::-1], device_slots=rows)
    loaded = engine.load(swapped)
    loaded.wait()
    assert loaded.verified_pages == 2
    assert_bytes_equal(here.reshape(2, -1), pages[::-1], "loaded", ["page", "byte"])
    assert (low == POISON).all()
    _check_surroundings(here)


@each_path
@pytest.mark.parametrize("index", [(1 << 31) - 2, (1 << 32) - 2, 5 << 32])
def test_device_indices_beyond_32_bits(index: int, path: str, space: ReservedSpace) -> None:
    """Row numbers, not only their offsets, use more than 31 and 32 bits."""
    geometry = _geometry(100, 4)
    rows = np.arange(index, index + 4)
    device = _layer(space.address, num_rows=index + 4, size=100)
    here = _commit(space, device.row_address(index), 400)
    pattern = pattern_rows(0, pool=0, layer=0, slots=rows, element_size=100).ravel()
    here[:] = pattern
    host, memory = _host(geometry, 1)
    engine = TransferEngine(PoolView(geometry, {"kv": (device,)}), host, path=path)
    for given in (rows, rows.tolist()):
        engine.store(TransferPlan.store(geometry, host_slots=[0], device_slots=given)).wait()
        assert_bytes_equal(memory, pattern, "stored")
        here[:] = POISON
        engine.load(TransferPlan.load(geometry, host_slots=[0], device_slots=given)).wait()
        assert_bytes_equal(here, pattern, "loaded")
        _check_surroundings(here)
    with pytest.raises(PlanError, match=f"holds {index + 4}, but there are only {index + 4} rows"):
        engine.store(TransferPlan.store(geometry, host_slots=[0], device_slots=rows + 1))


class _SparseHost:
    """Page slots and a digest table in reserved space: 40 million slots."""

    kind = SlotKind.PAGE

    def __init__(
        self,
        geometry: Geometry,
        view: PoolView,
        num_slots: int,
        table: ReservedSpace,
    ) -> None:
        self.geometry, self.view, self.num_slots = geometry, view, num_slots
        self.row_bytes = 8 * len(geometry.spans())
        cells: Any = (ctypes.c_uint64 * (num_slots * self.row_bytes // 8)).from_address(
            table.address
        )
        self.digests: npt.NDArray[np.uint64] = np.ndarray(
            (num_slots, self.row_bytes // 8), dtype=np.uint64, buffer=cells
        )

    def pin_for(self, context: Any) -> Any:  # noqa: ARG002
        raise AssertionError("nothing here is for a GPU")

    def check_slots(self, slots: npt.NDArray[np.int64]) -> None:
        pass

    def acquire(self, slots: npt.NDArray[np.int64]) -> None:
        pass

    def release(self, slots: npt.NDArray[np.int64]) -> None:
        pass


@each_path
def test_host_page_forty_million(path: str) -> None:
    """Page 40,000,000 of 3 layers of 64 tokens of 656 bytes: 5 TB into the pool, to the byte."""
    num_layers, size, page = 3, 656, 40_000_000
    plane = Plane(name="latent", num_layers=num_layers, element_size=size)
    geometry = Geometry(planes=(plane,))
    span = 64 * size
    slots = np.array([page, 0, page - 1])
    with (
        ReservedSpace((page + 1) * num_layers * span) as space,
        ReservedSpace((page + 1) * num_layers * 8) as table,
    ):
        layers = tuple(
            _layer(
                space.address + layer * span,
                num_rows=(page + 1) * 64,
                size=size,
                block_rows=64,
                block_stride=num_layers * span,
            )
            for layer in range(num_layers)
        )
        host = _SparseHost(geometry, PoolView(geometry, {"latent": layers}), page + 1, table)
        at = [int(slot) * num_layers * span for slot in slots]
        for slot, offset in zip(slots.tolist(), at, strict=True):
            assert layers[0].row_address(slot * 64) == space.address + offset
            space.commit(offset, num_layers * span)
            table.commit(slot * host.row_bytes, host.row_bytes)
        pool = np.zeros((num_layers, 3 * 64, size), dtype=np.uint8)
        for layer in range(num_layers):
            pool[layer] = pattern_rows(
                0, pool=0, layer=layer, slots=np.arange(192), element_size=size
            )
        expected = pool.copy()
        device = PoolView.from_tensors(geometry, {"latent": pool})
        checked: HostPages = host
        engine = TransferEngine(device, checked, path=path)
        rows = np.arange(192)
        engine.store(TransferPlan.store(geometry, host_slots=slots, device_slots=rows)).wait()
        for number, offset in enumerate(at):
            found = memory_at(space.address + offset, num_layers * span)
            wanted = expected[:, number * 64 : (number + 1) * 64].ravel()
            assert_bytes_equal(found, wanted, f"page in slot {slots[number]}")
        pool[:] = POISON
        loaded = engine.load(TransferPlan.load(geometry, host_slots=slots, device_slots=rows))
        loaded.wait()
        assert loaded.verified_pages == 3
        assert_bytes_equal(pool, expected, "loaded", ["layer", "token", "byte"])


def test_addresses_are_exact_at_any_width() -> None:
    """The address of page 40,000,000 of 61 layers, 93 TiB into a pool, and of one far beyond."""
    span = 64 * 656
    for page in (40_000_000, 1 << 60):
        layer = _layer(
            4096, num_rows=(page + 1) * 64, size=656, block_rows=64, block_stride=61 * span
        )
        assert layer.row_address(page * 64 + 63) == 4096 + page * 61 * 64 * 656 + 63 * 656


@each_path
@pytest.mark.parametrize("limit", _LIMITS.values(), ids=list(_LIMITS))
def test_host_slots_around_a_limit(limit: int, path: str, space: ReservedSpace) -> None:
    """Few slots, so far apart that the last starts at the limit; a gap within them stays whole."""
    size, page_size = 131, 4
    geometry = _geometry(size, page_size)
    host_layer = _layer(
        space.address + _MARGIN,
        num_rows=3 * page_size,
        size=size,
        stride=size + 3,
        block_rows=page_size,
        block_stride=limit // 2,
    )
    spread = (page_size - 1) * (size + 3) + size
    pages = [_commit(space, host_layer.row_address(slot * page_size), spread) for slot in range(3)]
    host = RegisteredHostPool(geometry, PoolView(geometry, {"kv": (host_layer,)}))
    pool = pattern_rows(limit, pool=0, layer=0, slots=np.arange(12), element_size=size)
    expected = pool.copy()
    device = PoolView.from_tensors(geometry, {"kv": [pool]})
    engine = TransferEngine(device, host, path=path)
    rows, slots = np.arange(12).reshape(3, 4), [2, 0, 1]
    engine.store(TransferPlan.store(geometry, host_slots=slots, device_slots=rows)).wait()
    for number, slot in enumerate(slots):
        wanted = np.full((page_size, size + 3), POISON, dtype=np.uint8)
        wanted[:, :size] = expected[rows[number]]
        assert_bytes_equal(pages[slot], wanted.ravel()[:spread], f"slot {slot}")
        _check_surroundings(pages[slot])
    pool[:] = POISON
    loaded = engine.load(TransferPlan.load(geometry, host_slots=slots, device_slots=rows))
    loaded.wait()
    assert loaded.verified_pages == 3
    assert_bytes_equal(pool, expected, "loaded", ["row", "byte"])


@each_path
@pytest.mark.parametrize("widest", ["block_stride", "row_stride", "piece_stride"])
@pytest.mark.parametrize("limit", [1 << 31, 1 << 32, 1 << 40], ids=["2^31", "2^32", "2^40"])
def test_strides_beyond_a_limit(limit: int, widest: str, path: str, space: ReservedSpace) -> None:
    """Blocks, rows or pieces of an element that are themselves further apart than a limit."""
    near = {"piece_stride": 300, "row_stride": 900, "block_stride": 1800}
    strides: dict[str, Any] = {**near, widest: limit + 8}
    view = LayerView(
        address=space.address + _MARGIN,
        num_rows=4,
        block_rows=2,
        num_pieces=3,
        piece_size=24,
        name="far apart",
        **strides,
    )
    geometry = _geometry(72, 4)
    far = 2 if widest == "piece_stride" else 1
    for steps in range(far + 1):
        _commit(space, view.address + steps * strides[widest], 3 * 1800)
    pattern = pattern_rows(limit, pool=0, layer=0, slots=range(4), element_size=72)
    write_rows(view, range(4), pattern)
    host, memory = _host(geometry, 1)
    engine = TransferEngine(PoolView(geometry, {"kv": (view,)}), host, path=path)
    rows = [2, 0, 3, 1]
    engine.store(TransferPlan.store(geometry, host_slots=[0], device_slots=rows)).wait()
    assert_bytes_equal(memory.reshape(4, 72), pattern[rows], "stored", ["row", "byte"])
    write_rows(view, range(4), np.full((4, 72), POISON, dtype=np.uint8))
    engine.load(TransferPlan.load(geometry, host_slots=[0], device_slots=rows)).wait()
    assert_bytes_equal(read_rows(view, range(4)), pattern, "loaded", ["row", "byte"])
    for steps in range(far + 1):
        start = view.address + steps * strides[widest]
        assert (memory_at(start - _MARGIN, _MARGIN) == POISON).all()
