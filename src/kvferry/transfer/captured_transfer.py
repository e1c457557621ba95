"""A transfer that lies in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.closing import ClosedAtExit
from kvferry.errors import TransferError
from kvferry.transfer.device_transfer import read_report

if TYPE_CHECKING:
    from kvferry.errors import TransferFaultError
    from kvferry.transfer.command_buffer import CommandBuffer
    from kvferry.transfer.holdings import Holdings
    from kvferry.transfer.plan import TransferPlan

__all__ = ["CapturedTransfer"]


class CapturedTransfer(ClosedAtExit):
    """A transfer that every replay of a graph carries out anew, with the slots of its plan.

    It lies in the captured stream, so it is in order with the rest of the graph: what comes before
    it wrote or read its rows, what comes after it finds the bytes. Indices in device memory are
    read at every replay, others are those of the plan. Until `close` it keeps its buffers, the
    engine and a lease of the host pool; close it when the graph is not replayed any more.

    What it tells is of the last replay, once that is over: synchronise with it first. Before the
    first one every page is bad.
    """

    def __init__(
        self,
        plan: TransferPlan,
        commands: CommandBuffer,
        *,
        held: Holdings,
        path: str,
        verified: bool,
        owner: object,
        on_close: Callable[[CapturedTransfer], None],
    ) -> None:
        """Made by `TransferEngine.capture`."""
        self.plan = plan
        self.held = held
        """What it has of its engine."""

        self._path = path
        self._verified = verified
        self._commands: CommandBuffer | None = commands
        self._owner = owner
        self._on_close = on_close
        commands.distrust()

    @property
    def path(self) -> str:
        """As `TransferHandle.path`."""
        return self._path

    @property
    def verified(self) -> bool:
        """As `TransferHandle.verified`."""
        return self._verified

    @property
    def error(self) -> TransferFaultError | None:
        """Why the last replay's transfer failed, or None."""
        return self._report()[0]

    @property
    def bad_pages(self) -> tuple[int, ...]:
        """As `TransferHandle.bad_pages`, of the last replay."""
        return self._report()[1]

    @property
    def verified_pages(self) -> int:
        """As `TransferHandle.verified_pages`, of the last replay."""
        error, bad = self._report()
        if error is not None or not self._verified:
            return 0
        return bad[0] if bad else self.plan.num_pages

    def _report(self) -> tuple[TransferFaultError | None, tuple[int, ...]]:
        if self._commands is None:
            raise TransferError("the captured transfer is closed; read it before")
        return read_report(self.plan, self._commands)

    def close(self) -> None:
        """Give everything back; the graph must not be replayed any more. Twice is once."""
        self._commands = None
        self._on_close(self)
        self._owner = None
