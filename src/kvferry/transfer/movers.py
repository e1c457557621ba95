"""The two ways to carry out a plan on a GPU, each as calls in the streams of one direction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvferry.kernels import RELAYOUT_BLOCKS
from kvferry.kernels.jit import Event, Stream
from kvferry.transfer.closing import close_all
from kvferry.transfer.compiled_direct import CompiledDirect
from kvferry.transfer.compiled_staging import CompiledStaging
from kvferry.transfer.host_copies import HostCopies
from kvferry.transfer.staging import SHORT_PIECE_BYTES, piece_capacity, pieces_of
from kvferry.transfer.staging_ring import StagingRing
from kvferry.types import Direction

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable, Sequence

    from kvferry.kernels.jit import Context
    from kvferry.transfer.arrivals import Arrivals
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.host_pages import PinnedAddresses
    from kvferry.transfer.link_clock import LinkInterval
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route
    from kvferry.transfer.span_launcher import SpanLauncher
    from kvferry.transfer.span_table import SpanTable
    from kvferry.transfer.staging import Piece

__all__ = ["DEFAULT_STAGING_BYTES", "DirectMover", "StagedMover", "Streams"]

DEFAULT_STAGING_BYTES = 64 << 20
"""Of one direction."""

_MAX_CUTS = 256


class Streams(NamedTuple):
    """Those of one direction."""

    kernels: Stream
    """Behind all that the direction's kernels did."""

    aside: Stream
    """For every other piece. A kernel that waits in a stream behind another is not there yet when
    a busy GPU has room for a moment; two streams have two kernels there."""

    copies: Stream
    reports: Stream

    @classmethod
    def make(cls, context: Context, kept: Callable[[Stream], Stream]) -> Streams:
        """New ones, each given to `kept` as soon as it is there.

        Kernels are short and what waits for them is not: they go before what computes beside.
        """
        return cls(
            kernels=kept(Stream(context, urgent=True)),
            aside=kept(Stream(context, urgent=True)),
            copies=kept(Stream(context)),
            reports=kept(Stream(context, urgent=True)),
        )


class DirectMover:
    """The direct mover: kernels read and write host memory in place.

    The context must be current for every call.

    Args:
        context: Of the GPU.
        launcher: Of the mover's engine.
        compiled: What calls the driver; None: Python does.
    """

    def __init__(
        self, context: Context, launcher: SpanLauncher, *, compiled: ctypes.CDLL | None
    ) -> None:
        self._launcher = launcher
        self._compiled = (
            CompiledDirect(compiled, context, launcher) if compiled is not None else None
        )

    def launch(
        self,
        plan: TransferPlan,
        table: SpanTable,
        commands: CommandBuffer,
        kernels: Stream,
        arrivals: Arrivals | None,
    ) -> None:
        """Enqueue `plan` in `kernels`; `arrivals` is None inside a graph, where no layer is waited
        for."""
        if self._compiled is not None and arrivals is not None and not table.has_grouped:
            self._compiled.launch(plan, table, commands, kernels, arrivals)
            return
        # Call after call, from here; csrc/direct_submit.c makes the same ones.
        self._launcher.begin(plan, table, commands)
        for step in table.steps:
            self._launcher.launch(step, kernels)
            if arrivals is not None:
                arrivals.mark(step.layers, kernels)


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
        compiled: What calls the driver; None: Python does.

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
        compiled: ctypes.CDLL | None,
    ) -> None:
        self._launcher = launcher
        self._copies = HostCopies(context, pinned)
        self._blocks = RELAYOUT_BLOCKS * context.num_multiprocessors
        self._capacity = piece_capacity(staging_bytes)
        self._cuts: dict[tuple[int, int], tuple[Route, list[Piece]]] = {}
        self._rings: dict[Direction, StagingRing] = {}
        self._begun: dict[Direction, Event] = {}
        self._compiled: CompiledStaging | None
        try:
            for direction in Direction:
                self._begun[direction] = Event(context)
                self._rings[direction] = StagingRing(context, staging_bytes)
            self._compiled = (
                CompiledStaging(
                    compiled,
                    context,
                    launcher,
                    self._copies,
                    pinned,
                    self._rings,
                    self._begun,
                    self._blocks,
                )
                if compiled is not None
                else None
            )
        except BaseException:
            self.close()
            raise

    @property
    def batched(self) -> bool:
        """Whether many pieces can be copied in one call."""
        return self._copies.batched

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
        arrivals: Arrivals,
        interval: LinkInterval | None = None,
    ) -> None:
        """Enqueue `plan` behind what `streams.kernels` and `streams.copies` hold.

        All its kernels are over where `streams.kernels` is, all its copies where `streams.copies`.
        `interval` is told where the first copy begins.
        """
        pieces = self._pieces(plan, route)
        if self._compiled is not None and not table.has_grouped:
            self._compiled.launch(plan, route, table, commands, streams, pieces, arrivals, interval)
        else:
            self._launch(plan, route, table, commands, streams, pieces, arrivals, interval)
        if not pieces:  # what is over in either stream is over
            for step in table.steps:
                arrivals.mark(step.layers, streams.kernels)

    def _launch(
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
        """Call after call, from here; csrc/staged_submit.c makes the same ones."""
        is_load = plan.direction is Direction.LOAD
        ring, copies = self._rings[plan.direction], streams.copies
        lanes = (streams.kernels, streams.aside)
        begun = self._begun[plan.direction]
        begun.record(streams.kernels.handle)
        streams.aside.wait_for(begun)
        launch, blocks = self._launcher.launch_staged, self._blocks
        copy = self._copies.of(plan, copies).submit
        self._launcher.begin(plan, table, commands)
        before: Event | None = None  # where the piece before is, in the other lane
        for number, piece in enumerate(pieces):
            group, step = route.groups[piece.group], table.steps[piece.group]
            lane = lanes[number % 2]
            brings, takes = (copies, lane) if is_load else (lane, copies)
            room = ring.take(piece.num_pages * group.pitch, (copies,) if is_load else lanes)
            if is_load:
                if interval is not None:
                    interval.begin(copies)
                copy(piece, group, room.address)
            else:
                launch(step, commands, piece, room.address, blocks, lane)
            room.filled.record(brings.handle)
            takes.wait_for(room.filled)
            if is_load:
                launch(step, commands, piece, room.address, blocks, lane)
            else:
                if interval is not None:
                    interval.begin(copies)
                copy(piece, group, room.address)
            room.emptied.record(takes.handle)
            if piece.ends_group:
                # Of this group, or of layers before it: bytes are there layer after layer, and
                # where the last are there, all are.
                if before is not None:
                    lane.wait_for(before)
                arrivals.mark(step.layers, lane)
            before = room.emptied if is_load else room.filled
        if before is not None:
            streams.kernels.wait_for(before)
        else:  # there are no pages
            copies.wait_for(begun)

    def _pieces(self, plan: TransferPlan, route: Route) -> list[Piece]:
        """How `plan` is cut; the same for each of so many pages, so it is kept."""
        key = (id(route), plan.num_pages)
        found = self._cuts.get(key)
        if found is None:
            if len(self._cuts) >= _MAX_CUTS:
                self._cuts.clear()
            pieces = pieces_of(
                route.groups,
                plan.num_pages,
                capacity=self._capacity,
                smallest=SHORT_PIECE_BYTES,
                first_is_short=plan.direction is Direction.STORE,
            )
            # With its route, so that no other gets its id meanwhile.
            found = self._cuts[key] = (route, list(pieces))
        return found[1]

    def close(self) -> None:
        """Give all memory back; nothing of it may be in flight."""
        close_all((*self._rings.values(), *self._begun.values()))
        self._rings.clear()
        self._begun.clear()
