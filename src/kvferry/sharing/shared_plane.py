"""A data plane whose loads are carried out on every rank of the machine, from one host copy."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from kvferry.errors import PlanError
from kvferry.tiers import Command, Completion, DataPlane, Moved, MovePages, RunningTransfer, Verify
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.geometry import Geometry
    from kvferry.memory import HostPool
    from kvferry.sharing.shared_host import SharedHost
    from kvferry.transfer import TransferEngine
    from kvferry.types import SlotKind

__all__ = ["SharedDataPlane"]

_TURN_SECS = 0.01


class _Load:
    """One load: what this process says of it, and who else has yet to."""

    def __init__(self) -> None:
        self.own: Moved | None = None
        self.owed: set[int] = set()
        self.told: list[Moved] = []

    def merged(self) -> Moved | None:
        """What all say together; None until all have."""
        if self.own is None or self.owed:
            return None
        said = [self.own, *self.told]
        error = next((one.error for one in said if one.error), "")
        bad = () if error else tuple(sorted({page for one in said for page in one.bad_pages}))
        # Path, bytes and seconds stay this process's own: each rank has a link of its own.
        return dataclasses.replace(
            self.own, error=error, bad_pages=bad, verified=all(one.verified for one in said)
        )


class SharedDataPlane(DataPlane):
    """Loads go to the peers too, and are over when all have answered. All else is done here alone.

    So a slot has a reader until the last process that reads it is done with it, or is gone. Only
    this process writes to the host copy, and only it talks to storage.

    Args:
        geometry: As `DataPlane`.
        engines: As `DataPlane`.
        pools: Shared ones.
        verify: As `DataPlane`.
        host: The peers. Closed with this.
    """

    def __init__(
        self,
        geometry: Geometry,
        engines: Mapping[SlotKind, TransferEngine],
        pools: Mapping[SlotKind, HostPool],
        *,
        verify: Verify,
        host: SharedHost,
    ) -> None:
        super().__init__(geometry, engines, pools, verify=verify)
        self._host = host
        self._loads: dict[int, _Load] = {}
        host.offer(geometry, pools, verify)

    def submit(self, command: Command) -> RunningTransfer | None:
        """As `DataPlane.submit`. A load for which a rank is missing ends as one that failed.

        Raises:
            PlanError: Device slots lie on the device, where peers cannot see them.
        """
        if not isinstance(command, MovePages) or command.direction is not Direction.LOAD:
            return super().submit(command)
        _check_on_host(command)
        self._hear()
        running = super().submit(command)
        # Only now: what is refused here is asked of nobody.
        load = self._loads.setdefault(command.job, _Load())
        load.owed |= self._host.send(command)
        if missing := self._host.missing_ranks():
            # It goes on, as callers wait for its layers; but a replica cannot use it.
            named = ", ".join(map(str, missing))
            load.told.append(Moved(command.job, error=f"nobody is there for ranks {named}"))
        return running

    @property
    def has_news(self) -> bool:
        """Always: that a peer came or went is noticed by listening."""
        return True

    def poll(self) -> list[Completion]:
        """As `DataPlane.poll`; a load is told when all ranks have answered."""
        self._hear()
        told: list[Completion] = []
        for completion in super().poll():
            load = self._loads.get(getattr(completion, "job", -1))
            if load is not None and isinstance(completion, Moved) and load.own is None:
                load.own = completion
            else:
                told.append(completion)
        for job, load in list(self._loads.items()):
            if (merged := load.merged()) is not None:
                del self._loads[job]
                told.append(merged)
        return told

    def wait(self, timeout: float) -> bool:
        """As `DataPlane.wait`."""
        deadline = time.monotonic() + timeout
        while not self._ready and not self._host.wait(0.0):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # What peers say and what happens here cannot be waited for at once. One is waited for,
            # and the other looked at in between.
            turn = min(left, _TURN_SECS)
            is_theirs = bool(self._loads) and not self.num_running
            if self._host.wait(turn) if is_theirs else super().wait(turn):
                return True
            if is_theirs and super().wait(0.0):
                return True
        return True

    def close(self, timeout: float) -> bool:
        """As `DataPlane.close`, and take leave of the peers."""
        ended = super().close(timeout)
        self._host.close()
        return ended

    def _hear(self) -> None:
        for one in self._host.poll():
            load = self._loads[one.moved.job]  # it is here until nobody owes it
            load.owed.discard(one.generation)
            load.told.append(one.moved)


def _check_on_host(command: MovePages) -> None:
    for slots in (command.device_slots, *(command.plane_slots or {}).values()):
        if getattr(slots, "is_cuda", False):
            raise PlanError(
                "device slots of a load from a shared host copy lie on the device, where other "
                "ranks cannot read them: give them on the host, as a list or an array"
            )
