"""Which GPU path carries one span between two pools: the resolver, asked about real views."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import PlanError
from kvferry.kernels.copy_config import CopyDecision, CopyPath, resolve_copy
from kvferry.kernels.transfer_args import MAX_SPAN_BYTES, span_runs

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvferry.geometry import LayerView, Span

__all__ = ["decide_span", "no_kernel", "refused_paths"]


def refused_paths(
    num_bytes: int, *, disabled: Collection[CopyPath] = (), verify: bool = True, num_pieces: int = 1
) -> dict[CopyPath, str]:
    """Paths that may not carry a span whatever its alignment, and why: for `resolve_copy`.

    Args:
        num_bytes: Of the span.
        disabled: Paths that are switched off.
        verify: Whether digests are made and checked.
        num_pieces: Pieces that an element lies in, on the side where they are more.
    """
    refused = dict.fromkeys(disabled, "switched off by KVFERRY_DISABLE_PATHS")
    if num_bytes > MAX_SPAN_BYTES:
        too_long = (
            f"spans of {num_bytes:,} bytes are longer than the {MAX_SPAN_BYTES:,} that kernels "
            f"take at once; choose a smaller page_size"
        )
        return {path: refused.get(path, too_long) for path in CopyPath}
    if num_pieces > 1:
        refused.setdefault(
            CopyPath.GROUPED, f"takes an element in one piece, and here it lies in {num_pieces}"
        )
    if verify and CopyPath.REALIGN in disabled:
        refused.setdefault(
            CopyPath.GROUPED, "its digests are made by realign, which is switched off"
        )
    return refused


def no_kernel(span: Span, decision: CopyDecision) -> PlanError:
    """The error for a span that no kernel may carry."""
    return PlanError(
        f"plane {span.plane.name!r}, layer {span.layer} cannot move as asked: {decision.reason}"
    )


def decide_span(
    span: Span,
    device: LayerView,
    host: LayerView,
    *,
    run_rows: int,
    path: CopyPath | None = None,
    unroll: int | None = None,
    disabled: Collection[CopyPath] = (),
    verify: bool = True,
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
        verify: Whether digests are made and checked.
    """
    runs = span_runs(device, host, rows_per_page=span.rows, run_rows=run_rows)
    return resolve_copy(
        span.plane.element_size,
        rows=runs.rows,
        unroll=unroll,
        path=path,
        source_alignment=runs.device_alignment,
        destination_alignment=runs.host_alignment,
        refused=refused_paths(
            span.num_bytes,
            disabled=disabled,
            verify=verify,
            num_pieces=max(device.num_pieces, host.num_pieces),
        ),
    )
