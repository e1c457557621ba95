"""The compiled host kernel; everything else about the package is in pyproject.toml."""

from __future__ import annotations

from setuptools import Extension, setup

# Plain C over addresses, loaded with ctypes: it needs no Python.h, so one build serves every
# Python from 3.11. Where there is no compiler the build goes on without it (`optional`), and
# transfers take the numpy path, which `handle.path` names.
_HOST_MOVE = Extension(
    "kvferry.kernels._host_move",
    sources=["src/kvferry/kernels/csrc/host_move.c"],
    extra_compile_args=["-std=c11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
    optional=True,
    py_limited_api=True,
)

setup(ext_modules=[_HOST_MOVE], options={"bdist_wheel": {"py_limited_api": "cp311"}})
