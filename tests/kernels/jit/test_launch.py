"""Prepared launches: parameters that are rewritten in place, and limits checked beforehand."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest
from tests.kernels.jit.conftest import FakeBindings

from kvferry.errors import LaunchError
from kvferry.kernels.jit import MAX_SHARED_BYTES, Driver, Function, PreparedLaunch

_Dim3 = tuple[int, int, int]


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("count", ctypes.c_int32),
        ("flag", ctypes.c_uint8),
    )


@pytest.fixture
def function(driver: Driver) -> Function:
    """A kernel with 2,048 bytes of static shared memory."""
    return driver.context(0).load(b"cubin", 13).function("copy")


def _prepared(function: Function, **changes: Any) -> PreparedLaunch:
    given: dict[str, Any] = {"grid": (7, 2, 3), "block": (256, 1, 1), **changes}
    return PreparedLaunch(function, _Parameters(2**63, -5, 200), **given)


def test_a_launch_gives_the_driver_all_it_was_made_with(
    function: Function, bindings: FakeBindings
) -> None:
    """Kernel, grid, block, shared memory, stream and each parameter, in order."""
    _prepared(function, shared_bytes=64).launch(0x77)
    assert bindings.launched == [("function copy", 7, 2, 3, 256, 1, 1, 64, 0x77, [2**63, -5, 200])]


def test_parameters_and_grid_are_rewritten_in_place(
    function: Function, bindings: FakeBindings
) -> None:
    """Each launch has the values of its moment; nobody else's memory is read in between."""
    launch = _prepared(function)
    for number in range(100):
        launch.parameters.count = number
        launch.resize((number + 1, 1, 1))
        if number == 50:
            gc.collect()
        launch.launch(0)
    assert [seen[-1] for seen in bindings.launched] == [[2**63, n, 200] for n in range(100)]
    assert [seen[1:4] for seen in bindings.launched] == [(n + 1, 1, 1) for n in range(100)]
    assert launch.grid == (100, 1, 1)


@pytest.mark.parametrize(
    "grid", [(0, 1, 1), (1, 65536, 1), (1, 1, 65536), (2**31, 1, 1), (-1, 1, 1)]
)
def test_a_grid_that_cannot_be(function: Function, grid: _Dim3) -> None:
    """It is refused when it is set, first or later, and the old one stays."""
    with pytest.raises(LaunchError, match="grid"):
        _prepared(function, grid=grid)
    launch = _prepared(function)
    with pytest.raises(LaunchError, match="grid"):
        launch.resize(grid)
    assert launch.grid == (7, 2, 3)


@pytest.mark.parametrize("block", [(0, 1, 1), (1025, 1, 1), (32, 32, 2), (-1, -1, 1)])
def test_a_block_that_cannot_be(function: Function, block: _Dim3) -> None:
    """The kernel's own limit is in the message."""
    with pytest.raises(LaunchError, match="1024"):
        _prepared(function, block=block)


def test_shared_memory_is_limited_to_what_every_gpu_has(
    function: Function, bindings: FakeBindings
) -> None:
    """Static and dynamic together; above 48 KiB the driver is asked, below it is not."""
    most = MAX_SHARED_BYTES - function.shared_bytes
    for num_bytes in (-1, most + 1):
        with pytest.raises(LaunchError, match="shared memory"):
            _prepared(function, shared_bytes=num_bytes)
    _prepared(function, shared_bytes=48 * 1024 - function.shared_bytes)
    assert not [call for call in bindings.calls if call[0] == "cuFuncSetAttribute"]
    _prepared(function, shared_bytes=48 * 1024 - function.shared_bytes + 1)
    assert len([call for call in bindings.calls if call[0] == "cuFuncSetAttribute"]) == 1
    _prepared(function, shared_bytes=most)
    assert ("cuFuncSetAttribute", "function copy", 8, most) in bindings.calls


def test_a_launch_that_fails(function: Function, bindings: FakeBindings) -> None:
    """The error has kernel, sizes, code, and that the fault may be an earlier kernel's."""
    launch = _prepared(function)
    bindings.fails["cuLaunchKernel"] = bindings.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(LaunchError, match=r"copy.*7 x 2 x 3.*256.*\(700\).*earlier kernel") as e:
        launch.launch(0)
    assert e.value.code == 700


def test_a_thread_without_a_context(function: Function, bindings: FakeBindings) -> None:
    """It is told how to get one."""
    launch = _prepared(function)
    bindings.fails["cuLaunchKernel"] = bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(LaunchError, match="make_current"):
        launch.launch(0)
