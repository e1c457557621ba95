"""Launches the kernels that carry a plan, group of layers after group of layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.kernels import CopyPath, MoveKernels
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.kernels.jit import Stream
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.span_table import Carried, Launch, SpanTable

__all__ = ["DEFAULT_BLOCKS", "SpanLauncher", "default_blocks"]

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

    def load(self, carried: Sequence[Carried]) -> None:
        """Compile or load all that `launch` will need for these spans."""
        paths = {one.path for one in carried}
        if self._verify and CopyPath.GROUPED in paths:
            paths.add(CopyPath.REALIGN)
        self._kernels.load(*paths)

    def launch(
        self,
        plan: TransferPlan,
        table: SpanTable,
        commands: CommandBuffer,
        stream: Stream,
        reached: Callable[[Sequence[int]], None],
    ) -> None:
        """Start all kernels of `plan` in `stream`.

        `reached` is called where `stream` has come to the end of model layers, and gets them.
        """
        if plan.num_pages:
            self._fill(plan, table, commands)
        args = self._kernels.transfer
        for launch in table.launches:
            if plan.num_pages:
                args.first_span, args.num_spans = launch.first, launch.num_spans
                self._kernels.share_out(launch.path, launch.page_work)
                self._move(launch, bool(args.is_load), stream.handle)
            if launch.ends_layers:
                reached(launch.ends_layers)

    def finish(
        self, plan: TransferPlan, table: SpanTable, commands: CommandBuffer, stream: Stream
    ) -> None:
        """Write or compare all digests of `plan`, in a `stream` that is behind its kernels."""
        if plan.num_pages and self._verify:
            self._fill(plan, table, commands)
            args = self._kernels.transfer
            args.first_span, args.num_spans = 0, table.num_spans
            self._kernels.finish(table.num_spans * plan.num_pages, stream.handle)

    def _fill(self, plan: TransferPlan, table: SpanTable, commands: CommandBuffer) -> None:
        args = self._kernels.transfer
        args.spans = table.address
        for index, address in enumerate(commands.row_tables):
            args.rows[index] = address
        args.host_slots = commands.host_slots
        args.page_seeds = commands.page_seeds
        args.sums = commands.sums
        args.bad_pages = commands.bad_pages
        args.fault = commands.fault
        args.num_pages = args.sums_stride = plan.num_pages
        args.index_bytes = commands.index_bytes
        args.is_load = plan.direction is Direction.LOAD
        args.verify = self._verify

    def _move(self, launch: Launch, is_load: bool, stream: Any) -> None:
        blocks = self._blocks or default_blocks(launch.path, is_load, launch.host_run)
        if launch.path is CopyPath.FLAT:
            self._kernels.flat(blocks, stream)
        elif launch.path is CopyPath.REALIGN:
            self._kernels.realign(blocks, stream)
        elif launch.grouped is not None:
            self._kernels.grouped(launch.grouped, blocks, stream)
            if self._verify:
                self._kernels.share_out(CopyPath.REALIGN, 0)
                self._kernels.realign(blocks, stream, digest_only=True)
