"""The direct mover: one kernel a layer reads or writes mapped host memory in place."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.errors import (
    ConfigError,
    DriverError,
    PlanError,
    TransferError,
    TransferFaultError,
)
from kvferry.kernels import (
    CopyDecision,
    CopyPath,
    GroupedConfig,
    MoveKernels,
    decide_span,
    span_args,
)
from kvferry.kernels.jit import Event, Stream, process_loader
from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.command_buffer import CommandBuffer, CommandBuffers, row_tables
from kvferry.transfer.device_transfer import DeviceTransfer
from kvferry.transfer.paths import disabled_gpu_paths
from kvferry.transfer.span_launcher import SpanLauncher
from kvferry.transfer.span_table import Carried, SpanTable
from kvferry.types import Direction

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView, PoolView, Span
    from kvferry.kernels.jit import KernelLoader
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan

__all__ = ["DirectMover"]

# A plan's kind (its spans, runs and row tables) is laid out once; this many kinds are kept.
_MAX_TABLES = 64
_FINISH_BLOCK = 256

_TableKey = tuple[tuple[tuple[int, int, int], ...], int]


class DirectMover:
    """Carries out plans between a GPU's pool and pinned host memory, in streams of its own.

    Loads and stores each have a stream. A transfer starts after what the caller's stream holds
    when it is submitted, and the caller's stream waits for it only where it is told to.

    Args:
        device: The pool, on one GPU.
        host: Page slots that can be pinned.
        loader: Where kernels come from.
        verify: Make digests on store and check them on load.
        blocks: Blocks of a launch; None: as measured.
        path: Carry everything this way, or refuse; None: flat, where it cannot realign.
        unroll: With grouped: how its threads share an element.
        disabled: Paths not to use.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        loader: KernelLoader,
        *,
        verify: bool,
        blocks: int | None = None,
        path: CopyPath | None = None,
        unroll: int | None = None,
        disabled: frozenset[CopyPath] = frozenset(),
    ) -> None:
        self._device = device
        self._host = host
        self._verify = verify
        self._path = path
        self._unroll = unroll
        self._disabled = disabled
        self._gpu = _gpu_index(device.device)
        self._context = loader.driver.context(self._gpu)
        with self._context.current():
            self._pinned = host.pin_for(self._context)
            kernels = MoveKernels(loader, self._gpu)
            self._streams = {direction: Stream(self._context) for direction in Direction}
            self._setup = Stream(self._context)
            self._ready = {direction: Event(self._context) for direction in Direction}
        self._launcher = SpanLauncher(kernels, verify=verify, blocks=blocks)
        self._commands = CommandBuffers(self._context)
        self._events: list[Event] = []
        self._tables: collections.OrderedDict[_TableKey, SpanTable] = collections.OrderedDict()
        self._in_flight: dict[int, DeviceTransfer] = {}
        self._captured: list[CapturedTransfer] = []
        self._closed = False

    @classmethod
    def open(
        cls,
        device: PoolView,
        host: HostPages,
        *,
        verify: bool,
        path: str | None,
        unroll: int | None,
        num_blocks: int | None,
    ) -> DirectMover:
        """A mover with the driver, compiler and cache of this process.

        Raises:
            ConfigError: `path` is no GPU path or is switched off, or `num_blocks` is below 1.
            MissingDependencyError, NoDeviceError, DriverTooOldError, PinError: as they say.
        """
        if num_blocks is not None and num_blocks < 1:
            raise ConfigError(f"num_blocks={num_blocks}: give at least 1, or None")
        disabled = disabled_gpu_paths()
        names = [one.value for one in CopyPath if one not in disabled]
        if not names:
            raise ConfigError(
                "every path for GPU pools is switched off; take one out of KVFERRY_DISABLE_PATHS"
            )
        if path is not None and path not in names:
            raise ConfigError(
                f"path {path!r} is not to be had for GPU pools; there are: {', '.join(names)}"
            )
        return cls(
            device,
            host,
            process_loader(),
            verify=verify,
            blocks=num_blocks,
            path=None if path is None else CopyPath(path),
            unroll=unroll,
            disabled=disabled,
        )

    @property
    def path(self) -> str:
        """How this mover is called; each handle says which kernels carried it."""
        return "direct"

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds for transfers in flight."""
        return self._commands.device_bytes

    def decide(self, span: Span, run_rows: int) -> CopyDecision:
        """Which kernel carries `span` where `run_rows` rows are neighbours, and why."""
        return decide_span(
            span,
            self._device.view(span.plane.name, span.layer),
            self._host_view(span),
            run_rows=run_rows,
            path=self._path,
            unroll=self._unroll,
            disabled=self._disabled,
        )

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]:
        """For each plane and layer of `plan`: which kernel carries it, and why."""
        return {
            (span.plane.name, span.layer): self.decide(span, plan.device_run(span.plane.name))
            for span in plan.spans
        }

    def submit(self, plan: TransferPlan, stream: int | None) -> DeviceTransfer:
        """Start `plan` after what `stream` holds now; None: the caller's current stream.

        Raises:
            PlanError: A span cannot be carried the way that was asked for.
            TransferError: The mover is closed, or the stream is being captured into a graph.
            DriverError: There is no device memory for the transfer's indices.
            JITError, MissingDependencyError: A kernel that is needed for the first time cannot be
                compiled.
        """
        with self._context.beside_captures():
            stream = self.current_stream() if stream is None else stream
            if self._context.is_capturing(stream):
                raise TransferError(
                    f"stream {stream} is being captured into a graph: a transfer that every replay "
                    f"is to carry out is put there by the engine's `capture`. For one transfer, "
                    f"submit before the replay, and call wait_all on the stream that replays"
                )
            return self._start(plan, *self._prepare(plan), stream)

    def capture(self, plan: TransferPlan, stream: int | None, owner: object) -> CapturedTransfer:
        """Put `plan` into the graph that `stream` is capturing; `owner` lives as long as it.

        Raises as `submit`, and TransferError where the stream is not being captured.
        """
        with self._context.beside_captures():
            stream = self.current_stream() if stream is None else stream
            if not self._context.is_capturing(stream):
                raise TransferError(
                    f"stream {stream} is not being captured into a graph; begin the capture, or "
                    f"load and store"
                )
            table, commands = self._prepare(plan)
            captured = CapturedTransfer(
                plan, commands, path=table.path, verified=self._verify, owner=owner,
                on_close=self._let_go,
            )  # fmt: skip
            self._captured.append(captured)
            theirs = Stream.borrowed(self._context, stream)
            # Where one of these fails, the graph may hold the others: nothing is given back.
            commands.copy_in(theirs)
            self._launcher.launch(plan, table, commands, theirs, lambda _: None)
            commands.copy_out(theirs)
            return captured

    def _let_go(self, captured: CapturedTransfer, commands: CommandBuffer) -> None:
        self._captured.remove(captured)
        self._commands.put(commands)
        self._host.release()

    def _prepare(self, plan: TransferPlan) -> tuple[SpanTable, CommandBuffer]:
        """What a transfer needs before anything is enqueued; the pool is leased."""
        if self._closed:
            raise TransferError("the engine is closed; make a new one over the same pools")
        self._reap()
        tables, table_of = row_tables(plan)
        table = self._table(plan, table_of)
        if plan.num_pages > table.max_pages:
            raise PlanError(
                f"{plan.num_pages} pages in one transfer; kernels take {table.max_pages} of "
                f"this geometry at once: split the plan"
            )
        commands = self._commands.take()
        try:
            commands.lay_out(plan, tables, table.num_spans)
        except (DriverError, PlanError):
            self._commands.put(commands)
            raise
        self._host.acquire()
        return table, commands

    def _start(
        self, plan: TransferPlan, table: SpanTable, commands: CommandBuffer, stream: int
    ) -> DeviceTransfer:
        ours = self._streams[plan.direction]
        layers: dict[int, Event] = {}
        finished = self._event()
        transfer = DeviceTransfer(
            plan,
            path=table.path,
            verified=self._verify,
            context=self._context,
            current_stream=self.current_stream,
            commands=commands,
            layers=layers,
            finished=finished,
            on_done=self._retire,
        )
        self._in_flight[id(transfer)] = transfer
        try:
            ready = self._ready[plan.direction]
            ready.record(stream)
            ours.wait_for(ready)
            commands.copy_in(ours)
            self._launcher.launch(
                plan, table, commands, ours,
                lambda ended: layers.update(dict.fromkeys(ended, self._recorded(ours))),
            )  # fmt: skip
            commands.copy_out(ours)
        except DriverError as fault:
            transfer.fail(fault)
        finished.record(ours.handle)
        return transfer

    def _table(self, plan: TransferPlan, table_of: dict[str, int]) -> SpanTable:
        runs = {name: plan.device_run(name) for name in plan.device_rows}
        key: _TableKey = (
            tuple((s.index, table_of[s.plane.name], runs[s.plane.name]) for s in plan.spans),
            0,
        )
        found = self._tables.get(key)
        if found is None:
            carried = [
                self._carry(span, table_of[span.plane.name], runs[span.plane.name])
                for span in plan.spans
            ]
            # Here, where nothing is under way yet that a compiler's failure would leave behind.
            self._launcher.load(carried)
            found = self._tables[key] = SpanTable(self._context, carried, self._setup)
            if len(self._tables) > _MAX_TABLES and not (self._in_flight or self._captured):
                self._tables.popitem(last=False)[1].close()
        self._tables.move_to_end(key)
        return found

    def _carry(self, span: Span, rows_table: int, run_rows: int) -> Carried:
        decision = self.decide(span, run_rows)
        if decision.chosen is None:
            raise PlanError(
                f"plane {span.plane.name!r}, layer {span.layer} cannot move as asked: "
                f"{decision.reason}"
            )
        grouped: GroupedConfig | None = None
        if decision.chosen is CopyPath.GROUPED:
            grouped = decision.grouped.config
        digests: NDArray[np.uint64] = self._host.digests
        address = digests.ctypes.data + span.index * digests.itemsize
        args = span_args(
            span,
            self._device.view(span.plane.name, span.layer),
            self._host_view(span),
            run_rows=run_rows,
            digest_address=self._pinned.device_address(address),
            digest_stride=digests.strides[0],
            rows_table=rows_table,
        )
        return Carried(span.model_layer, decision.chosen, grouped, args)

    def _host_view(self, span: Span) -> LayerView:
        """The span's rows on the host, where the device sees them."""
        view = self._host.view.view(span.plane.name, span.layer)
        return dataclasses.replace(view, address=self._pinned.device_address(view.address))

    def current_stream(self) -> int:
        """The caller's current stream on this GPU: torch's where torch is loaded, else legacy."""
        torch = sys.modules.get("torch")
        if torch is None:
            return 0
        return int(torch.cuda.current_stream(self._gpu).cuda_stream)

    def _event(self) -> Event:
        return self._events.pop() if self._events else Event(self._context)

    def _recorded(self, stream: Stream) -> Event:
        event = self._event()
        event.record(stream.handle)
        return event

    def _reap(self) -> None:
        """Retire what is over, so that buffers and events of dropped handles come back."""
        for transfer in list(self._in_flight.values()):
            transfer.poll()

    def _retire(
        self, transfer: DeviceTransfer, commands: CommandBuffer, events: Sequence[Event]
    ) -> None:
        del self._in_flight[id(transfer)]
        self._commands.put(commands)
        self._events.extend(events)
        self._host.release()

    def close(self) -> None:
        """Wait for what is in flight, well or not, then give all memory back."""
        self._closed = True
        for transfer in list(self._in_flight.values()):
            with contextlib.suppress(TransferFaultError):  # its handle tells
                transfer.wait()
        for captured in list(self._captured):
            captured.close()
        with self._context.beside_captures():
            self._commands.close()
            while self._tables:
                self._tables.popitem()[1].close()
            for event in (*self._events, *self._ready.values()):
                event.close()
            self._events.clear()
            for stream in (*self._streams.values(), self._setup):
                stream.close()


def _gpu_index(device: str) -> int:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise PlanError(f"device {device} is no NVIDIA GPU; the direct mover serves cuda devices")
    return int(index or 0)
