"""Streams, events and plain memory of one GPU: the few calls that a transfer makes.

Every method must be called with the context current (`Context.current`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.kernels.jit.driver import Context

if TYPE_CHECKING:
    from kvferry.errors import DriverError

__all__ = ["DeviceBuffer", "Event", "PinnedBuffer", "Stream"]


class Stream:
    """A stream that does not wait for the legacy default stream."""

    handle: Any

    def __init__(self, context: Context, *, urgent: bool = False) -> None:
        """Make a stream; `urgent` gives it the highest priority the GPU has."""
        self._bind(context)
        _, highest = self._driver.call("cuCtxGetStreamPriorityRange")
        flags = self._driver.bindings.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.handle = self._driver.call(
            "cuStreamCreateWithPriority", flags, highest if urgent else 0
        )

    @classmethod
    def borrowed(cls, context: Context, handle: Any) -> Stream:
        """Somebody else's stream, by its handle; do not close it."""
        stream = cls.__new__(cls)
        stream._bind(context)
        stream.handle = handle
        return stream

    def _bind(self, context: Context) -> None:
        self._driver = context.driver
        bindings = self._driver.bindings
        self._copy_in = bindings.cuMemcpyHtoDAsync
        self._copy_out = bindings.cuMemcpyDtoHAsync
        self._copy_within = bindings.cuMemcpyDtoDAsync
        self._fill = bindings.cuMemsetD8Async

    def wait_for(self, event: Event) -> None:
        """Start nothing more before `event` is reached."""
        event.block(self.handle)

    def copy_in(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from pinned host memory to the device."""
        self._driver.check(
            self._copy_in(target, source, num_bytes, self.handle), "copy to the device"
        )

    def copy_out(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from the device to pinned host memory."""
        self._driver.check(
            self._copy_out(target, source, num_bytes, self.handle), "copy from the device"
        )

    def copy_within(self, target: int, source: int, num_bytes: int) -> None:
        """Copy inside the device."""
        self._driver.check(
            self._copy_within(target, source, num_bytes, self.handle), "copy inside the device"
        )

    def clear(self, target: int, num_bytes: int) -> None:
        """Set device memory to zero."""
        self._driver.check(self._fill(target, 0, num_bytes, self.handle), "clear device memory")

    def drain(self) -> None:
        """Block until all in it is over. For set-up only: a transfer is waited for by its event."""
        self._driver.call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Destroy the stream when all in it is over."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._driver.call("cuStreamDestroy", handle)


class Event:
    """A point in a stream. Without timing unless asked, as timed events cost more."""

    __slots__ = ("_block", "_driver", "_query", "_record", "address", "handle")

    def __init__(self, context: Context, *, timed: bool = False) -> None:
        """Make an event that nothing was recorded in: it counts as reached.

        `timed`: the GPU notes the time when it is reached, for `seconds_since`.
        """
        self._driver = context.driver
        bindings = self._driver.bindings
        kinds = bindings.CUevent_flags
        flags = kinds.CU_EVENT_DEFAULT if timed else kinds.CU_EVENT_DISABLE_TIMING
        self.handle: Any = self._driver.call("cuEventCreate", flags)
        self.address = int(self.handle)  # as compiled code has it
        self._record = bindings.cuEventRecord
        self._block = bindings.cuStreamWaitEvent
        self._query = bindings.cuEventQuery

    def record(self, stream: Any) -> None:
        """Take what is in `stream` (its handle) so far."""
        (status,) = self._record(self.handle, stream)
        if status:
            raise self.not_recorded(status)

    def block(self, stream: Any) -> None:
        """Let `stream` (its handle) go on only when this is reached."""
        (status,) = self._block(stream, self.handle, 0)
        if status:
            raise self.not_awaited(status)

    def not_recorded(self, status: Any) -> DriverError:
        """What to raise where recording it gave `status`."""
        return self._driver.error(status, "the CUDA driver could not record an event")

    def not_awaited(self, status: Any) -> DriverError:
        """What to raise where waiting for it in a stream gave `status`."""
        return self._driver.error(status, "the CUDA driver could not wait for an event in a stream")

    @property
    def reached(self) -> bool:
        """Whether all that was recorded is over. Raises DriverError where it failed."""
        result = self._query(self.handle)
        if result[0] == self._driver.bindings.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._driver.check(result, "finish the work before an event")
        return True

    def seconds_since(self, earlier: Event) -> float:
        """The GPU's time from `earlier` to this, in seconds; half a microsecond is noise.

        Raises:
            DriverError: One of the two is not timed, was never recorded, or is not reached.
        """
        return float(self._driver.call("cuEventElapsedTime", earlier.handle, self.handle)) / 1e3

    def close(self) -> None:
        """Destroy the event."""
        if self.handle is not None:
            handle, self.handle = self.handle, None
            self._driver.call("cuEventDestroy", handle)


class DeviceBuffer:
    """Device memory that stays where it is."""

    def __init__(self, context: Context, num_bytes: int) -> None:
        """Allocate; DriverError where the device is full."""
        self._driver = context.driver
        self.num_bytes = num_bytes
        self.address = int(self._driver.call("cuMemAlloc", num_bytes))

    def close(self) -> None:
        """Free it; nothing may use it any more."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFree", address)


class PinnedBuffer:
    """Host memory that the device copies to and from without a detour."""

    def __init__(self, context: Context, num_bytes: int) -> None:
        """Allocate; DriverError where it cannot be had."""
        self._driver = context.driver
        self.num_bytes = num_bytes
        # Usable from every context: an engine may have several GPUs in one process.
        self.address = int(self._driver.call("cuMemHostAlloc", num_bytes, 0x01))

    def close(self) -> None:
        """Free it; nothing may use it any more."""
        if self.address:
            address, self.address = self.address, 0
            self._driver.call("cuMemFreeHost", address)
