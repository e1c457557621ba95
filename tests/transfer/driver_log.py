"""What a transfer tells the driver, call for call, for two ways of making one to be compared."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

from tests.transfer.fake_gpu import FakeGpu

from kvferry.kernels.transfer_args import TransferArgs
from kvferry.transfer import TransferHandle

_WATCHED = (
    *("cuEventRecord", "cuStreamWaitEvent", "cuLaunchKernel"),
    *("cuMemcpy2DAsync", "cuMemcpyBatchAsync"),
)


class DriverLog:
    """Every argument of the calls, and every field of what kernels are launched with.

    Args:
        gpu: Whose driver.
        events: Those that are told apart; of all others it is chance which one is taken.
    """

    def __init__(self, gpu: FakeGpu, events: Collection[int] = ()) -> None:
        self.gpu = gpu
        self._events = events
        self._calls: list[Any] = []

    def calls_of(self, move: Callable[[], TransferHandle]) -> list[Any]:
        """The calls of one transfer, which must go well."""
        self._calls = []
        for name in _WATCHED:
            self.gpu.hooks[name] = functools.partial(self._noted, name)
        handle = move()
        for name in _WATCHED:
            del self.gpu.hooks[name]
        handle.wait()
        assert not handle.bad_pages
        return self._calls

    def _noted(self, name: str, *given: Any) -> None:
        self._calls.append((name, *getattr(self, f"_{name}")(*given)))

    def _cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:  # noqa: N802
        return event if event in self._events else "a mark", stream

    def _cuStreamWaitEvent(self, stream: int, event: int, _: int) -> tuple[Any, ...]:  # noqa: N802
        return self._cuEventRecord(event, stream)

    def _cuMemcpy2DAsync(self, told: SimpleNamespace, stream: Any) -> tuple[Any, ...]:  # noqa: N802
        host, device = ("src", "dst") if told.srcMemoryType == 1 else ("dst", "src")
        return (
            *(getattr(told, host + "Host"), getattr(told, host + "Pitch"), host),
            *(getattr(told, device + "Device"), getattr(told, device + "Pitch")),
            *(told.WidthInBytes, told.Height, stream),
        )

    def _cuMemcpyBatchAsync(self, *given: Any) -> tuple[Any, ...]:  # noqa: N802
        targets, sources, sizes, count, _, _, number, stream = given
        arrays = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        return (*(int(one) for array in arrays for one in array), number, stream)

    def _cuLaunchKernel(self, kernel: int, *given: Any) -> tuple[Any, ...]:  # noqa: N802
        *dims, stream, parameters, _ = given
        first = ctypes.c_void_p.from_address(parameters).value or 0
        transfer = TransferArgs.from_buffer_copy(
            ctypes.string_at(first, ctypes.sizeof(TransferArgs))
        )
        fields = [getattr(transfer, name) for name, *_ in TransferArgs._fields_ if name != "rows"]
        return (kernel, *dims, stream, *transfer.rows, *fields)
