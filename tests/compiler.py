"""Which compilers this machine has, and the mark of tests that need what the C compiler builds."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess

import pytest

from kvferry.kernels import native_library

NO_COMPILER = "no C compiler, so the compiled kernel is not built"

# Compilers are there without their headers on some machines; that is no compiler to us.
_PROGRAMS = {
    "c": "#include <stdint.h>\n#include <string.h>\n",
    "c++": "#include <cstdint>\n#include <cstring>\n",
}


@functools.cache
def c_compiler() -> str | None:
    """The command of a C compiler that works; None if there is none.

    `CC` where it is set, and nothing else then; otherwise `cc` or `gcc`. The Makefile looks alike.
    """
    return _first_working("c", os.environ.get("CC"), ("cc", "gcc"))


@functools.cache
def cpp_compiler() -> str | None:
    """As `c_compiler` for C++: `CXX` where it is set, otherwise `c++` or `g++`."""
    return _first_working("c++", os.environ.get("CXX"), ("c++", "g++"))


def _first_working(language: str, named: str | None, usual: tuple[str, ...]) -> str | None:
    for command in (named,) if named else usual:
        try:
            tried = subprocess.run(
                [*shlex.split(command), "-fsyntax-only", "-x", language, "-"],
                input=_PROGRAMS[language],
                text=True,
                capture_output=True,
                check=False,
                timeout=30,
            )
        except (FileNotFoundError, PermissionError):
            continue
        if tried.returncode == 0:
            return command
    return None


needs_kernel = pytest.mark.skipif(
    native_library() is None and c_compiler() is None, reason=NO_COMPILER
)
"""Skips where the kernel cannot be built. Where it can and was not, the test runs and fails."""
