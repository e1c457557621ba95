"""Carries plans out on a GPU: what each of its movers needs around a transfer, and which it is."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from kvferry.errors import (
    DriverError,
    PinError,
    PlanError,
    TransferError,
    TransferFaultError,
)
from kvferry.kernels import CopyDecision, MoveKernels
from kvferry.kernels.jit import Event, Stream
from kvferry.transfer.arrivals import Arrivals
from kvferry.transfer.caller_stream import current_stream
from kvferry.transfer.captured_transfer import CapturedTransfer
from kvferry.transfer.closing import Closes, close_all
from kvferry.transfer.command_buffer import CommandBuffer, CommandBuffers, row_tables
from kvferry.transfer.device_transfer import DeviceTransfer
from kvferry.transfer.holdings import Holdings
from kvferry.transfer.in_flight import InFlight
from kvferry.transfer.link_clock import LinkClock
from kvferry.transfer.movers import DirectMover, StagedMover, Streams
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


_Kept = TypeVar("_Kept", bound=Closes)


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
        self._interpreted = options.compiled is None
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
            self._direct = DirectMover(context, self._launcher, compiled=options.compiled)
            self._staged: StagedMover | None = None
            if self._router.can_stage:
                self._staged = kept(
                    StagedMover(
                        context,
                        self._launcher,
                        self._pinned,
                        staging_bytes=options.staging_bytes,
                        compiled=options.compiled,
                    )
                )
                self._router.batched = self._staged.batched
            self._commands = kept(CommandBuffers(context))
            self._clock = kept(LinkClock(context)) if options.timed else None
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
            route = self._router.route(plan)
            held = self._nothing_yet(plan)
            transfer = DeviceTransfer(
                plan,
                route,
                # Where the driver is called from Python, which takes longer.
                interpreted=self._interpreted,
                verified=self._verify,
                context=self._context,
                current_stream=self.current_stream,
                held=held,
                finished=self._in_flight.event(),
                lock=self._in_flight.lock,
                on_done=self._in_flight.remove,
            )
            self._in_flight.add(transfer)
            try:
                if self._clock is not None:
                    transfer.interval = self._clock.interval()
                self._start(transfer, *self._prepare(plan, route, held), stream)
            except DriverError as fault:
                transfer.fail(fault, raised=not transfer.ends_in)
                if not transfer.ends_in:
                    raise
            except BaseException as stopped:  # an interrupt, say: it goes on when all is in order
                transfer.fail(stopped, raised=True)
                raise
            finally:
                transfer.end()
            return transfer

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
            held = self._nothing_yet(plan)
            try:
                table, commands = self._prepare(plan, self._router.direct(plan), held)
                captured = CapturedTransfer(
                    plan, commands, held=held, path=table.path, verified=self._verify, owner=owner,
                    on_close=self._let_go,
                )  # fmt: skip
                self._captured.append(captured)
            except BaseException:
                held.give_back()
                raise
            held.forget_digests()
            theirs = Stream.borrowed(self._context, stream)
            # Where one of these fails, the graph may hold the others: nothing is given back.
            commands.copy_in(theirs)
            commands.keep_rows(theirs)
            self._direct.launch(plan, table, commands, theirs, None)
            self._launcher.finish(plan, table, commands, theirs)
            commands.copy_out(theirs)
            return captured

    def _let_go(self, captured: CapturedTransfer) -> None:
        with self._in_flight.lock:  # the engine may be closed on another thread
            if captured in self._captured:
                self._captured.remove(captured)
            captured.held.give_back()

    def _nothing_yet(self, plan: TransferPlan) -> Holdings:
        """What a transfer holds before it has anything, where the engine takes one."""
        if self._closed:
            raise TransferError("the engine is closed; make a new one over the same pools")
        self._in_flight.reap()
        return Holdings(self._host, self._commands, plan, verify=self._verify)

    def _prepare(
        self, plan: TransferPlan, route: Route, held: Holdings
    ) -> tuple[SpanTable, CommandBuffer]:
        """Get what a transfer needs before anything is enqueued; it is in `held` by then."""
        held.lease()
        if self._pinned.closed:
            raise PinError(
                "the host pool is not pinned any more, for a close() of it has failed: make a new "
                "engine, which pins it again"
            )
        tables, table_of = row_tables(plan)
        held.table = table = self._tables.take(plan, table_of, route)
        if plan.num_pages > table.max_pages:
            raise PlanError(
                f"{plan.num_pages} pages in one transfer; kernels take {table.max_pages} of "
                f"this geometry at once: split the plan"
            )
        commands = held.take_commands()
        commands.lay_out(plan, tables, table.num_spans)
        return table, commands

    def _start(
        self, transfer: DeviceTransfer, table: SpanTable, commands: CommandBuffer, stream: int
    ) -> None:
        """Put all of it into streams, and say in `transfer` which those are by then."""
        plan, route = transfer.plan, transfer.route
        streams = self._streams[plan.direction]
        staged = self._staged if route.mover is Mover.STAGED else None
        interval = transfer.interval

        arrivals = Arrivals(self._in_flight, transfer.layers)
        ours = (streams.kernels, streams.aside, streams.copies)
        transfer.ends_in = ours
        # While the caller's stream is still at its work: nothing of it is read here.
        commands.copy_in(streams.kernels)
        theirs = Stream.borrowed(self._context, stream)
        transfer.ends_in = (*ours, theirs)  # until ours wait for it: the copy writes to the buffer
        commands.keep_rows(theirs)
        ready = self._ready[plan.direction]
        ready.record(stream)
        for one in (streams.kernels, streams.copies)[: 1 if staged is None else 2]:
            one.wait_for(ready)
            self._in_flight.order(one, plan, route.mover)
        transfer.ends_in = ours
        if staged is None:
            if interval is not None:
                interval.begin(streams.kernels)
            self._direct.launch(plan, table, commands, streams.kernels, arrivals)
            transfer.moved = transfer.layers[plan.model_layers[-1]]
        else:
            staged.launch(plan, route, table, commands, streams, arrivals, interval)
            is_load = plan.direction is Direction.LOAD
            transfer.moved = arrivals.recorded(streams.kernels if is_load else streams.copies)
        streams.reports.wait_for(transfer.moved)
        if interval is not None:
            interval.end(streams.kernels if staged is None else streams.copies)
            streams.reports.wait_for(interval.last)
        transfer.ends_in = (streams.reports,)
        self._launcher.finish(plan, table, commands, streams.reports)
        commands.copy_out(streams.reports)

    def current_stream(self) -> int:
        """The caller's current stream on this GPU."""
        return current_stream(self._gpu)

    def close(self) -> None:
        """Wait for what is in flight, well or not, then give all memory back.

        Raises:
            TransferTimeoutError: Something does not end; nothing is given back.
            DriverError: The driver keeps something; all else is given back.
        """
        self._closed = True
        with self._context.beside_captures():
            self._in_flight.reap()
        for transfer in self._in_flight:
            with contextlib.suppress(TransferFaultError):  # its handle tells
                transfer.wait()
        for captured in list(self._captured):
            captured.close()
        if any(transfer.lost for transfer in self._in_flight):
            # The GPU may still be at it, and nobody can ask: what it uses is never used for else.
            if self not in _parked:
                _parked.append(self)
            return
        streams = itertools.chain(*self._streams.values())
        optional = [one for one in (self._staged, self._clock) if one is not None]
        with self._in_flight.lock, self._context.beside_captures():
            close_all(
                (
                    self._commands,
                    self._tables,
                    self._in_flight,
                    *self._ready.values(),
                    *optional,
                    *streams,
                    self._setup,
                )
            )


def _gpu_index(device: str) -> int:
    kind, _, index = device.partition(":")
    if kind != "cuda":
        raise PlanError(f"device {device} is no NVIDIA GPU; the direct mover serves cuda devices")
    return int(index or 0)
