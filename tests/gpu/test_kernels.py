"""Kernels on a real GPU: prepared launches, and compiling once for all processes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvferry
from kvferry.kernels import CopyPath, MoveKernels
from kvferry.kernels.jit import (
    CubinCache,
    Driver,
    KernelLoader,
    KernelSource,
    PreparedLaunch,
    process_loader,
)

pytestmark = pytest.mark.gpu

_COUNT = 1000
_TEXT = """
struct Pair { unsigned long long target; long long count; };
extern "C" __global__ void number(Pair pair, unsigned int first) {
    long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at < pair.count) reinterpret_cast<unsigned int *>(pair.target)[at] = first + at;
}
"""


class _Pair(ctypes.Structure):
    _fields_ = (("target", ctypes.c_uint64), ("count", ctypes.c_int64))


class _Parameters(ctypes.Structure):
    _fields_ = (("pair", _Pair), ("first", ctypes.c_uint32))


@pytest.mark.parametrize("is_prepared", [True, False], ids=["prepared", "raw"])
def test_a_prepared_launch_does_what_a_raw_one_does(tmp_path: Path, is_prepared: bool) -> None:
    """A struct by value and a number beside it arrive alike either way, and nothing else is hit."""
    target = torch.full((_COUNT + 64,), -1, dtype=torch.int32, device="cuda:0")
    loader = KernelLoader(Driver.open(), CubinCache(tmp_path))
    function = loader.load(KernelSource(name="number.cu", text=_TEXT), 0).function("number")
    parameters = _Parameters(_Pair(target.data_ptr(), _COUNT), 7)
    grid, block = (-(-_COUNT // 256), 1, 1), (256, 1, 1)
    torch.cuda.synchronize()
    with function.context.current():
        if is_prepared:
            PreparedLaunch(function, parameters, grid=grid, block=block).launch(0)
        else:
            values = (parameters.pair, ctypes.c_uint32(parameters.first))
            array = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
            driver = function.context.driver
            driver.check(
                driver.bindings.cuLaunchKernel(
                    function.handle, *grid, *block, 0, 0, ctypes.addressof(array), 0
                ),
                "launch",
            )
    torch.cuda.synchronize()
    expected = torch.arange(7, 7 + _COUNT, dtype=torch.int32, device="cuda:0")
    assert torch.equal(target[:_COUNT], expected)
    assert bool((target[_COUNT:] == -1).all())


def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    """The first loader compiles what a geometry needs; the next takes all of it from the folder."""
    driver, counts = Driver.open(), []
    for _ in range(2):
        cache = CubinCache(tmp_path)
        loader = KernelLoader(driver, cache)
        MoveKernels(loader, 0).load(*CopyPath)
        counts.append(cache.counts)
        loader.close()
    assert [(found.hits, found.misses) for found in counts] == [(0, 4), (4, 0)]


def test_no_kernel_spills() -> None:
    """On the GPU that is here, no kernel of a transfer keeps a thread's registers in memory."""
    loader = process_loader()
    kernels = MoveKernels(loader, 0)
    kernels.load(*CopyPath)
    for prepared in kernels._launches.values():
        assert prepared.function.local_bytes == 0, prepared.function.name


# One transfer each way in a process without torch. With an argument, NVRTC cannot be imported.
_CHILD = """
import json, sys
if len(sys.argv) > 1:
    sys.modules["cuda.bindings.nvrtc"] = None
from kvferry.testing.device_memory import GuardedDeviceBuffer
from kvferry.testing.layouts import DeviceLayout
from kvferry.testing.round_trip import RoundTrip
from kvferry.types import SlotKind
told = {}
for path, size in (("flat", 576), ("realign", 131), ("grouped", 576)):
    with RoundTrip(element_size=size, kind=SlotKind.PAGE, device_run=1, host_layout=None,
                   device_layout=DeviceLayout.FLAT, allocate=GuardedDeviceBuffer) as trip:
        trip.store(path, "int32")
        trip.load(path, "int64")
told["torch"] = "torch" in sys.modules
with open("/proc/self/maps") as file:
    told["compiler"] = "libnvrtc" in file.read()
print(json.dumps(told))
"""


def _child(folder: Path, *arguments: str) -> dict[str, bool]:
    source = str(Path(kvferry.__file__).parents[1])
    ran = subprocess.run(
        [sys.executable, "-c", _CHILD, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={**os.environ, "KVFERRY_CACHE_DIR": str(folder), "PYTHONPATH": source},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told: dict[str, bool] = json.loads(ran.stdout.splitlines()[-1])
    return told


def test_a_second_process_needs_no_compiler(tmp_path: Path) -> None:
    """From an empty folder kernels are compiled; from a full one NVRTC is not even opened.

    Neither process has torch: the driver and its bindings are all that a GPU takes.
    """
    folder = tmp_path / "cubins"
    assert _child(folder) == {"torch": False, "compiler": True}
    assert _child(folder, "without NVRTC") == {"torch": False, "compiler": False}
