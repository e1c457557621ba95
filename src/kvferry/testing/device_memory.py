"""Guarded memory on a GPU, for the same checks as in host memory."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from kvferry.kernels.jit import DeviceBuffer, process_loader
from kvferry.testing.patterns import GUARD_BYTES, GuardedBuffer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvferry.kernels.jit import Context

__all__ = ["GuardedDeviceBuffer"]


class GuardedDeviceBuffer(GuardedBuffer):
    """As `GuardedBuffer`, on a GPU; `inside` is a copy in host memory, made by `check`."""

    def __init__(self, num_bytes: int, context: Context | None = None) -> None:
        """Allocate `num_bytes` and guards on the GPU of `context`; None: the first one."""
        super().__init__(num_bytes)
        self._context = process_loader().driver.context(0) if context is None else context
        self.device = f"cuda:{self._context.device}"
        with self._context.current():
            self._memory = DeviceBuffer(self._context, self._whole.nbytes)
        self._finalizer = weakref.finalize(self, _free, self._context, self._memory)
        self._upload()

    @property
    def address(self) -> int:
        """Of the first byte inside, on the GPU."""
        return self._memory.address + GUARD_BYTES

    def fill(self, image: npt.NDArray[np.uint8] | None = None) -> None:
        """As in host memory; over when it returns."""
        super().fill(image)
        self._upload()

    def check(self, expected: npt.NDArray[np.uint8] | None = None, what: str = "buffer") -> None:
        """As in host memory, of what is on the GPU now."""
        with self._context.current():
            self._context.driver.call(
                "cuMemcpyDtoH", self._whole.ctypes.data, self._memory.address, self._whole.nbytes
            )
        super().check(expected, what)

    def _upload(self) -> None:
        with self._context.current():
            self._context.driver.call(
                "cuMemcpyHtoD", self._memory.address, self._whole.ctypes.data, self._whole.nbytes
            )
            # A copy from pageable memory may return before it has arrived.
            self._context.driver.call("cuCtxSynchronize")


def _free(context: Context, memory: DeviceBuffer) -> None:
    with context.current():
        memory.close()
