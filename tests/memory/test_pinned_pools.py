"""Pools that a GPU reaches: what they pin, what they look up, and the order of their end."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.memory.fake_pins import OUT_OF_MEMORY, FakePins, whole_pages

from kvferry.errors import ConfigError, PinError, PoolClosedError, PoolInUseError
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.memory import (
    HostPool,
    PageKind,
    RegisteredHostPool,
    SlotOwner,
    is_registered,
    linux_calls,
)
from kvferry.types import SlotKind

PAGE = mmap.PAGESIZE
MIB = 1 << 20
TIB = 1 << 40


def _geometry(element_size: int = 656, num_layers: int = 3) -> Geometry:
    return Geometry(
        planes=(
            Plane(name="latent", num_layers=num_layers, element_size=element_size),
            Plane(
                name="state",
                num_layers=2,
                element_size=96,
                rows_per_page=1,
                hit_rule=HitRule.exact_boundary(),
            ),
        ),
        page_size=4,
    )


def _engine_tensor(num_bytes: int, offset: int) -> npt.NDArray[np.uint8]:
    """Memory that starts `offset` bytes after the start of a memory page."""
    raw = np.zeros(num_bytes + 2 * PAGE, dtype=np.uint8)
    start = -raw.ctypes.data % PAGE + offset
    return raw[start : start + num_bytes]


def _engine_pool(offset: int = 100) -> RegisteredHostPool:
    tensor = _engine_tensor(3 * 40 * 656, offset).reshape(3, 40, 656)
    return RegisteredHostPool.from_tensors(_geometry(), {"latent": tensor})


def test_pool_is_pinned_as_a_whole_until_it_is_closed() -> None:
    """Slots and digests are one registration of exactly the pool's bytes."""
    driver = FakePins(shift=64 * TIB)
    pool = HostPool(_geometry(), num_slots=7)
    assert pool.registration is None
    registration = pool.pin(driver)
    assert pool.registration is registration
    assert driver.pinned == {pool.address: pool.num_bytes}
    for address in (pool.address, pool.slot_address(6), pool.digests.ctypes.data):
        assert registration.device_address(address) == address + 64 * TIB
    address = pool.address
    pool.close()
    assert driver.unregistered == [address]
    assert pool.registration is None
    with pytest.raises(PoolClosedError):
        pool.pin(driver)


def test_pool_in_chunks_splits_no_slot() -> None:
    """Where the driver takes small pieces only, each of them holds whole slots."""
    geometry = _geometry(element_size=8200, num_layers=8)
    slot = geometry.slot_bytes()
    pool = HostPool(geometry, num_slots=200)
    driver = FakePins(lambda asked: 1 if asked.num_bytes > 20 * MIB else None)
    registration = pool.pin(driver)
    assert len(registration.chunks) > 2
    assert registration.num_bytes == pool.num_bytes
    for slot_index in range(200):
        start = pool.slot_address(slot_index)
        assert registration.chunk_of(start) == registration.chunk_of(start + slot - 1)
    with pytest.raises(PinError, match="not in this registration"):
        registration.chunk_of(pool.address + pool.num_bytes)
    pool.close()
    assert driver.pinned == {}


def test_a_second_user_gets_the_registration_there_is() -> None:
    """Pinning again asks the driver nothing, but does not pass gaps to who cannot use them."""
    driver = FakePins(gap=MIB)
    with HostPool(_geometry(element_size=4096), num_slots=8) as pool:
        first = pool.pin(driver, chunk_bytes=64 * 1024, allow_gaps=True)
        calls = len(driver.asked)
        assert pool.pin(driver, allow_gaps=True) is first
        with pytest.raises(PinError, match="allow_gaps=True"):
            pool.pin(driver)
        assert len(driver.asked) == calls > 1


def test_refused_pool_is_as_it_was() -> None:
    """After a refusal the pool is open, unpinned, and can be used and pinned later."""
    driver = FakePins(lambda _: OUT_OF_MEMORY)
    with HostPool(_geometry(), num_slots=3) as pool:
        with pytest.raises(PinError, match="code 2"):
            pool.pin(driver)
        assert pool.registration is None
        with pytest.raises(ConfigError, match="chunk_bytes=10"):
            pool.pin(driver, chunk_bytes=10)
        assert pool.allocate(2, SlotOwner.INDEX) is not None
        assert pool.pin(FakePins()).num_bytes == pool.num_bytes


def test_refused_close_leaves_the_pool_pinned() -> None:
    """While a lease, a transfer or a view keeps the pool open, the driver is not asked to unpin."""
    driver = FakePins()
    pool = HostPool(_geometry(), num_slots=3)
    registration = pool.pin(driver)
    held = pool.slot_view(1)
    with pytest.raises(PoolInUseError, match="drop those"):
        pool.close()
    held.release()
    pool.acquire()
    with pytest.raises(PoolInUseError, match="leases out: 1"):
        pool.close()
    pool.release()
    slots = pool.allocate(1)
    assert slots is not None
    with pytest.raises(PoolInUseError, match="TRANSFER: 1"):
        pool.close()
    assert driver.unregistered == []
    assert pool.registration is registration
    assert registration.device_address(pool.slot_address(2))
    pool.free(slots, SlotOwner.TRANSFER)
    pool.close()
    assert len(driver.unregistered) == 1


def test_memory_that_the_driver_keeps_is_not_unmapped() -> None:
    """A refused unpin keeps the mapping, which is not taken for pinned, and close tries again."""
    driver = FakePins()
    pool = HostPool(_geometry(), num_slots=3)
    pool.pin(driver)
    driver.keeps[pool.address] = 999
    with pytest.raises(PinError, match="code 999"):
        pool.close()
    assert not pool.closed
    assert pool.registration is None
    with pytest.raises(PinError, match=r"close\(\) again"):
        pool.pin(driver)
    pool.slot_view(0)[:] = b"x" * pool.slot_bytes
    driver.keeps.clear()
    pool.close()
    assert pool.closed
    assert driver.pinned == {}


def test_a_dropped_pool_is_unpinned() -> None:
    """A pool that nobody closed leaves nothing with the driver."""
    driver = FakePins()
    pool = HostPool(_geometry(), num_slots=3)
    pool.pin(driver)
    del pool
    gc.collect()
    assert driver.pinned == {}


def test_pinning_does_not_need_the_lock_limit() -> None:
    """The driver pins by its own means: nothing is locked, so `ulimit -l` is no obstacle."""

    def locked() -> str:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(line for line in lines if line.startswith("VmLck:"))

    before = locked()
    with HostPool(_geometry(), num_slots=3) as pool:
        pool.pin(FakePins())
        assert locked() == before


def test_engine_pool_looks_its_tensors_up() -> None:
    """Tensors that the engine pinned are used as they are; only the digest table is registered."""
    pool = _engine_pool(offset=100)
    driver = FakePins(shift=TIB)
    layers = pool.view.layers["latent"]
    start, end = whole_pages(layers[0].address, layers[2].end - layers[0].address)
    driver.register(start, end - start)
    registration = pool.pin(driver)
    table = pool.digests.ctypes.data
    assert table % PAGE == 0
    assert driver.pinned == {start: end - start, table: pool.digests.nbytes}
    for address in (layers[0].address, layers[2].end - 1, table):
        assert registration.device_address(address) == address + TIB
    assert registration.contiguous
    assert pool.pin(driver) is registration
    pool.close()
    assert driver.unregistered == [table]


def test_engine_pool_of_unpinned_tensors_is_refused() -> None:
    """Unpinned memory is never taken for pinned: refused, the digest table given back."""
    pool = _engine_pool()
    driver = FakePins()
    with pytest.raises(PinError, match="should be pinned"):
        pool.pin(driver)
    assert driver.pinned == {}
    assert pool.registration is None
    # A part of it pinned is no better.
    start, _ = whole_pages(pool.view.layers["latent"][0].address, 1)
    driver.register(start, PAGE)
    with pytest.raises(PinError, match="should be pinned"):
        pool.pin(driver)
    assert list(driver.pinned) == [start]
    pool.close()


def test_engine_pool_pins_its_tensors_on_request() -> None:
    """The memory pages of all layers are registered, each once, however the layers share them."""
    pool = _engine_pool(offset=100)
    driver = FakePins(shift=TIB)
    registration = pool.pin(driver, pin_tensors=True)
    layers = pool.view.layers["latent"]
    start, end = whole_pages(layers[0].address, layers[2].end - layers[0].address)
    table = pool.digests.ctypes.data
    assert driver.pinned == {start: end - start, table: pool.digests.nbytes}
    for layer in layers:
        for row in (0, 39):
            address = layer.row_address(row)
            assert is_registered(address, 656, driver)
            assert registration.device_address(address, 656) == address + TIB
    pool.close()
    assert driver.unregistered == [start, table] or driver.unregistered == [table, start]
    assert driver.pinned == {}


def test_tensors_that_share_a_memory_page_are_pinned_once() -> None:
    """Two tensors of one heap page are one range; tensors far apart are two."""
    geometry = _geometry(element_size=16, num_layers=3)
    raw = _engine_tensor(64 * PAGE, offset=0)
    near, other, far = (raw[start : start + 640].reshape(40, 16) for start in (48, 800, 40 * PAGE))
    pool = RegisteredHostPool.from_tensors(geometry, {"latent": [far, near, other]})
    driver = FakePins()
    pool.pin(driver, pin_tensors=True)
    base = raw.ctypes.data
    table = pool.digests.ctypes.data
    assert {*driver.pinned} == {base, base + 40 * PAGE, table}
    assert driver.pinned[base] == driver.pinned[base + 40 * PAGE] == PAGE
    pool.close()
    assert driver.pinned == {}


def test_layers_side_by_side_are_pinned_together() -> None:
    """Layers of whole memory pages, one after another, are one registration and not one each."""
    geometry = _geometry(element_size=1024, num_layers=3)
    tensor = _engine_tensor(3 * 40 * 1024, offset=0).reshape(3, 40, 1024)
    pool = RegisteredHostPool.from_tensors(geometry, {"latent": tensor})
    driver = FakePins(gap=MIB)
    pool.pin(driver, pin_tensors=True)
    table = pool.digests.ctypes.data
    assert driver.pinned == {table: pool.digests.nbytes, tensor.ctypes.data: tensor.nbytes}
    pool.close()


def test_refusal_of_the_second_tensor_gives_back_the_first() -> None:
    """All or nothing holds over several tensors and the digest table."""
    geometry = _geometry(element_size=16, num_layers=2)
    raw = _engine_tensor(64 * PAGE, offset=0)
    layers = [raw[start : start + 640].reshape(40, 16) for start in (0, 40 * PAGE)]
    pool = RegisteredHostPool.from_tensors(geometry, {"latent": layers})
    second = layers[1].ctypes.data
    driver = FakePins(lambda asked: 712 if asked.address == second else None)
    with pytest.raises(PinError, match="look it up instead"):
        pool.pin(driver, pin_tensors=True)
    assert driver.pinned == {}
    assert driver.pending is None
    assert pool.registration is None
    pool.close()


def test_engine_pool_closes_like_ours() -> None:
    """Not under leases or views of the digests, pinned until then, and everything after raises."""
    pool = _engine_pool()
    driver = FakePins()
    pool.pin(driver, pin_tensors=True)
    pool.digests[1, 1] = 9
    held = pool.digests
    with pytest.raises(PoolInUseError, match="drop those"):
        pool.close()
    assert pool.digests[1, 1] == 9
    assert driver.unregistered == []
    del held
    pool.acquire()
    with pytest.raises(PoolInUseError, match="1 transfers"):
        pool.close()
    pool.release()
    driver.keeps[pool.digests.ctypes.data] = 999
    with pytest.raises(PinError, match="code 999"):
        pool.close()
    assert not pool.closed
    assert pool.registration is None
    driver.keeps.clear()
    pool.close()
    pool.close()
    assert pool.closed
    assert driver.pinned == {}
    for use in (pool.acquire, lambda: pool.digests, lambda: pool.pin(driver)):
        with pytest.raises(PoolClosedError, match="closed"):
            use()


def test_digests_of_an_engine_pool_are_committed_memory() -> None:
    """The table starts empty, on a memory page of its own, for states as for pages."""
    tensor = np.zeros((2, 5, 96), dtype=np.uint8)
    pool = RegisteredHostPool.from_tensors(_geometry(), {"state": tensor}, kind=SlotKind.STATE)
    assert pool.digests.shape == (5, 2)
    assert not pool.digests.any()
    assert pool.digests.ctypes.data % PAGE == 0
    pool.close()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reserved", [False, True])
def test_pools_of_every_backing_are_pinned_alike(
    monkeypatch: pytest.MonkeyPatch, reserved: bool, shared: bool
) -> None:
    """Huge pages and shared memory too: in chunks where need be, none of which splits a slot."""

    def huge_pages_are_ordinary(num_bytes: int, _: int) -> mmap.mmap:
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    make_shared = linux_calls.shared_memory
    monkeypatch.setattr(linux_calls, "map_huge", huge_pages_are_ordinary)
    monkeypatch.setattr(
        linux_calls, "shared_memory", lambda name, size, **_: make_shared(name, size)
    )
    pool = HostPool(
        _geometry(element_size=8200, num_layers=8),
        num_slots=200,
        huge_pages="always" if reserved else "transparent",
        shared=shared,
        unchecked_budget=reserved,
    )
    assert (pool.backing.pages is PageKind.RESERVED) is reserved
    assert pool.backing.shared is shared
    driver = FakePins(lambda asked: 1 if asked.num_bytes > 20 * MIB else None)
    registration = pool.pin(driver)
    assert len(registration.chunks) > 2
    # What whole huge pages take beyond the pool is nobody's, and is left alone.
    assert registration.num_bytes == pool.num_bytes <= pool.backing.num_bytes
    for slot in range(200):
        start = pool.slot_address(slot)
        assert registration.chunk_of(start) == registration.chunk_of(start + pool.slot_bytes - 1)
    pool.close()
    assert driver.pinned == {}
