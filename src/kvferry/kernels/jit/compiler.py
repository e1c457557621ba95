"""NVRTC: CUDA C++ to a cubin, in this process. No other module opens the compiler.

Which compiler is installed is read from package metadata, so that whoever finds a cubin in the
cache never loads the compiler's 100 MB.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Any, NamedTuple

from kvferry.errors import (
    CompileError,
    CompilerVersionError,
    DriverTooOldError,
    KernelSourceError,
    MissingDependencyError,
)
from kvferry.kernels.jit.driver import driver_version
from kvferry.kernels.jit.kernel_source import KernelSource
from kvferry.kernels.jit.packages import PACKAGES, install_line

__all__ = [
    "OPTIONS",
    "CompileReport",
    "Compiler",
    "KernelResources",
    "architecture",
    "compile_cubin",
    "compile_report",
    "installed_compiler",
]

# Without --no-source-include a header that happens to lie in the current directory is compiled in.
OPTIONS = ("--std=c++17", "--no-source-include")

_OLDEST_ARCH = 80
_ARCH = re.compile(r"sm_(?P<number>[0-9]+)[af]?\Z")

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers(?:.*?(?P<shared>\d+) bytes smem)?")


class Compiler(NamedTuple):
    """An installed NVRTC, as its package describes it."""

    package: str
    version: str
    """In full, such as `13.0.88`: two builds of one release may compile differently."""
    release: tuple[int, int]
    """Major and minor version of CUDA."""

    @property
    def identity(self) -> str:
        """What tells this compiler from every other, for a cubin's key."""
        return f"{self.package} {self.version}"


class KernelResources(NamedTuple):
    """What one kernel takes of a multiprocessor. All sizes in bytes."""

    kernel: str
    registers: int
    """Registers a thread."""
    stack_bytes: int
    """Local memory a thread; more than 0 also where an array cannot be kept in registers."""
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    """Static shared memory a block."""

    @property
    def spills(self) -> bool:
        """Whether registers were moved to memory because there were too few."""
        return self.spill_store_bytes + self.spill_load_bytes > 0


class CompileReport(NamedTuple):
    """What the assembler says of the kernels of one unit."""

    arch: str
    kernels: tuple[KernelResources, ...]
    """By name."""
    log: str


def architecture(capability: tuple[int, int]) -> str:
    """The target for a GPU of this compute capability: `sm_90` for (9, 0).

    Raises:
        KernelSourceError: older than sm_80, which kvferry's kernels do not support.
    """
    arch = f"sm_{capability[0]}{capability[1]}"
    _check_arch(arch)
    return arch


@functools.cache
def installed_compiler() -> Compiler:
    """The NVRTC that belongs to the installed bindings. Does not open it.

    Raises:
        MissingDependencyError: the bindings or the compiler are not installed; the message has the
            line that installs those for this machine's driver.
        DriverTooOldError: no installable compiler makes cubins for this machine's driver.
    """
    bindings = _version_of("cuda-bindings")
    major = _release(bindings)[0]
    package = "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    version = _version_of(package)
    if _release(version)[0] != major:
        raise MissingDependencyError(
            f"cuda-bindings {bindings} opens the compiler of CUDA {major}, and {package} is "
            f"{version}; pip install '{package}=={major}.*'"
        )
    return Compiler(package, version, _release(version))


def compile_cubin(source: KernelSource, arch: str, options: tuple[str, ...] = OPTIONS) -> bytes:
    """The cubin of `source` for `arch`; the same bytes in every process.

    Raises:
        CompileError: the compiler refused it.
        CompilerVersionError: the process has opened another compiler than the installed one.
        KernelSourceError: `arch` is no target, or older than sm_80.
        MissingDependencyError: there is no compiler.
    """
    return _compile(source, arch, options)[0]


def compile_report(
    source: KernelSource, arch: str, options: tuple[str, ...] = OPTIONS
) -> CompileReport:
    """Registers, spills and shared memory of the kernels of `source`; raises as `compile_cubin`.

    It compiles, always: the option that makes the assembler talk changes the cubin, so what is
    compiled here is not what the cache holds.
    """
    log = _compile(source, arch, (*options, "--ptxas-options=-v"))[1]
    kernels = _resources(log)
    if not kernels:
        raise CompileError(
            f'{source.name} for {arch} has no kernel; declare one extern "C" __global__. '
            f"The compiler's log:\n{log}"
        )
    return CompileReport(arch, kernels, log)


def _compile(source: KernelSource, arch: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    _check_arch(arch)
    compiler = installed_compiler()
    nvrtc = _open(compiler)
    given = (f"-arch={arch}", *options, *source.define_options)
    status, program = nvrtc.nvrtcCreateProgram(
        source.text.encode(),
        source.name.encode(),
        len(source.headers),
        [header.text.encode() for header in source.headers],
        [header.name.encode() for header in source.headers],
    )
    _check(nvrtc, status, f"take in {source.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(given), [o.encode() for o in given])
        log = _text(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(
                f"{compiler.identity} could not compile {source.name} for {arch} with "
                f"{' '.join(given)}: {status.name}. {_next_step(nvrtc, status, compiler)} "
                f"The compiler's log:\n{log}"
            )
        cubin = _buffer(nvrtc, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return cubin, log


def _next_step(nvrtc: Any, status: Any, compiler: Compiler) -> str:
    if status == nvrtc.nvrtcResult.NVRTC_ERROR_INVALID_OPTION:
        return (
            "A target that it does not know is newer than it: install a newer one with pip install "
            f"-U '{compiler.package}=={compiler.release[0]}.*'."
        )
    return (
        "Until it compiles, the paths that need it can be switched off with KVFERRY_DISABLE_PATHS; "
        "please report the log."
    )


@functools.cache
def _open(compiler: Compiler) -> Any:
    """The bindings, once the library behind them is known to be `compiler`."""
    try:
        from cuda.bindings import nvrtc

        status, *found = nvrtc.nvrtcVersion()
    # The bindings have a plain RuntimeError, or a subclass, for a library that does not open.
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            f"{compiler.identity} is installed but does not open ({error}); install it again: pip "
            f"install --force-reinstall '{compiler.package}=={compiler.version}', and {_extra()}"
        ) from error
    _check(nvrtc, status, "say its version")
    if tuple(found) != compiler.release:
        # Cubins would be filed under a compiler that did not make them.
        raise CompilerVersionError(
            f"this process has opened the compiler of CUDA {found[0]}.{found[1]}, and the one that "
            f"is installed is {compiler.identity}: another library has loaded its own, or "
            f"LD_LIBRARY_PATH leads to it. Install that version of {compiler.package}, or take the "
            "other one away"
        )
    return nvrtc


def _check(nvrtc: Any, status: Any, doing: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(
            f"NVRTC could not {doing}: {status.name}; if memory is short, free some, else report it"
        )


def _buffer(nvrtc: Any, size_of: Any, fetch: Any, program: Any) -> bytes:
    """What `fetch` writes, which is as long as `size_of` says."""
    status, size = size_of(program)
    _check(nvrtc, status, "tell the size of its output")
    # The bindings write into the bytes object, and Python shares those of one byte or none.
    buffer = bytes(bytearray(size + 2))
    (status,) = fetch(program, buffer)
    _check(nvrtc, status, "give its output")
    return buffer[:size]


def _text(nvrtc: Any, size_of: Any, fetch: Any, program: Any) -> str:
    return _buffer(nvrtc, size_of, fetch, program).rstrip(b"\0").decode(errors="replace").strip()


def _resources(log: str) -> tuple[KernelResources, ...]:
    """The assembler's lines, a kernel each; functions that were not inlined count to theirs."""
    found: dict[str, list[int]] = {}
    current: list[int] | None = None
    for line in log.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            current = found.setdefault(entry["name"], [0, 0, 0, 0, 0])
        if current is None:
            continue
        stack = _STACK.search(line)
        if stack:
            current[1] = max(current[1], int(stack["stack"]))
            current[2] += int(stack["stores"])
            current[3] += int(stack["loads"])
        used = _USED.search(line)
        if used:
            current[0] = int(used["registers"])
            current[4] = int(used["shared"] or 0)
    return tuple(KernelResources(name, *found[name]) for name in sorted(found))


def _check_arch(arch: str) -> None:
    match = _ARCH.match(arch)
    if not match or int(match["number"]) < _OLDEST_ARCH:
        raise KernelSourceError(
            f"{arch!r} is no target for kvferry's kernels, which need sm_{_OLDEST_ARCH} (Ampere) "
            "or newer; name one like sm_90, or use the paths that need no kernel"
        )


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
        raise MissingDependencyError(
            f"{package} is not installed, and kernels cannot be built without it: {_extra()}"
        ) from error


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _extra() -> str:
    """The line that installs bindings and compiler for this machine's driver."""
    driver = driver_version()
    if driver is None:
        newest, oldest = max(PACKAGES), min(PACKAGES)
        return f"{install_line(newest)}; for a driver of CUDA {oldest}: {install_line(oldest)}"
    if driver[0] < 12:
        raise DriverTooOldError(
            f"the driver is of CUDA {driver[0]}.{driver[1]}, and the oldest that kvferry's kernels "
            "run on is 12.0; update it"
        )
    return install_line(driver[0])
