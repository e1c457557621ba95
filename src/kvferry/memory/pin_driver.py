"""Pinning through the CUDA driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import DriverError

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = ["ContextPinDriver"]

_INVALID_VALUE = 1


class ContextPinDriver:
    """A `PinDriver` over the context of one GPU. What it pins, every GPU of the process reaches."""

    def __init__(self, context: Context) -> None:
        self._context = context
        bindings = context.driver.bindings
        self._flags = bindings.CU_MEMHOSTREGISTER_PORTABLE | bindings.CU_MEMHOSTREGISTER_DEVICEMAP
        self._host = int(bindings.CUmemorytype.CU_MEMORYTYPE_HOST)
        self._device = int(bindings.CUmemorytype.CU_MEMORYTYPE_DEVICE)

    def register(self, address: int, num_bytes: int) -> None:
        """Pin and map ``[address, address + num_bytes)``. Raises DriverError."""
        with self._context.current():
            self._context.driver.call("cuMemHostRegister", address, num_bytes, self._flags)

    def unregister(self, address: int) -> None:
        """Undo `register`. Raises DriverError."""
        with self._context.current():
            self._context.driver.call("cuMemHostUnregister", address)

    def device_pointer(self, address: int) -> int:
        """What this GPU calls `address` of pinned memory. Raises DriverError."""
        # Unlike cuMemHostGetDevicePointer this is defined for addresses inside a registration too.
        return self._attribute("CU_POINTER_ATTRIBUTE_DEVICE_POINTER", address)

    def is_pinned(self, address: int) -> bool:
        """Whether `address` is host memory that the driver knows. Raises DriverError."""
        return self._memory_type(address) == self._host

    def is_on_device(self, address: int) -> bool:
        """Whether `address` is memory of a GPU. Raises DriverError."""
        return self._memory_type(address) == self._device

    def _memory_type(self, address: int) -> int | None:
        try:
            return self._attribute("CU_POINTER_ATTRIBUTE_MEMORY_TYPE", address)
        except DriverError as bad:
            # So it answers for memory that it has never seen.
            if bad.code == _INVALID_VALUE:
                return None
            raise

    def clear_error(self) -> None:
        """Nothing to do: a call of the driver's own interface reports its failure, and keeps none.

        The run-time library remembers the last failure, but only of calls made through it.
        """

    def _attribute(self, name: str, address: int) -> int:
        driver = self._context.driver
        with self._context.current():
            attribute = getattr(driver.bindings.CUpointer_attribute, name)
            return int(driver.call("cuPointerGetAttribute", attribute, address))
