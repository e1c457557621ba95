"""Planes that share a device's memory must not be loaded onto the same bytes by one transfer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView, PoolView
    from kvferry.transfer.plan import TransferPlan

__all__ = ["check_apart"]


def check_apart(plan: TransferPlan, device: PoolView) -> None:
    """Raises PlanError where rows of two planes that `plan` writes share a byte on the device."""
    layers: dict[str, list[LayerView]] = {}
    for span in plan.spans:
        layers.setdefault(span.plane.name, []).append(device.view(span.plane.name, span.layer))
    for one, other in itertools.combinations(layers, 2):
        rows, other_rows = plan.rows_on_host(one), plan.rows_on_host(other)
        # Layers usually share in one pattern: the same distance, the same strides. One look each.
        seen = set()
        for view, other_view in itertools.product(layers[one], layers[other]):
            if view.end <= other_view.address or other_view.end <= view.address:
                continue
            pattern = (other_view.address - view.address, _shape(view), _shape(other_view))
            if pattern not in seen:
                seen.add(pattern)
                row = _first_shared(view, rows.ravel(), other_view, other_rows.ravel())
                if row is not None:
                    raise PlanError(
                        f"planes {one!r} and {other!r} share memory, and both would be loaded onto "
                        f"it at row {row} of {one!r}; give them different device slots, or load "
                        f"them in transfers of their own"
                    )


def _shape(view: LayerView) -> tuple[int, ...]:
    return (view.row_stride, view.block_rows, view.block_stride, view.element_extent)


def _first_shared(
    view: LayerView,
    rows: NDArray[np.int64],
    other: LayerView,
    other_rows: NDArray[np.int64],
) -> int | None:
    """A row whose element reaches into an element of the other plane, gaps included."""
    begins = _begins(view, rows)
    order = np.argsort(begins)
    begins, rows = begins[order], rows[order]
    other_begins = np.sort(_begins(other, other_rows))
    # The last element of the other plane that begins before this one ends.
    last = np.searchsorted(other_begins, begins + view.element_extent) - 1
    reached = np.flatnonzero(
        (last >= 0) & (other_begins[np.maximum(last, 0)] + other.element_extent > begins)
    )
    return int(rows[reached].min()) if reached.size else None


def _begins(view: LayerView, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    blocks, within = np.divmod(rows, view.block_rows)
    begins: NDArray[np.int64] = blocks * view.block_stride + within * view.row_stride
    begins += view.address
    return begins
