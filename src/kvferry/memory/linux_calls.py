"""Calls to Linux that Python has no name for, or makes while it holds the interpreter lock.

Each raises OSError with the system's reason. Addresses and lengths are in bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import platform

__all__ = [
    "MADV_HUGEPAGE",
    "MADV_POPULATE_WRITE",
    "advise",
    "clear",
    "lock",
    "map_huge",
    "map_over",
    "prefer_node",
    "shared_memory",
]

MADV_HUGEPAGE = 14
# Unlike MAP_POPULATE it says when it failed. Linux 5.14.
MADV_POPULATE_WRITE = 23

_MAP_FIXED = 0x10
_MAP_HUGETLB = 0x40000
_MFD_HUGETLB = 0x4
_HUGE_SHIFT = 26
_MPOL_PREFERRED = 1
_MAX_NODES = 1024
_MBIND = {"x86_64": 237, "aarch64": 235}


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.syscall.restype = ctypes.c_long
    return libc


def advise(address: int, num_bytes: int, advice: int) -> None:
    """madvise."""
    if _libc().madvise(address, num_bytes, advice) != 0:
        raise _last_error()


def clear(address: int, num_bytes: int) -> None:
    """Write zeros, without the interpreter lock."""
    ctypes.memset(address, 0, num_bytes)


def lock(address: int, num_bytes: int) -> None:
    """mlock."""
    if _libc().mlock(address, num_bytes) != 0:
        raise _last_error()


def map_huge(num_bytes: int, huge_page_bytes: int) -> mmap.mmap:
    """New private memory in reserved huge pages, which have one size, a power of two."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB | _size_flag(huge_page_bytes)
    return mmap.mmap(-1, num_bytes, flags=flags)


def map_over(address: int, num_bytes: int, fd: int) -> None:
    """Map the file `fd` in place of what is there; after a failure nothing may be there."""
    access = mmap.PROT_READ | mmap.PROT_WRITE
    got = _libc().mmap(address, num_bytes, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if got != address:
        raise _last_error()


def shared_memory(name: str, num_bytes: int, *, huge_page_bytes: int = 0) -> int:
    """A new file in memory alone, gone with its last mapping and descriptor; 0: ordinary pages."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_page_bytes:
        flags |= _MFD_HUGETLB | _size_flag(huge_page_bytes)
    fd = os.memfd_create(name, flags)
    try:
        os.ftruncate(fd, num_bytes)
        if huge_page_bytes:
            # Reserves the pages, or fails. Failing later would leave a hole in what is mapped.
            mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED).close()
        # Made smaller, it would be a SIGBUS for all who map it.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def prefer_node(address: int, num_bytes: int, node: int) -> None:
    """Have pages that come into being here taken from `node`, as long as it has some (mbind)."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MAX_NODES:
        raise OSError(f"mbind of node {node} is not known for {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MAX_NODES // bits))()
    mask[node // bits] = 1 << node % bits
    failed = _libc().syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(num_bytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(_MAX_NODES + 1),
        ctypes.c_uint(0),
    )
    if failed:
        raise _last_error()


def _size_flag(huge_page_bytes: int) -> int:
    return (huge_page_bytes.bit_length() - 1) << _HUGE_SHIFT


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
