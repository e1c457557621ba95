"""What a transfer moves, worked out and checked before a byte moves.

A plan pairs page slots on the host with rows on the device and says which planes and layers go
which way. It is pure bookkeeping: no memory, no tensor library, and the same plan for every mover.
Letters: N pages in the plan, R rows a page of a plane.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, Plane, Span
from kvferry.kernels import page_seed
from kvferry.types import Direction, SlotKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TransferPlan", "blocks_to_rows"]

_Member = TypeVar("_Member", bound=enum.StrEnum)

# 2^62 keeps every product of a row and a stride that can exist inside 64 bits far from the sign.
_MAX_INDEX = 1 << 62


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TransferPlan:
    """N pages between host slots and device rows. Build it with `load` or `store`."""

    direction: Direction
    geometry: Geometry
    kind: SlotKind
    host_slots: NDArray[np.int64]
    """Shape: ``[N]``. Page slots, each at most once."""

    device_rows: Mapping[str, NDArray[np.int64]]
    """By plane: shape ``[N, R]``, the device row of each row of each page."""

    spans: tuple[Span, ...]
    """What moves of every page, in the order it moves: by model layer, then plane."""

    page_seeds: NDArray[np.uint64]
    """Shape: ``[N]``. The seed of each page's digests; 0 where no key was given."""

    def __repr__(self) -> str:
        return (
            f"TransferPlan({self.direction.value}, {self.kind.value} slots: {self.num_pages}, "
            f"spans of each: {len(self.spans)}, bytes: {self.num_bytes})"
        )

    @property
    def num_pages(self) -> int:
        """N."""
        return int(self.host_slots.shape[0])

    @property
    def num_bytes(self) -> int:
        """The bytes of KV that move."""
        return self.num_pages * sum(span.num_bytes for span in self.spans)

    @property
    def model_layers(self) -> tuple[int, ...]:
        """The model layers that the plan touches, in the order they arrive."""
        return tuple(dict.fromkeys(span.model_layer for span in self.spans))

    @classmethod
    def load(cls, geometry: Geometry, **given: Any) -> TransferPlan:
        """A plan from the host to the device; arguments as for `build`."""
        return cls.build(geometry, Direction.LOAD, **given)

    @classmethod
    def store(cls, geometry: Geometry, **given: Any) -> TransferPlan:
        """A plan from the device to the host; arguments as for `build`."""
        return cls.build(geometry, Direction.STORE, **given)

    @classmethod
    def build(
        cls,
        geometry: Geometry,
        direction: Direction,
        *,
        host_slots: Any,
        device_slots: Any = None,
        plane_slots: Mapping[str, Any] | None = None,
        planes: Iterable[str] | None = None,
        layers: Iterable[int] | None = None,
        page_keys: Sequence[bytes] | None = None,
        kind: SlotKind = SlotKind.PAGE,
    ) -> TransferPlan:
        """Check the indices of a transfer and put them in order.

        Indices may be lists, numpy arrays or CPU tensors of any integer type.

        Args:
            geometry: The planes.
            direction: LOAD or STORE.
            host_slots: Shape ``[N]``. The host page slot of each page.
            device_slots: Shape ``[N, P]`` or ``[N·P]``. The device token slot of every token of
                every page: for planes with one row a token. See `blocks_to_rows` for block tables.
            plane_slots: For planes with another number of rows a page, by name: shape ``[N, R]``
                or ``[N·R]``. May also give a plane with one row a token slots of its own.
            planes: Which planes move; None: all of `kind`.
            layers: Which model layers move; None: all.
            page_keys: The key of each page, mixed into its digests. None: no key.
            kind: PAGE, or STATE for checkpoints of recurrent state.

        Raises:
            PlanError: Before anything moves: wrong shapes, lengths, types, negative indices, a
                destination named twice, an unknown plane or layer, or a plane without slots.
        """
        direction = _member(Direction, "direction", direction)
        kind = _member(SlotKind, "kind", kind)
        slots = _indices("host_slots", host_slots)
        if slots.ndim != 1:
            raise PlanError(f"host_slots must have one dimension, not shape {slots.shape}")
        if direction is Direction.STORE:
            _check_unique("host_slots", slots)
        spans = _select_spans(geometry, kind, planes, layers)
        moved = {span.plane.name: span.plane for span in spans}
        rows = _rows_by_plane(geometry, moved, device_slots, plane_slots or {}, len(slots))
        if direction is Direction.LOAD:
            for name, of_plane in rows.items():
                _check_unique(f"device slots of plane {name!r}", of_plane.ravel())
        return cls(
            direction=direction,
            geometry=geometry,
            kind=kind,
            host_slots=slots,
            device_rows=rows,
            spans=spans,
            page_seeds=_seeds(page_keys, len(slots)),
        )


def blocks_to_rows(block_ids: Any, *, block_size: int, page_size: int) -> NDArray[np.int64]:
    """Token slots from an engine's block table.

    Args:
        block_ids: Shape ``[blocks]``. The engine's blocks in token order; the engine keeps token i
            of block b in slot ``b·block_size + i``.
        block_size: The engine's own page size, in tokens: the device run.
        page_size: Ours, in tokens. One of the two must divide the other.

    Returns:
        Shape ``[pages, page_size]``.

    Raises:
        PlanError: Neither size divides the other, or the blocks are no whole number of pages.
    """
    for name, size in (("block_size", block_size), ("page_size", page_size)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise PlanError(f"{name} must be a positive whole number, not {size!r}")
    if block_size % page_size and page_size % block_size:
        raise PlanError(
            f"block_size {block_size} and page_size {page_size}: one must divide the other; "
            f"choose a page_size that is a multiple or a divisor of {block_size}"
        )
    blocks = _indices("block_ids", block_ids).ravel()
    if blocks.size and int(blocks.max()) >= _MAX_INDEX // block_size:
        raise PlanError(
            f"block_ids holds {int(blocks.max())}; with {block_size} tokens a block, ids lie below "
            f"{_MAX_INDEX // block_size}"
        )
    tokens = len(blocks) * block_size
    if tokens % page_size:
        raise PlanError(
            f"{len(blocks)} blocks of {block_size} tokens are no whole number of pages of "
            f"{page_size}; pass whole pages only"
        )
    slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    return slots.reshape(-1, page_size)


def _indices(what: str, given: Any) -> NDArray[np.int64]:
    """The plan's own copy: what its caller does with `given` afterwards changes nothing."""
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as refused:
        raise PlanError(
            f"{what} is no array of indices ({refused}); give lists of equal length, or a dense "
            f"array in host memory"
        ) from refused
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise PlanError(f"{what} must be whole numbers, not {array.dtype}; use int32 or int64")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= _MAX_INDEX:
        bad = low if low < 0 else high
        raise PlanError(f"{what} holds {bad}; indices lie between 0 and the size of the pool")
    indices = np.array(array, dtype=np.int64, order="C")
    indices.setflags(write=False)
    return indices


def _member(kind: type[_Member], what: str, given: Any) -> _Member:
    """`given` as a member of `kind`; its plain value will do, as in a plan read from JSON."""
    try:
        return kind(given)
    except ValueError as bad:
        known = ", ".join(str(member) for member in kind)
        raise PlanError(f"{what} must be one of {known}, not {given!r}") from bad


def _check_unique(what: str, indices: NDArray[np.int64]) -> None:
    ordered = np.sort(indices)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(
            f"{what} names {int(twice[0])} twice as a destination; every destination may be "
            f"written once in a transfer"
        )


def _select_spans(
    geometry: Geometry,
    kind: SlotKind,
    planes: Iterable[str] | None,
    layers: Iterable[int] | None,
) -> tuple[Span, ...]:
    spans = geometry.spans(kind)
    if not spans:
        raise PlanError(f"this geometry keeps nothing in {kind.value} slots; use the other kind")
    wanted_planes = {span.plane.name for span in spans}
    if planes is not None:
        asked = [planes] if isinstance(planes, str) else list(planes)
        unknown = sorted(set(asked) - wanted_planes)
        if unknown or not asked:
            raise PlanError(
                f"planes {unknown or asked} are not in {kind.value} slots; there are: "
                f"{', '.join(sorted(wanted_planes))}"
            )
        wanted_planes = set(asked)
    spans = tuple(span for span in spans if span.plane.name in wanted_planes)
    if layers is not None:
        asked_layers = set(layers)
        unknown_layers = sorted(asked_layers - {span.model_layer for span in spans})
        if unknown_layers or not asked_layers:
            raise PlanError(
                f"model layers {unknown_layers} have no rows in planes "
                f"{', '.join(sorted(wanted_planes))}; ask for layers these planes have"
            )
        spans = tuple(span for span in spans if span.model_layer in asked_layers)
    return tuple(sorted(spans, key=lambda span: (span.model_layer, span.plane_index)))


def _rows_by_plane(
    geometry: Geometry,
    moved: Mapping[str, Plane],
    device_slots: Any,
    plane_slots: Mapping[str, Any],
    num_pages: int,
) -> dict[str, NDArray[np.int64]]:
    unknown = sorted(set(plane_slots) - set(moved))
    if unknown:
        raise PlanError(f"plane_slots names {unknown}, which this transfer does not move")
    shared = None
    rows: dict[str, NDArray[np.int64]] = {}
    for name, plane in moved.items():
        per_page = geometry.rows_per_page(plane)
        if name in plane_slots:
            rows[name] = _paged(f"plane_slots[{name!r}]", plane_slots[name], num_pages, per_page)
        elif plane.rows_per_page is None and device_slots is not None:
            if shared is None:
                shared = _paged("device_slots", device_slots, num_pages, per_page)
            rows[name] = shared
        else:
            where = "device_slots" if plane.rows_per_page is None else f"plane_slots[{name!r}]"
            raise PlanError(
                f"plane {name!r} keeps {per_page} rows a page; say where they lie on the device "
                f"with {where}, shape [{num_pages}, {per_page}]"
            )
    return rows


def _paged(what: str, given: Any, num_pages: int, per_page: int) -> NDArray[np.int64]:
    indices = _indices(what, given)
    if indices.shape not in ((num_pages, per_page), (num_pages * per_page,)):
        raise PlanError(
            f"{what} has shape {indices.shape}, but {num_pages} host slots with {per_page} rows a "
            f"page need [{num_pages}, {per_page}]"
        )
    return indices.reshape(num_pages, per_page)


def _seeds(page_keys: Sequence[bytes] | None, num_pages: int) -> NDArray[np.uint64]:
    if page_keys is None:
        return np.zeros(num_pages, dtype=np.uint64)
    if len(page_keys) != num_pages:
        raise PlanError(f"{len(page_keys)} page keys for {num_pages} host slots; give one a page")
    wrong = next((key for key in page_keys if not isinstance(key, bytes)), None)
    if wrong is not None:
        raise PlanError(f"a page key must be bytes, not {type(wrong).__name__}")
    return np.array([page_seed(key) for key in page_keys], dtype=np.uint64)
