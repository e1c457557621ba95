"""``kvferry doctor`` tries transfers on a GPU that is made of host memory."""

from __future__ import annotations

import ctypes

import pytest
from tests.transfer import conftest
from tests.transfer.fake_gpu import CALLER, FakeGpu, Status

from kvferry.cli.doctor.transfer_probe import transfer_error
from kvferry.errors import CompileError
from kvferry.kernels import CopyPath, MoveKernels
from kvferry.transfer.gpu_carrier import GpuCarrier

gpu = conftest.gpu


def _copy(target: int, source: int, num_bytes: int) -> None:
    ctypes.memmove(target, source, num_bytes)


@pytest.fixture(autouse=True)
def _plain_copies(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guarded pool of the probe needs beside what transfers need."""
    monkeypatch.setattr(gpu, "_cu_memcpy_hto_d", _copy, raising=False)
    monkeypatch.setattr(gpu, "_cu_memcpy_dto_h", _copy, raising=False)
    monkeypatch.setattr(gpu, "_cu_ctx_synchronize", lambda: None, raising=False)
    # The process of the probe has no torch; this one may, without a GPU.
    monkeypatch.setattr(GpuCarrier, "current_stream", lambda _: CALLER)


@pytest.mark.parametrize("path", CopyPath)
def test_each_path_is_tried_with_its_own_kernels(gpu: FakeGpu, path: CopyPath) -> None:
    """Pages go out and come back through the path's kernel and the one that ends digests."""
    assert transfer_error(path, 0) == ""
    launched = {call for call in gpu.calls if call.startswith("kernel ")}
    digests = {"kernel realign"} if path is CopyPath.GROUPED else set()
    assert launched == {f"kernel {path.value}", "kernel finish"} | digests


def test_a_kernel_that_does_not_build_is_told(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything moves, in the compiler's words."""

    def broken(*_: object) -> None:
        raise CompileError("flat does not compile")

    monkeypatch.setattr(MoveKernels, "load", broken)
    assert transfer_error(CopyPath.FLAT, 0) == "flat does not compile"
    assert not [call for call in gpu.calls if call.startswith("kernel ")]


def test_a_transfer_that_fails_is_told(gpu: FakeGpu) -> None:
    """A launch that the driver refuses is no path that works."""
    gpu.hooks["cuLaunchKernel"] = lambda *_: Status.CUDA_ERROR_LAUNCH_FAILED
    assert "CUDA_ERROR_LAUNCH_FAILED" in transfer_error(CopyPath.FLAT, 0)
