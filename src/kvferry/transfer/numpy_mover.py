"""The mover for device pools in host memory where the compiled kernel is missing: numpy copies.

Exact for any size and stride, and two to five times slower than `native_mover`.

Rows that are neighbours on both sides move as one window. A window's bytes are gathered in page
order into a buffer that stays in cache, digested there, and scattered from it, so each byte crosses
main memory once each way.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.kernels import NO_DIGEST, digest_spans, span_seeds
from kvferry.types import Direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView
    from kvferry.transfer.span_move import SpanMove

__all__ = ["move_span_numpy"]

# Bytes gathered at a time: small enough for the second-level cache, large enough that the cost of
# a few numpy calls does not show.
_CHUNK_BYTES = 256 << 10


def _window_rows(rows: NDArray[np.int64], *views: LayerView) -> int:
    """The most rows that can move as one everywhere: the gcd of all runs. Shape: ``[N, R]``.

    A run ends where device rows stop being neighbours, at the end of a page, and at the end of a
    block in a view whose blocks are apart.
    """
    window = rows.shape[1]
    breaks = np.flatnonzero(np.diff(rows.ravel()) != 1) + 1
    if breaks.size:
        window = math.gcd(window, int(np.gcd.reduce(breaks)))
    for view in views:
        if view.num_blocks > 1:
            window = math.gcd(window, view.block_rows)
    starts = rows[:, ::window]
    for view in views:
        # A window may begin anywhere in a block so long as it ends in the same one.
        if view.num_blocks > 1 and (starts % view.block_rows + window > view.block_rows).any():
            return 1
    return int(window)


def move_span_numpy(move: SpanMove, direction: Direction, *, verify: bool) -> NDArray[np.bool_]:
    """Move one span of every page; returns which pages hold the right bytes. Shape: ``[N]``.

    Stores write the digest table (0 where `verify` is off). Loads check it and leave the device
    rows of a page that fails untouched; without a digest to check against a page fails too.
    """
    span = move.span
    window = _window_rows(move.device_rows, move.device, move.host)
    pages, per_page = move.device_rows.shape
    seeds = span_seeds(
        move.page_seeds,
        plane_index=span.plane_index,
        layer=span.layer,
        num_bytes=span.num_bytes,
    )
    device_starts = move.device_rows[:, ::window]
    host_starts = move.host_slots[:, None] * per_page + np.arange(0, per_page, window)
    device, host = _Windows(move.device, window), _Windows(move.host, window)
    good = np.ones(pages, dtype=np.bool_)
    step = max(1, _CHUNK_BYTES // span.num_bytes)
    for first in range(0, pages, step):
        part = slice(first, first + step)
        slots = move.host_slots[part]
        if direction is Direction.STORE:
            gathered = device.gather(device_starts[part])
            move.digests[slots] = NO_DIGEST  # never a digest over bytes that are being replaced
            host.scatter(host_starts[part], gathered)
            if verify:
                move.digests[slots] = digest_spans(gathered, seeds[part])
            continue
        gathered = host.gather(host_starts[part])
        if verify:
            expected = move.digests[slots]
            found = digest_spans(gathered, seeds[part])
            good[part] = (found == expected) & (expected != NO_DIGEST)
        device.scatter(device_starts[part][good[part]], gathered[good[part]])
    return good


class _Windows:
    """A view's rows, `window` at a time, addressed by the row each window starts with."""

    def __init__(self, view: LayerView, window: int) -> None:
        self._view = view
        self._window = window
        self._bytes = window * view.element_size
        self._array = self._strided()

    def _strided(self) -> NDArray[Any]:
        view, window = self._view, self._window
        memory = (ctypes.c_uint8 * (view.end - view.address)).from_address(view.address)
        flat = np.ctypeslib.as_array(memory)
        starts = (view.num_blocks, view.block_rows - window + 1)
        steps = (view.block_stride, view.row_stride)
        if view.rows_are_contiguous or (window == 1 and view.num_pieces == 1):
            # One opaque item a window: numpy then copies it with a single memmove.
            item = np.dtype((np.void, self._bytes))
            return np.ndarray(starts, dtype=item, buffer=flat, strides=steps)
        return np.ndarray(
            (*starts, window, view.num_pieces),
            dtype=np.dtype((np.void, view.piece_size)),
            buffer=flat,
            strides=(*steps, view.row_stride, view.piece_stride),
        )

    def _index(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        blocks, within = np.divmod(starts.ravel(), self._view.block_rows)
        return blocks, within

    def gather(self, starts: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Each page's bytes in token order. Shape ``[pages, windows]`` to ``[pages, bytes]``."""
        found = self._array[self._index(starts)]
        return found.reshape(-1).view(np.uint8).reshape(starts.shape[0], -1)

    def scatter(self, starts: NDArray[np.int64], gathered: NDArray[np.uint8]) -> None:
        """The reverse of `gather`."""
        if starts.shape[0]:
            shape = (starts.size, *self._array.shape[2:])
            self._array[self._index(starts)] = (
                gathered.reshape(-1).view(self._array.dtype).reshape(shape)
            )
