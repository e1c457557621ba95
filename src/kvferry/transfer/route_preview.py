"""The route of a transfer that nobody submits: what an engine would do, worked out without a GPU.

Pools are imagined as dense, and begin on every alignment there is. An engine's own may be padded or
misaligned, which can change the kernels; where the bytes of a page lie on the host cannot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.errors import PlanError
from kvferry.geometry import LayerView, layer_order
from kvferry.kernels import decide_span, no_kernel, pages_per_launch, span_args
from kvferry.transfer.movers import DEFAULT_STAGING_BYTES
from kvferry.transfer.paths import check_gpu_paths, disabled_gpu_paths, staging_is_disabled
from kvferry.transfer.route import Route, plan_route
from kvferry.transfer.router import host_places, planned_count, refuse_little_staging
from kvferry.transfer.staging import (
    MAX_PARTS,
    SHORT_PIECE_BYTES,
    Place,
    piece_capacity,
    pieces_of,
    wants_one_call,
)
from kvferry.types import Direction, Layout, Mover, SlotKind

if TYPE_CHECKING:
    from kvferry.geometry import Geometry, Span
    from kvferry.kernels import CopyPath
    from kvferry.transfer.profile import DeviceProfile

__all__ = ["KernelUse", "RoutePreview", "preview_route"]

# Of the imagined pools. Layers of a layer_first pool then begin on 16 bytes, whatever their size.
_SLOTS = 16


class KernelUse(NamedTuple):
    """Spans of one plane that the same kernel carries for the same reason."""

    plane: str
    layers: tuple[int, ...]
    """Model layers."""

    kernel: str
    """``flat`` or ``realign``."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoutePreview:
    """What an engine would do with a transfer."""

    direction: Direction
    num_pages: int
    num_runs: int
    num_bytes: int
    """Of KV."""

    planned_pages: int
    """Routes are planned for powers of two: `num_pages` counts as so many."""

    planned_runs: int
    route: Route
    """As planned, so its ``seconds`` are those of `planned_pages` in `planned_runs`."""

    seconds: Mapping[str, float]
    """What each way would take for all pages."""

    num_pieces: int
    """Of staging, one kernel step each; 0 where the mover is direct."""

    num_copy_calls: int
    """What the copy engine is told, where copies of many pieces are to be had."""

    num_batches: int
    """How many of these calls have many pieces: at most `MAX_PARTS` each."""

    kernels: tuple[KernelUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "direction": self.direction.value,
            "num_pages": self.num_pages,
            "num_runs": self.num_runs,
            "num_bytes": self.num_bytes,
            "planned_for": {"num_pages": self.planned_pages, "num_runs": self.planned_runs},
            **self.route.to_dict(),
            "estimated_seconds": dict(self.seconds),
            "pieces": self.num_pieces,
            "copy_calls": self.num_copy_calls,
            "copy_calls_of_many_pieces": self.num_batches,
            "kernels": [{**one._asdict(), "layers": list(one.layers)} for one in self.kernels],
        }


def preview_route(
    geometry: Geometry,
    direction: Direction,
    *,
    num_pages: int,
    profile: DeviceProfile,
    host_run: int | None = None,
    device_run: int = 1,
    host_layout: Layout = Layout.PAGE_MAJOR,
    staging_bytes: int | None = None,
    mover: Mover | None = None,
) -> RoutePreview:
    """How an engine would carry `num_pages` pages of all planes that follow the tokens.

    It looks at KVFERRY_DISABLE_PATHS, as an engine does, and at no GPU. What an engine refuses is
    refused here.

    Args:
        geometry: The planes.
        direction: LOAD or STORE.
        num_pages: N, from 1.
        profile: What the device can do.
        host_run: Pages that keep neighbouring host slots, from 1; None: all of them.
        device_run: Tokens that keep neighbouring device slots.
        host_layout: Of the host pool. PAGE_MAJOR is kvferry's own.
        staging_bytes: Of a direction; None: 64 MiB; 0: nothing is staged.
        mover: Take this one; None: the faster.

    Raises:
        PlanError: A count is below 1, no plane follows the tokens, `mover` is STAGED and this
            cannot be staged, no kernel takes an element, or these are more pages than kernels
            take at once.
        ConfigError: KVFERRY_DISABLE_PATHS names what is no path, or all that could serve a GPU; or
            `staging_bytes` is given and too little for a page of one layer.
    """
    counts = {"num_pages": num_pages, "host_run": host_run, "device_run": device_run}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise PlanError(f"{name} must be 1 or more, not {count:,}")
    check_gpu_paths(disabled_gpu_paths())
    is_given = staging_bytes is not None
    staging_bytes = DEFAULT_STAGING_BYTES if staging_bytes is None else staging_bytes
    if staging_bytes < 0:
        raise PlanError(f"staging_bytes must be 0 or more, not {staging_bytes:,}")
    spans = geometry.spans_by_layer(SlotKind.PAGE)
    if not spans:
        raise PlanError("this geometry keeps nothing in page slots: no plane follows the tokens")
    views = _host_views(geometry, host_layout)
    capacity = piece_capacity(staging_bytes)
    places: dict[int, Place] = {}
    if staging_is_disabled():
        why_not = "switched off by KVFERRY_DISABLE_PATHS"
    elif not staging_bytes:
        why_not = "staging_bytes is 0"
    else:
        places, why_not = host_places(spans, lambda span: views[span.index], capacity)
        if is_given and mover is None:
            refuse_little_staging(staging_bytes, why_not)

    def route_of(pages: int, runs: int) -> Route:
        return plan_route(
            spans,
            num_pages=pages,
            num_runs=runs,
            direction=direction,
            profile=profile,
            places=None if why_not else places,
            capacity=capacity,
            why_not_staged=why_not,
            mover=mover,
        )

    run = num_pages if host_run is None else min(host_run, num_pages)
    num_runs = -(-num_pages // run)
    planned = planned_count(num_pages), planned_count(num_runs)
    route = route_of(*planned)
    asked = num_pages, num_runs
    exact = route if asked == planned else route_of(*asked)
    kernels = _kernels(route, views, spans, num_pages, device_run)
    copies = list(_copies(route, num_pages, run, capacity, direction))
    return RoutePreview(
        direction=direction,
        num_pages=num_pages,
        num_runs=num_runs,
        num_bytes=num_pages * sum(span.num_bytes for span in spans),
        planned_pages=planned[0],
        planned_runs=planned[1],
        route=route,
        seconds=exact.seconds,
        num_pieces=len(copies),
        num_copy_calls=sum(calls for calls, _ in copies),
        num_batches=sum(calls for calls, many in copies if many),
        kernels=kernels,
    )


def _host_views(geometry: Geometry, layout: Layout) -> dict[int, LayerView]:
    """Where each span's rows lie in a host pool of `_SLOTS` pages at address 0."""
    views: dict[int, LayerView] = {}
    base, end = 0, 0
    before: str | None = None
    for span in geometry.spans(SlotKind.PAGE):
        plane, size = span.plane, span.plane.element_size
        if layout is Layout.PAGE_MAJOR:
            # kvferry's own: all planes of a page in one slot.
            address, row_stride = span.offset, size
            block_rows, block_stride = span.rows, geometry.slot_bytes(SlotKind.PAGE)
        else:
            order = layer_order(
                layout, plane, span.layer, rows_per_page=span.rows, num_pages=_SLOTS
            )
            if before not in (None, plane.name):
                base += end
            end, before = order.pool_bytes, plane.name
            address, row_stride = base + order.offset, order.row_stride
            block_rows, block_stride = order.block_rows, order.block_stride
        views[span.index] = LayerView(
            address=address,
            num_rows=span.rows * _SLOTS,
            row_stride=row_stride,
            block_rows=block_rows,
            block_stride=block_stride,
            num_pieces=1,
            piece_size=size,
            piece_stride=size,
            name=f"plane {plane.name!r}, layer {span.layer} ({layout.value})",
        )
    return views


def _copies(
    route: Route, num_pages: int, run: int, capacity: int, direction: Direction
) -> Iterator[tuple[int, bool]]:
    """Of each piece: how many copy calls, and whether those are of many. As `HostCopies`."""
    if route.mover is Mover.DIRECT:
        return
    for piece in pieces_of(
        route.groups,
        num_pages,
        capacity=capacity,
        smallest=SHORT_PIECE_BYTES,
        first_is_short=direction is Direction.STORE,
    ):
        group = route.groups[piece.group]
        runs = (piece.first_page + piece.num_pages - 1) // run - piece.first_page // run + 1
        calls = runs * len(group.bands)
        parts = piece.num_pages * len(group.bands)
        many = run < num_pages and wants_one_call(calls, parts)
        yield (-(-parts // MAX_PARTS), True) if many else (calls, False)


def _kernels(
    route: Route,
    views: Mapping[int, LayerView],
    spans: Sequence[Span],
    num_pages: int,
    device_run: int,
) -> tuple[KernelUse, ...]:
    if route.mover is Mover.STAGED:
        sides = [
            one for group in route.groups for one in zip(group.spans, group.views(), strict=True)
        ]
    else:
        sides = [(span, views[span.index]) for span in spans]
    disabled = disabled_gpu_paths()
    layers: dict[tuple[int, CopyPath, str], list[int]] = {}
    all_args = []
    for span, host in sides:
        device = _device_view(span)
        run_rows = math.gcd(device_run, span.rows)
        decision = decide_span(span, device, host, run_rows=run_rows, disabled=disabled)
        if decision.chosen is None:
            raise no_kernel(span, decision)
        key = (span.plane_index, decision.chosen, decision.reason)
        layers.setdefault(key, []).append(span.model_layer)
        all_args.append(
            span_args(
                span,
                device,
                host,
                run_rows=run_rows,
                digest_address=0,
                digest_stride=8,
                rows_table=0,
            )
        )
    most = pages_per_launch(all_args)
    if num_pages > most:
        raise PlanError(
            f"{num_pages:,} pages in one transfer; kernels take {most:,} of this geometry at once: "
            f"plan fewer tokens, and split the transfer"
        )
    names = {span.plane_index: span.plane.name for span in spans}
    return tuple(
        KernelUse(names[plane], tuple(sorted(of)), kernel, reason)
        for (plane, kernel, reason), of in sorted(layers.items(), key=lambda one: one[0][0])
    )


def _device_view(span: Span) -> LayerView:
    """A dense layer of an engine's pool."""
    size, rows = span.plane.element_size, span.rows * _SLOTS
    return LayerView(
        address=0,
        num_rows=rows,
        row_stride=size,
        block_rows=rows,
        block_stride=rows * size,
        num_pieces=1,
        piece_size=size,
        piece_stride=size,
        name=f"plane {span.plane.name!r}, layer {span.layer} (device)",
    )
