"""Many scattered pieces by the copy engine in one call, which leaves no pause between them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import DriverTooOldError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.errors import DriverError
    from kvferry.kernels.jit.driver import Context
    from kvferry.kernels.jit.queue import Stream

__all__ = ["PieceCopy"]

_NAME = "cuMemcpyBatchAsync"
# The versions at which its arguments changed. That of 12.8 also says which piece failed, and costs
# several times as much for each.
_FIRST, _WITHOUT_FAILED = 12080, 13000

# Destinations, sources, sizes, their number, attributes, the piece that each of those begins with,
# their number, [the piece that failed,] stream.
_TOLD = (
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t),
)
_Call = ctypes.CFUNCTYPE(ctypes.c_int, *_TOLD, ctypes.c_void_p)
_CallOf12 = ctypes.CFUNCTYPE(ctypes.c_int, *_TOLD, ctypes.c_void_p, ctypes.c_void_p)


class _Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`: sources are read in the order of the stream; no hints."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("hints", ctypes.c_int * 4),
        ("flags", ctypes.c_uint),
    )


class PieceCopy:
    """Copies between pinned host memory and the device, both ways.

    The driver's function is called by its address with arrays of addresses: its binding makes an
    object of every one of them. Every method must be called with the context current.

    Raises:
        DriverTooOldError: The driver is of a CUDA before 12.8.
    """

    def __init__(self, context: Context) -> None:
        self._driver = context.driver
        version = self._driver.version[0] * 1000 + self._driver.version[1] * 10
        if version < _FIRST:
            raise DriverTooOldError(
                f"this driver is of CUDA {self._driver.version[0]}.{self._driver.version[1]}, and "
                f"{_NAME} is there from 12.8 on; update the driver"
            )
        wanted = _FIRST if version < _WITHOUT_FAILED else _WITHOUT_FAILED
        self.entry_point = self._driver.entry_point(_NAME, wanted)
        """Where the driver's function lies."""
        self._call = (_CallOf12 if wanted == _FIRST else _Call)(self.entry_point)
        self._attributes = _Attributes(source_order=1)
        self._first = ctypes.c_size_t(0)
        self._failed = ctypes.c_size_t(0)
        attributes, first, failed = (
            ctypes.addressof(one) for one in (self._attributes, self._first, self._failed)
        )
        self.told = (attributes, first, failed if wanted == _FIRST else 0)
        """Where the attributes of all pieces lie, the piece they begin with, and where the driver
        puts the piece that failed; 0: it does not."""
        self._told = (attributes, first, 1, *((failed,) if wanted == _FIRST else ()))

    def submit(
        self,
        stream: Stream,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> None:
        """Copy `sizes` bytes each from `sources` to `targets`, addresses as they are in 64 bits.

        All have one shape, and their numbers lie side by side in memory.

        Raises:
            DriverError: The driver refused, or earlier work has failed.
        """
        status = self._call(
            *(targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, sizes.size),
            *(*self._told, int(stream.handle)),
        )
        if status:
            raise self.refused(status, sizes.size)

    def refused(self, status: int, num_pieces: int) -> DriverError:
        """What to raise where the driver's function said `status`."""
        code = self._driver.bindings.CUresult(status)
        return self._driver.error(code, f"{num_pieces} pieces could not be copied")
