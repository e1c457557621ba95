"""Copies between host pages and staging: what the copy engine is told, in the fewest calls."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DriverTooOldError
from kvferry.kernels.jit import PieceCopy, RowCopy
from kvferry.transfer.staging import cut_copy, wants_one_call
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context, Stream
    from kvferry.transfer.host_pages import PinnedAddresses
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.staging import Group, Piece

__all__ = ["HostCopies"]

_ONE_RUN = range(1)
_Numbers = NDArray[np.int64]


class HostCopies:
    """The copy calls of one engine. The context must be current for every one.

    Args:
        context: Of the GPU.
        pinned: The host pool.
    """

    def __init__(self, context: Context, pinned: PinnedAddresses) -> None:
        self._pinned = pinned
        self._rows: Mapping[Direction, RowCopy] = {
            direction: RowCopy(context, to_device=direction is Direction.LOAD)
            for direction in Direction
        }
        self._pieces: PieceCopy | None
        try:
            self._pieces = PieceCopy(context)
        except DriverTooOldError:
            self._pieces = None

    @property
    def batched(self) -> bool:
        """Whether many pieces can go in one call. With an older driver each run is a call."""
        return self._pieces is not None

    def submit(
        self, plan: TransferPlan, piece: Piece, group: Group, staging: int, stream: Stream
    ) -> None:
        """Between the host pages of `piece` and its room at `staging`, as `plan` goes.

        Few long runs are strided copies, a call each; else all pages are pieces of one call.

        Raises:
            DriverError: The driver refused, or earlier work has failed.
        """
        runs = plan.host_runs
        if len(runs) == 1:
            self._copy_runs(plan, piece, group, staging, stream, _ONE_RUN)
            return
        end = piece.first_page + piece.num_pages
        first = bisect.bisect_right(runs, piece.first_page, key=lambda run: run.first_page) - 1
        last = bisect.bisect_left(runs, end, lo=first, key=lambda run: run.first_page)
        num_calls = (last - first) * len(group.bands)
        if self._pieces is not None and wants_one_call(num_calls, piece.num_pages * group.width):
            self._copy_pages(self._pieces, plan, piece, group, staging, stream)
        else:
            self._copy_runs(plan, piece, group, staging, stream, range(first, last))

    def _copy_runs(
        self,
        plan: TransferPlan,
        piece: Piece,
        group: Group,
        staging: int,
        stream: Stream,
        which: range,
    ) -> None:
        copy = self._rows[plan.direction].submit
        end = piece.first_page + piece.num_pages
        for at in which:
            run = plan.host_runs[at]
            begin = max(run.first_page, piece.first_page)
            rows = min(run.first_page + run.num_pages, end) - begin
            slot = run.first_slot + begin - run.first_page
            for (address, pitch), width, in_staging in group.bands:
                host = address + slot * pitch
                device = staging + (begin - piece.first_page) * group.pitch + in_staging
                if host + (rows - 1) * pitch + width <= self._end_of_chunk(host):
                    copy(stream, host, pitch, device, group.pitch, width, rows)
                    continue
                for row, count, offset, part in cut_copy(
                    host, pitch, width, rows, self._end_of_chunk
                ):
                    copy(
                        stream,
                        host + row * pitch + offset,
                        pitch,
                        device + row * group.pitch + offset,
                        group.pitch,
                        part,
                        count,
                    )

    def _copy_pages(
        self,
        copy: PieceCopy,
        plan: TransferPlan,
        piece: Piece,
        group: Group,
        staging: int,
        stream: Stream,
    ) -> None:
        slots = plan.host_slots[piece.first_page : piece.first_page + piece.num_pages]
        pages = np.arange(piece.num_pages) * group.pitch + staging
        bands = group.bands
        host = np.concatenate([slots * one.place.pitch + one.place.address for one in bands])
        device = np.concatenate([pages + one.in_staging for one in bands])
        sizes = np.repeat([one.width for one in bands], piece.num_pages)
        host, device, sizes = self._inside_chunks(host, device, sizes)
        told = (host, device) if plan.direction is Direction.STORE else (device, host)
        targets, sources = (side.view(np.uint64) for side in told)
        copy.submit(stream, targets, sources, sizes.view(np.uint64))

    def _inside_chunks(
        self, host: _Numbers, device: _Numbers, sizes: _Numbers
    ) -> tuple[_Numbers, _Numbers, _Numbers]:
        """The same pieces, cut where one would cross from one registration into the next."""
        if int(host.max()) + int(sizes.max()) <= self._end_of_chunk(int(host.min())):
            return host, device, sizes
        parts = [
            (at + offset, to + offset, part)
            for at, to, size in zip(host.tolist(), device.tolist(), sizes.tolist(), strict=True)
            for _, _, offset, part in cut_copy(at, size, size, 1, self._end_of_chunk)
        ]
        cut = np.array(parts, dtype=np.int64)
        return cut[:, 0].copy(), cut[:, 1].copy(), cut[:, 2].copy()

    def _end_of_chunk(self, address: int) -> int:
        return self._pinned.chunk_of(address).end
