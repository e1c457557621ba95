"""On a real GPU, beside torch: build, load and launch, in streams, threads and graphs."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvferry.errors import LaunchError
from kvferry.kernels.jit import (
    CubinCache,
    Driver,
    Function,
    KernelLoader,
    KernelSource,
    PreparedLaunch,
)

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.gpu

_NUM_BYTES = 100_001


class _Parameters(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("num_bytes", ctypes.c_int64),
    )


@pytest.fixture
def add(tmp_path: Path, tiny: KernelSource) -> Function:
    """The kernel that adds 3 to each byte, loaded on GPU 0, where torch has its context too."""
    import torch

    torch.zeros(1, device="cuda")
    return KernelLoader(Driver.open(), CubinCache(tmp_path)).load(tiny, 0).function("add")


def _tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Random bytes, and a poisoned target with a canary behind it."""
    import torch

    source = torch.randint(0, 256, (_NUM_BYTES,), dtype=torch.uint8, device="cuda")
    return source, torch.full((_NUM_BYTES + 64,), 0xA5, dtype=torch.uint8, device="cuda")


def _prepared(add: Function, source: torch.Tensor, target: torch.Tensor) -> PreparedLaunch:
    parameters = _Parameters(source.data_ptr(), target.data_ptr(), _NUM_BYTES)
    grid = (-(-_NUM_BYTES // 256), 1, 1)
    return PreparedLaunch(add, parameters, grid=grid, block=(256, 1, 1))


def _assert_added(source: torch.Tensor, target: torch.Tensor) -> None:
    import torch

    assert torch.equal(target[:_NUM_BYTES], source + 3)
    assert torch.equal(target[_NUM_BYTES:], torch.full_like(target[_NUM_BYTES:], 0xA5))


def test_a_kernel_runs_in_torch_s_stream(add: Function) -> None:
    """It follows what torch did in that stream, and torch's context stays the current one."""
    import torch

    source, target = _tensors()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        source += 1
        _prepared(add, source, target).launch(stream.cuda_stream)
    stream.synchronize()
    _assert_added(source, target)


def test_parameters_are_taken_when_launched(add: Function) -> None:
    """Rewriting them while the kernel waits behind a slow one changes nothing."""
    import torch

    stream = torch.cuda.current_stream()
    first, second = _tensors(), _tensors()
    launch = _prepared(add, *first)
    torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
    launch.launch(stream.cuda_stream)
    launch.parameters.source, launch.parameters.target = (one.data_ptr() for one in second)
    launch.launch(stream.cuda_stream)
    launch.parameters.num_bytes = 0
    stream.synchronize()
    _assert_added(*first)
    _assert_added(*second)


def test_a_launch_is_captured_into_a_graph(add: Function) -> None:
    """The first launch of a kernel may be a captured one, and each replay runs it."""
    import torch

    source, target = _tensors()
    launch = _prepared(add, source, target)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.launch(torch.cuda.current_stream().cuda_stream)
    for _ in range(2):
        source += 1
        target[:_NUM_BYTES] = 0
        graph.replay()
        torch.cuda.synchronize()
        _assert_added(source, target)


def test_a_thread_needs_a_context(add: Function) -> None:
    """A new thread gets a typed error without one, and launches with one."""
    import torch

    source, target = _tensors()
    torch.cuda.synchronize()
    launch = _prepared(add, source, target)
    caught: list[LaunchError] = []

    def work() -> None:
        try:
            launch.launch(0)
        except LaunchError as error:
            caught.append(error)
        add.context.make_current()
        launch.launch(0)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    torch.cuda.synchronize()
    assert [error.code for error in caught] == [201]
    _assert_added(source, target)


def test_a_launch_that_the_driver_refuses(add: Function) -> None:
    """Shared memory that was not allowed is refused with a code, and the context lives on."""
    source, target = _tensors()
    launch = _prepared(add, source, target)
    too_much = PreparedLaunch(add, launch.parameters, grid=(1, 1, 1), block=(1, 1, 1),
                              shared_bytes=60_000)  # fmt: skip
    add.allow_dynamic_shared(0)
    with pytest.raises(LaunchError, match="add") as caught:
        too_much.launch(0)
    assert caught.value.code != 0
    launch.launch(0)
    add.context.driver.call("cuCtxSynchronize")
    _assert_added(source, target)
