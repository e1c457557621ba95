"""What a transfer moves, worked out and checked before a byte moves.

A plan pairs page slots on the host with rows on the device and says which planes and layers go
which way. It is pure bookkeeping: no memory, no tensor library, and the same plan for every mover.
Letters: N pages in the plan, R rows a page of a plane.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, Plane, Span
from kvferry.kernels import page_seed
from kvferry.transfer.indices import (
    DeviceRows,
    check_unique,
    host_indices,
    rows_of_pages,
    run_length,
)
from kvferry.transfer.staging import Run, run_table, runs_of
from kvferry.types import Direction, SlotKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TransferPlan"]

_Member = TypeVar("_Member", bound=enum.StrEnum)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TransferPlan:
    """N pages between host slots and device rows. Build it with `load` or `store`."""

    direction: Direction
    geometry: Geometry
    kind: SlotKind
    host_slots: NDArray[np.int64]
    """Shape: ``[N]``. Page slots, each at most once."""

    device_rows: Mapping[str, NDArray[np.int64] | DeviceRows]
    """By plane: shape ``[N, R]``, the device row of each row of each page."""

    spans: tuple[Span, ...]
    """What moves of every page, in the order it moves: by model layer, then plane."""

    page_seeds: NDArray[np.uint64]
    """Shape: ``[N]``. The seed of each page's digests; 0 where no key was given."""

    _device_runs: dict[str, int] = dataclasses.field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return (
            f"TransferPlan({self.direction.value}, {self.kind.value} slots: {self.num_pages}, "
            f"spans of each: {len(self.spans)}, bytes: {self.num_bytes})"
        )

    @property
    def num_pages(self) -> int:
        """N."""
        return int(self.host_slots.shape[0])

    def rows_on_host(self, plane: str) -> NDArray[np.int64]:
        """The device rows of `plane`, ``[N, R]``; waits for the device where they are there."""
        rows = self.device_rows[plane]
        return rows.to_host() if isinstance(rows, DeviceRows) else rows

    def device_run(self, plane: str) -> int:
        """How many rows of `plane` surely lie side by side on the device, and begin on a multiple.

        With g the result, rows ``i·g`` to ``(i + 1)·g - 1`` of each page are consecutive device
        rows, and the first of them is a multiple of g. Costs a pass over the rows when first asked.
        """
        found = self._device_runs.get(plane)
        if found is None:
            rows = self.device_rows[plane]
            found = rows.run if isinstance(rows, DeviceRows) else run_length(rows)
            self._device_runs[plane] = found
        return found

    def part(
        self,
        pages: NDArray[np.int64],
        spans: tuple[Span, ...],
        *,
        host_slots: NDArray[np.int64] | None = None,
        device_rows: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> TransferPlan:
        """The same transfer of some pages and spans, in the order that they are given in.

        Args:
            pages: Shape ``[n]``. Positions in this plan, each at most once.
            spans: Some of `spans`.
            host_slots: Other slots for those pages, shape ``[n]``; None: this plan's.
            device_rows: Other rows for them, by plane, shape ``[n, R]``; None: this plan's, which
                must be in host memory.
        """
        names = dict.fromkeys(span.plane.name for span in spans)
        if device_rows is None:
            device_rows = {name: self.rows_on_host(name)[pages] for name in names}
        return dataclasses.replace(
            self,
            host_slots=self.host_slots[pages] if host_slots is None else host_slots,
            device_rows={name: device_rows[name] for name in names},
            spans=spans,
            page_seeds=self.page_seeds[pages],
            _device_runs={},
        )

    @functools.cached_property
    def run_table(self) -> NDArray[np.int64]:
        """Pages in neighbouring host slots, in the order of the plan; see `run_table`."""
        return run_table(self.host_slots)

    @property
    def host_runs(self) -> list[Run]:
        """The rows of `run_table`."""
        return runs_of(self.run_table)

    @property
    def num_bytes(self) -> int:
        """The bytes of KV that move."""
        return self.num_pages * sum(span.num_bytes for span in self.spans)

    @functools.cached_property
    def model_layers(self) -> tuple[int, ...]:
        """The model layers that the plan touches, in the order they arrive."""
        if self.spans is self.geometry.spans_by_layer(self.kind):
            return self.geometry.model_layers(self.kind)
        return tuple(dict.fromkeys(span.model_layer for span in self.spans))

    @functools.cached_property
    def spans_key(self) -> tuple[object, ...]:
        """What tells `spans` from others of this geometry."""
        if self.spans is self.geometry.spans_by_layer(self.kind):
            return (self.kind,)
        return tuple(span.index for span in self.spans)

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
        device_run: int = 1,
    ) -> TransferPlan:
        """Check the indices of a transfer and put them in order.

        Indices may be lists, numpy arrays or CPU tensors of any integer type. Those of the device
        may also be int32 or int64 tensors on it: then only the kernels see them, an index out of
        range leaves out its element (a staged store brings zeros for it) and makes its page bad,
        and duplicates are the caller's care.

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
            device_run: For device slots on the device, a promise: from every multiple of it in a
                page, so many rows are neighbours, the first on a multiple. An engine's own page
                size. Slots in host memory are looked at instead.

        Raises:
            PlanError: Before anything moves: wrong shapes, lengths, types, negative indices, a
                destination named twice, an unknown plane or layer, or a plane without slots.
        """
        direction = _member(Direction, "direction", direction)
        kind = _member(SlotKind, "kind", kind)
        slots = host_indices("host_slots", host_slots)
        if slots.ndim != 1:
            raise PlanError(f"host_slots must have one dimension, not shape {slots.shape}")
        if direction is Direction.STORE:
            check_unique("host_slots", slots)
        spans = _select_spans(geometry, kind, planes, layers)
        moved = {span.plane.name: span.plane for span in spans}
        if not isinstance(device_run, int) or isinstance(device_run, bool) or device_run < 1:
            raise PlanError(f"device_run must be a positive whole number, not {device_run!r}")
        rows = _rows_by_plane(
            geometry, moved, device_slots, plane_slots or {}, len(slots), device_run
        )
        if direction is Direction.LOAD:
            for name, of_plane in rows.items():
                if not isinstance(of_plane, DeviceRows):
                    check_unique(f"device slots of plane {name!r}", of_plane.ravel())
        return cls(
            direction=direction,
            geometry=geometry,
            kind=kind,
            host_slots=slots,
            device_rows=rows,
            spans=spans,
            page_seeds=_seeds(page_keys, len(slots)),
        )


def _member(kind: type[_Member], what: str, given: Any) -> _Member:
    """`given` as a member of `kind`; its plain value will do, as in a plan read from JSON."""
    try:
        return kind(given)
    except ValueError as bad:
        known = ", ".join(str(member) for member in kind)
        raise PlanError(f"{what} must be one of {known}, not {given!r}") from bad


def _select_spans(
    geometry: Geometry,
    kind: SlotKind,
    planes: Iterable[str] | None,
    layers: Iterable[int] | None,
) -> tuple[Span, ...]:
    spans = geometry.spans(kind)
    if not spans:
        raise PlanError(f"this geometry keeps nothing in {kind.value} slots; use the other kind")
    if planes is None and layers is None:
        return geometry.spans_by_layer(kind)
    wanted_planes = {span.plane.name for span in spans}
    if planes is not None:
        asked = [planes] if isinstance(planes, str) else _listed("planes", planes)
        unknown = sorted(set(asked) - wanted_planes)
        if unknown or not asked:
            raise PlanError(
                f"planes {unknown or asked} are not in {kind.value} slots; there are: "
                f"{', '.join(sorted(wanted_planes))}"
            )
        wanted_planes = set(asked)
    spans = tuple(span for span in spans if span.plane.name in wanted_planes)
    if layers is not None:
        asked_layers = set(_listed("layers", layers))
        unknown_layers = sorted(asked_layers - {span.model_layer for span in spans})
        if unknown_layers or not asked_layers:
            raise PlanError(
                f"model layers {unknown_layers} have no rows in planes "
                f"{', '.join(sorted(wanted_planes))}; ask for layers these planes have"
            )
        spans = tuple(span for span in spans if span.model_layer in asked_layers)
    return tuple(sorted(spans, key=lambda span: (span.model_layer, span.plane_index)))


def _listed(what: str, given: Any) -> list[Any]:
    if not isinstance(given, Iterable):
        raise PlanError(f"{what} must be a list, not {given!r}")
    return list(given)


def _rows_by_plane(
    geometry: Geometry,
    moved: Mapping[str, Plane],
    device_slots: Any,
    plane_slots: Mapping[str, Any],
    num_pages: int,
    device_run: int,
) -> dict[str, NDArray[np.int64] | DeviceRows]:
    unknown = sorted(set(plane_slots) - set(moved))
    if unknown:
        raise PlanError(f"plane_slots names {unknown}, which this transfer does not move")
    shared = None
    rows: dict[str, NDArray[np.int64] | DeviceRows] = {}
    for name, plane in moved.items():
        per_page = geometry.rows_per_page(plane)
        if name in plane_slots:
            what = f"plane_slots[{name!r}]"
            rows[name] = rows_of_pages(what, plane_slots[name], num_pages, per_page, device_run)
        elif plane.rows_per_page is None and device_slots is not None:
            if shared is None:
                shared = rows_of_pages(
                    "device_slots", device_slots, num_pages, per_page, device_run
                )
            rows[name] = shared
        else:
            where = "device_slots" if plane.rows_per_page is None else f"plane_slots[{name!r}]"
            raise PlanError(
                f"plane {name!r} keeps {per_page} rows a page; say where they lie on the device "
                f"with {where}, shape [{num_pages}, {per_page}]"
            )
    return rows


def _seeds(page_keys: Sequence[bytes] | None, num_pages: int) -> NDArray[np.uint64]:
    if page_keys is None:
        return np.zeros(num_pages, dtype=np.uint64)
    if not isinstance(page_keys, Sequence) or isinstance(page_keys, bytes | str):
        raise PlanError(f"page_keys must be a list of bytes, not {page_keys!r}")
    if len(page_keys) != num_pages:
        raise PlanError(f"{len(page_keys)} page keys for {num_pages} host slots; give one a page")
    wrong = next((key for key in page_keys if not isinstance(key, bytes)), None)
    if wrong is not None:
        raise PlanError(f"a page key must be bytes, not {type(wrong).__name__}")
    return np.array([page_seed(key) for key in page_keys], dtype=np.uint64)
