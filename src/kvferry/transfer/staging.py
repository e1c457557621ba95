"""How a plan is laid out in staging: groups of layers, bands of a page slot, pieces, runs of slots.

A *band* is what neighbouring spans fill of a page slot: contiguous bytes. A *group* is some model
layers: a few bands, side by side in staging, page after page. A *piece* is a group of some
neighbouring pages of the plan: what is copied and laid out at once. A *run* is neighbouring pages
of the plan in neighbouring slots: one strided copy a band.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.geometry import LayerView

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import Span

__all__ = [
    "MAX_PARTS",
    "PARTS_WORTH_A_CALL",
    "SHORT_PIECE_BYTES",
    "Band",
    "Group",
    "LayerGroups",
    "Piece",
    "Place",
    "Run",
    "cut_copy",
    "piece_capacity",
    "pieces_of",
    "place_of",
    "run_table",
    "runs_of",
    "wants_one_call",
]

_BAND_ALIGNMENT = 256
# The copy engine's limit on the bytes from one row to the next: CU_DEVICE_ATTRIBUTE_MAX_PITCH.
_MAX_PITCH = (1 << 31) - 1
PARTS_WORTH_A_CALL = 60
"""A call of the copy engine may have so many parts before several calls are better."""
MAX_PARTS = 1 << 14
"""A call has at most so many parts: compiled code has room for no more."""
SHORT_PIECE_BYTES = 4 << 20
"""The shortest last piece of a load and first of a store: its relayout is beside no copy."""

# Kernels look at no more than whether there are several.
_VIEWED_PAGES = 2


class Place(NamedTuple):
    """Where a span lies in a host pool: in slot s at ``address + s · pitch``, in one piece."""

    address: int
    pitch: int


class Band(NamedTuple):
    """Contiguous bytes of a page slot, and where they begin in a page of staging."""

    place: Place
    width: int
    in_staging: int


@dataclasses.dataclass(frozen=True)
class Group:
    """Some model layers with all their spans."""

    layers: tuple[int, ...]
    spans: tuple[Span, ...]
    bands: tuple[Band, ...]
    offsets: tuple[int, ...]
    """Where each of `spans` begins in a page of staging."""

    pitch: int
    """Bytes from one page of staging to the next."""

    @functools.cached_property
    def width(self) -> int:
        """The bytes of a page that cross the link."""
        return sum(band.width for band in self.bands)

    def views(self) -> Iterator[LayerView]:
        """The rows of each of `spans` in staging that begins at address 0, as far as need be."""
        for span, offset in zip(self.spans, self.offsets, strict=True):
            size = span.plane.element_size
            yield LayerView(
                address=offset,
                num_rows=_VIEWED_PAGES * span.rows,
                row_stride=size,
                block_rows=span.rows,
                block_stride=self.pitch,
                num_pieces=1,
                piece_size=size,
                piece_stride=size,
                name="staging",
            )


class Piece(NamedTuple):
    """Pages ``[first_page, first_page + num_pages)`` of the plan, one group of layers."""

    group: int
    first_page: int
    num_pages: int
    ends_group: bool


class Run(NamedTuple):
    """Pages of the plan from `first_page` on, in neighbouring slots from `first_slot` on."""

    first_page: int
    first_slot: int
    num_pages: int


def piece_capacity(staging_bytes: int) -> int:
    """Bytes that one piece may take of a direction's staging: one is copied, one is laid out."""
    return staging_bytes // 2


def place_of(view: LayerView, rows_per_page: int) -> Place | None:
    """Where the pages of `view` lie, `rows_per_page` rows each; None: not evenly, or in pieces."""
    # A row that is a page needs no neighbour: it is in one piece wherever the next one is.
    if view.num_pieces > 1 or (rows_per_page > 1 and not view.rows_are_contiguous):
        return None
    page_bytes = rows_per_page * view.piece_size
    if view.block_rows == rows_per_page:
        pitch = max(view.block_stride, page_bytes)
    elif view.num_blocks == 1 or view.block_stride == view.block_rows * view.row_stride:
        pitch = rows_per_page * view.row_stride
    else:
        return None
    return Place(view.address, pitch) if page_bytes <= pitch <= _MAX_PITCH else None


class LayerGroups:
    """Some spans in groups of neighbouring model layers; each is made once, whoever wants it.

    Args:
        spans: Of a plan.
        places: Of each span, by its index.
        with_gaps: Let a band go over the padding between layers of a plane. Only where the host is
            read: what lies between its spans is not ours to write.
    """

    def __init__(
        self, spans: Sequence[Span], places: Mapping[int, Place], *, with_gaps: bool
    ) -> None:
        self._places = places
        self._with_gaps = with_gaps
        self._by_layer: dict[int, list[Span]] = {}
        for span in spans:
            self._by_layer.setdefault(span.model_layer, []).append(span)
        self._layers = sorted(self._by_layer)
        self._made: dict[tuple[int, int], Group] = {}

    def of(self, sizes: Iterable[int]) -> tuple[Group, ...]:
        """Of so many layers each, in the order of model layers; the sum is their number."""
        groups, first = [], 0
        for size in sizes:
            group = self._made.get((first, size))
            if group is None:
                members = self._layers[first : first + size]
                group = _group(members, self._by_layer, self._places, with_gaps=self._with_gaps)
                self._made[first, size] = group
            groups.append(group)
            first += size
        return tuple(groups)


def _group(
    layers: Sequence[int],
    by_layer: Mapping[int, list[Span]],
    places: Mapping[int, Place],
    *,
    with_gaps: bool,
) -> Group:
    spans = sorted(
        (span for layer in layers for span in by_layer[layer]),
        key=lambda span: places[span.index].address,
    )
    bands: list[Band] = []
    offsets: list[int] = []
    before: Span | None = None
    end = 0
    for span in spans:
        place = places[span.index]
        last = bands[-1] if bands else None
        joined = (
            last is not None
            and before is not None
            and place.pitch == last.place.pitch
            and place.address + span.num_bytes - last.place.address <= place.pitch
            and (
                place.address == last.place.address + last.width
                or (
                    with_gaps
                    and (before.plane_index, before.layer + 1) == (span.plane_index, span.layer)
                    and place.address - last.place.address - last.width < _BAND_ALIGNMENT
                )
            )
        )
        if joined and last is not None:
            width = place.address + span.num_bytes - last.place.address
            bands[-1] = last._replace(width=width)
        else:
            bands.append(Band(place, span.num_bytes, _up(end)))
        offsets.append(bands[-1].in_staging + place.address - bands[-1].place.address)
        end = bands[-1].in_staging + bands[-1].width
        before = span
    return Group(tuple(layers), tuple(spans), tuple(bands), tuple(offsets), _up(end))


def _up(value: int) -> int:
    return -(-value // _BAND_ALIGNMENT) * _BAND_ALIGNMENT


def pieces_of(
    groups: Sequence[Group],
    num_pages: int,
    *,
    capacity: int,
    smallest: int,
    first_is_short: bool,
) -> Iterator[Piece]:
    """Every group in pieces of at most `capacity` bytes, in order.

    What nothing runs beside is short: in a load the relayout of the last piece, in a store that of
    the first. So the pieces there halve down to about `smallest` bytes, or grow from it.

    Args:
        groups: Each with a `Group.pitch` of at most `capacity`.
        num_pages: Of the plan.
        capacity: Bytes of staging that a piece may take.
        smallest: Bytes.
        first_is_short: In a store; else the last is.
    """
    for index, group in enumerate(groups):
        most = max(1, capacity // group.pitch)
        least = max(1, smallest // group.pitch)
        counts = [most] * (num_pages // most)
        if num_pages % most:
            counts.append(num_pages % most)
        if first_is_short and index == 0:
            counts = _halved(num_pages, most, least)[::-1]
        elif not first_is_short and index == len(groups) - 1:
            counts = _halved(num_pages, most, least)
        first = 0
        for count in counts:
            yield Piece(index, first, count, first + count == num_pages)
            first += count


def _halved(num_pages: int, most: int, least: int) -> list[int]:
    """`num_pages` in pieces of at most `most`, of which each is at most half of what is left."""
    counts = []
    while num_pages:
        count = min(most, max(least, num_pages // 2), num_pages)
        counts.append(count)
        num_pages -= count
    return counts


def cut_copy(
    host: int, pitch: int, width: int, rows: int, end_of_chunk: Callable[[int], int]
) -> Iterator[tuple[int, int, int, int]]:
    """A strided copy in parts that stay inside one registration of pinned memory each.

    Args:
        host: Where the first row begins.
        pitch: From one row to the next.
        width: Of a row.
        rows: How many.
        end_of_chunk: Where the registration of an address ends.

    Yields:
        First row, rows, offset in a row, and width of each part.
    """
    row = 0
    while row < rows:
        at = host + row * pitch
        room = end_of_chunk(at) - at
        if room >= width:
            count = min(rows - row, (room - width) // pitch + 1)
            yield row, count, 0, width
            row += count
            continue
        offset = 0
        while offset < width:
            part = min(width - offset, end_of_chunk(at + offset) - at - offset)
            yield row, 1, offset, part
            offset += part
        row += 1


def wants_one_call(num_calls: int, num_parts: int) -> bool:
    """Whether the `num_parts` bands of a piece's pages had better go as parts of one call than in
    `num_calls` calls, each for a run of pages.

    A call pauses the copy engine for 3 us; parts of one call do not, but each costs the CPU half a
    microsecond, which counts a tenth.
    """
    return num_calls > 1 and num_calls * PARTS_WORTH_A_CALL > num_parts


def run_table(host_slots: NDArray[np.int64]) -> NDArray[np.int64]:
    """The runs of a plan's host slots, in the plan's order: the fields of a `Run` each.

    Shapes: slots ``[N]``, runs ``[runs, 3]``, side by side in memory.
    """
    if host_slots.size < 2:  # of which there are many, and numpy costs by the call
        return np.array([(0, slot, 1) for slot in host_slots.tolist()], np.int64).reshape(-1, 3)
    begins = np.flatnonzero(host_slots[1:] - host_slots[:-1] != 1) + 1
    table = np.empty((begins.size + 1, 3), np.int64)
    table[0, 0] = 0
    table[1:, 0] = begins
    table[:, 1] = host_slots[table[:, 0]]
    table[:-1, 2] = table[1:, 0] - table[:-1, 0]
    table[-1, 2] = host_slots.size - table[-1, 0]
    return table


def runs_of(table: NDArray[np.int64]) -> list[Run]:
    """The rows of a `run_table`."""
    return [Run(*row) for row in table.tolist()]
