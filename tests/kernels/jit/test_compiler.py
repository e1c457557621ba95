"""The compiler: every target, its complaints, its report, and what to install without it."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvferry.adapters.transformers.cache_shape import _PACKAGES
from kvferry.errors import (
    CompileError,
    CompilerVersionError,
    DriverTooOldError,
    KernelSourceError,
    MissingDependencyError,
)
from kvferry.kernels.jit import (
    OPTIONS,
    KernelSource,
    architecture,
    compile_cubin,
    compile_report,
    compiler,
    install_line,
    installed_compiler,
)
from kvferry.kernels.jit.packages import PACKAGES

_ROOT = Path(__file__).parents[3]
_ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test ask anew what is installed."""
    monkeypatch.setattr(compiler, "installed_compiler", installed_compiler.__wrapped__)
    monkeypatch.setattr(compiler, "_open", compiler._open.__wrapped__)


def _installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    """Let the packages be installed in these versions, and no other."""

    def version(package: str) -> str:
        try:
            return versions[package.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(package) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("arch", _ARCHS)
def test_each_target_compiles(tiny: KernelSource, arch: str) -> None:
    """A cubin is an ELF file for the very target, the same each time."""
    cubin = compile_cubin(tiny, arch)
    assert cubin[:4] == b"\x7fELF"
    assert b"add" in cubin
    assert arch.encode() in cubin
    assert cubin == compile_cubin(tiny, arch)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 1)])
def test_the_target_is_the_gpu_s_own(tiny: KernelSource, capability: tuple[int, int]) -> None:
    """Also those between the large steps get the exact target, and it compiles."""
    arch = architecture(capability)
    assert arch == f"sm_{capability[0]}{capability[1]}"
    assert compile_cubin(tiny, arch)


@pytest.mark.parametrize("arch", ["sm_75", "sm_", "compute_90", "90", "sm_90 -G"])
def test_targets_that_are_none_are_refused(tiny: KernelSource, arch: str) -> None:
    """Old GPUs and other words are refused before the compiler is asked."""
    with pytest.raises(KernelSourceError, match="sm_80"):
        compile_cubin(tiny, arch)
    with pytest.raises(KernelSourceError, match="sm_75"):
        architecture((7, 5))


def test_a_compile_error_has_all_that_is_needed() -> None:
    """Unit, target, options, the log with its line, and what to do."""
    source = KernelSource("wrong.cu", "\n\nsyntax error here;", defines=(("N", "7"),))
    with pytest.raises(CompileError) as caught:
        compile_cubin(source, "sm_90")
    said = str(caught.value)
    for part in ("wrong.cu for sm_90", "-arch=sm_90", *OPTIONS, "-DN=7", "wrong.cu(3): error",
                 "KVFERRY_DISABLE_PATHS", installed_compiler().identity):  # fmt: skip
        assert part in said


def test_a_target_that_the_compiler_does_not_know(tiny: KernelSource) -> None:
    """A GPU newer than the compiler leads to the line that installs a newer one."""
    with pytest.raises(CompileError, match=r"pip install -U 'nvidia-cuda-nvrtc"):
        compile_cubin(tiny, "sm_999")


def test_headers_do_not_come_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that happens to lie there is not compiled in."""
    (tmp_path / "stray.cuh").write_text("#define N 1\n")
    monkeypatch.chdir(tmp_path)
    source = KernelSource("k.cu", '#include "stray.cuh"\nextern "C" __global__ void k() {}')
    with pytest.raises(CompileError, match="could not open source file"):
        compile_cubin(source, "sm_90")
    assert compile_cubin(source, "sm_90", ("--std=c++17",)), "the option makes no difference"


@pytest.mark.parametrize("arch", _ARCHS)
def test_the_report_tells_registers_spills_and_shared_memory(arch: str) -> None:
    """A kernel that must spill does, one beside it does not, and shared memory is counted."""
    source = KernelSource(
        "k.cu",
        """
        extern "C" __global__ void small(int* p) { p[threadIdx.x] = 1; }
        extern "C" __global__ void shared(int* p) {
            __shared__ int kept[300];
            kept[threadIdx.x] = p[threadIdx.x];
            __syncthreads();
            p[threadIdx.x] = kept[299 - threadIdx.x];
        }
        extern "C" __global__ void __launch_bounds__(1024, 2) large(const float* p, float* q) {
            float v[96];
            #pragma unroll
            for (int i = 0; i < 96; ++i) v[i] = p[i * 1024 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 96; ++i) q[i * 1024 + threadIdx.x] = v[95 - i] * v[(i * 7) % 96];
        }
        """,
    )
    report = compile_report(source, arch)
    large, shared, small = report.kernels
    assert (large.kernel, shared.kernel, small.kernel) == ("large", "shared", "small")
    assert not small.spills
    assert not shared.spills
    assert large.spills
    assert large.stack_bytes > 0
    assert (small.shared_bytes, shared.shared_bytes, large.shared_bytes) == (0, 1200, 0)
    assert 0 < small.registers <= large.registers <= 64
    assert report.arch == arch


def test_a_spill_in_a_function_counts_to_its_kernel() -> None:
    """What a function that is not inlined spills is the kernel's."""
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for _Z1fv\n"
        "ptxas         .     24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Function properties for k\n"
        "    16 bytes stack frame, 2 bytes spill stores, 1 bytes spill loads\n"
        "ptxas info    : Used 32 registers, used 1 barriers, 128 bytes smem, 376 bytes cmem[0]\n"
    )
    assert compiler._resources(log) == (compiler.KernelResources("k", 32, 24, 10, 5, 128),)


def test_a_unit_without_a_kernel_has_no_report() -> None:
    """A report about nothing would pass every check."""
    with pytest.raises(CompileError, match="has no kernel"):
        compile_report(KernelSource("k.cu", "__device__ int x;"), "sm_90")


@pytest.mark.parametrize(
    ("driver", "line"),
    [
        ((12, 4), install_line(12)),
        ((13, 0), install_line(13)),
        ((14, 1), install_line(13)),
        (None, f"{install_line(13)}; for a driver of CUDA 12: {install_line(12)}"),
    ],
)
@pytest.mark.parametrize("present", [{}, {"cuda_bindings": "13.0.3"}])
def test_without_a_compiler_the_line_that_installs_it_is_said(
    tiny: KernelSource,
    monkeypatch: pytest.MonkeyPatch,
    driver: tuple[int, int] | None,
    line: str,
    present: dict[str, str],
) -> None:
    """It is that for this machine's driver."""
    _installed(monkeypatch, **present)
    monkeypatch.setattr(compiler, "driver_version", lambda: driver)
    with pytest.raises(MissingDependencyError, match=re.escape(line)):
        compile_cubin(tiny, "sm_90")


def test_what_is_to_be_installed_is_what_the_extras_bring() -> None:
    """The line names packages with their versions, for the nearest CUDA that there are some for."""
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {f"cuda{major}": list(names) for major, names in PACKAGES.items()} == {
        name: names for name, names in extras.items() if name.startswith("cuda")
    }
    assert list(_PACKAGES) == extras["transformers"]
    assert install_line(11) == install_line(12)
    assert install_line(14) == install_line(13)
    assert install_line(13) == "pip install 'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"


def test_a_driver_that_no_compiler_serves(
    tiny: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be installed for CUDA 11: the driver is what must change."""
    _installed(monkeypatch)
    monkeypatch.setattr(compiler, "driver_version", lambda: (11, 8))
    with pytest.raises(DriverTooOldError, match=r"11\.8.*update it"):
        compile_cubin(tiny, "sm_90")


@pytest.mark.parametrize(
    ("versions", "identity"),
    [
        ({"cuda_bindings": "13.0.3", "nvidia_cuda_nvrtc": "13.2.5"}, "nvidia-cuda-nvrtc 13.2.5"),
        (
            {"cuda_bindings": "12.9.4", "nvidia_cuda_nvrtc_cu12": "12.9.86"},
            "nvidia-cuda-nvrtc-cu12 12.9.86",
        ),
    ],
)
def test_the_compiler_is_the_bindings_one(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], identity: str
) -> None:
    """CUDA 12 and 13 have packages of different names."""
    _installed(monkeypatch, nvidia_cuda_nvrtc_cu11="11.8.89", **versions)
    found = compiler.installed_compiler()
    assert found.identity == identity
    assert found.release == tuple(int(n) for n in found.version.split(".")[:2])


def test_a_compiler_of_another_major_version_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bindings could not open it."""
    _installed(monkeypatch, cuda_bindings="13.0.3", nvidia_cuda_nvrtc="14.0.1")
    with pytest.raises(MissingDependencyError, match=r"'nvidia-cuda-nvrtc==13\.\*'"):
        compiler.installed_compiler()


def test_another_compiler_than_the_installed_one_is_refused(
    tiny: KernelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cubins would be filed under the wrong name."""
    bindings = importlib.metadata.version("cuda-bindings")
    _installed(monkeypatch, cuda_bindings=bindings, nvidia_cuda_nvrtc="13.99.1")
    with pytest.raises(CompilerVersionError, match=r"13\.99\.1"):
        compile_cubin(tiny, "sm_90")


def test_a_library_that_does_not_open(tiny: KernelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is said to be one, with the line that repairs it."""
    from cuda.bindings import nvrtc

    def absent() -> Any:
        raise RuntimeError("libnvrtc.so.13: file too short")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", absent)
    with pytest.raises(MissingDependencyError, match=r"too short.*--force-reinstall"):
        compile_cubin(tiny, "sm_90")
