"""Launches the kernels that carry a plan, step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvferry.kernels import CopyPath, MoveKernels
from kvferry.types import Direction, Mover

if TYPE_CHECKING:
    from kvferry.errors import DriverError
    from kvferry.kernels import LaunchArgs, TransferArgs
    from kvferry.kernels.jit import Stream
    from kvferry.transfer.span_table import Carried, Launch, SpanTable, Step
    from kvferry.transfer.staging import Piece

__all__ = ["DEFAULT_BLOCKS", "LaunchMemory", "Launched", "SpanLauncher", "default_blocks"]


class Launched(Protocol):
    """How much moves, and which way: a `TransferPlan`, say."""

    @property
    def num_pages(self) -> int:
        """N."""

    @property
    def direction(self) -> Direction:
        """Towards the device or away from it."""


class LaunchMemory(Protocol):
    """Where the kernels of a launch read and report, on the device: a `CommandBuffer`, say."""

    row_tables: tuple[tuple[int, int], ...]
    """Where each begins, and the bytes of one page in it."""

    index_bytes: int
    host_slots: int
    page_seeds: int
    fault: int
    bad_pages: int
    sums: int


DEFAULT_BLOCKS: Mapping[CopyPath, int] = {
    CopyPath.FLAT: 32,
    CopyPath.REALIGN: 64,
    CopyPath.GROUPED: 16,
}
"""Blocks of a launch, each on a multiprocessor of its own. More starve what computes beside."""

LONG_RUN_BYTES = 4096
"""Loads of runs on the host from here on want fewer requests on the way, not more."""
LONG_LOAD_BLOCKS = 24


def default_blocks(path: CopyPath, is_load: bool, host_run: int) -> int:
    """How many blocks a launch has whose runs on the host are `host_run` bytes or longer."""
    if path is CopyPath.FLAT and is_load and host_run >= LONG_RUN_BYTES:
        return LONG_LOAD_BLOCKS
    return DEFAULT_BLOCKS[path]


class SpanLauncher:
    """The kernels of one mover. One thread at a time, with the context current.

    Args:
        kernels: Of the mover's GPU.
        verify: Make digests on store and check them on load.
        blocks: Blocks of a launch; None: `default_blocks`.
    """

    def __init__(self, kernels: MoveKernels, *, verify: bool, blocks: int | None) -> None:
        self._kernels = kernels
        self._verify = verify
        self._blocks = blocks

    def load(self, carried: Sequence[Carried], mover: Mover) -> None:
        """Compile or load all that `mover` will need for these spans."""
        paths = {one.path for one in carried}
        if self._verify and CopyPath.GROUPED in paths:
            paths.add(CopyPath.REALIGN)
        self._kernels.load(*paths, relayout=mover is Mover.STAGED)

    def begin(self, plan: Launched, table: SpanTable, commands: LaunchMemory) -> None:
        """What all launches of `plan` have in common. Call it before the first."""
        args = self._kernels.transfer
        args.spans = table.address
        args.host_base = 0
        args.fault = commands.fault
        args.sums_stride = plan.num_pages
        args.index_bytes = commands.index_bytes
        args.is_load = plan.direction is Direction.LOAD
        args.verify = self._verify
        self._select(commands, 0, plan.num_pages)
        args.host_slots = commands.host_slots

    def launch(self, step: Step, stream: Stream) -> None:
        """Start the kernels of a step for all pages of the plan, in place on the host."""
        if not self._kernels.transfer.num_pages:
            return
        for launch in step.launches:
            self._move(launch, self._blocks, stream)

    def launch_staged(
        self,
        step: Step,
        commands: LaunchMemory,
        piece: Piece,
        staging: int,
        blocks: int,
        stream: Stream,
    ) -> None:
        """Start those for some pages, between the device pool and staging at that address."""
        args = self._kernels.transfer
        self._select(commands, piece.first_page, piece.num_pages)
        args.host_slots = 0
        args.host_base = staging
        for launch in step.launches:
            self._move(launch, self._blocks or blocks, stream, relayout=True)

    @property
    def transfer(self) -> TransferArgs:
        """What all kernels read; `begin` fills it."""
        return self._kernels.transfer

    def in_place(self, step: Step, is_load: bool) -> list[LaunchArgs]:
        """What `launch` launches for a step of flat and realign, for compiled code."""
        return [
            self._told(
                launch,
                self._blocks or default_blocks(launch.path, is_load, launch.host_run),
                relayout=False,
            )
            for launch in step.launches
        ]

    def relayouts(self, step: Step, blocks: int) -> list[LaunchArgs]:
        """What `launch_staged` launches for a step of flat and realign, for compiled code."""
        return [
            self._told(launch, self._blocks or blocks, relayout=True) for launch in step.launches
        ]

    def refused(self, launch: LaunchArgs, status: Any) -> DriverError:
        """What to raise where compiled code could not carry out `launch`."""
        return self._kernels.refused(launch, status)

    def finish(
        self, plan: Launched, table: SpanTable, commands: LaunchMemory, stream: Stream
    ) -> None:
        """Write or compare all digests of `plan`, in a `stream` that is behind its kernels."""
        if plan.num_pages and self._verify:
            self.begin(plan, table, commands)
            args = self._kernels.transfer
            args.first_span, args.num_spans = 0, table.num_spans
            self._kernels.finish(table.num_spans * plan.num_pages, stream.handle)

    def _told(self, launch: Launch, blocks: int, *, relayout: bool) -> LaunchArgs:
        return self._kernels.launch_args(
            launch.path,
            blocks,
            relayout=relayout,
            first_span=launch.first,
            num_spans=launch.num_spans,
            page_work=launch.page_work,
        )

    def _select(self, commands: LaunchMemory, first_page: int, num_pages: int) -> None:
        args = self._kernels.transfer
        for index, (address, page_bytes) in enumerate(commands.row_tables):
            args.rows[index] = address + first_page * page_bytes
        args.page_seeds = commands.page_seeds + first_page * 8
        args.sums = commands.sums + first_page * 8
        args.bad_pages = commands.bad_pages + first_page
        args.first_page = first_page
        args.num_pages = num_pages

    def _move(
        self, launch: Launch, blocks: int | None, stream: Stream, *, relayout: bool = False
    ) -> None:
        args = self._kernels.transfer
        args.first_span, args.num_spans = launch.first, launch.num_spans
        self._kernels.share_out(launch.path, launch.page_work)
        if blocks is None:
            blocks = default_blocks(launch.path, bool(args.is_load), launch.host_run)
        if launch.path is CopyPath.FLAT:
            self._kernels.flat(blocks, stream.handle, relayout=relayout)
        elif launch.path is CopyPath.REALIGN:
            self._kernels.realign(blocks, stream.handle, relayout=relayout)
        elif launch.grouped is not None:
            self._kernels.grouped(launch.grouped, blocks, stream.handle)
            if self._verify:
                self._kernels.share_out(CopyPath.REALIGN, 0)
                self._kernels.realign(blocks, stream.handle, digest_only=True)
