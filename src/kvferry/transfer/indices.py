"""Where rows lie on a device: indices from lists, arrays and tensors, checked and kept."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import PlanError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "MAX_INDEX",
    "DeviceRows",
    "blocks_to_rows",
    "check_unique",
    "host_indices",
    "rows_of_pages",
    "run_length",
]

MAX_INDEX = 1 << 62
"""Indices lie below. It keeps every product of a row and a stride that can exist inside 64 bits."""

_FIRST_ROWS = 64

# More tokens than any block or page has; it bounds what one block id can grow to.
_MAX_BLOCK_SIZE = 1 << 30


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceRows:
    """Device rows that lie on the device themselves, where nobody can check them beforehand.

    A row that does not exist is left out by the kernels and told by `TransferHandle.wait`.
    """

    address: int
    index_bytes: int
    """4 or 8."""

    shape: tuple[int, int]
    """``(N, R)``."""

    run: int
    """What the caller promised: see `TransferPlan.device_run`."""

    device: str
    tensor: Any = dataclasses.field(repr=False)
    """Keeps the indices alive until the transfer is over."""

    @property
    def num_bytes(self) -> int:
        """Of the indices."""
        return self.index_bytes * self.shape[0] * self.shape[1]

    def to_host(self) -> NDArray[np.int64]:
        """A copy in host memory; waits for the device."""
        return np.asarray(self.tensor.cpu(), dtype=np.int64).reshape(self.shape)


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
        whole = isinstance(size, int) and not isinstance(size, bool)
        if not whole or not 1 <= size <= _MAX_BLOCK_SIZE:
            raise PlanError(
                f"{name} must be a positive whole number up to {_MAX_BLOCK_SIZE}, not {size!r}"
            )
    if block_size % page_size and page_size % block_size:
        raise PlanError(
            f"block_size {block_size} and page_size {page_size}: one must divide the other; "
            f"choose a page_size that is a multiple or a divisor of {block_size}"
        )
    blocks = host_indices("block_ids", block_ids).ravel()
    if blocks.size and int(blocks.max()) >= MAX_INDEX // block_size:
        raise PlanError(
            f"block_ids holds {int(blocks.max())}; with {block_size} tokens a block, ids lie below "
            f"{MAX_INDEX // block_size}"
        )
    tokens = len(blocks) * block_size
    if tokens % page_size:
        raise PlanError(
            f"{len(blocks)} blocks of {block_size} tokens are no whole number of pages of "
            f"{page_size}; pass whole pages only"
        )
    slots = blocks[:, None] * block_size + np.arange(block_size, dtype=np.int64)
    return slots.reshape(-1, page_size)


def host_indices(what: str, given: Any) -> NDArray[np.int64]:
    """The plan's own copy: what its caller does with `given` afterwards changes nothing.

    Raises:
        PlanError: `given` is no array of whole numbers from 0 to `MAX_INDEX`, in host memory.
    """
    if isinstance(given, np.ma.MaskedArray):
        raise PlanError(f"{what} is a masked array; pass the indices that count, without a mask")
    try:
        array = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as refused:
        raise PlanError(
            f"{what} is no array of indices ({refused}); give lists of equal length, or a dense "
            f"array in host memory"
        ) from refused
    if array.size == 0:
        return array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise PlanError(f"{what} must be whole numbers, not {array.dtype}; use int32 or int64")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= MAX_INDEX:
        bad = low if low < 0 else high
        raise PlanError(f"{what} holds {bad}; indices lie between 0 and the size of the pool")
    indices = np.array(array, dtype=np.int64, order="C")
    indices.setflags(write=False)
    return indices


def run_length(rows: NDArray[np.int64]) -> int:
    """How many of a page's rows surely lie side by side, and begin on a multiple; ``[N, R]``."""
    flat = rows.ravel()
    # Rows that lie anywhere show it at once, and those are the many: a run only gets shorter.
    if _run_by_breaks(flat[:_FIRST_ROWS], rows.shape[1]) == 1:
        return 1
    run = _run_by_breaks(flat, rows.shape[1])
    if run == 1:
        return 1
    starts = rows[:, ::run]
    return math.gcd(run, int(np.gcd.reduce(starts.ravel()))) if starts.size else run


def _run_by_breaks(flat: NDArray[np.int64], run: int) -> int:
    breaks = np.flatnonzero(flat[1:] - flat[:-1] != 1) + 1
    return math.gcd(run, int(np.gcd.reduce(breaks))) if breaks.size else run


def check_unique(what: str, indices: NDArray[np.int64]) -> None:
    """Raises PlanError where a destination is named twice."""
    ordered = np.sort(indices)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise PlanError(
            f"{what} names {int(twice[0])} twice as a destination; every destination may be "
            f"written once in a transfer"
        )


def rows_of_pages(
    what: str, given: Any, num_pages: int, per_page: int, device_run: int
) -> NDArray[np.int64] | DeviceRows:
    """Device rows of every page, from an array in host memory or a tensor on the device.

    Raises:
        PlanError: The shape is not ``[num_pages, per_page]``, flat or not, or the type no integer.
    """
    if getattr(given, "is_cuda", False):
        _check_shape(what, tuple(given.shape), num_pages, per_page)
        return _device_rows(what, given, num_pages, per_page, device_run)
    indices = host_indices(what, given)
    _check_shape(what, indices.shape, num_pages, per_page)
    return indices.reshape(num_pages, per_page)


def _device_rows(
    what: str, tensor: Any, num_pages: int, per_page: int, device_run: int
) -> DeviceRows:
    kind = str(tensor.dtype)
    if kind not in ("torch.int32", "torch.int64"):
        raise PlanError(f"{what} on the device must be int32 or int64, not {kind}")
    if not tensor.is_contiguous():
        raise PlanError(f"{what} on the device is not contiguous; pass {what}.contiguous()")
    return DeviceRows(
        address=tensor.data_ptr(),
        index_bytes=tensor.element_size(),
        shape=(num_pages, per_page),
        run=math.gcd(device_run, per_page),
        device=str(tensor.device),
        tensor=tensor,
    )


def _check_shape(what: str, shape: tuple[int, ...], num_pages: int, per_page: int) -> None:
    if shape not in ((num_pages, per_page), (num_pages * per_page,)):
        raise PlanError(
            f"{what} has shape {shape}, but {num_pages} host slots with {per_page} rows a "
            f"page need [{num_pages}, {per_page}]"
        )
