"""The handle of a transfer that a GPU carries out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.errors import DriverError, TransferError, TransferFaultError, TransferTimeoutError
from kvferry.kernels import fault_of
from kvferry.transfer.handle import DEFAULT_TIMEOUT_SECS, TransferHandle
from kvferry.types import Mover

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context, Event, Stream
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.holdings import Holdings
    from kvferry.transfer.link_clock import LinkInterval
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route

__all__ = ["DeviceTransfer", "read_report"]


class DeviceTransfer(TransferHandle):
    """A transfer in streams of the engine, which is made before anything of it is there.

    It goes through four states, each marked by a single assignment, so that an interrupt anywhere
    leaves it in one of them, and whoever looks next goes on from there: open, ended (`finished` is
    recorded behind all of it), settled (that was reached, and the report is taken), over (all that
    it held is given back).
    """

    def __init__(
        self,
        plan: TransferPlan,
        route: Route,
        *,
        interpreted: bool,
        verified: bool,
        context: Context,
        current_stream: Callable[[], int],
        held: Holdings,
        finished: Event,
        lock: threading.RLock,
        on_done: Callable[[DeviceTransfer], None],
    ) -> None:
        self.plan = plan
        self.route: Route = route
        self.held = held
        """What it has of its engine."""

        self.ends_in: tuple[Stream, ...] = ()
        """The streams that something of it may be in; none: nothing was enqueued."""

        self.layers: dict[int, Event] = {}
        """By model layer: where its bytes are there, and its rows may be written again."""

        self.moved: Event | None = None
        """Where all bytes are there; None: the transfer has failed before that."""

        self.interval: LinkInterval | None = None
        """When its bytes are on the link, where that is to be told."""

        self.lost = False
        """Nobody can tell any more when it ends: it keeps what it holds for ever."""

        self._interpreted = interpreted
        self._verified = verified
        self._context = context
        self._current_stream = current_stream
        self._finished = finished
        self._on_done = on_done
        self._lock = lock
        self._error: TransferError | None = None
        self._bad_pages: tuple[int, ...] = ()
        self._link_seconds: tuple[float, float] | None = None
        # Until `finished` is recorded anew it tells of an earlier transfer, and means nothing; once
        # settled, this transfer's events are those of another.
        self._ended = self._settled = self._over = False

    @property
    def path(self) -> str:
        table, mover = self.held.table, self.route.mover
        words = [mover.value] if mover is Mover.STAGED or table is None else []
        if table is not None:
            # Grouped kernels are launched from Python wherever they are asked for.
            if self._interpreted and not table.has_grouped:
                words.append("interpreted")
            words.append(table.path)
        return " ".join(words)

    @property
    def events(self) -> set[Event]:
        """All that it has recorded."""
        moved = () if self.moved is None else (self.moved,)
        return {*self.layers.values(), *moved, self._finished}

    @property
    def verified(self) -> bool:
        return self._verified

    @property
    def done(self) -> bool:
        self.poll()
        return self._over

    def poll(self) -> None:
        """Look whether the GPU is done; if so take its report and give the buffers back."""
        if self._ended and not self._over:
            with self._context.beside_captures():
                self._look()

    @property
    def error(self) -> TransferError | None:
        return self._error if self.done else None

    @property
    def bad_pages(self) -> tuple[int, ...]:
        return self._bad_pages if self.done else ()

    @property
    def link_seconds(self) -> tuple[float, float] | None:
        return self._link_seconds if self.done else None

    def end(self) -> None:
        """Mark where it ends, however much of it came into which streams. The context is current.

        Where that was interrupted it may be done again, and later: then it ends later.
        """
        if self._ended or self.lost:
            return
        try:
            if self.ends_in:
                last, *others = self.ends_in
                for other in others:
                    self._finished.record(other.handle)
                    last.wait_for(self._finished)
                self._finished.record(last.handle)
        except DriverError as fault:
            self.fail(fault)
            try:
                for stream in self.ends_in:
                    stream.drain()
            except DriverError as gone:
                self.fail(gone)
                self.lost = self._over = True
                return
        self._ended = True
        if not self.ends_in:
            self._look()

    def hold_back(self, stream: Stream) -> None:
        """Let `stream` go on only when this transfer is over; the context must be current."""
        with self._lock:
            if self._ended and not self._settled:
                stream.wait_for(self._finished)

    def fail(self, fault: BaseException, *, raised: bool = False) -> None:
        """The transfer could not be submitted whole: it ends as failed when the rest is over.

        Nothing of `fault` is kept that leads back here: its traceback has the frames of all callers
        with what they hold, pools among it, and only a collection would end such a ring.

        Args:
            fault: Why.
            raised: It goes on to the caller, who never has the handle.
        """
        self._error = TransferFaultError(
            f"{self.plan.direction.value} of {self.plan.num_pages} pages on path {self.path} "
            f"failed: {fault}"
        )
        if not raised:
            self._error.__cause__ = fault.with_traceback(None)

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        self._raise_behind(stream)
        reached = self.layers.get(layer)
        if reached is None:
            raise TransferError(
                f"model layer {layer} is not part of this transfer; it moves layers "
                f"{', '.join(map(str, self.plan.model_layers))}"
            )
        self._order(reached, stream)

    def wait_all(self, stream: int | None = None) -> None:
        self._raise_behind(stream)
        self._order(self.moved or self._finished, stream)

    def _raise_behind(self, stream: int | None) -> None:
        """Raise the error, if there is one; whoever then mends the rows does so after what of the
        transfer is still to come."""
        if self._error is not None and self._ended:
            self._order(self._finished, stream)
        self._raise_error()

    def _order(self, event: Event, stream: int | None) -> None:
        if self._settled or self.lost:
            return
        with self._context.current():
            stream = self._current_stream() if stream is None else stream
            if self._context.is_capturing(stream):
                raise TransferError(
                    f"stream {stream} is being captured into a graph, which cannot wait for a "
                    f"transfer that is none of its own: call wait_all before each replay, on the "
                    f"stream that replays"
                )
            with self._lock:  # on another thread it may be settled just now
                if not self._settled:
                    event.block(stream)

    def wait(self, timeout: float = DEFAULT_TIMEOUT_SECS) -> None:
        deadline = time.monotonic() + timeout
        with self._context.beside_captures():
            while not self._look():
                if not time.monotonic() < deadline:  # also where it is no number: that never comes
                    raise TransferTimeoutError(
                        f"{self.plan.direction.value} of {self.plan.num_pages} pages on path "
                        f"{self.path} is not over after {timeout:g} s; it goes on: wait again, or "
                        f"look at what its stream waits for"
                    )
                os.sched_yield()
        self._raise_error()

    def _look(self) -> bool:
        """Whether it is over; the context must be current."""
        with self._lock:
            if self._ended and not self._over and self._settle():
                # Whoever sees that it is over finds everything given back.
                self.held.give_back()
                self._on_done(self)
                self._over = True
        return self._over

    def _raise_error(self) -> None:
        if self._error is not None:
            # Another each time: one that is raised keeps the frames of who waited.
            raise TransferFaultError(*self._error.args) from self._error.__cause__

    def _settle(self) -> bool:
        if self._settled:
            return True
        try:
            if self.ends_in and not self._finished.reached:
                return False
        except DriverError as fault:
            self.fail(fault)
        commands = self.held.commands
        if self._error is None and commands is not None:
            self._error, self._bad_pages = read_report(self.plan, commands)
            commands.finished()
        if self.interval is not None:
            self._link_seconds = self.interval.take(whole=self._error is None)
        self._settled = True
        return True


def read_report(
    plan: TransferPlan, commands: CommandBuffer
) -> tuple[TransferFaultError | None, tuple[int, ...]]:
    """What went wrong in a transfer that is over, and which of its pages are bad."""
    code, bad_pages = commands.report()
    fault = fault_of(code)
    if fault is None:
        return None, bad_pages
    return (
        TransferFaultError(
            f"a device slot of plane {_plane_of_table(plan, fault.rows_table)!r} is outside its "
            f"pool, first at page {fault.page}, row {fault.row} of the plan; its element was "
            f"left out and the page is bad: check the index tensor"
        ),
        bad_pages,
    )


def _plane_of_table(plan: TransferPlan, table: int) -> str:
    seen: list[Any] = []
    for name, rows in plan.device_rows.items():
        if not any(rows is other for other in seen):
            seen.append(rows)
        if len(seen) == table + 1:
            return name
    return "?"
