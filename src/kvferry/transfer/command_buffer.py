"""The memory of one GPU transfer: what the kernels read beside the pools, and what they report.

pinned   | row tables | host slots | page seeds | fault | bad pages |   copied in
device   | row tables | host slots | page seeds | fault | bad pages |
pinned                                          | fault | bad pages |   copied out
device   | sums |

Sums are zero before a transfer: the kernel that finishes digests leaves them so. After a transfer
that failed they are cleared.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import PlanError
from kvferry.kernels import NO_FAULT
from kvferry.kernels.jit import Context, DeviceBuffer, PinnedBuffer, Stream
from kvferry.transfer.closing import close_all
from kvferry.transfer.indices import DeviceRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvferry.transfer.plan import TransferPlan

__all__ = ["CommandBuffer", "CommandBuffers", "row_tables"]

_ALIGNMENT = 256
# Room for 32k tokens, or 1,000 pages of 61 layers. Where a buffer must grow the driver may wait for
# the device.
_SMALLEST_BYTES = 512 << 10
_NUM_AHEAD = 2
"""Transfers that may be in flight before a buffer is allocated for one more."""

_MAX_INT32 = (1 << 31) - 1


def _index_bytes(tables: Sequence[NDArray[np.int64] | DeviceRows]) -> int:
    """The width of all row tables of a launch: that of those on the device, where there are any."""
    widths = {rows.index_bytes for rows in tables if isinstance(rows, DeviceRows)}
    if len(widths) > 1:
        raise PlanError(
            "device slots on the device are int32 for one plane and int64 for another; use one type"
        )
    width = widths.pop() if widths else 8
    if width == 4:
        for rows in tables:
            if not isinstance(rows, DeviceRows) and rows.size and int(rows.max()) > _MAX_INT32:
                raise PlanError(
                    f"device slot {int(rows.max())} does not fit the int32 that another plane's "
                    f"slots on the device have; use int64 there"
                )
    return width


def row_tables(
    plan: TransferPlan,
) -> tuple[list[NDArray[np.int64] | DeviceRows], dict[str, int]]:
    """The different row arrays of a plan, and which of them each plane uses."""
    tables: list[NDArray[np.int64] | DeviceRows] = []
    table_of: dict[str, int] = {}
    for name, rows in plan.device_rows.items():
        known = next((index for index, one in enumerate(tables) if one is rows), None)
        if known is None:
            known = len(tables)
            tables.append(rows)
        table_of[name] = known
    return tables, table_of


def _pair(context: Context, num_bytes: int) -> tuple[DeviceBuffer, PinnedBuffer]:
    device = DeviceBuffer(context, num_bytes)
    try:
        return device, PinnedBuffer(context, num_bytes)
    except BaseException:
        device.close()
        raise


def _bytes_of(buffer: PinnedBuffer) -> NDArray[np.uint8]:
    memory = (ctypes.c_uint8 * buffer.num_bytes).from_address(buffer.address)
    return np.ctypeslib.as_array(memory)


class CommandBuffer:
    """Room for one transfer at a time. Grows to what the largest needs, and never shrinks."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._device, self._upload = _pair(context, _SMALLEST_BYTES)
        held: list[DeviceBuffer | PinnedBuffer] = [self._device, self._upload]
        try:
            self._report = PinnedBuffer(context, _SMALLEST_BYTES // 8)
            held.append(self._report)
            self._sums = DeviceBuffer(context, _SMALLEST_BYTES)
        except BaseException:
            for one in held:
                one.close()
            raise
        self._sums_are_zero = False
        self._staged = _bytes_of(self._upload)
        self._on_device: list[tuple[int, DeviceRows]] = []
        self.row_tables: tuple[tuple[int, int], ...] = ()
        """Where each begins on the device, and the bytes of one page in it."""

        self.index_bytes = 8
        self.host_slots = 0
        self.page_seeds = 0
        self.fault = 0
        self.bad_pages = 0
        self.sums = 0
        self._upload_bytes = 0
        self._num_pages = 0

    @property
    def device_bytes(self) -> int:
        """The device memory it holds."""
        return self._device.num_bytes + self._sums.num_bytes

    def lay_out(
        self, plan: TransferPlan, tables: list[NDArray[np.int64] | DeviceRows], num_spans: int
    ) -> None:
        """Give every part its place and fill in what is copied in.

        The buffer must be idle. Raises PlanError where row tables on the device differ in width,
        DriverError where there is no memory for the buffer.
        """
        self.index_bytes = _index_bytes(tables)
        index_type = np.int32 if self.index_bytes == 4 else np.int64
        copied = [
            rows.astype(index_type, copy=False)
            for rows in tables
            if not isinstance(rows, DeviceRows)
        ]
        parts = [*copied, plan.host_slots, plan.page_seeds]
        offsets, end = [], 0
        for part in parts:
            offsets.append(end)
            end += -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT
        # The fault and the bad pages are neighbours: one copy brings back both.
        fault = end + _ALIGNMENT - 8
        self._upload_bytes = behind = fault + 8 + plan.num_pages
        self._num_pages = plan.num_pages
        on_device = []
        for rows in tables:
            if isinstance(rows, DeviceRows):
                behind = -(-behind // _ALIGNMENT) * _ALIGNMENT
                on_device.append((behind, rows))
                behind += rows.num_bytes
        base = self._reserve(behind, 8 + plan.num_pages, num_spans * plan.num_pages * 8)
        self._on_device = [(base + offset, rows) for offset, rows in on_device]
        *placed, self.host_slots, self.page_seeds = (base + offset for offset in offsets)
        places, copies = iter(placed), iter(self._on_device)
        self.row_tables = tuple(
            (
                next(copies)[0] if isinstance(rows, DeviceRows) else next(places),
                rows.shape[1] * self.index_bytes,
            )
            for rows in tables
        )
        self.fault = base + fault
        self.bad_pages = self.fault + 8
        self.sums = self._sums.address
        staged = self._staged
        for part, offset in zip(parts, offsets, strict=True):
            staged[offset : offset + part.nbytes].view(part.dtype)[:] = part.reshape(-1)
        staged[fault : fault + 8].view(np.uint64)[0] = NO_FAULT
        staged[fault + 8 : self._upload_bytes] = 0

    def _reserve(self, device_bytes: int, report_bytes: int, sums_bytes: int) -> int:
        # First the new, and it takes its place; then away with the old. So where there is no room,
        # where the driver keeps the old, or after an interrupt, what is here can be used.
        if self._device.num_bytes < device_bytes:
            grown = _pair(self._context, 1 << (device_bytes - 1).bit_length())
            old = (self._device, self._upload)
            self._device, self._upload = grown
            self._staged = _bytes_of(self._upload)
            close_all(old)
        if self._report.num_bytes < report_bytes:
            report = PinnedBuffer(self._context, 1 << (report_bytes - 1).bit_length())
            report, self._report = self._report, report
            report.close()
        if self._sums.num_bytes < sums_bytes:
            sums = DeviceBuffer(self._context, 1 << (sums_bytes - 1).bit_length())
            self._sums_are_zero = False
            sums, self._sums = self._sums, sums
            sums.close()
        return self._device.address

    def keep_rows(self, stream: Stream) -> None:
        """Copy row tables that lie on the device, in the caller's `stream`.

        The transfer runs later and in another stream; by then its caller may have written others.
        """
        for target, rows in self._on_device:
            stream.copy_within(target, rows.address, rows.num_bytes)

    def copy_in(self, stream: Stream) -> None:
        """Bring it to the device, and let what the kernels add to be zero."""
        stream.copy_in(self._device.address, self._upload.address, self._upload_bytes)
        if not self._sums_are_zero:
            stream.clear(self._sums.address, self._sums.num_bytes)
        self._sums_are_zero = False

    def finished(self) -> None:
        """The transfer went through to its end, and has left the sums as they were."""
        self._sums_are_zero = True

    def copy_out(self, stream: Stream) -> None:
        """Bring back what the kernels report."""
        stream.copy_out(self._report.address, self.fault, 8 + self._num_pages)

    def distrust(self) -> None:
        """Let `report` call every page bad until `copy_out` has brought back another."""
        ctypes.c_uint64.from_address(self._report.address).value = NO_FAULT
        ctypes.memset(self._report.address + 8, 1, self._num_pages)

    def report(self) -> tuple[int, tuple[int, ...]]:
        """The fault code and the positions of bad pages; only once `copy_out` is over."""
        fault = ctypes.c_uint64.from_address(self._report.address).value
        flags = np.frombuffer(
            ctypes.string_at(self._report.address + 8, self._num_pages), dtype=np.uint8
        )
        return fault, tuple(int(page) for page in np.flatnonzero(flags))

    def close(self) -> None:
        """Free everything; the buffer must be idle."""
        close_all((self._device, self._upload, self._report, self._sums))


class CommandBuffers:
    """The command buffers of one engine: a transfer takes an idle one, or a new one.

    So submitting never waits for an earlier transfer, and memory follows the number of transfers
    in flight, not their total.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._idle: list[CommandBuffer] = []
        self._all: list[CommandBuffer] = []
        try:
            for _ in range(_NUM_AHEAD):
                self._all.append(CommandBuffer(context))
        except BaseException:
            self.close()
            raise
        self._idle += self._all

    @property
    def device_bytes(self) -> int:
        """The device memory of all of them."""
        return sum(buffer.device_bytes for buffer in self._all)

    def take(self) -> CommandBuffer:
        """An idle buffer. The caller gives it back with `put`."""
        if self._idle:
            return self._idle.pop()
        made = CommandBuffer(self._context)
        self._all.append(made)
        return made

    def put(self, buffer: CommandBuffer) -> None:
        """Give back a buffer that no transfer uses any more."""
        self._idle.append(buffer)

    def close(self) -> None:
        """Free all of them; no transfer may be in flight."""
        self._idle.clear()
        close_all(self._all)
        self._all.clear()
