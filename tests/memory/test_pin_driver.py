"""Pinning through the CUDA driver: the calls it makes, and on a GPU that bytes arrive."""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stub_driver import build_driver, run_over_driver

from kvferry.errors import BudgetError, DriverError, PinError
from kvferry.geometry import Geometry, Plane
from kvferry.kernels.jit import Context, Driver
from kvferry.memory import (
    ContextPinDriver,
    HostMapping,
    HostPool,
    HugePages,
    is_registered,
    look_up,
    register,
)

BASE = 0x7F00_0000_0000
MIB = 1 << 20


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712


class _DeviceAttribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class _PointerAttribute(enum.IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3


class _MemoryType(enum.IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2


class _Bindings:
    """The driver's functions that pinning takes; calls outside a context fail as the real ones."""

    CUresult = _Result
    CUdevice_attribute = _DeviceAttribute
    CUpointer_attribute = _PointerAttribute
    CUmemorytype = _MemoryType
    CU_MEMHOSTREGISTER_PORTABLE = 1
    CU_MEMHOSTREGISTER_DEVICEMAP = 2

    def __init__(self) -> None:
        self.in_context = 0
        self.calls: list[tuple[Any, ...]] = []
        self.refusal = _Result.CUDA_SUCCESS
        self.pinned: dict[int, _MemoryType] = {}

    def cuInit(self, _: int) -> Any:  # noqa: N802
        return (_Result.CUDA_SUCCESS,)

    def cuDriverGetVersion(self) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, 13000

    def cuDeviceGetCount(self) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, 1

    def cuDeviceGet(self, ordinal: int) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, ordinal

    def cuDeviceGetAttribute(self, _: int, __: int) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, 9

    def cuDevicePrimaryCtxRetain(self, _: int) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, "context"

    def cuCtxPushCurrent(self, _: str) -> Any:  # noqa: N802
        self.in_context += 1
        return (_Result.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:  # noqa: N802
        self.in_context -= 1
        return _Result.CUDA_SUCCESS, "context"

    def cuGetErrorName(self, status: _Result) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, _: _Result) -> Any:  # noqa: N802
        return _Result.CUDA_SUCCESS, b"as it was told"

    def _status(self) -> _Result:
        return self.refusal if self.in_context else _Result.CUDA_ERROR_INVALID_CONTEXT

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:  # noqa: N802
        self.calls.append(("register", address, num_bytes, flags))
        return (self._status(),)

    def cuMemHostUnregister(self, address: int) -> Any:  # noqa: N802
        self.calls.append(("unregister", address))
        return (self._status(),)

    def cuPointerGetAttribute(self, attribute: _PointerAttribute, address: int) -> Any:  # noqa: N802
        kind = self.pinned.get(address)
        status = self._status()
        if kind is None and not status:
            status = _Result.CUDA_ERROR_INVALID_VALUE
        if status or kind is None:
            return status, None
        if attribute is _PointerAttribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            return status, int(kind)
        return status, address + (1 << 46)


@pytest.fixture
def bindings() -> _Bindings:
    """A driver of CUDA 13 over one GPU."""
    return _Bindings()


@pytest.fixture
def pins(bindings: _Bindings) -> ContextPinDriver:
    """Pinning over `bindings`."""
    return ContextPinDriver(Driver(bindings, "13.0.3").context(0))


def test_calls_and_flags(bindings: _Bindings, pins: ContextPinDriver) -> None:
    """Memory is registered portable and mapped, with the context current only for the call."""
    pins.register(BASE, 4097)
    pins.unregister(BASE)
    pins.clear_error()
    assert bindings.calls == [("register", BASE, 4097, 3), ("unregister", BASE)]
    assert bindings.in_context == 0


def test_refusals_have_their_code(bindings: _Bindings, pins: ContextPinDriver) -> None:
    """What the driver answers comes through with name and number, and as PinError from register."""
    bindings.refusal = _Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    with pytest.raises(DriverError, match="ALREADY_REGISTERED") as raised:
        pins.register(BASE, 4096)
    assert raised.value.code == 712
    with pytest.raises(PinError, match=r"code 712 .*ALREADY_REGISTERED.*look it up instead"):
        register(BASE, 4096, pins)
    assert bindings.in_context == 0


def test_pointers_are_asked_for(bindings: _Bindings, pins: ContextPinDriver) -> None:
    """Host memory is pinned, device memory and what the driver has never seen are not."""
    bindings.pinned = {BASE: _MemoryType.CU_MEMORYTYPE_HOST, 7: _MemoryType.CU_MEMORYTYPE_DEVICE}
    assert pins.is_pinned(BASE)
    assert pins.device_pointer(BASE) == BASE + (1 << 46)
    assert not pins.is_pinned(7)
    assert not pins.is_pinned(BASE + 1)
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        pins.device_pointer(BASE + 1)
    bindings.refusal = _Result.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(DriverError, match="INVALID_CONTEXT"):
        pins.is_pinned(BASE)


_CHILD = """
from kvferry.errors import PinError
from kvferry.kernels.jit import Driver
from kvferry.memory import ContextPinDriver, HostMapping, is_registered, look_up, register
pins = ContextPinDriver(Driver.open().context(0))
with HostMapping(10000) as memory:
    address = memory.address
    assert not is_registered(address, 10000, pins)
    with register(address, 10000, pins) as registration:
        assert is_registered(address, 10000, pins)
        assert not is_registered(address, 10001, pins)
        assert registration.device_address(address + 7) == address + 7 + (1 << 46)
        found = look_up(address + 3, 9000, pins)
        assert found.device_address(address + 3) == address + 3 + (1 << 46)
        try:
            register(address, 4096, pins)
        except PinError as refused:
            print(refused)
    assert not is_registered(address, 1, pins)
"""


def test_real_bindings_take_the_calls(tmp_path: Path) -> None:
    """Through the real bindings, over a stub driver: register, look up, refuse, unregister."""
    pytest.importorskip("cuda.bindings.driver")
    build_driver(Path(__file__).parents[1] / "cli" / "stub_gpu.c", tmp_path)
    ran = run_over_driver(tmp_path, _CHILD)
    assert ran.returncode == 0, ran.stderr
    assert "code 712" in ran.stdout


@pytest.fixture
def context() -> Iterator[Context]:
    """The first GPU."""
    opened = Driver.open().context(0)
    yield opened
    opened.close()


def _round_trip(context: Context, source: int, target: int, num_bytes: int) -> None:
    """Carry bytes from `source` to the GPU and back to `target`."""
    driver = context.driver
    with context.current():
        memory = driver.call("cuMemAlloc", num_bytes)
        try:
            driver.call("cuMemcpyHtoDAsync", memory, source, num_bytes, 0)
            driver.call("cuMemcpyDtoHAsync", target, memory, num_bytes, 0)
            driver.call("cuStreamSynchronize", 0)
        finally:
            driver.call("cuMemFree", memory)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [None, 1 << 20])
def test_gpu_reaches_pinned_memory(context: Context, chunk_bytes: int | None) -> None:
    """Registered whole or in chunks, every chunk has an address, and bytes survive the way."""
    pins = ContextPinDriver(context)
    size = 3 * MIB + 4097
    with HostMapping(2 * size) as memory:
        memory.view[:size] = os.urandom(size)
        memory.view[size:] = b"\xa5" * size
        assert not is_registered(memory.address, 2 * size, pins)
        with register(memory.address, 2 * size, pins, chunk_bytes=chunk_bytes) as registration:
            assert is_registered(memory.address, 2 * size, pins)
            for chunk in registration.chunks:
                assert pins.is_pinned(chunk.end - 1)
                last = registration.device_address(chunk.end - 1)
                assert last == chunk.device_address + chunk.num_bytes - 1
                # A copy must not leave the chunk.
                take = min(chunk.num_bytes, memory.address + size - chunk.address, 64 * 1024)
                if take > 0:
                    target = chunk.address + size
                    room = registration.chunk_of(target).end - target
                    take = min(take, room)
                    _round_trip(context, chunk.address, target, take)
                    at = chunk.address - memory.address
                    arrived = memory.view[size + at : size + at + take]
                    assert bytes(arrived) == bytes(memory.view[at : at + take])
                    arrived.release()
        assert not is_registered(memory.address, 1, pins)


@pytest.mark.gpu
def test_gpu_refuses_what_is_registered(context: Context) -> None:
    """A range that is pinned already is refused with the advice to look it up, and that works."""
    pins = ContextPinDriver(context)
    with HostMapping(MIB) as memory, register(memory.address, MIB, pins):
        with pytest.raises(PinError, match=r"code 712 .*look it up instead"):
            register(memory.address, MIB, pins)
        with look_up(memory.address + 5, MIB - 5, pins) as found:
            assert found.device_address(memory.address + 5, 100) > 0
        assert is_registered(memory.address, MIB, pins)


@pytest.mark.gpu
def test_gpu_error_state_is_clean_after_a_refusal(context: Context) -> None:
    """A refused registration surfaces at no later call, of kvferry or of torch."""
    import torch

    pins = ContextPinDriver(context)
    # No memory is mapped there.
    with pytest.raises(PinError):
        register(1 << 20, 64 * MIB, pins)
    assert int(torch.ones(8, device="cuda").sum()) == 8
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_gpu_finds_memory_that_torch_pinned(context: Context) -> None:
    """Tensors of torch's pinned allocator are looked up, also in their middle; others are not."""
    import torch

    pins = ContextPinDriver(context)
    pinned = torch.zeros(5 * MIB, dtype=torch.uint8, pin_memory=True)
    with look_up(pinned.data_ptr() + 3, 4 * MIB, pins) as found:
        assert found.contiguous
    plain = torch.zeros(5 * MIB, dtype=torch.uint8)
    assert not is_registered(plain.data_ptr(), plain.nbytes, pins)


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_bytes", [None, MIB])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("huge_pages", ["never", "transparent", "always"])
def test_gpu_pool_pins_and_unpins(
    context: Context, huge_pages: HugePages, shared: bool, chunk_bytes: int | None
) -> None:
    """A host pool's slots are reached while it is open, and its memory is free after that."""
    pins = ContextPinDriver(context)
    geometry = Geometry(planes=(Plane(name="latent", num_layers=3, element_size=656),))
    try:
        pool = HostPool(geometry, num_slots=64, huge_pages=huge_pages, shared=shared)
    except BudgetError as absent:
        if huge_pages != "always":
            raise
        pytest.skip(f"no reserved huge pages: {absent}")
    registration = pool.pin(pins, chunk_bytes=chunk_bytes)
    address, last = pool.address, pool.num_slots - 1
    assert registration.num_bytes == pool.num_bytes
    assert (len(registration.chunks) > 1) is (chunk_bytes is not None)
    pool.slot_view(0)[:] = os.urandom(pool.slot_bytes)
    _round_trip(context, pool.slot_address(0), pool.slot_address(last), pool.slot_bytes)
    assert bytes(pool.slot_view(last)) == bytes(pool.slot_view(0))
    pool.close()
    assert not pins.is_pinned(address)
