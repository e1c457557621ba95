"""The direct mover: one kernel a layer reads or writes mapped host memory in place."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.errors import (
    ConfigError,
    DriverError,
    PinError,
    PlanError,
    TransferError,
    TransferFaultError,
)
from kvferry.kernels import (
    NO_DIGEST,
    UNROLLS,
    CopyDecision,
    CopyPath,
    MoveKernels,
)
from kvferry.kernels.jit import Event, Stream, process_loader
from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.command_buffer import CommandBuffer, CommandBuffers, row_tables
from kvferry.transfer.device_transfer import DeviceTransfer
from kvferry.transfer.in_flight import InFlight
from kvferry.transfer.paths import disabled_gpu_paths
from kvferry.transfer.span_launcher import SpanLauncher
from kvferry.transfer.span_table import SpanTable
from kvferry.transfer.span_tables import SpanTables
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.geometry import PoolView
    from kvferry.kernels.jit import KernelLoader
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan

__all__ = ["DirectMover"]

_parked: list[DirectMover] = []


class DirectMover:
    """Carries out plans between a GPU's pool and pinned host memory, in streams of its own.

    Loads and stores each have a stream. A transfer starts after what the caller's stream holds
    when it is submitted, and the caller's stream waits for it only where it is told to. Digests are
    written or compared, and reported, in a further stream: beside the next transfer and the
    caller's work, for both need nothing but the bytes.

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
        self._host = host
        self._verify = verify
        self._gpu = _gpu_index(device.device)
        self._context = loader.driver.context(self._gpu)
        with self._context.current():
            self._pinned = host.pin_for(self._context)
            kernels = MoveKernels(loader, self._gpu)
            self._streams = {direction: Stream(self._context) for direction in Direction}
            self._reports = {direction: Stream(self._context) for direction in Direction}
            self._setup = Stream(self._context)
            self._ready = {direction: Event(self._context) for direction in Direction}
        self._launcher = SpanLauncher(kernels, verify=verify, blocks=blocks)
        self._commands = CommandBuffers(self._context)
        self._in_flight = InFlight(self._context)
        self._tables = SpanTables(
            device,
            host,
            self._pinned,
            self._context,
            self._setup,
            load=self._launcher.load,
            in_use=lambda table: bool(self._captured) or self._in_flight.uses(table),
            verify=verify,
            path=path,
            unroll=unroll,
            disabled=disabled,
        )
        self._lost: list[DeviceTransfer] = []
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
        if num_blocks is not None and not (isinstance(num_blocks, int) and num_blocks >= 1):
            raise ConfigError(f"num_blocks={num_blocks}: give a whole number from 1, or None")
        if unroll is not None and (unroll not in UNROLLS or path not in (None, "grouped")):
            raise ConfigError(
                f"unroll={unroll} with path={path!r}: it is one of "
                f"{', '.join(map(str, UNROLLS))}, and goes with grouped alone"
            )
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

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]:
        """For each plane and layer of `plan`: which kernel carries it, and why."""
        return self._tables.explain(plan)

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
            finished = self._in_flight.event()
            try:
                table, commands = self._prepare(plan)
            except BaseException:
                self._in_flight.put_back(finished)
                raise
            return self._start(plan, table, commands, finished, stream)

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
            commands.keep_rows(theirs)
            self._launcher.launch(plan, table, commands, theirs, lambda _: None)
            self._launcher.finish(plan, table, commands, theirs)
            commands.copy_out(theirs)
            return captured

    def _let_go(self, captured: CapturedTransfer, commands: CommandBuffer) -> None:
        self._captured.remove(captured)
        self._commands.put(commands)
        self._host.release(captured.plan.host_slots)

    def _prepare(self, plan: TransferPlan) -> tuple[SpanTable, CommandBuffer]:
        """What a transfer needs before anything is enqueued; the pool is leased."""
        if self._closed:
            raise TransferError("the engine is closed; make a new one over the same pools")
        self._in_flight.reap()
        self._host.acquire(plan.host_slots)
        try:
            return self._laid_out(plan)
        except BaseException:
            self._host.release(plan.host_slots)
            raise

    def _laid_out(self, plan: TransferPlan) -> tuple[SpanTable, CommandBuffer]:
        if self._pinned.closed:
            raise PinError(
                "the host pool is not pinned any more, for a close() of it has failed: make a new "
                "engine, which pins it again"
            )
        tables, table_of = row_tables(plan)
        table = self._tables.take(plan, table_of)
        if plan.num_pages > table.max_pages:
            raise PlanError(
                f"{plan.num_pages} pages in one transfer; kernels take {table.max_pages} of "
                f"this geometry at once: split the plan"
            )
        commands = self._commands.take()
        try:
            commands.lay_out(plan, tables, table.num_spans)
        except BaseException:
            self._commands.put(commands)
            raise
        return table, commands

    def _start(
        self,
        plan: TransferPlan,
        table: SpanTable,
        commands: CommandBuffer,
        finished: Event,
        stream: int,
    ) -> DeviceTransfer:
        ours = self._streams[plan.direction]
        layers: dict[int, Event] = {}
        transfer = DeviceTransfer(
            plan,
            path=table.path,
            verified=self._verify,
            context=self._context,
            current_stream=self.current_stream,
            commands=commands,
            layers=layers,
            finished=finished,
            lock=self._in_flight.lock,
            on_done=self._retire,
        )
        self._in_flight.add(transfer, table)
        ends_in = ours
        try:
            # While the caller's stream is still at its work: nothing of it is read here.
            commands.copy_in(ours)
            commands.keep_rows(Stream.borrowed(self._context, stream))
            ready = self._ready[plan.direction]
            ready.record(stream)
            ours.wait_for(ready)
            self._in_flight.order(ours, plan)
            self._launcher.launch(
                plan, table, commands, ours,
                lambda ended: layers.update(dict.fromkeys(ended, self._recorded(ours))),
            )  # fmt: skip
            reports = self._reports[plan.direction]
            reports.wait_for(layers[plan.model_layers[-1]])
            ends_in = reports
            self._launcher.finish(plan, table, commands, reports)
            commands.copy_out(reports)
        except DriverError as fault:
            transfer.fail(fault)
        except BaseException as stopped:  # an interrupt, say, which goes on when all is in order
            transfer.fail(stopped)
            raise
        finally:
            self._end(transfer, finished, ends_in)
        return transfer

    def _end(self, transfer: DeviceTransfer, finished: Event, ends_in: Stream) -> None:
        """Mark where the transfer ends, however much of it came there."""
        try:
            finished.record(ends_in.handle)
        except DriverError as fault:
            transfer.fail(fault)
            try:
                ends_in.drain()
            except DriverError as lost:
                transfer.lose(lost)
                self._lost.append(transfer)
                return
        transfer.submitted()

    def current_stream(self) -> int:
        """The caller's current stream on this GPU: torch's where torch is loaded, else legacy."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():  # a build for the CPU has no streams
            return 0
        return int(torch.cuda.current_stream(self._gpu).cuda_stream)

    def _recorded(self, stream: Stream) -> Event:
        event = self._in_flight.event()
        event.record(stream.handle)
        return event

    def _retire(
        self, transfer: DeviceTransfer, commands: CommandBuffer, events: Sequence[Event]
    ) -> None:
        self._in_flight.remove(transfer, events)
        self._commands.put(commands)
        if not self._verify and transfer.plan.direction is Direction.STORE:
            self._host.digests[transfer.plan.host_slots] = NO_DIGEST
        self._host.release(transfer.plan.host_slots)

    def close(self) -> None:
        """Wait for what is in flight, well or not, then give all memory back."""
        self._closed = True
        for transfer in self._in_flight:
            with contextlib.suppress(TransferFaultError):  # its handle tells
                transfer.wait()
        for captured in list(self._captured):
            captured.close()
        if self._lost:
            # The GPU may still be at it, and nobody can ask: what it uses is never used for else.
            _parked.append(self)
            return
        with self._context.beside_captures():
            self._commands.close()
            self._tables.close()
            self._in_flight.close()
            for event in self._ready.values():
                event.close()
            for stream in (*self._streams.values(), *self._reports.values(), self._setup):
                stream.close()


def _gpu_index(device: str) -> int:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise PlanError(f"device {device} is no NVIDIA GPU; the direct mover serves cuda devices")
    return int(index or 0)
