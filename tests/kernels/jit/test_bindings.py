"""The real bindings, over a libcuda.so.1 that is compiled here and has no GPU behind it.

It shows that each call is made as the bindings want it, and that what they hand to the driver is
what was meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.stub_driver import build_driver, run_over_driver

_CHILD = """
import ctypes, json
from kvferry.errors import DriverError
from kvferry.kernels.jit import Driver, PreparedLaunch, driver_version

class Pair(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("second", ctypes.c_uint8))
class Parameters(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("count", ctypes.c_int32), ("pair", Pair))
class Launch(ctypes.Structure):
    _fields_ = (("sizes", ctypes.c_uint * 7), ("function", ctypes.c_uint64),
                ("stream", ctypes.c_uint64), ("address", ctypes.c_uint64),
                ("count", ctypes.c_int32), ("pair", Pair))

library = ctypes.CDLL("libcuda.so.1")
number = lambda name: ctypes.c_int.in_dll(library, name).value
def refused(function, *arguments):
    try: function(*arguments)
    except DriverError as error: return [type(error).__name__, error.code, str(error)]

driver = Driver.open()
context = driver.context(0)
module = context.load(b"\\x7fELF and so on", 13)
function = module.function("copy")
parameters = Parameters(2**63 + 5, -7, Pair(-3, 200))
launch = PreparedLaunch(function, parameters, grid=(2**31 - 1, 2, 3), block=(8, 4, 2),
                        shared_bytes=60000)
seen = []
def look():
    last = Launch.in_dll(library, "stub_launch")
    seen.append([list(last.sizes), last.function, last.stream, last.address, last.count,
                 last.pair.first, last.pair.second])
launch.launch(0x77)
look()
parameters.count, parameters.pair.second = 2**31 - 1, 1
launch.resize((1, 1, 1))
launch.launch(driver.bindings.CUstream(0))
look()
depth = number("stub_depth")
context.make_current()
print(json.dumps({
    "version": [driver.version, driver_version()],
    "gpu": [driver.num_devices, context.capability, context.num_multiprocessors],
    "function": [function.registers, function.local_bytes, function.shared_bytes,
                 function.max_threads],
    "seen": seen,
    "dynamic": number("stub_dynamic_shared"), "depth": [depth, number("stub_depth")],
    "fault": refused(launch.launch, 0xbad0),
    "kernel": refused(module.function, "other"),
    "image": refused(context.load, b"no cubin", 13),
    "absent": refused(driver.call, "cuMemAlloc", 64),
    "asked": [number("stub_oldest_asked"), number("stub_newest_asked")],
}))
module.unload()
context.close()
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a child prints that uses the stub as its driver."""
    folder = tmp_path_factory.mktemp("stub")
    source = Path(__file__).with_name("stub_driver.c")
    build_driver(source, folder)
    ran = run_over_driver(folder, _CHILD)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_the_driver_answers(said: dict[str, Any]) -> None:
    """Versions, GPU and kernel are as the driver says, each attribute under its own name."""
    assert said["version"] == [[13, 0], [13, 0]]
    assert said["gpu"] == [1, [9, 0], 132]
    assert said["function"] == [40, 16, 2048, 1024]


def test_a_launch_arrives_as_it_was_meant(said: dict[str, Any]) -> None:
    """Sizes, handles and parameters of three kinds, rewritten between two launches."""
    first, second = said["seen"]
    assert first == [[2**31 - 1, 2, 3, 8, 4, 2, 60000], 0x3000, 0x77, 2**63 + 5, -7, -3, 200]
    assert second == [[1, 1, 1, 8, 4, 2, 60000], 0x3000, 0, 2**63 + 5, 2**31 - 1, -3, 1]
    assert said["dynamic"] == 60000


def test_contexts_are_left_as_found(said: dict[str, Any]) -> None:
    """None is current before one is asked for."""
    assert said["depth"] == [0, 1]


def test_refusals_are_typed(said: dict[str, Any]) -> None:
    """A fault, a kernel and a cubin that are refused, and functions that are not there."""
    kind, code, text = said["fault"]
    assert (kind, code) == ("LaunchError", 700)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700), an illegal memory access" in text
    assert said["kernel"][:2] == ["DriverError", 500]
    assert said["image"][:2] == ["DriverError", 200]
    assert said["absent"][0] == "DriverTooOldError"


def test_functions_are_asked_for_by_version(said: dict[str, Any]) -> None:
    """Each with the version whose parameters the bindings give it, none newer than themselves."""
    oldest, newest = said["asked"]
    assert 2000 <= oldest < newest < 14000


def test_without_a_driver_there_is_a_typed_error(tmp_path: Path) -> None:
    """The real bindings' complaint about a library that is none becomes ours."""
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    code = (
        "from kvferry.kernels.jit import Driver, driver_version\n"
        "from kvferry.errors import NoDeviceError\n"
        "assert driver_version() is None\n"
        "try: Driver.open()\n"
        "except NoDeviceError as error: print(error)\n"
    )
    ran = run_over_driver(tmp_path, code)
    assert "the NVIDIA driver does not open" in ran.stdout, ran.stderr
