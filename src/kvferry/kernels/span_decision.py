"""Which GPU path carries one span between two pools: the resolver, asked about real views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.kernels.copy_config import CopyDecision, CopyPath, resolve_copy
from kvferry.kernels.transfer_args import span_runs

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvferry.geometry import LayerView, Span

__all__ = ["decide_span"]


def decide_span(
    span: Span,
    device: LayerView,
    host: LayerView,
    *,
    run_rows: int,
    path: CopyPath | None = None,
    unroll: int | None = None,
    disabled: Collection[CopyPath] = (),
) -> CopyDecision:
    """The one answer for check, launch and report.

    Args:
        span: Which layer of which plane.
        device: Where its rows lie on the device.
        host: Where they lie on the host.
        run_rows: The device run that is promised; see `span_runs`.
        path: The path that is asked for, or None for the best.
        unroll: As for `resolve_copy`.
        disabled: Paths that are switched off.
    """
    runs = span_runs(device, host, rows_per_page=span.rows, run_rows=run_rows)
    refused = dict.fromkeys(disabled, "switched off by KVFERRY_DISABLE_PATHS")
    pieces = max(device.num_pieces, host.num_pieces)
    if pieces > 1:
        refused.setdefault(
            CopyPath.GROUPED, f"takes an element in one piece, and here it lies in {pieces}"
        )
    return resolve_copy(
        span.plane.element_size,
        rows=runs.rows,
        unroll=unroll,
        path=path,
        source_alignment=runs.device_alignment,
        destination_alignment=runs.host_alignment,
        refused=refused,
    )
