"""Whether this machine has a C compiler, and the mark of tests that need what it builds."""

from __future__ import annotations

import functools
import os
import shlex
import subprocess

import pytest

from kvferry.kernels import native_library

NO_COMPILER = "no C compiler, so the compiled kernel is not built"

# Compilers are there without the C library's headers on some machines; that is no compiler to us.
_PROGRAM = "#include <stdint.h>\n#include <string.h>\n"


@functools.cache
def c_compiler() -> str | None:
    """The command of a C compiler that works; None if there is none.

    `CC` where it is set, and nothing else then; otherwise `cc` or `gcc`. The Makefile looks alike.
    """
    named = os.environ.get("CC")
    for command in (named,) if named else ("cc", "gcc"):
        try:
            tried = subprocess.run(
                [*shlex.split(command), "-fsyntax-only", "-x", "c", "-"],
                input=_PROGRAM,
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
