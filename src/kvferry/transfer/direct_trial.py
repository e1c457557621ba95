"""Pages for the kernel `flat` to carry, in memory that somebody else has allocated."""

from __future__ import annotations

import ctypes
import itertools
import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.geometry import Geometry, LayerView, Plane, host_pool_view
from kvferry.kernels import NO_FAULT, CopyPath, SpanArgs, page_work, span_args
from kvferry.types import Direction, SlotKind

if TYPE_CHECKING:
    from kvferry.kernels import MoveKernels
    from kvferry.kernels.jit import Stream

__all__ = ["DirectTrial", "TrialRoom", "TrialSize"]

_PAGE_SIZE = 64
# No power of two divides it far, as of the latent vectors of models with many layers.
_ELEMENT_SIZE = 656
_ALIGNMENT = 256


class TrialRoom(NamedTuple):
    """Bytes that a trial takes."""

    host: int
    """Pinned: slots, then digests."""
    device: int
    tables: int
    """On the device: what the kernels read beside the pools. As much in pinned memory, once."""


class TrialSize(NamedTuple):
    """How much a trial moves."""

    num_pages: int
    """Of 64 tokens."""
    num_layers: int
    """Each launch moves one or more of them."""

    @property
    def geometry(self) -> Geometry:
        """What a page is."""
        plane = Plane(name="trial", num_layers=self.num_layers, element_size=_ELEMENT_SIZE)
        return Geometry(planes=(plane,), page_size=_PAGE_SIZE)

    @property
    def num_rows(self) -> int:
        """Of each layer on the device."""
        return self.num_pages * _PAGE_SIZE

    @property
    def num_bytes(self) -> int:
        """What a whole load or store moves."""
        return self.num_pages * self.geometry.page_bytes

    @property
    def slots_bytes(self) -> int:
        """Of all slots, up to where digests may begin."""
        return _aligned(self.num_pages * self.geometry.slot_bytes(SlotKind.PAGE))

    @property
    def table_bytes(self) -> tuple[int, ...]:
        """Spans, rows, slots, seeds, fault, bad pages, sums."""
        pages, layers = self.num_pages, self.num_layers
        spans = layers * ctypes.sizeof(SpanArgs)
        return spans, 8 * self.num_rows, 8 * pages, 8 * pages, 8, pages, 8 * pages * layers

    @property
    def room(self) -> TrialRoom:
        """The memory that it takes."""
        return TrialRoom(
            host=self.slots_bytes + 8 * self.num_pages * self.num_layers,
            device=self.num_layers * self.num_rows * _ELEMENT_SIZE,
            tables=sum(map(_aligned, self.table_bytes)),
        )


class DirectTrial:
    """Host pages, page_major, and device rows in no order, each apart; moved whole, either way.

    Nothing is read back: a trial is for its time. Digests are added up as in any transfer, and
    never compared. The context must be current.

    Args:
        size: How much. All memory is as large as its `room` and begins on 256 bytes.
        kernels: Of the GPU.
        stream: Where the tables are copied to the device.
        host: Of the pages in pinned memory, as the GPU sees it.
        device: Of the rows on the device.
        tables: Of the tables on the device.
        staging: Pinned memory for the tables; in use until `stream` is through.
        device_name: Such as ``cuda:0``.

    Raises:
        DriverError: The driver refused.
        JITError, MissingDependencyError: The kernel cannot be compiled.
    """

    def __init__(
        self,
        size: TrialSize,
        kernels: MoveKernels,
        stream: Stream,
        *,
        host: int,
        device: int,
        tables: int,
        staging: int,
        device_name: str,
    ) -> None:
        self._size = size
        self._kernels = kernels
        kernels.load(CopyPath.FLAT)
        spans = _spans(size, host, device, device_name)
        self._work = page_work(CopyPath.FLAT, spans[0])
        order = random.Random(0)  # noqa: S311  # the same scatter in each calibration
        rows = order.sample(range(size.num_rows), size.num_rows)
        slots = order.sample(range(size.num_pages), size.num_pages)
        contents = (
            bytes(spans),
            np.asarray(rows, np.int64).tobytes(),
            np.asarray(slots, np.int64).tobytes(),
            bytes(8 * size.num_pages),
            NO_FAULT.to_bytes(8, "little"),
        )
        starts = [0, *itertools.accumulate(map(_aligned, size.table_bytes))]
        ctypes.memset(staging, 0, starts[-1])
        for start, content in zip(starts, contents, strict=False):
            ctypes.memmove(staging + start, content, len(content))
        stream.copy_in(tables, staging, starts[-1])
        args = kernels.transfer
        places = [tables + start for start in starts]
        args.spans, args.rows[0], args.host_slots, args.page_seeds = places[:4]
        args.fault, args.bad_pages, args.sums = places[4:7]
        args.num_pages = args.sums_stride = size.num_pages
        args.index_bytes, args.verify = 8, 1

    def move(self, stream: Stream, direction: Direction, blocks: int, *, launches: int = 1) -> None:
        """Submit a load or a store of all pages, by a quota of `blocks`, in some launches.

        Raises:
            LaunchError: The driver refused.
        """
        args = self._kernels.transfer
        args.is_load = direction is Direction.LOAD
        bounds = [self._size.num_layers * at // launches for at in range(launches + 1)]
        for first, stop in itertools.pairwise(bounds):
            args.first_span, args.num_spans = first, stop - first
            self._kernels.share_out(CopyPath.FLAT, self._work)
            self._kernels.flat(blocks, stream.handle)


def _spans(size: TrialSize, host: int, device: int, device_name: str) -> ctypes.Array[SpanArgs]:
    geometry = size.geometry
    layer_bytes = size.num_rows * _ELEMENT_SIZE
    pages = host_pool_view(geometry, SlotKind.PAGE, base=host, num_slots=size.num_pages)
    found = [
        span_args(
            span,
            LayerView(
                address=device + span.layer * layer_bytes,
                num_rows=size.num_rows,
                row_stride=_ELEMENT_SIZE,
                block_rows=size.num_rows,
                block_stride=layer_bytes,
                num_pieces=1,
                piece_size=_ELEMENT_SIZE,
                piece_stride=_ELEMENT_SIZE,
                device=device_name,
                name=f"layer {span.layer} of a trial",
            ),
            pages.view(span.plane.name, span.layer),
            run_rows=1,
            digest_address=host + size.slots_bytes + 8 * span.index,
            digest_stride=8 * size.num_layers,
            rows_table=0,
        )
        for span in geometry.spans(SlotKind.PAGE)
    ]
    return (SpanArgs * len(found))(*found)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
