"""Carries plans out on a GPU: what each of its movers needs around a transfer, and which it is."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvferry.errors import (
    DriverError,
    PinError,
    PlanError,
    TransferError,
    TransferFaultError,
)
from kvferry.kernels import NO_DIGEST, CopyDecision, MoveKernels
from kvferry.kernels.jit import Event, Stream
from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.command_buffer import CommandBuffer, CommandBuffers, row_tables
from kvferry.transfer.device_transfer import DeviceTransfer
from kvferry.transfer.in_flight import InFlight
from kvferry.transfer.movers import StagedMover, Streams, launch_direct
from kvferry.transfer.profile_store import load_profile
from kvferry.transfer.router import Router
from kvferry.transfer.span_launcher import SpanLauncher
from kvferry.transfer.span_table import SpanTable
from kvferry.transfer.span_tables import SpanTables
from kvferry.types import Direction, Mover

if TYPE_CHECKING:
    from kvferry.geometry import PoolView
    from kvferry.kernels.jit import KernelLoader
    from kvferry.transfer.gpu_options import GpuOptions
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route

__all__ = ["GpuCarrier"]

_parked: list[GpuCarrier] = []


class _Closes(Protocol):
    def close(self) -> None: ...


_Kept = TypeVar("_Kept", bound=_Closes)


class GpuCarrier:
    """Carries out plans between a GPU's pool and pinned host memory, in streams of its own.

    Loads and stores each have streams: for kernels, for the copy engine, and for reports. A
    transfer starts after what the caller's stream holds when it is submitted, and the caller's
    stream waits for it only where it is told to. Digests are written or compared, and reported,
    beside the next transfer and the caller's work, for both need nothing but the bytes.

    Args:
        device: The pool, on one GPU.
        host: Page slots that can be pinned.
        loader: Where kernels come from.
        options: What was chosen.

    Raises:
        ConfigError: The staged mover is asked for, and cannot be.
        DriverError, PinError: Memory cannot be had or pinned; nothing is left behind.
    """

    def __init__(
        self, device: PoolView, host: HostPages, loader: KernelLoader, options: GpuOptions
    ) -> None:
        self._host = host
        self._verify = verify = options.verify
        self._gpu = _gpu_index(device.device)
        self._context = context = loader.driver.context(self._gpu)
        self._router = Router(
            host,
            load_profile(context) if options.profile is None else options.profile,
            staging_bytes=options.staging_bytes,
            mover=options.mover,
            why_not_staged=options.why_not_staged,
        )
        with context.current(), contextlib.ExitStack() as undo:

            def kept(made: _Kept) -> _Kept:
                undo.callback(made.close)
                return made

            self._pinned = host.pin_for(context)
            kernels = MoveKernels(loader, self._gpu)
            self._launcher = SpanLauncher(kernels, verify=verify, blocks=options.blocks)
            self._streams = {way: Streams.make(context, kept) for way in Direction}
            self._setup = kept(Stream(context))
            self._ready = {way: kept(Event(context)) for way in Direction}
            self._staged: StagedMover | None = None
            if self._router.can_stage:
                self._staged = kept(
                    StagedMover(
                        context,
                        self._launcher,
                        self._pinned,
                        staging_bytes=options.staging_bytes,
                    )
                )
                self._router.batched = self._staged.batched
            self._commands = kept(CommandBuffers(context))
            undo.pop_all()
        self._in_flight = InFlight(context, shared_storage=device.shared_storage)
        self._tables = SpanTables(
            device,
            host,
            self._pinned,
            self._context,
            self._setup,
            load=self._launcher.load,
            in_use=lambda table: bool(self._captured) or self._in_flight.uses(table),
            verify=verify,
            path=options.path,
            unroll=options.unroll,
            disabled=options.disabled,
        )
        self._lost: list[DeviceTransfer] = []
        self._captured: list[CapturedTransfer] = []
        self._closed = False

    @property
    def path(self) -> str:
        """The movers that there are; each handle says which carried it, and with which kernels."""
        return "direct" if self._staged is None else "staged"

    @property
    def device_bytes(self) -> int:
        """Device memory that it holds for transfers in flight, staging included."""
        staging = 0 if self._staged is None else self._staged.device_bytes
        return self._commands.device_bytes + staging

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]:
        """For each plane and layer of `plan`: which kernel carries it, and why."""
        return self._tables.explain(plan, self._router.route(plan))

    def route(self, plan: TransferPlan) -> Route:
        """Which mover carries `plan`, in which steps, and why."""
        return self._router.route(plan)

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
                route = self._router.route(plan)
                table, commands = self._prepare(plan, route)
            except BaseException:
                self._in_flight.put_back(finished)
                raise
            return self._start(plan, route, table, commands, finished, stream)

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
            table, commands = self._prepare(plan, self._router.direct(plan))
            captured = CapturedTransfer(
                plan, commands, path=table.path, verified=self._verify, owner=owner,
                on_close=self._let_go,
            )  # fmt: skip
            self._captured.append(captured)
            self._forget_digests(plan)
            theirs = Stream.borrowed(self._context, stream)
            # Where one of these fails, the graph may hold the others: nothing is given back.
            commands.copy_in(theirs)
            commands.keep_rows(theirs)
            launch_direct(self._launcher, plan, table, commands, theirs, lambda *_: None)
            self._launcher.finish(plan, table, commands, theirs)
            commands.copy_out(theirs)
            return captured

    def _forget_digests(self, plan: TransferPlan) -> None:
        """Of slots that a store without digests writes: those that are there vouch for others."""
        if not self._verify and plan.direction is Direction.STORE:
            self._host.digests[plan.host_slots] = NO_DIGEST

    def _let_go(self, captured: CapturedTransfer, commands: CommandBuffer) -> None:
        self._captured.remove(captured)
        self._commands.put(commands)
        self._forget_digests(captured.plan)
        self._host.release(captured.plan.host_slots)

    def _prepare(self, plan: TransferPlan, route: Route) -> tuple[SpanTable, CommandBuffer]:
        """What a transfer needs before anything is enqueued; the pool is leased."""
        if self._closed:
            raise TransferError("the engine is closed; make a new one over the same pools")
        self._in_flight.reap()
        self._host.acquire(plan.host_slots)
        try:
            return self._laid_out(plan, route)
        except BaseException:
            self._host.release(plan.host_slots)
            raise

    def _laid_out(self, plan: TransferPlan, route: Route) -> tuple[SpanTable, CommandBuffer]:
        if self._pinned.closed:
            raise PinError(
                "the host pool is not pinned any more, for a close() of it has failed: make a new "
                "engine, which pins it again"
            )
        tables, table_of = row_tables(plan)
        table = self._tables.take(plan, table_of, route)
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
        route: Route,
        table: SpanTable,
        commands: CommandBuffer,
        finished: Event,
        stream: int,
    ) -> DeviceTransfer:
        streams = self._streams[plan.direction]
        staged = self._staged if route.mover is Mover.STAGED else None
        transfer = DeviceTransfer(
            plan,
            route,
            path=table.path if staged is None else f"staged {table.path}",
            verified=self._verify,
            context=self._context,
            current_stream=self.current_stream,
            commands=commands,
            finished=finished,
            lock=self._in_flight.lock,
            on_done=self._retire,
        )
        self._in_flight.add(transfer, table)

        def reached(layers: Sequence[int], at: Stream) -> None:
            transfer.layers.update(dict.fromkeys(layers, self._recorded(at)))

        ends_in = [streams.kernels, streams.aside, streams.copies]
        try:
            # While the caller's stream is still at its work: nothing of it is read here.
            commands.copy_in(streams.kernels)
            theirs = Stream.borrowed(self._context, stream)
            ends_in.append(theirs)  # until ours wait for it: the copy writes to the buffer
            commands.keep_rows(theirs)
            ready = self._ready[plan.direction]
            ready.record(stream)
            for ours in (streams.kernels, streams.copies)[: 1 if staged is None else 2]:
                ours.wait_for(ready)
                self._in_flight.order(ours, plan, route.mover)
            ends_in.remove(theirs)
            if staged is None:
                launch_direct(self._launcher, plan, table, commands, streams.kernels, reached)
                transfer.moved = transfer.layers[plan.model_layers[-1]]
            else:
                staged.launch(plan, route, table, commands, streams, reached)
                is_load = plan.direction is Direction.LOAD
                transfer.moved = self._recorded(streams.kernels if is_load else streams.copies)
            streams.reports.wait_for(transfer.moved)
            ends_in = [streams.reports]
            self._launcher.finish(plan, table, commands, streams.reports)
            commands.copy_out(streams.reports)
        except DriverError as fault:
            transfer.fail(fault)
        except BaseException as stopped:  # an interrupt, say, which goes on when all is in order
            transfer.fail(stopped)
            raise
        finally:
            self._end(transfer, finished, ends_in)
        return transfer

    def _end(self, transfer: DeviceTransfer, finished: Event, ends_in: Sequence[Stream]) -> None:
        """Mark where the transfer ends, however much of it came into which streams."""
        last, *others = ends_in
        try:
            for other in others:
                finished.record(other.handle)
                last.wait_for(finished)
            finished.record(last.handle)
        except DriverError as fault:
            transfer.fail(fault)
            try:
                for stream in ends_in:
                    stream.drain()
            except DriverError as lost:
                transfer.lose(lost)
                self._lost.append(transfer)
                return
        except BaseException:  # an interrupt: nothing is given back before all is over
            for stream in ends_in:
                stream.drain()
            transfer.submitted()
            raise
        transfer.submitted()

    def current_stream(self) -> int:
        """The caller's current stream on this GPU: torch's where torch is loaded, else legacy."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():  # a build for the CPU has no streams
            return 0
        return int(torch.cuda.current_stream(self._gpu).cuda_stream)

    def _recorded(self, stream: Stream) -> Event:
        event = self._in_flight.event()
        try:
            event.record(stream.handle)
        except BaseException:
            self._in_flight.put_back(event)
            raise
        return event

    def _retire(
        self, transfer: DeviceTransfer, commands: CommandBuffer, events: Sequence[Event]
    ) -> None:
        self._in_flight.remove(transfer, events)
        self._commands.put(commands)
        self._forget_digests(transfer.plan)
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
            if self._staged is not None:
                self._staged.close()
            for stream in (*itertools.chain(*self._streams.values()), self._setup):
                stream.close()


def _gpu_index(device: str) -> int:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise PlanError(f"device {device} is no NVIDIA GPU; the direct mover serves cuda devices")
    return int(index or 0)
