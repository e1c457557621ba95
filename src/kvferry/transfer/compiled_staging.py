"""The staged mover's calls of the driver from compiled code: a fifth of the time of the same calls
from Python."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvferry.kernels import (
    DRIVER_FUNCTIONS,
    BandArgs,
    ChunkArgs,
    GroupArgs,
    LaunchArgs,
    PieceArgs,
    RowTableArgs,
    StagedArgs,
    SubmitStep,
    fields_of,
    submit_staged,
)
from kvferry.transfer.staging import MAX_PARTS, PARTS_WORTH_A_CALL
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.errors import DriverError
    from kvferry.kernels.jit import Context, Event
    from kvferry.transfer.arrivals import Arrivals
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.host_copies import HostCopies
    from kvferry.transfer.host_pages import PinnedAddresses
    from kvferry.transfer.link_clock import LinkInterval
    from kvferry.transfer.movers import Streams
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route
    from kvferry.transfer.span_launcher import SpanLauncher
    from kvferry.transfer.span_table import SpanTable
    from kvferry.transfer.staging import Piece
    from kvferry.transfer.staging_ring import StagingRing

__all__ = ["CompiledStaging"]

_MAX_LAYOUTS = 256


class _Layout(NamedTuple):
    """What is the same in every transfer of so many pages along one route."""

    pieces: ctypes.Array[PieceArgs]
    groups: ctypes.Array[GroupArgs]
    kept: tuple[Any, ...]
    """What the groups point to, and what the layout is known by."""


class CompiledStaging:
    """Puts staged transfers into their streams as `StagedMover` does, in one call each.

    The context must be current for every call, and one thread at a time may make one.

    Args:
        library: The compiled code.
        context: Of the GPU.
        launcher: Of the mover's engine.
        copies: Of the mover.
        pinned: The host pool.
        rings: The mover's staging memory.
        begun: The event of each direction that the lane aside waits for.
        blocks: Of a relayout.

    Raises:
        DriverTooOldError: The driver lacks one of the functions.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        context: Context,
        launcher: SpanLauncher,
        copies: HostCopies,
        pinned: PinnedAddresses,
        rings: dict[Direction, StagingRing],
        begun: dict[Direction, Event],
        blocks: int,
    ) -> None:
        self._library = library
        self._driver = context.driver
        self._launcher = launcher
        self._copies = copies
        self._pinned = pinned
        self._blocks = blocks
        self._layouts: dict[tuple[int, int, int], _Layout] = {}
        chunks = pinned.chunks
        self._chunks = (ChunkArgs * len(chunks))(
            *(ChunkArgs(one.address, one.end) for one in chunks)
        )
        self._parts = np.empty((3, MAX_PARTS), np.uint64)
        targets, sources, sizes = (row.ctypes.data for row in self._parts)
        found = {
            field: self._driver.entry_point(name, version)
            for field, (name, version) in DRIVER_FUNCTIONS.items()
        }
        pieces = copies.pieces
        attributes, first, failed = (0, 0, 0) if pieces is None else pieces.told
        self._told = {
            direction: StagedArgs(
                **found,
                copy_pieces=0 if pieces is None else pieces.entry_point,
                piece_attributes=attributes,
                piece_first=first,
                piece_failed=failed,
                begun=begun[direction].address,
                chunks=ctypes.addressof(self._chunks),
                num_chunks=len(chunks),
                is_load=direction is Direction.LOAD,
                parts_worth_a_call=PARTS_WORTH_A_CALL,
                fields=fields_of(launcher.transfer),
                ring=ctypes.addressof(rings[direction].args),
                part_targets=targets,
                part_sources=sources,
                part_sizes=sizes,
                max_parts=MAX_PARTS,
            )
            for direction in Direction
        }
        self._rings, self._begun = rings, begun  # they are reached by their addresses alone

    def launch(
        self,
        plan: TransferPlan,
        route: Route,
        table: SpanTable,
        commands: CommandBuffer,
        streams: Streams,
        pieces: Sequence[Piece],
        arrivals: Arrivals,
        interval: LinkInterval | None,
    ) -> None:
        """As `StagedMover.launch`, which has cut `plan` into `pieces`.

        Raises:
            DriverError: The driver refused, or earlier work has failed; what was enqueued before
                that stays.
            PinError: A host page is not pinned.
        """
        layout = self._layout(plan, route, table, pieces)
        told = self._told[plan.direction]
        lanes = (streams.kernels.handle, streams.aside.handle)
        told.lanes[0], told.lanes[1] = int(lanes[0]), int(lanes[1])
        told.copies = int(streams.copies.handle)
        told.pieces, told.num_pieces = ctypes.addressof(layout.pieces), len(layout.pieces)
        told.groups = ctypes.addressof(layout.groups)
        runs = plan.run_table
        told.runs, told.num_runs = runs.ctypes.data, len(runs)
        told.host_slots = plan.host_slots.ctypes.data
        tables = (RowTableArgs * len(commands.row_tables))(
            *(RowTableArgs(*one) for one in commands.row_tables)
        )
        told.row_tables, told.num_row_tables = ctypes.addressof(tables), len(tables)
        told.page_seeds, told.sums = commands.page_seeds, commands.sums
        told.bad_pages = commands.bad_pages
        told.interval = None if interval is None else interval.first.address
        self._launcher.begin(plan, table, commands)
        marks = arrivals.marks([step.layers for step in table.steps] if layout.pieces else [])
        num_recorded = 0
        try:
            told.reached = marks.address
            status = submit_staged(self._library, told)
            if interval is not None and told.interval_begun:
                interval.begun()
            num_recorded = told.num_reached
            if status:
                raise self._refused(told, status, plan.direction)
        finally:
            marks.settle(num_recorded)

    def _layout(
        self, plan: TransferPlan, route: Route, table: SpanTable, pieces: Sequence[Piece]
    ) -> _Layout:
        key = (id(route), id(table), plan.num_pages)
        found = self._layouts.get(key)
        if found is None:
            if len(self._layouts) >= _MAX_LAYOUTS:
                self._layouts.clear()
            groups = (GroupArgs * len(route.groups))()
            arrays: list[Any] = []
            for group, step, told in zip(route.groups, table.steps, groups, strict=True):
                bands = (BandArgs * len(group.bands))(
                    *(BandArgs(*one.place, one.width, one.in_staging) for one in group.bands)
                )
                launches = self._launcher.relayouts(step, self._blocks)
                of_step = (LaunchArgs * len(launches))(*launches)
                arrays += (bands, of_step)
                told.pitch = group.pitch
                told.bands, told.num_bands = ctypes.addressof(bands), len(bands)
                told.launches, told.num_launches = ctypes.addressof(of_step), len(of_step)
            cut = (PieceArgs * len(pieces))(*(PieceArgs(*one) for one in pieces))
            # With its route and table, so that no others get their ids meanwhile.
            found = self._layouts[key] = _Layout(cut, groups, (*arrays, route, table))
        return found

    def _refused(self, told: StagedArgs, status: int, direction: Direction) -> DriverError:
        step = SubmitStep(told.step)
        if step is SubmitStep.NOT_PINNED:
            self._pinned.chunk_of(told.detail)  # it raises, and knows why
        code = self._driver.bindings.CUresult(status)
        if step is SubmitStep.LAUNCH:
            return self._launcher.refused(LaunchArgs.from_address(told.detail), code)
        if step is SubmitStep.RECORD:
            return self._begun[direction].not_recorded(code)
        if step is SubmitStep.WAIT:
            return self._begun[direction].not_awaited(code)
        return self._copies.refused(direction, status, told.detail)
