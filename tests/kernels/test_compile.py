"""The transfer kernels compile for every GPU generation without spilling, where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.kernels import CopyPath, move_kernels
from kvferry.kernels.jit import (
    MAX_SHARED_BYTES,
    CompileReport,
    KernelResources,
    KernelSource,
    compile_cubin,
    compile_report,
)

_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
_KERNELS = tuple(sorted([*CopyPath, "finish"]))
# 64 Ki registers of a multiprocessor over the 512 threads of a block.
_MAX_REGISTERS = 128


def _check(kernel: KernelResources) -> None:
    assert not kernel.spills, kernel
    assert kernel.stack_bytes == 0, kernel
    assert kernel.registers <= _MAX_REGISTERS, kernel
    assert kernel.shared_bytes <= MAX_SHARED_BYTES, kernel


@pytest.mark.parametrize("arch", _ARCHS)
def test_no_kernel_spills(arch: str) -> None:
    """All four kernels keep everything in registers, so few that a block of 512 threads fits."""
    report: CompileReport = compile_report(KernelSource.packaged("transfer.cu"), arch)
    assert [kernel.kernel for kernel in report.kernels] == [f"kvferry_{name}" for name in _KERNELS]
    for kernel in report.kernels:
        _check(kernel)
    assert "warning" not in report.log, report.log


@pytest.mark.parametrize("name", _KERNELS)
def test_a_kernel_is_compiled_alone(name: str) -> None:
    """Who needs one kernel compiles one, which is what keeps the first transfer quick."""
    source = KernelSource.packaged("transfer.cu", {f"KVFERRY_KERNEL_{name.upper()}": 1})
    (kernel,) = compile_report(source, "sm_90").kernels
    assert kernel.kernel == f"kvferry_{name}"
    _check(kernel)


@pytest.mark.parametrize("arch", _ARCHS)
@pytest.mark.parametrize("name", ["flat", "realign"])
def test_a_relayout_leaves_room_for_another_block(name: str, arch: str) -> None:
    """Two blocks fit on a multiprocessor at once, and nothing is spilled for that."""
    told = move_kernels.defines(name, relayout=True)
    (kernel,) = compile_report(KernelSource.packaged("transfer.cu", told), arch).kernels
    _check(kernel)
    assert kernel.registers <= _MAX_REGISTERS // move_kernels.RELAYOUT_BLOCKS


def test_launches_and_kernels_agree_on_blocks_and_shared_memory() -> None:
    """Threads a block and room a warp are the same on both sides, and fit on every GPU."""
    threads, finish = move_kernels._MOVE_THREADS, move_kernels._FINISH_THREADS
    room = move_kernels._TILE_ROOM_BYTES
    assert threads // 32 * room <= MAX_SHARED_BYTES
    source = KernelSource.packaged("transfer.cu", {"KVFERRY_KERNEL_FINISH": 1})
    asserts = "".join(
        f'static_assert({left} == {right}, "{left}");\n'
        for left, right in (
            ("kFlatThreads", threads),
            ("kRealignThreads", threads),
            ("kGroupedThreads", threads),
            ("kFinishThreads", finish),
            ("kvferry::kTileRoom", room),
            ("kvferry::kLanes", 32),
        )
    )
    compile_cubin(dataclasses.replace(source, text=source.text + asserts), "sm_90")
