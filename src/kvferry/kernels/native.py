"""What is compiled when kvferry is installed (csrc/*.c), called through ctypes.

It is built with the package where there is a C compiler and comes ready in a wheel. Calls release
the interpreter lock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import pathlib

from kvferry.errors import ConfigError
from kvferry.kernels.submit_call import DirectArgs, StagedArgs

__all__ = [
    "NativeMove",
    "NativeView",
    "native_digest",
    "native_library",
    "submit_direct",
    "submit_staged",
]

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


# As the functions of these names have it: a version, and the size of what is handed over.
_ABI = {
    "kvferry_host_abi": 1 << 32 | ctypes.sizeof(NativeMove),
    "kvferry_direct_abi": 1 << 32 | ctypes.sizeof(DirectArgs),
    "kvferry_staged_abi": 1 << 32 | ctypes.sizeof(StagedArgs),
}


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
        for name, wanted in _ABI.items():
            told = getattr(library, name)
            told.restype = ctypes.c_int64
            if (found := int(told())) != wanted:
                raise OSError(f"it is of version {found:#x}, and this code of {wanted:#x}")
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
    library.kvferry_submit_staged.argtypes = (ctypes.POINTER(StagedArgs),)
    library.kvferry_submit_staged.restype = ctypes.c_int
    library.kvferry_submit_direct.argtypes = (ctypes.POINTER(DirectArgs),)
    library.kvferry_submit_direct.restype = ctypes.c_int
    return library


def native_digest(library: ctypes.CDLL, address: int, num_bytes: int, seed: int) -> int:
    """The digest of the span at `address`; `seed` as from `span_seeds`."""
    return int(library.kvferry_digest(address, num_bytes, seed))


def submit_direct(library: ctypes.CDLL, told: DirectArgs) -> int:
    """Put a direct transfer into its stream. The context must be current.

    Returns:
        What the driver said, 0 where all of it is in the stream; else ``step`` tells where it
        ended.
    """
    return int(library.kvferry_submit_direct(ctypes.byref(told)))


def submit_staged(library: ctypes.CDLL, told: StagedArgs) -> int:
    """Put a staged transfer into its streams. The context must be current.

    Returns:
        What the driver said, 0 where all of it is in the streams; else ``step`` tells where it
        ended, and -1 is an address in ``detail`` that is not pinned.
    """
    return int(library.kvferry_submit_staged(ctypes.byref(told)))
