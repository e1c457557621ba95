"""The transfer kernels' own functions as a library of this process, for machines without a GPU."""

from __future__ import annotations

import ctypes
import functools
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from tests.compiler import cpp_compiler

import kvferry

CSRC = Path(kvferry.__file__).parent / "kernels" / "csrc"
_HERE = Path(__file__).parent


def compile_cpp(source: Path, output: Path, *flags: str) -> None:
    """Compile a file that includes the device headers; without a compiler the test is skipped."""
    compiler = cpp_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    strict = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = [*shlex.split(compiler), *strict, *flags, f"-I{CSRC}", str(source), f"-o{output}"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr[-3000:]


@functools.cache
def kernel_emulator() -> ctypes.CDLL:
    """What transfer_emulator.cpp exports; compiled once a process."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "emulator.so"
        compile_cpp(_HERE / "transfer_emulator.cpp", library, "-shared", "-fPIC")
        return ctypes.CDLL(str(library))
