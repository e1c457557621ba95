"""A kernel small enough to compile in a test, and a driver without a GPU."""

# The driver chose the names, and takes more than is looked at.
# ruff: noqa: N802, ARG002

from __future__ import annotations

import ctypes
import enum
from typing import Any

import pytest

from kvferry.kernels.jit import Driver, Header, KernelSource

_TEXT = """#include "amount.cuh"
extern "C" __global__ void add(const unsigned char* from, unsigned char* to, long long num_bytes) {
    long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at < num_bytes) to[at] = from[at] + AMOUNT;
}
"""


class _Result(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209
    CUDA_ERROR_ILLEGAL_ADDRESS = 700


class _DeviceAttribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class _FunctionAttribute(enum.IntEnum):
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1
    CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES = 3
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


class FakeBindings:
    """Answers as the driver's bindings do, and remembers what it was asked.

    `fails` maps a function's name to the status it shall return.
    """

    CUresult = _Result
    CUdevice_attribute = _DeviceAttribute
    CUfunction_attribute = _FunctionAttribute

    def __init__(self) -> None:
        """A machine with two GPUs of compute capability 9.0 and a driver of CUDA 13.0."""
        self.version = 13000
        self.capability = (9, 0)
        self.fails: dict[str, _Result] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.depth = 0
        self.launched: list[tuple[Any, ...]] = []

    def _done(self, name: str, *values: Any, given: tuple[Any, ...] = ()) -> tuple[Any, ...]:
        self.calls.append((name, *given))
        status = self.fails.get(name, _Result.CUDA_SUCCESS)
        return (status, *(None if status else value for value in values))

    def cuInit(self, flags: int) -> Any:
        return self._done("cuInit")

    def cuDriverGetVersion(self) -> Any:
        return self._done("cuDriverGetVersion", self.version)

    def cuGetErrorName(self, status: _Result) -> Any:
        return _Result.CUDA_SUCCESS, status.name.encode()

    def cuGetErrorString(self, status: _Result) -> Any:
        return _Result.CUDA_SUCCESS, b"as it was told"

    def cuDeviceGetCount(self) -> Any:
        return self._done("cuDeviceGetCount", 2)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._done("cuDeviceGet", f"device {ordinal}")

    def cuDeviceGetAttribute(self, attribute: int, device: str) -> Any:
        values = {75: self.capability[0], 76: self.capability[1], 16: 132}
        return self._done("cuDeviceGetAttribute", values[attribute])

    def cuDevicePrimaryCtxRetain(self, device: str) -> Any:
        return self._done("cuDevicePrimaryCtxRetain", f"context of {device}", given=(device,))

    def cuDevicePrimaryCtxRelease(self, device: str) -> Any:
        return self._done("cuDevicePrimaryCtxRelease", given=(device,))

    def cuCtxPushCurrent(self, context: str) -> Any:
        self.depth += 1
        return self._done("cuCtxPushCurrent", given=(context,))

    def cuCtxPopCurrent(self) -> Any:
        self.depth -= 1
        return self._done("cuCtxPopCurrent", "a context")

    def cuCtxSetCurrent(self, context: str) -> Any:
        return self._done("cuCtxSetCurrent", given=(context,))

    def cuModuleLoadData(self, image: bytes) -> Any:
        assert self.depth > 0, "no context is current"
        return self._done("cuModuleLoadData", object(), given=(image,))

    def cuModuleUnload(self, module: Any) -> Any:
        assert self.depth > 0, "no context is current"
        return self._done("cuModuleUnload", given=(module,))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> Any:
        assert self.depth > 0, "no context is current"
        return self._done("cuModuleGetFunction", f"function {name.decode()}")

    def cuFuncLoad(self, function: str) -> Any:
        return self._done("cuFuncLoad", given=(function,))

    def cuFuncGetAttribute(self, attribute: int, function: str) -> Any:
        values = {0: 1024, 1: 2048, 3: 16, 4: 40}
        return self._done("cuFuncGetAttribute", values[attribute])

    def cuFuncSetAttribute(self, function: str, attribute: int, value: int) -> Any:
        return self._done("cuFuncSetAttribute", given=(function, attribute, value))

    def cuLaunchKernel(self, *arguments: Any) -> Any:
        """Read the parameters at once, as the driver does: three of 8, 4 and 1 bytes."""
        *where, addresses, extra = arguments
        assert extra == 0
        at = (ctypes.c_void_p * 3).from_address(addresses)
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint8)
        values = [kind.from_address(a or 0).value for kind, a in zip(kinds, at, strict=True)]
        self.launched.append((*where, values))
        return self._done("cuLaunchKernel")


@pytest.fixture
def bindings() -> FakeBindings:
    """Bindings of CUDA 13 over a driver that is not there."""
    return FakeBindings()


@pytest.fixture
def driver(bindings: FakeBindings) -> Driver:
    """A driver over `bindings`."""
    return Driver(bindings, "13.0.3")


@pytest.fixture
def tiny() -> KernelSource:
    """A unit with one kernel, `add`, and one header."""
    return KernelSource("tiny.cu", _TEXT, headers=(Header("amount.cuh", "#define AMOUNT 3\n"),))
