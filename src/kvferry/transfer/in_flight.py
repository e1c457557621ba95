"""The transfers of one mover that are not over, and what later ones must wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvferry.kernels.jit import Context, Event, Stream
from kvferry.transfer.closing import close_all
from kvferry.transfer.indices import DeviceRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.transfer.device_transfer import DeviceTransfer
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.span_table import SpanTable
    from kvferry.types import Mover

__all__ = ["InFlight", "plans_meet"]


class InFlight:
    """Transfers from before they hold anything until they are over, and spare events.

    A transfer is taken out by whoever sees first that it is over, on any thread.

    Args:
        context: Of the GPU.
        shared_storage: Planes of the device pool may lie on the same bytes: rows of one are then
            rows of another, by other numbers, and any two plans may touch the same.
    """

    def __init__(self, context: Context, *, shared_storage: bool = False) -> None:
        self._context = context
        self._shared_storage = shared_storage
        self._transfers: dict[int, DeviceTransfer] = {}
        self._events: list[Event] = []
        self._spare: list[Event] = []
        self.lock = threading.RLock()
        """Held while a transfer is settled: two threads may look at one handle."""

    def __iter__(self) -> Iterator[DeviceTransfer]:
        with self.lock:
            return iter(list(self._transfers.values()))

    def __len__(self) -> int:
        return len(self._transfers)

    def add(self, transfer: DeviceTransfer) -> None:
        """From now on what it holds is in use."""
        with self.lock:
            self._transfers[id(transfer)] = transfer

    def remove(self, transfer: DeviceTransfer) -> None:
        """It is over, and nobody uses its events any more. Twice is once."""
        with self.lock:
            if self._transfers.pop(id(transfer), None) is not None:
                self._spare.extend(transfer.events)

    def uses(self, table: SpanTable) -> bool:
        """Whether a transfer still reads `table`."""
        return any(transfer.held.table is table for transfer in self)

    def reap(self) -> None:
        """Look at all of them, so that buffers of dropped handles come back.

        Where submitting one was interrupted, its end is marked now. The context must be current,
        and no transfer on its way into the streams.
        """
        for transfer in self:
            transfer.end()
            transfer.poll()

    def event(self) -> Event:
        """A spare event, or a new one; the context must be current."""
        return self.events(1)[0]

    def events(self, count: int) -> list[Event]:
        """Spare ones, or new ones; the context must be current. Raises DriverError."""
        with self.lock:
            at = max(len(self._spare) - count, 0)
            found = self._spare[at:]
            del self._spare[at:]
        try:
            while len(found) < count:
                made = Event(self._context)
                self._events.append(made)
                found.append(made)
        except BaseException:
            self.put_back(found)
            raise
        return found

    def put_back(self, events: Iterable[Event]) -> None:
        """Give back events that were not used."""
        with self.lock:
            self._spare.extend(events)

    def order(self, stream: Stream, plan: TransferPlan, mover: Mover) -> None:
        """Let `stream` wait for transfers in other streams that touch what `plan` touches.

        Those the same way by the same mover are in the same streams. Others go on side by side.
        """
        for transfer in self:
            same = (transfer.plan.direction, transfer.route.mover) == (plan.direction, mover)
            if not same and (self._shared_storage or plans_meet(transfer.plan, plan)):
                transfer.hold_back(stream)

    def close(self) -> None:
        """Destroy all events; no transfer may use one any more."""
        self._spare.clear()
        close_all(self._events)
        self._events.clear()


def plans_meet(one: TransferPlan, other: TransferPlan) -> bool:
    """Whether two plans name a host slot or a device row in common, as far as can be told."""
    if one.kind is other.kind and _share(one.host_slots, other.host_slots):
        return True
    for name, rows in one.device_rows.items():
        others = other.device_rows.get(name)
        if others is None:
            continue
        if isinstance(rows, DeviceRows) or isinstance(others, DeviceRows):
            return True  # nobody has seen those indices
        if _share(rows, others):
            return True
    return False


def _share(one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    if not one.size or not other.size:
        return False
    if int(one.max()) < int(other.min()) or int(other.max()) < int(one.min()):
        return False
    return bool(np.isin(one.ravel(), other.ravel()).any())
