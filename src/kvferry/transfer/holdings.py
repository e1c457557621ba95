"""What a transfer on a GPU has of its engine until it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.kernels import NO_DIGEST
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.transfer.command_buffer import CommandBuffer, CommandBuffers
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.span_table import SpanTable

__all__ = ["Holdings"]


class Holdings:
    """A lease of the host pool, a command buffer and a span table, of one transfer.

    It is there before any of them, so that an interrupt on the way leaves none without an owner.
    Each is noted as gone before it is given back: an interrupt in between may keep something for
    longer, but nothing is given back twice, to two new owners.

    Args:
        host: Page slots.
        buffers: Where command buffers come from.
        plan: Of the transfer.
        verify: Whether digests are on.
    """

    def __init__(
        self, host: HostPages, buffers: CommandBuffers, plan: TransferPlan, *, verify: bool
    ) -> None:
        self._host = host
        self._buffers = buffers
        self._plan = plan
        self._verify = verify
        self._leased = False
        self.commands: CommandBuffer | None = None
        self.table: SpanTable | None = None

    def lease(self) -> None:
        """Keep the pool open and the plan's slots owned. Raises PoolClosedError."""
        self._host.acquire(self._plan.host_slots)
        self._leased = True

    def take_commands(self) -> CommandBuffer:
        """A command buffer of its own. Raises DriverError where there is no memory for one."""
        self.commands = commands = self._buffers.take()
        return commands

    def forget_digests(self) -> None:
        """Of slots that a store without digests writes: those that are there vouch for others."""
        if not self._verify and self._plan.direction is Direction.STORE:
            self._host.digests[self._plan.host_slots] = NO_DIGEST

    def give_back(self) -> None:
        """Give back what it has; the GPU is at nothing of it any more. Twice is once."""
        commands, self.commands = self.commands, None
        if commands is not None:
            self._buffers.put(commands)
        if self._leased:
            self.forget_digests()
            self._leased = False
            self._host.release(self._plan.host_slots)
