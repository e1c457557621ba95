"""Copies of evenly spaced rows by the copy engine: it keeps its speed beside busy kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.errors import DriverError
    from kvferry.kernels.jit.driver import Context
    from kvferry.kernels.jit.queue import Stream

__all__ = ["RowCopy"]


class RowCopy:
    """One direction between pinned host memory and the device, its parameters laid out once.

    Every method must be called with the context current.
    """

    def __init__(self, context: Context, *, to_device: bool) -> None:
        self._driver = context.driver
        bindings = self._driver.bindings
        kinds = bindings.CUmemorytype
        host, device = kinds.CU_MEMORYTYPE_HOST, kinds.CU_MEMORYTYPE_DEVICE
        self._to_device = to_device
        self._copy = bindings.cuMemcpy2DAsync
        self._told = bindings.CUDA_MEMCPY2D()
        self._told.srcMemoryType = host if to_device else device
        self._told.dstMemoryType = device if to_device else host

    def submit(
        self,
        stream: Stream,
        host: int,
        host_pitch: int,
        device: int,
        device_pitch: int,
        width: int,
        rows: int,
    ) -> None:
        """Copy `rows` rows of `width` bytes, each a pitch after the one before, both sides apart.

        Raises:
            DriverError: The driver refused, or earlier work has failed.
        """
        told = self._told
        if self._to_device:
            told.srcHost, told.srcPitch = host, host_pitch
            told.dstDevice, told.dstPitch = device, device_pitch
        else:
            told.dstHost, told.dstPitch = host, host_pitch
            told.srcDevice, told.srcPitch = device, device_pitch
        told.WidthInBytes, told.Height = width, rows
        (status,) = self._copy(told, stream.handle)
        if status:
            raise self.refused(status)

    def refused(self, status: int) -> DriverError:
        """What to raise where the driver's function said `status`."""
        code = self._driver.bindings.CUresult(int(status))
        return self._driver.error(
            code, "the CUDA driver could not copy rows between host and device"
        )
