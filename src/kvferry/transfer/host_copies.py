"""Copies between host pages and staging: what the copy engine is told, in the fewest calls."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DriverTooOldError
from kvferry.kernels.jit import PieceCopy, RowCopy
from kvferry.transfer.staging import MAX_PARTS, cut_copy, wants_one_call
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.errors import DriverError
    from kvferry.kernels.jit import Context, Stream
    from kvferry.transfer.host_pages import PinnedAddresses
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.staging import Group, Piece

__all__ = ["HostCopies", "PlanCopies"]

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
        self.pieces: PieceCopy | None
        """None: the driver has no call for many pieces."""
        try:
            self.pieces = PieceCopy(context)
        except DriverTooOldError:
            self.pieces = None

    @property
    def batched(self) -> bool:
        """Whether many pieces can go in one call. With an older driver each run is a call."""
        return self.pieces is not None

    def refused(self, direction: Direction, status: int, num_pieces: int) -> DriverError:
        """What to raise where a copy gave `status`: of so many pieces, or 0 for one of rows."""
        if self.pieces is not None and num_pieces:
            return self.pieces.refused(status, num_pieces)
        return self._rows[direction].refused(status)

    def of(self, plan: TransferPlan, stream: Stream) -> PlanCopies:
        """Those of one plan, in `stream`."""
        return PlanCopies(plan, stream, self._rows[plan.direction], self.pieces, self._pinned)


class _Pages(NamedTuple):
    """Every band of every page of a plan as a piece. Shapes: ``[pages, bands]``."""

    host: _Numbers
    in_staging: _Numbers
    """Counted from where the first page lies."""

    sizes: _Numbers
    in_one_chunk: bool
    """No piece crosses from one registration into the next."""


class PlanCopies:
    """Copies between the host pages of one plan and staging. Made by `HostCopies.of`."""

    def __init__(
        self,
        plan: TransferPlan,
        stream: Stream,
        rows: RowCopy,
        pieces: PieceCopy | None,
        pinned: PinnedAddresses,
    ) -> None:
        self._plan = plan
        self._stream = stream
        self._rows = rows
        self._pieces = pieces
        self._pinned = pinned
        self._runs = plan.host_runs
        self._pages: dict[int, _Pages] = {}

    def submit(self, piece: Piece, group: Group, staging: int) -> None:
        """Between the host pages of `piece` and its room at `staging`, as the plan goes.

        Few long runs are strided copies, a call each; else all pages are pieces of one call.

        Raises:
            DriverError: The driver refused, or earlier work has failed.
        """
        runs = self._runs
        if len(runs) == 1:
            self._copy_runs(piece, group, staging, _ONE_RUN)
            return
        end = piece.first_page + piece.num_pages
        first = bisect.bisect_right(runs, piece.first_page, key=lambda run: run.first_page) - 1
        last = bisect.bisect_left(runs, end, lo=first, key=lambda run: run.first_page)
        num_calls = (last - first) * len(group.bands)
        num_parts = piece.num_pages * len(group.bands)
        if self._pieces is not None and wants_one_call(num_calls, num_parts):
            self._copy_pages(self._pieces, piece, group, staging)
        else:
            self._copy_runs(piece, group, staging, range(first, last))

    def _copy_runs(self, piece: Piece, group: Group, staging: int, which: range) -> None:
        copy, stream = self._rows.submit, self._stream
        end = piece.first_page + piece.num_pages
        for at in which:
            run = self._runs[at]
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

    def _copy_pages(self, copy: PieceCopy, piece: Piece, group: Group, staging: int) -> None:
        pages = self._pages.get(piece.group)
        if pages is None:  # of all pages at once: numpy costs by the call
            pages = self._pages[piece.group] = self._pages_of(group)
        host = pages.host[piece.first_page : piece.first_page + piece.num_pages]
        device = pages.in_staging[: piece.num_pages] + staging
        sizes = pages.sizes[: piece.num_pages]
        if not pages.in_one_chunk:
            host, device, sizes = self._inside_chunks(host, device, sizes)
        is_load = self._plan.direction is Direction.LOAD
        targets, sources = (device, host) if is_load else (host, device)
        for first in range(0, sizes.size, MAX_PARTS):
            part = slice(first, first + MAX_PARTS)
            copy.submit(
                self._stream,
                *(numbers.reshape(-1)[part] for numbers in (targets, sources, sizes)),
            )

    def _pages_of(self, group: Group) -> _Pages:
        bands, slots = group.bands, self._plan.host_slots
        host = np.empty((len(slots), len(bands)), dtype=np.int64)
        in_staging, sizes = np.empty_like(host), np.empty_like(host)
        from_first = np.arange(len(slots)) * group.pitch
        for at, ((address, pitch), width, offset) in enumerate(bands):
            host[:, at] = slots * pitch + address
            in_staging[:, at] = from_first + offset
            sizes[:, at] = width
        end = int(host.max()) + max(band.width for band in bands)
        return _Pages(host, in_staging, sizes, end <= self._end_of_chunk(int(host.min())))

    def _inside_chunks(
        self, host: _Numbers, device: _Numbers, sizes: _Numbers
    ) -> tuple[_Numbers, _Numbers, _Numbers]:
        """The same pieces, cut where one would cross from one registration into the next."""
        parts = [
            (at + offset, to + offset, part)
            for at, to, size in zip(
                host.ravel().tolist(), device.ravel().tolist(), sizes.ravel().tolist(), strict=True
            )
            for _, _, offset, part in cut_copy(at, size, size, 1, self._end_of_chunk)
        ]
        cut = np.array(parts, dtype=np.int64)
        return cut[:, 0].copy(), cut[:, 1].copy(), cut[:, 2].copy()

    def _end_of_chunk(self, address: int) -> int:
        return self._pinned.chunk_of(address).end
