"""Lists of rows, on the device or in host memory, as kernels in the caller's stream read them."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import PlanError
from kvferry.kernels.jit import Context, DeviceBuffer, Event, PinnedBuffer, Stream
from kvferry.transfer.closing import close_all
from kvferry.transfer.indices import check_unique, host_indices

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RowList", "RowUploads", "check_rows", "row_list"]

_SMALLEST_BYTES = 64 << 10


@dataclasses.dataclass(frozen=True, eq=False)
class RowList:
    """Rows of one side of a move, one after another."""

    count: int
    index_bytes: int
    """4 or 8."""

    address: int
    """On the device; 0 where the rows are in host memory still."""

    on_host: NDArray[np.int64] | None
    tensor: Any = dataclasses.field(repr=False, default=None)
    """Keeps the rows."""


def row_list(what: str, given: Any) -> RowList:
    """`given` as a list: a tensor of int32 or int64 on the device, or whole numbers on the host.

    Raises:
        PlanError: It is neither, or has other than one dimension.
    """
    shape = tuple(getattr(given, "shape", (len(given),)))
    if len(shape) != 1:
        raise PlanError(f"{what} has shape {shape}; give one row number an element, in one list")
    if not getattr(given, "is_cuda", False):
        rows = host_indices(what, given)
        return RowList(count=shape[0], index_bytes=8, address=0, on_host=rows)
    kind = str(given.dtype)
    if kind not in ("torch.int32", "torch.int64"):
        raise PlanError(f"{what} on the device must be int32 or int64, not {kind}")
    if not given.is_contiguous():
        given = given.contiguous()
    return RowList(
        count=shape[0],
        index_bytes=given.element_size(),
        address=given.data_ptr(),
        on_host=None,
        tensor=given,
    )


def check_rows(what: str, rows: RowList, num_rows: int | None, *, written: bool) -> None:
    """Look at a list in host memory: no row from `num_rows` on, none written to twice.

    Raises:
        PlanError: There is one.
    """
    if rows.on_host is None or not rows.count:
        return
    if num_rows is not None and int(rows.on_host.max()) >= num_rows:
        raise PlanError(
            f"{what} holds {int(rows.on_host.max())}; the pool has rows 0 to {num_rows - 1}"
        )
    if written:
        check_unique(what, rows.on_host)


class _Room:
    """Pinned memory and as much on the device, used by one move at a time."""

    def __init__(self, context: Context, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.device = DeviceBuffer(context, num_bytes)
        try:
            self.pinned = PinnedBuffer(context, num_bytes)
            self.used = Event(context)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        things = (getattr(self, name, None) for name in ("used", "pinned", "device"))
        close_all([one for one in things if one is not None])


class RowUploads:
    """Brings lists from host memory to the device, in the caller's stream, and waits for nothing.

    A room is used again once the move that it was for is over. The context must be current for
    every call.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._rooms: list[_Room] = []
        self._taken: list[_Room] = []

    @property
    def device_bytes(self) -> int:
        """The device memory it holds."""
        return sum(room.num_bytes for room in (*self._rooms, *self._taken))

    def upload(self, rows: NDArray[np.int64], stream: Stream) -> int:
        """Copy `rows` in `stream`; where they are on the device, until `used` is called."""
        room = self._take(rows.nbytes)
        copied = np.ascontiguousarray(rows)
        ctypes.memmove(room.pinned.address, copied.ctypes.data, copied.nbytes)
        stream.copy_in(room.device.address, room.pinned.address, rows.nbytes)
        return room.device.address

    def used(self, stream: Stream) -> None:
        """All that reads what was uploaded since the last call is in `stream` by now."""
        taken, self._taken = self._taken, []
        for room in taken:
            room.used.record(stream.handle)
            self._rooms.append(room)

    def _take(self, num_bytes: int) -> _Room:
        for number, room in enumerate(self._rooms):
            if room.num_bytes >= num_bytes and room.used.reached:
                self._taken.append(self._rooms.pop(number))
                return room
        made = _Room(self._context, max(_SMALLEST_BYTES, 1 << (num_bytes - 1).bit_length()))
        self._taken.append(made)
        return made

    def close(self) -> None:
        """Free all of it; nothing may be in flight."""
        close_all([*self._rooms, *self._taken])
        self._rooms.clear()
        self._taken.clear()
