"""Rows by two lists, moved by the transfer kernels in the caller's own stream.

This is what an engine asks for that has an index list for each side, keeps account of its pools
itself, and orders its streams itself. There are no digests and no handles: what comes behind a move
in the stream finds the bytes.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.errors import PlanError, TransferError
from kvferry.geometry import LayerView, Plane, Span
from kvferry.kernels import (
    NO_FAULT,
    RELAYOUT_BLOCKS,
    CopyDecision,
    CopyPath,
    MoveKernels,
    decide_span,
    fault_of,
    no_kernel,
    span_args,
)
from kvferry.kernels.jit import DeviceBuffer, PinnedBuffer, Stream
from kvferry.transfer.closing import Closes, close_all
from kvferry.transfer.row_lists import RowList, RowUploads
from kvferry.transfer.row_rooms import Room, RowRooms, rooms_of
from kvferry.transfer.span_launcher import SpanLauncher
from kvferry.transfer.span_table import Carried, SpanTable
from kvferry.transfer.staging import Piece
from kvferry.types import Direction, Mover

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.kernels.jit import KernelLoader

__all__ = ["RowMove", "RowMover", "RowOptions"]

_MAX_TABLES = 4096
_SMALLEST_FLAGS = 64 << 10


class RowMove(NamedTuple):
    """One layer of one plane on both sides; addresses are what the GPU calls them."""

    device: LayerView
    host: LayerView


class RowOptions(NamedTuple):
    """How rows are to be moved; all of it may be left alone."""

    path: CopyPath | None = None
    """The only kernel to consider."""

    unroll: int | None = None
    """Of grouped."""

    num_blocks: int | None = None
    """Thread blocks of a launch."""


class _Batch(NamedTuple):
    """What a launcher wants to know of a plan."""

    num_pages: int
    direction: Direction


@dataclasses.dataclass
class _Memory:
    """Where the kernels read and report."""

    row_tables: tuple[tuple[int, int], ...]
    index_bytes: int
    host_slots: int
    page_seeds: int
    fault: int
    bad_pages: int
    sums: int


class RowMover:
    """Moves rows on one GPU. Thread-safe. Nothing waits for the GPU but what says so.

    A move of a kind that was not seen before brings a table to the device in a stream of its own,
    and compiles or loads kernels; later ones only launch.

    Args:
        loader: Where kernels come from.
        gpu: Which GPU.
        disabled: Paths not to use.

    Raises:
        DriverError: There is no such GPU, or no memory on it.
    """

    def __init__(
        self, loader: KernelLoader, gpu: int, *, disabled: frozenset[CopyPath] = frozenset()
    ) -> None:
        self._context = context = loader.driver.context(gpu)
        self._disabled = disabled
        self._kernels = MoveKernels(loader, gpu)
        self._launchers: dict[int | None, SpanLauncher] = {}
        self._tables: collections.OrderedDict[object, SpanTable] = collections.OrderedDict()
        self._lock = threading.Lock()
        with context.current():
            self._setup = Stream(context)
            self._fault = DeviceBuffer(context, 256)
            # What a span is told of digests, of which there are none.
            self._report = PinnedBuffer(context, 256)
            self._flags = [DeviceBuffer(context, _SMALLEST_FLAGS)]
            self._uploads = RowUploads(context)
            self._rooms = RowRooms(context)
            self._no_fault_yet(self._setup)

    def decide(self, move: RowMove, options: RowOptions = RowOptions()) -> CopyDecision:  # noqa: B008
        """Which kernel would carry `move`, and why."""
        return decide_span(
            _span(0, move),
            move.device,
            move.host,
            run_rows=1,
            path=options.path,
            unroll=options.unroll,
            disabled=self._disabled,
            verify=False,
        )

    def load(self, *paths: CopyPath) -> None:
        """Compile or load kernels, so that the first move does not."""
        with self._lock, self._context.beside_captures():
            self._kernels.load(*paths)

    def move(
        self,
        moves: Sequence[RowMove],
        device_rows: RowList,
        host_rows: RowList,
        direction: Direction,
        stream: int,
        options: RowOptions = RowOptions(),  # noqa: B008
    ) -> None:
        """Put it into `stream`: row i of one list goes to row i of the other, for every layer.

        Rows beyond a device view are left out, and `first_fault` tells of them; those of the host
        are taken as they are, so whoever gives them on the device must have looked at them.

        Args:
            moves: At least one.
            device_rows: Rows of the device views.
            host_rows: Rows of the host views, as many; int64 where they are on the device.
            direction: LOAD: to the device views.
            stream: A stream's handle.
            options: How.

        Raises:
            PlanError: The lists differ in length, or a span cannot be carried as asked.
            TransferError: The stream is being captured into a graph, and a list is on the host.
            DriverError, JITError, MissingDependencyError: Memory or a kernel cannot be had.
        """
        count = _count(device_rows, host_rows)
        if host_rows.on_host is None and host_rows.index_bytes != 8 and count:
            raise PlanError("rows of the host on the device must be int64; convert them")
        if not count:
            return
        with self._lock, self._context.beside_captures():
            table = self._table(moves, options, Mover.DIRECT)
            self._check_count(table, count)
            theirs = Stream.borrowed(self._context, stream)
            memory = self._memory(device_rows, theirs)
            memory.host_slots = self._on_device(host_rows, theirs)
            launcher = self._launcher(options.num_blocks)
            launcher.begin(_Batch(count, direction), table, memory)
            for step in table.steps:
                launcher.launch(step, theirs)
            self._uploads.used(theirs)

    def store_staged(
        self,
        moves: Sequence[RowMove],
        device_rows: RowList,
        host_addresses: NDArray[np.int64],
        row_bytes: int,
        staging: int,
        staging_rows: int,
        stream: int,
        options: RowOptions = RowOptions(),  # noqa: B008
    ) -> None:
        """Away from the device by way of staging: laid out there, then copied by the copy engine.

        What does not have room at once goes in two halves of staging by turns, so that a copy runs
        beside the kernels of the next.

        Args:
            moves: Their host views are of staging, from address 0 on, `row_bytes` a row.
            device_rows: Rows of the device views.
            host_addresses: Where row i of staging goes, as the GPU calls it. Shape ``[rows]``.
            row_bytes: All that staging holds of a row.
            staging: Its address, on 128 bytes.
            staging_rows: How many it has room for; at least 1.
            stream: A stream's handle; kernels are in it, and it is behind the copies in the end.
            options: How.

        Raises as `move`, and PlanError where staging is not as it must be.
        """
        if staging % 128 or staging_rows < 1:
            raise PlanError(
                f"staging at {staging:#x} for {staging_rows} rows: it must begin on 128 bytes and "
                f"have room for a row"
            )
        count = device_rows.count
        if len(host_addresses) != count:
            raise PlanError(f"{count} device rows and {len(host_addresses)} places on the host")
        if not count:
            return
        with self._lock, self._context.beside_captures():
            table = self._table(moves, options, Mover.STAGED)
            self._check_count(table, count)
            theirs = Stream.borrowed(self._context, stream)
            memory = self._memory(device_rows, theirs)
            launcher = self._launcher(options.num_blocks)
            launcher.begin(_Batch(count, Direction.STORE), table, memory)
            blocks = RELAYOUT_BLOCKS * self._context.num_multiprocessors

            def lay_out(room: Room) -> None:
                piece = Piece(0, first_page=room.first, num_pages=room.num_rows, ends_group=True)
                for step in table.steps:
                    launcher.launch_staged(step, memory, piece, room.address, blocks, theirs)

            rooms = rooms_of(staging, staging_rows, row_bytes, count)
            self._rooms.store(rooms, lay_out, host_addresses, row_bytes, theirs)
            self._uploads.used(theirs)

    def first_fault(self, stream: int) -> int | None:
        """The position in its list of a device row that was left out; None: there was none.

        Waits for `stream`, and forgets what it told.
        """
        with self._lock, self._context.beside_captures():
            theirs = Stream.borrowed(self._context, stream)
            theirs.copy_out(self._report.address + 64, self._fault.address, 8)
            theirs.drain()
            code = ctypes.c_uint64.from_address(self._report.address + 64).value
            self._no_fault_yet(theirs)
        fault = fault_of(code)
        return None if fault is None else fault.page

    def _memory(self, device_rows: RowList, stream: Stream) -> _Memory:
        flags = self._flags[-1]
        if flags.num_bytes < device_rows.count:
            # Those before it stay: a kernel may still write there.
            flags = DeviceBuffer(self._context, 1 << (device_rows.count - 1).bit_length())
            self._flags.append(flags)
        address = self._on_device(device_rows, stream)
        return _Memory(
            row_tables=((address, device_rows.index_bytes),),
            index_bytes=device_rows.index_bytes,
            host_slots=0,
            page_seeds=self._fault.address,
            fault=self._fault.address,
            bad_pages=flags.address,
            sums=self._fault.address,
        )

    def _on_device(self, rows: RowList, stream: Stream) -> int:
        if rows.on_host is None:
            return rows.address
        if self._context.is_capturing(stream.handle):
            raise TransferError(
                f"stream {stream.handle} is being captured into a graph, and every replay would "
                f"read the rows of the host as they are then; give them on the device"
            )
        return self._uploads.upload(rows.on_host, stream)

    def _launcher(self, num_blocks: int | None) -> SpanLauncher:
        found = self._launchers.get(num_blocks)
        if found is None:
            found = SpanLauncher(self._kernels, verify=False, blocks=num_blocks)
            self._launchers[num_blocks] = found
        return found

    def _table(self, moves: Sequence[RowMove], options: RowOptions, mover: Mover) -> SpanTable:
        key = (mover, options.path, options.unroll, tuple(moves))
        found = self._tables.get(key)
        if found is None:
            carried = [self._carry(number, move, options) for number, move in enumerate(moves)]
            self._launcher(None).load(carried, mover)
            found = self._tables[key] = SpanTable(self._context, [carried], self._setup)
            while len(self._tables) > _MAX_TABLES:
                # The driver frees it when the device has done what may still read it.
                self._tables.popitem(last=False)[1].close()
        self._tables.move_to_end(key)
        return found

    def _carry(self, number: int, move: RowMove, options: RowOptions) -> Carried:
        span = _span(number, move)
        decision = self.decide(move, options)
        if decision.chosen is None:
            raise no_kernel(span, decision)
        args = span_args(
            span,
            move.device,
            move.host,
            run_rows=1,
            digest_address=self._report.address,
            digest_stride=0,
            rows_table=0,
        )
        grouped = decision.grouped.config if decision.chosen is CopyPath.GROUPED else None
        return Carried(0, decision.chosen, grouped, args)

    def _check_count(self, table: SpanTable, count: int) -> None:
        if count > table.max_pages:
            raise PlanError(
                f"{count} rows in one move; kernels take {table.max_pages} of these at once: "
                f"give fewer"
            )

    def _no_fault_yet(self, stream: Stream) -> None:
        ctypes.c_uint64.from_address(self._report.address + 128).value = NO_FAULT
        stream.copy_in(self._fault.address, self._report.address + 128, 8)
        stream.drain()

    def close(self) -> None:
        """Give all memory back; nothing that was put into a stream may be under way."""
        with self._lock, self._context.beside_captures():
            held: list[Closes] = [
                *self._tables.values(),
                self._uploads,
                self._rooms,
                *self._flags,
                self._fault,
                self._report,
            ]
            self._tables.clear()
            self._flags.clear()
            close_all([*held, self._setup])


def _span(number: int, move: RowMove) -> Span:
    size = move.device.element_size
    plane = Plane(name="rows", num_layers=1, element_size=size)
    return Span(index=number, plane=plane, plane_index=0, layer=0, rows=1, offset=0, num_bytes=size)


def _count(device_rows: RowList, host_rows: RowList) -> int:
    if device_rows.count != host_rows.count:
        raise PlanError(
            f"{device_rows.count} rows on the device and {host_rows.count} on the host; give one "
            f"of each for every row that moves"
        )
    return device_rows.count
