"""The transfer kernels' own functions as a library of this process, for machines without a GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import kvferry

CSRC = Path(kvferry.__file__).parent / "kernels" / "csrc"
_HERE = Path(__file__).parent
_COMPILER = shutil.which("c++") or shutil.which("g++")


def compile_cpp(source: Path, output: Path, *flags: str) -> None:
    """Compile a file that includes the device headers; without a compiler the test is skipped."""
    if _COMPILER is None:
        pytest.skip("no C++ compiler")
    strict = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = [_COMPILER, *strict, "-I", str(CSRC), *flags, str(source), "-o", str(output)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr[-3000:]


@functools.cache
def kernel_emulator() -> ctypes.CDLL:
    """What transfer_emulator.cpp exports; compiled once a process."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "emulator.so"
        compile_cpp(_HERE / "transfer_emulator.cpp", library, "-shared", "-fPIC")
        return ctypes.CDLL(str(library))
