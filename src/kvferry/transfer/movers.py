"""The two ways to carry out a plan on a GPU, each as calls in the streams of one direction."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.kernels.jit import RowCopy
from kvferry.transfer.staging import cut_copy, pieces_of
from kvferry.transfer.staging_ring import StagingRing
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context, Stream
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.host_pages import PinnedAddresses
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route
    from kvferry.transfer.span_launcher import SpanLauncher
    from kvferry.transfer.span_table import SpanTable
    from kvferry.transfer.staging import Band, Piece

__all__ = ["DEFAULT_STAGING_BYTES", "StagedMover", "Streams", "launch_direct"]

DEFAULT_STAGING_BYTES = 64 << 20
"""Of one direction."""

# The shortest last piece of a load and first of a store: its relayout is beside no copy.
_SHORT_PIECE_BYTES = 4 << 20


class Streams(NamedTuple):
    """Those of one direction."""

    kernels: Stream
    copies: Stream
    reports: Stream


Reached = Callable[[Sequence[int], "Stream"], None]
"""Called where a stream has come to the end of model layers."""


def launch_direct(
    launcher: SpanLauncher,
    plan: TransferPlan,
    table: SpanTable,
    commands: CommandBuffer,
    kernels: Stream,
    reached: Reached,
) -> None:
    """The direct mover: kernels in `kernels` read and write host memory in place."""
    launcher.begin(plan, table, commands)
    for step in table.steps:
        launcher.launch(step, kernels)
        reached(step.layers, kernels)


class StagedMover:
    """The staged mover.

        load    host pages --copy engine--> staging --kernels, digest--> device pool
        store   device pool --kernels, digest--> staging --copy engine--> host pages

    Pieces of a plan go through a ring of staging memory, so that one is copied while others are
    laid out. All waits are events in streams; the CPU waits for nothing. The context must be
    current for every call.

    Args:
        context: Of the GPU.
        launcher: Of the mover's engine.
        pinned: The host pool.
        staging_bytes: Device memory of each direction, allocated now.

    Raises:
        DriverError: There is no device memory for it.
    """

    def __init__(
        self,
        context: Context,
        launcher: SpanLauncher,
        pinned: PinnedAddresses,
        *,
        staging_bytes: int,
    ) -> None:
        self._launcher = launcher
        self._pinned = pinned
        self._blocks = context.num_multiprocessors
        self._copies: Mapping[Direction, RowCopy] = {
            direction: RowCopy(context, to_device=direction is Direction.LOAD)
            for direction in Direction
        }
        self._rings: dict[Direction, StagingRing] = {}
        try:
            for direction in Direction:
                self._rings[direction] = StagingRing(context, staging_bytes)
        except BaseException:
            self.close()
            raise
        self.capacity = staging_bytes // 2
        """Bytes of the largest piece."""

    @property
    def device_bytes(self) -> int:
        """The staging memory it holds."""
        return sum(ring.num_bytes for ring in self._rings.values())

    def launch(
        self,
        plan: TransferPlan,
        route: Route,
        table: SpanTable,
        commands: CommandBuffer,
        streams: Streams,
        reached: Reached,
    ) -> None:
        """Enqueue `plan`: what is read is behind the streams of its direction, on either side."""
        is_load = plan.direction is Direction.LOAD
        ring, kernels, copies = self._rings[plan.direction], streams.kernels, streams.copies
        self._launcher.begin(plan, table, commands)
        brings, takes = (copies, kernels) if is_load else (kernels, copies)
        done = 0
        for piece in pieces_of(
            route.groups,
            plan.num_pages,
            capacity=self.capacity,
            smallest=_SHORT_PIECE_BYTES,
            first_is_short=not is_load,
        ):
            group, step = route.groups[piece.group], table.steps[piece.group]
            room = ring.take(piece.num_pages * group.pitch, brings)
            if is_load:
                self._copy(plan, piece, group.bands, group.pitch, room.address, copies)
            else:
                self._launcher.launch_staged(
                    step, commands, piece, room.address, self._blocks, kernels
                )
            room.filled.record(brings.handle)
            takes.wait_for(room.filled)
            if is_load:
                self._launcher.launch_staged(
                    step, commands, piece, room.address, self._blocks, kernels
                )
            else:
                self._copy(plan, piece, group.bands, group.pitch, room.address, copies)
            room.emptied.record(takes.handle)
            if piece.ends_group:
                reached(step.layers, kernels)
                done += 1
        for step in table.steps[done:]:  # of no pages
            reached(step.layers, kernels)

    def _copy(
        self,
        plan: TransferPlan,
        piece: Piece,
        bands: Sequence[Band],
        pitch: int,
        staging: int,
        stream: Stream,
    ) -> None:
        copy = self._copies[plan.direction].submit
        end = piece.first_page + piece.num_pages
        runs = plan.host_runs
        at = bisect.bisect_right(runs, piece.first_page, key=lambda run: run.first_page) - 1
        while at < len(runs) and runs[at].first_page < end:
            run = runs[at]
            at += 1
            first = max(run.first_page, piece.first_page)
            rows = min(run.first_page + run.num_pages, end) - first
            slot = run.first_slot + first - run.first_page
            for band in bands:
                (address, host_pitch), width, in_staging = band
                host = address + slot * host_pitch
                device = staging + (first - piece.first_page) * pitch + in_staging
                for row, count, offset, part in cut_copy(
                    host, host_pitch, width, rows, self._end_of_chunk
                ):
                    copy(
                        stream,
                        host=host + row * host_pitch + offset,
                        host_pitch=host_pitch,
                        device=device + row * pitch + offset,
                        device_pitch=pitch,
                        width=part,
                        rows=count,
                    )

    def _end_of_chunk(self, address: int) -> int:
        return self._pinned.chunk_of(address).end

    def close(self) -> None:
        """Give all memory back; nothing of it may be in flight."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()
