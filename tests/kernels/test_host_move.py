"""The compiled host kernel: that it is there, and how it fares under the sanitizers."""

from __future__ import annotations

import pathlib
import shlex
import subprocess

import pytest
from tests.compiler import NO_COMPILER, c_compiler, needs_kernel

from kvferry.kernels import native_library

_FUZZ = pathlib.Path(__file__).with_name("host_move_fuzz.c")


@needs_kernel
def test_the_kernel_is_built_where_it_can_be() -> None:
    """Where there is a compiler the set-up leaves the kernel, so no test can miss it unnoticed."""
    assert native_library() is not None, (
        f"the compiled kernel is part of the set-up where there is a compiler, and "
        f"{c_compiler()!r} is one: run `make setup`"
    )


def test_random_moves_under_sanitizers(tmp_path: pathlib.Path) -> None:
    """Random sizes, strides, blocks and runs are exact, with no byte read or written outside."""
    compiler = c_compiler()
    if compiler is None:
        pytest.skip(NO_COMPILER)
    binary = tmp_path / "fuzz"
    subprocess.run(
        [
            *shlex.split(compiler),
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
