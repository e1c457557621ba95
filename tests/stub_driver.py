"""Drivers that are compiled here, and processes that find one as theirs."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.compiler import c_compiler

import kvferry


def build_driver(source: Path, folder: Path) -> None:
    """Compile `source` to the driver library in `folder`; skips where there is no C compiler."""
    compiler = c_compiler()
    if compiler is None:
        pytest.skip("no C compiler to make the stub with")
    library = folder / "libcuda.so.1"
    subprocess.run(
        [*shlex.split(compiler), "-shared", "-fPIC", "-o", library, source, "-ldl"],
        check=True,
        timeout=60,
    )


def run_over_driver(folder: Path, program: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that finds the driver in `folder`, and kvferry's sources."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(folder),
            "PYTHONPATH": str(Path(kvferry.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
