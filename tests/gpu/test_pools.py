"""Host memory under a GPU's transfers: kinds of memory, closing, dropping, and running many."""

from __future__ import annotations

import gc
import mmap
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import (
    DEVICE,
    GpuRig,
    latent,
    new_stream,
    owned_pool,
    pinned_pool,
    random_bytes,
    scattered,
)

from kvferry import (
    Geometry,
    HostPool,
    PoolView,
    RegisteredHostPool,
    TransferEngine,
    TransferHandle,
    TransferPlan,
)
from kvferry.errors import PinError, PoolClosedError, PoolInUseError, ViewError
from kvferry.kernels.jit import process_loader
from kvferry.memory import ContextPinDriver
from kvferry.types import Layout

pytestmark = pytest.mark.gpu

_PAGES = 4
_SLOTS = [5, 0, 3, 2]
_NUM_SLOTS = 6
_NUM_ROWS = 384

_Make = Callable[..., GpuRig]
_Slow = Callable[[Any], None]


def _pool_of(tensor: Any, **options: Any) -> RegisteredHostPool:
    """A layer_first host pool over any kind of memory. `tensor`: uint8 ``[L, tokens, E]``."""
    return RegisteredHostPool.from_tensors(latent(), {"latent": tensor}, **options)


def _shape(geometry: Geometry) -> tuple[int, int, int]:
    return geometry.planes[0].num_layers, _NUM_SLOTS * 64, 576


@pytest.fixture
def shared_memory() -> Any:
    """Memory that several processes could map, as an array of the pool's shape."""
    shape = _shape(latent())
    folder = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None  # noqa: S108 (shared memory)
    with tempfile.TemporaryFile(dir=folder) as file:
        os.ftruncate(file.fileno(), int(np.prod(shape)))
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED)
    return np.frombuffer(mapped, dtype=np.uint8).reshape(shape)


def _round_trip(pool: RegisteredHostPool) -> None:
    """Everything comes back that was stored, on memory that is registered as the pool says."""
    geometry = latent()
    tensor = random_bytes(1, 4, _NUM_ROWS, 576)
    before = tensor.clone()
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    at = torch.from_numpy(rows.reshape(-1)).to(DEVICE)
    view = PoolView.from_tensors(geometry, {"latent": tensor})
    given: dict[str, Any] = {"host_slots": _SLOTS, "device_slots": rows}
    with TransferEngine(view, pool) as engine:
        engine.store(TransferPlan.store(geometry, **given)).wait()
        tensor[:, at] = 0xA5
        handle = engine.load(TransferPlan.load(geometry, **given))
        handle.wait()
        assert handle.verified_pages == _PAGES
        assert torch.equal(tensor, before)


def test_memory_that_torch_pinned() -> None:
    """Tensors of torch's pinned allocator are used as they are."""
    pool = _pool_of(torch.empty(_shape(latent()), dtype=torch.uint8, pin_memory=True))
    _round_trip(pool)
    pool.close()


def test_memory_that_kvferry_pins() -> None:
    """Pageable tensors are pinned where that is allowed, and are not afterwards."""
    tensor = torch.empty(_shape(latent()), dtype=torch.uint8)
    pool = _pool_of(tensor, pin_tensors=True)
    _round_trip(pool)
    pool.close()
    pins = ContextPinDriver(process_loader().driver.context(0))
    assert not pins.is_pinned(tensor.data_ptr() + tensor.nbytes // 2)


def test_shared_memory(shared_memory: Any) -> None:
    """A mapping of shared memory serves like any other."""
    pool = _pool_of(shared_memory, pin_tensors=True)
    _round_trip(pool)
    pool.close()


def test_memory_that_nobody_pinned() -> None:
    """Pageable memory is refused when the engine is made, with the ways out, and untouched."""
    tensor = torch.full(_shape(latent()), 0x5A, dtype=torch.uint8)
    pool = _pool_of(tensor)
    view = PoolView.from_tensors(latent(), {"latent": random_bytes(1, 4, _NUM_ROWS, 576)})
    with pytest.raises(PinError, match=r"should be pinned.*pin_memory=True.*pin_tensors=True"):
        TransferEngine(view, pool)
    assert bool((tensor == 0x5A).all())
    pool.close()


def test_a_pool_that_is_pinned_in_chunks(make_rig: _Make) -> None:
    """Slots on either side of a border between two registrations are reached by one transfer."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=_NUM_SLOTS)
    assert isinstance(rig.host, HostPool)
    pins = ContextPinDriver(process_loader().driver.context(0))
    registration = rig.host.pin(pins, chunk_bytes=2 * rig.host.slot_bytes)
    assert len(registration.chunks) >= 3
    engine = rig.engine()
    rig.fill(1)
    rows, slots = scattered(1, 4, 64, _NUM_ROWS), [1, 2, 3, 4]
    given: dict[str, Any] = {"host_slots": slots, "device_slots": rows}
    engine.store(TransferPlan.store(rig.geometry, **given)).wait()
    rig.check_stored(slots, {"latent": rows})
    rig.poison()
    images = rig.after_load(slots, {"latent": rows})
    engine.load(TransferPlan.load(rig.geometry, **given)).wait()
    rig.check_device(images)


def test_a_device_pool_of_another_geometry(make_rig: _Make) -> None:
    """Pools of different geometries never meet."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=_NUM_SLOTS)
    other = latent(584)
    view = PoolView.from_tensors(other, {"latent": random_bytes(1, 4, _NUM_ROWS, 584)})
    with pytest.raises(ViewError, match="different geometries"):
        TransferEngine(view, rig.host)


def _load_plan(geometry: Geometry) -> TransferPlan:
    return TransferPlan.load(
        geometry, host_slots=_SLOTS, device_slots=scattered(1, _PAGES, 64, _NUM_ROWS)
    )


@pytest.mark.parametrize("layout", [None, Layout.LAYER_FIRST], ids=str)
def test_a_pool_is_not_closed_under_a_transfer(
    make_rig: _Make, slow: _Slow, layout: Layout | None
) -> None:
    """While a transfer is in flight closing is refused, nothing is unpinned; then it closes."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=_NUM_SLOTS, host_layout=layout)
    engine, work = rig.engine(), new_stream()
    engine.load(_load_plan(rig.geometry)).wait()
    slow(work)
    handle = engine.load(_load_plan(rig.geometry), work.cuda_stream)
    with pytest.raises(PoolInUseError):
        rig.host.close()
    assert not rig.host.closed
    handle.wait()
    engine.close()
    rig.host.close()
    with pytest.raises(PoolClosedError):
        rig.host.view if layout is None else rig.host.digests  # noqa: B018 (it raises)


def test_closing_an_engine_waits(make_rig: _Make, slow: _Slow) -> None:
    """`close` returns when what is in flight is over: its bytes are there, its handle is done."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=_NUM_SLOTS)
    rig.put(3, range(_NUM_SLOTS))
    engine, work = rig.engine(), new_stream()
    plan = _load_plan(rig.geometry)
    images = rig.after_load(_SLOTS, {"latent": scattered(1, _PAGES, 64, _NUM_ROWS)})
    engine.load(plan).wait()
    rig.poison()
    torch.cuda.synchronize()
    slow(work)
    handle = engine.load(plan, work.cuda_stream)
    engine.close()
    assert handle.done
    handle.wait_all()
    rig.check_device(images)


@pytest.mark.parametrize("order", ["engine first", "pool first", "handle last"])
def test_everything_may_be_dropped_at_any_time(slow: _Slow, order: str) -> None:
    """An engine, a pool or a handle that is dropped with a transfer in flight takes no byte along.

    The transfer writes to memory that must still be pinned when its turn comes; the GPU would
    report the fault at one of the later calls.
    """
    geometry, work = latent(), new_stream()
    tensor = random_bytes(1, 4, _NUM_ROWS, 576)
    view = PoolView.from_tensors(geometry, {"latent": tensor})
    for _ in range(3):
        pool: HostPool | None = owned_pool(geometry, _NUM_SLOTS)
        assert pool is not None
        engine: TransferEngine | None = TransferEngine(view, pool)
        assert engine is not None
        plan = TransferPlan.store(
            geometry, host_slots=_SLOTS, device_slots=scattered(1, _PAGES, 64, _NUM_ROWS)
        )
        engine.store(plan).wait()
        slow(work)
        handle: TransferHandle | None = engine.store(plan, work.cuda_stream)
        if order == "pool first":
            pool = handle = None
            gc.collect()
        engine = None
        if order == "handle last":
            pool = None
        gc.collect()
        # Dropping the engine took as long as the transfer, which follows a slow stream.
        assert work.query()
        if handle is not None:
            assert handle.done
            handle.wait()
            assert handle.verified_pages == _PAGES
        pool = handle = None
        gc.collect()
        torch.cuda.synchronize()


def test_a_hundred_transfers_in_a_row(make_rig: _Make, slow: _Slow) -> None:
    """With index arrays that are used again and handles that are dropped, every byte is right.

    All are in flight at once; a second hundred takes no more device memory than the first.
    """
    count, pages = 100, 2
    rig = make_rig(latent(num_layers=1), num_rows=count * pages * 64, num_slots=count * pages)
    engine, work = rig.engine(), new_stream()
    target = torch.full_like(rig.tensor, 0xA5)
    reader = TransferEngine(PoolView.from_tensors(rig.geometry, {"latent": target}), rig.host)
    rows, slots = np.zeros((pages, 64), dtype=np.int64), np.zeros(pages, dtype=np.int32)
    free = []
    for turn in range(3):
        rig.fill(turn)
        rig.slot_memory()[:] = 0xA5
        target.fill_(0xA5)
        expected = rig.tensor.clone()
        order = np.random.default_rng(turn).permutation(count * pages * 64)
        torch.cuda.synchronize()
        for _ in range(8):
            slow(work)
        last: TransferHandle | None = None
        for number in range(count):
            with torch.cuda.stream(work):
                slots[:] = [number * pages, number * pages + 1]
                rows[:] = order[number * pages * 64 : (number + 1) * pages * 64].reshape(pages, 64)
                given: dict[str, Any] = {"host_slots": slots, "device_slots": rows}
                stored = engine.store(TransferPlan.store(rig.geometry, **given))
                stored.wait_all()
                last = reader.load(TransferPlan.load(rig.geometry, **given))
                slots[:], rows[:] = -1, -1
                del stored
            if number % 25 == 0:
                gc.collect()
        assert last is not None
        last.wait()
        assert last.verified_pages == pages
        torch.cuda.synchronize()
        assert torch.equal(target, expected)
        del expected
        free.append(torch.cuda.mem_get_info()[0])
    reader.close()
    # The first turn fills torch's own cache of memory too.
    assert free[2] >= free[1] - (4 << 20), f"{free[1] - free[2]} bytes of device memory are gone"


def test_a_pool_that_pins_late(make_rig: _Make) -> None:
    """Two engines over one pool share its registration, and the first to close leaves it."""
    pool = pinned_pool(latent(), latent().planes, _NUM_SLOTS, Layout.PAGE_MAJOR)
    _round_trip(pool)
    _round_trip(pool)
    pool.close()
