"""What a transfer kernel is told: the ctypes twin of csrc/transfer.cuh.

A structure here has the fields of its namesake there, in order; tests compare every size, offset
and type. `span_args` works out a span's from the views of both pools. Letters: E element size, R
rows a page.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.errors import PlanError
from kvferry.kernels.copy_config import alignment_of
from kvferry.kernels.digest import span_where

if TYPE_CHECKING:
    from kvferry.geometry import LayerView, Span

__all__ = [
    "MAX_ROW_TABLES",
    "MAX_SPAN_BYTES",
    "NO_FAULT",
    "DivisorArgs",
    "Fault",
    "SpanArgs",
    "SpanRuns",
    "TransferArgs",
    "ViewArgs",
    "fast_divisor",
    "fault_of",
    "pages_per_launch",
    "span_args",
    "span_runs",
]

MAX_ROW_TABLES = 16
"""Tables of device rows that one launch may use."""

MAX_SPAN_BYTES = (1 << 31) - 1
"""The longest span that kernels take: they count its bytes in 31 bits."""

NO_FAULT = (1 << 64) - 1
"""What the kernels' fault word holds while every device row was in range."""

_MAX_DIVIDEND = (1 << 31) - 1
# Kernels number the parts of a span over all pages, and spans × pages, in 31 bits.
_MAX_PARTS = (1 << 31) - 1
_FLAT_PACKAGES = (16, 8)
# What the link and the memory behind it move at once. A line of flat begins on it.
_LINE_BYTES = 128
_WARP_THREADS = 32
# A fault code has 28 bits for the row of a page, and 4 for the table.
_FAULT_ROW_BITS = 28


class DivisorArgs(ctypes.Structure):
    """`FastDivisor`: what replaces a division by `divisor`. Make it with `fast_divisor`."""

    _fields_ = (
        ("divisor", ctypes.c_uint32),
        ("multiplier", ctypes.c_uint32),
        ("shift", ctypes.c_uint32),
    )


class ViewArgs(ctypes.Structure):
    """`View`: one layer of one plane in a pool, in bytes."""

    _fields_ = (
        ("base", ctypes.c_uint64),
        ("num_rows", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("block_stride", ctypes.c_int64),
        ("piece_stride", ctypes.c_int64),
        ("run_bytes", ctypes.c_int64),
        ("block_rows", DivisorArgs),
        ("piece_size", DivisorArgs),
        ("num_blocks", ctypes.c_uint32),
        ("num_pieces", ctypes.c_uint32),
    )


class SpanArgs(ctypes.Structure):
    """`Span`: one layer of one plane, as far as it is the same in every transfer."""

    _fields_ = (
        ("device", ViewArgs),
        ("host", ViewArgs),
        ("digests", ctypes.c_uint64),
        ("digest_stride", ctypes.c_int64),
        ("where", ctypes.c_uint64),
        ("num_bytes", ctypes.c_int64),
        ("element", DivisorArgs),
        ("page_lines", DivisorArgs),
        ("run_lines", DivisorArgs),
        ("rows_per_page", ctypes.c_uint32),
        ("rows_table", ctypes.c_uint32),
        ("flat_package", ctypes.c_uint32),
        ("line_mask", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class TransferArgs(ctypes.Structure):
    """`Transfer`: one launch. Addresses are the device's, of arrays that must outlive the kernel.

    Shapes, with N = `num_pages` and S = `num_spans`: `spans` SpanArgs[first_span + S] · `rows[t]`
    int32 or int64 [N, R] · `host_slots` int64 [N], or 0 where page i is in slot i · `page_seeds`
    uint64 [N] · `sums` uint64 [S, sums_stride], zeroed before the first kernel of a transfer ·
    `bad_pages` uint8 [N], zeroed · `fault` uint64, `NO_FAULT` beforehand, `fault_of` afterwards.
    A launch over some pages of a plan has arrays that begin at its `first_page`, and all the plan's
    pages as `sums_stride`. `host_base` is added to every address on the host.
    """

    _fields_ = (
        ("spans", ctypes.c_uint64),
        ("rows", ctypes.c_uint64 * MAX_ROW_TABLES),
        ("host_slots", ctypes.c_uint64),
        ("host_base", ctypes.c_uint64),
        ("page_seeds", ctypes.c_uint64),
        ("sums", ctypes.c_uint64),
        ("bad_pages", ctypes.c_uint64),
        ("fault", ctypes.c_uint64),
        ("num_pages", ctypes.c_uint32),
        ("first_span", ctypes.c_uint32),
        ("num_spans", ctypes.c_uint32),
        ("index_bytes", ctypes.c_uint32),
        ("is_load", ctypes.c_uint32),
        ("verify", ctypes.c_uint32),
        ("items_per_span", ctypes.c_uint32),
        ("sums_stride", ctypes.c_uint32),
        ("first_page", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class Fault(NamedTuple):
    """The first device row that was out of range, in the order of the plan's pages and rows."""

    page: int
    """Position in the plan."""
    row: int
    """Which of the page's rows."""
    rows_table: int


class SpanRuns(NamedTuple):
    """How far a span's bytes lie in one piece on either side, and what divides where they begin."""

    device_bytes: int
    """From any multiple of it in the span, as many bytes are contiguous on the device."""
    host_bytes: int
    rows: int
    """Neighbouring rows that are contiguous on both sides: what `resolve_copy` asks for."""
    device_alignment: int
    """1 to 16. Divides the address of every run on the device, and the run's length."""
    host_alignment: int

    @property
    def package(self) -> int:
        """The widest package, 1 to 16 bytes, that never leaves a run and is always aligned."""
        return min(self.device_alignment, self.host_alignment)


def span_runs(device: LayerView, host: LayerView, *, rows_per_page: int, run_rows: int) -> SpanRuns:
    """What is contiguous in a span of `rows_per_page` rows.

    Args:
        device: Where the rows lie on the device.
        host: Where they lie on the host; page slot s has rows ``s·R`` to ``s·R + R - 1``.
        rows_per_page: R.
        run_rows: The device run. It promises of every transfer, with g = gcd(`run_rows`, R): rows
            ``i·g`` to ``(i + 1)·g - 1`` of each page are consecutive device rows, and the first of
            them is a multiple of g. Kernels rely on it without looking. 1 promises nothing.

    Raises:
        PlanError: `rows_per_page` or `run_rows` is not positive.
    """
    for name, value in (("rows_per_page", rows_per_page), ("run_rows", run_rows)):
        if value < 1:
            raise PlanError(f"{name} must be a positive number of rows, not {value}")
    device_rows = _rows_of_run(device, math.gcd(run_rows, rows_per_page))
    host_rows = _rows_of_run(host, rows_per_page)
    return SpanRuns(
        device_bytes=_run_bytes(device, device_rows),
        host_bytes=_run_bytes(host, host_rows),
        rows=math.gcd(device_rows, host_rows),
        device_alignment=_run_alignment(device, device_rows),
        host_alignment=_run_alignment(host, host_rows),
    )


def span_args(
    span: Span,
    device: LayerView,
    host: LayerView,
    *,
    run_rows: int,
    digest_address: int,
    digest_stride: int,
    rows_table: int,
) -> SpanArgs:
    """The arguments for `span`, which hold for every transfer between these two pools.

    Args:
        span: Which layer of which plane, and its R.
        device: Where its rows lie on the device; addresses as the device sees them.
        host: Where its rows lie on the host; addresses as the *device* sees them.
        run_rows: The device run, a promise: see `span_runs`.
        digest_address: Of the span's digest of page slot 0, as the device sees it.
        digest_stride: Bytes from there to the digest of the next slot.
        rows_table: Which of `TransferArgs.rows` has the span's device rows.

    Raises:
        PlanError: The views do not fit the span, the span is longer than `MAX_SPAN_BYTES`, the
            digests are not on 8 bytes, or there is no such table.
    """
    _check_span(span, device, host)
    if digest_address % 8 or digest_stride % 8:
        raise PlanError(
            f"digests are 64-bit words, but lie at {digest_address:#x} and {digest_stride} bytes "
            f"apart; both must be multiples of 8"
        )
    if not 0 <= rows_table < MAX_ROW_TABLES:
        raise PlanError(
            f"rows_table {rows_table}: a launch has tables 0 to {MAX_ROW_TABLES - 1}; planes with "
            f"the same device rows can share one, others need a launch of their own"
        )
    runs = span_runs(device, host, rows_per_page=span.rows, run_rows=run_rows)
    package = runs.package if runs.package in _FLAT_PACKAGES else 0
    line_mask = 0 if _begins_on_lines(host, runs.host_bytes) else _LINE_BYTES - 1
    run_lines = _lines_of_run(runs.host_bytes, package, line_mask) if package else 1
    # Kernels look at a run's first row only. Rows after the last whole run belong to none, so that
    # no run begins inside the pool and ends outside.
    device_rows = device.num_rows
    if device.rows_are_contiguous:
        device_rows -= device_rows % (runs.device_bytes // device.row_stride)
    if not device_rows:
        raise PlanError(
            f"{device.name} has {device.num_rows:,} rows, fewer than the device run of "
            f"{run_rows:,} that is promised; promise a shorter run"
        )
    return SpanArgs(
        device=_view_args(device, device_rows, runs.device_bytes),
        host=_view_args(host, host.num_rows, runs.host_bytes),
        digests=digest_address,
        digest_stride=digest_stride,
        where=span_where(plane_index=span.plane_index, layer=span.layer, num_bytes=span.num_bytes),
        num_bytes=span.num_bytes,
        element=fast_divisor(span.plane.element_size),
        page_lines=fast_divisor(span.num_bytes // runs.host_bytes * run_lines),
        run_lines=fast_divisor(run_lines),
        rows_per_page=span.rows,
        rows_table=rows_table,
        flat_package=package,
        line_mask=line_mask,
    )


def pages_per_launch(spans: Sequence[SpanArgs]) -> int:
    """The most pages of `spans` that one launch may have, by any kernel.

    More need further launches, each with its own `num_pages` and arrays that begin at its first
    page.
    """
    if not spans:
        raise PlanError("a launch needs at least one span; do not launch for none")
    # No kernel cuts a span into more parts than elements, or than words of 8 bytes.
    parts = (max(int(span.rows_per_page), -(-int(span.num_bytes) // 8)) for span in spans)
    return _MAX_PARTS // max(len(spans), *parts)


def fast_divisor(divisor: int) -> DivisorArgs:
    """What `divide` in transfer.cuh takes to divide any n below 2^31 by `divisor` exactly.

    With ``divisor`` in (2^(s), 2^(s+1)], the multiplier ⌈2^(32+s) / divisor⌉ has 32 bits, and the
    high half of n times it, shifted down by s, is the quotient: the multiplier is too large by less
    than ``divisor / 2^(32+s) ≤ 2^-31`` of the unit, so n times that does not reach the next one.
    1 is told apart by the kernel.

    Raises:
        PlanError: `divisor` is not from 1 to 2^31 - 1.
    """
    if not 1 <= divisor <= _MAX_DIVIDEND:
        raise PlanError(f"kernels divide by 1 to {_MAX_DIVIDEND:,}, not by {divisor:,}")
    if divisor == 1:
        return DivisorArgs(1, 0, 0)
    shift = (divisor - 1).bit_length() - 1
    return DivisorArgs(divisor, -(-(1 << (32 + shift)) // divisor), shift)


def fault_of(code: int) -> Fault | None:
    """What the kernels' fault word says; None where no device row was out of range."""
    if code == NO_FAULT:
        return None
    row = code >> 4 & (1 << _FAULT_ROW_BITS) - 1
    return Fault(page=code >> 32, row=row, rows_table=code & 15)


def _rows_of_run(view: LayerView, rows: int) -> int:
    """Of `rows` consecutive rows from a multiple of `rows`, how many are surely contiguous."""
    if not view.rows_are_contiguous:
        return 1
    return math.gcd(rows, view.block_rows) if _blocks_are_apart(view) else rows


def _blocks_are_apart(view: LayerView) -> bool:
    return view.num_blocks > 1 and view.block_stride != view.block_rows * view.row_stride


def _run_bytes(view: LayerView, rows: int) -> int:
    return rows * view.row_stride if view.rows_are_contiguous else view.piece_size


def _run_alignment(view: LayerView, rows: int) -> int:
    """What divides the address of every run of `rows` rows, and its length."""
    run_bytes = _run_bytes(view, rows)
    return alignment_of(view.address, run_bytes, *_run_distances(view, run_bytes))


def _run_distances(view: LayerView, run_bytes: int) -> tuple[int, ...]:
    """Every run begins a sum of multiples of these from the view's address."""
    if not view.rows_are_contiguous:
        return (
            view.piece_stride if view.num_pieces > 1 else 0,
            view.row_stride if view.block_rows > 1 else 0,
            view.block_stride if view.num_blocks > 1 else 0,
        )
    if not _blocks_are_apart(view):
        return (run_bytes if run_bytes < view.num_rows * view.row_stride else 0,)
    return (run_bytes if run_bytes < view.block_rows * view.row_stride else 0, view.block_stride)


def _begins_on_lines(host: LayerView, run_bytes: int) -> bool:
    """Whether every run on the host begins on `_LINE_BYTES`."""
    steps = (host.address, *_run_distances(host, run_bytes))
    return all(step % _LINE_BYTES == 0 for step in steps)


def _lines_of_run(run_bytes: int, package: int, line_mask: int) -> int:
    """The lines of 32 packages that a run takes at most, where the first may be shorter."""
    slack = max(0, line_mask + 1 - package) if line_mask else 0
    return -(-(run_bytes + slack) // (_WARP_THREADS * package))


def _view_args(view: LayerView, num_rows: int, run_bytes: int) -> ViewArgs:
    return ViewArgs(
        base=view.address,
        num_rows=num_rows,
        row_stride=view.row_stride,
        block_stride=view.block_stride,
        piece_stride=view.piece_stride,
        run_bytes=run_bytes,
        block_rows=fast_divisor(view.block_rows),
        piece_size=fast_divisor(view.piece_size),
        num_blocks=view.num_blocks if _blocks_are_apart(view) else 1,
        num_pieces=view.num_pieces,
    )


def _check_span(span: Span, device: LayerView, host: LayerView) -> None:
    what = f"plane {span.plane.name!r}, layer {span.layer}"
    for view in (device, host):
        if view.element_size != span.plane.element_size:
            raise PlanError(
                f"{what}: elements have {span.plane.element_size:,} bytes, those of {view.name} "
                f"{view.element_size:,}; pass the views of this plane"
            )
        if view.num_rows > _MAX_DIVIDEND:
            raise PlanError(
                f"{what}: {view.name} has {view.num_rows:,} rows, and kernels count at most "
                f"{_MAX_DIVIDEND:,}; make the pool smaller"
            )
    if host.num_rows % span.rows:
        raise PlanError(
            f"{what}: {host.name} has {host.num_rows:,} rows, no whole pages of {span.rows}"
        )
    if span.num_bytes > MAX_SPAN_BYTES:
        raise PlanError(
            f"{what}: a page's {span.num_bytes:,} bytes are more than the {MAX_SPAN_BYTES:,} that "
            f"kernels take at once; choose a smaller page_size"
        )
