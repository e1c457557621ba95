"""Which slots transfers that are not over read or write. Used under the pool's lock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import SlotOwnershipError
from kvferry.memory.slot_runs import SlotRun

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BusySlots"]

_ONE = np.uint32(1)  # of the type of the counts: numpy takes eight times as long for any other


class BusySlots:
    """How many transfers use each of `num_slots` slots."""

    def __init__(self, num_slots: int) -> None:
        self._users: NDArray[np.uint32] = np.zeros(num_slots, dtype=np.uint32)

    def add(self, slots: NDArray[np.int64] | None) -> None:
        """A transfer begins to use `slots`. SlotOwnershipError for one that does not exist."""
        if slots is None:
            return
        outside = slots[(slots < 0) | (slots >= len(self._users))]
        if outside.size:
            raise SlotOwnershipError(
                f"slot {int(outside[0])} is none of the pool's {len(self._users)} slots"
            )
        np.add.at(self._users, slots, _ONE)

    def remove(self, slots: NDArray[np.int64] | None) -> None:
        """One that did so is over."""
        if slots is not None:
            np.subtract.at(self._users, slots, _ONE)

    def check_idle(self, runs: Iterable[SlotRun]) -> None:
        """Raises SlotOwnershipError for the first slot of `runs` that a transfer uses."""
        for run in runs:
            busy = np.flatnonzero(self._users[run.start : run.stop])
            if busy.size:
                raise SlotOwnershipError(
                    f"slot {run.start + int(busy[0])} is used by a transfer that is not over: "
                    f"wait for its handle, then free the slot"
                )
