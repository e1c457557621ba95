"""The compiled host kernel under AddressSanitizer and UBSan."""

from __future__ import annotations

import pathlib
import shutil
import subprocess

import pytest

_FUZZ = pathlib.Path(__file__).with_name("host_move_fuzz.c")


def test_random_moves_under_sanitizers(tmp_path: pathlib.Path) -> None:
    """Random sizes, strides, blocks and runs are exact, with no byte read or written outside."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    binary = tmp_path / "fuzz"
    subprocess.run(
        [
            compiler,
            "-std=c11",
            "-O1",
            "-g",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover=all",
            "-DKVFERRY_NO_CLONES",
            "-o",
            str(binary),
            str(_FUZZ),
        ],
        check=True,
        timeout=100,
    )
    ran = subprocess.run(
        [str(binary)],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # leak detection needs ptrace, often forbidden
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout == "4000 cases\n"
