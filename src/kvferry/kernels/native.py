"""The compiled host kernel (csrc/host_move.c), called through ctypes.

It is built with the package where there is a C compiler and comes ready in a wheel. Calls release
the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import pathlib

from kvferry.errors import ConfigError

__all__ = ["NativeMove", "NativeView", "native_digest", "native_library"]

_STEM = "_host_move"


class NativeView(ctypes.Structure):
    """`struct kvferry_view`: where the rows of one layer lie. Bytes."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("num_pieces", ctypes.c_int64),
        ("piece_size", ctypes.c_int64),
        ("piece_stride", ctypes.c_int64),
    )


class NativeMove(ctypes.Structure):
    """`struct kvferry_move`: one span of every page. Arrays belong to the caller."""

    _fields_ = (
        ("device", NativeView),
        ("host", NativeView),
        ("device_rows", ctypes.c_void_p),
        ("host_slots", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("digests", ctypes.c_void_p),
        ("digest_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("rows_per_page", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("good", ctypes.c_void_p),
        ("is_load", ctypes.c_int32),
        ("verify", ctypes.c_int32),
    )


# As kvferry_host_abi in csrc/host_move.c: a version, and the size of what is handed over.
_ABI = 1 << 32 | ctypes.sizeof(NativeMove)


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The compiled kernel, or None where the package was installed without a C compiler.

    Raises:
        ConfigError: There is one, and it cannot be used: damaged, or of another version.
    """
    folder = pathlib.Path(__file__).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = folder / f"{_STEM}{suffix}"
        if path.exists():
            return _opened(path)
    return None


def _opened(path: pathlib.Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        library.kvferry_host_abi.restype = ctypes.c_int64
        found = int(library.kvferry_host_abi())
        if found != _ABI:
            raise OSError(f"it is of version {found:#x}, and this code of {_ABI:#x}")
        return _declared(library)
    except (OSError, AttributeError) as bad:
        raise ConfigError(
            f"the compiled kernel {path} cannot be used ({bad}); install kvferry again, or go "
            f"without it: KVFERRY_DISABLE_PATHS=cpu"
        ) from bad


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    library.kvferry_move_span.argtypes = (ctypes.POINTER(NativeMove),)
    library.kvferry_move_span.restype = None
    library.kvferry_digest.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_uint64)
    library.kvferry_digest.restype = ctypes.c_uint64
    return library


def native_digest(library: ctypes.CDLL, address: int, num_bytes: int, seed: int) -> int:
    """The digest of the span at `address`; `seed` as from `span_seeds`."""
    return int(library.kvferry_digest(address, num_bytes, seed))
