"""The compiled host kernel; everything else about the package is in pyproject.toml."""

from __future__ import annotations

import atexit
import pathlib
import tempfile

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Plain C over addresses, loaded with ctypes: it needs no Python.h, so one build serves every
# Python from 3.11. Where there is no compiler the build goes on without it (`optional`), and
# transfers take the numpy path, which `handle.path` names.
_HOST_MOVE = Extension(
    "kvferry.kernels._host_move",
    sources=[
        "src/kvferry/kernels/csrc/host_move.c",
        "src/kvferry/kernels/csrc/staged_submit.c",
        "src/kvferry/kernels/csrc/direct_submit.c",
    ],
    depends=["src/kvferry/kernels/csrc/submit.h"],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
    optional=True,
    py_limited_api=True,
)

# A build/ folder that outlives a build would be packed into the next wheel: a kernel that can no
# longer be compiled, modules that are gone.
_BUILD = tempfile.TemporaryDirectory(prefix="kvferry-build-")
atexit.register(_BUILD.cleanup)


class _BuildKernel(build_ext):
    def build_extension(self, ext: Extension) -> None:
        if self.editable_mode:
            # An editable install keeps the kernel beside its source. If compiling fails now, one
            # of an older source must not stay.
            folder = pathlib.Path(ext.sources[0]).parents[1]
            for old in folder.glob(f"{ext.name.rpartition('.')[2]}*.so"):
                old.unlink()
        super().build_extension(ext)


setup(
    ext_modules=[_HOST_MOVE],
    cmdclass={"build_ext": _BuildKernel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}, "build": {"build_base": _BUILD.name}},
)
