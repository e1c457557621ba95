"""The transfer kernels' functions under AddressSanitizer and UBSan, where there is no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import kvferry

_CSRC = Path(kvferry.__file__).parent / "kernels" / "csrc"
_HARNESS = Path(__file__).with_name("transfer_harness.cpp")
_NUM_CASES = 1500


def test_random_transfers_under_sanitizers(tmp_path: Path) -> None:
    """Any size, stride, alignment and index is exact, and no byte outside is read or written."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "harness"
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    flags = ["-std=c++17", "-O1", "-g", *warnings, *sanitizers, "-I", str(_CSRC)]
    built = subprocess.run(
        [compiler, *flags, str(_HARNESS), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert built.returncode == 0, built.stderr[-3000:]
    ran = subprocess.run(
        [str(program), str(_NUM_CASES)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # leak detection needs ptrace, often forbidden
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    counts = [int(count) for count in re.findall(r"\d+", ran.stdout)]
    assert counts[0] == _NUM_CASES
    # Every path has been taken, and not by chance once.
    assert len(counts) == 5
    assert min(counts) > _NUM_CASES // 10, ran.stdout
