"""An engine's tensors and pointer tables as views, and its index lists, as a `RowMover` takes them.

A side of a move is host memory that is pinned, or memory of one GPU. What is neither is refused: a
kernel that reads it would end the process.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvferry.errors import PinError, PlanError, ViewError
from kvferry.geometry import LayerView
from kvferry.kernels.jit import Context, process_loader
from kvferry.memory import ContextPinDriver, look_up
from kvferry.transfer import RowList, RowMover, disabled_gpu_paths, row_list

__all__ = ["Gpu", "Side", "gpu_at", "gpu_of", "index_list", "moved", "row_view", "rows_of"]

# Tables of addresses do not tell how long a pool is. Kernels count its rows in 31 bits.
_MOST_ROWS = (1 << 31) - 1


class Side(NamedTuple):
    """Where rows lie on one side of a move, layer after layer, as the GPU calls it."""

    views: tuple[LayerView, ...]
    on_host: bool
    num_rows: int | None
    """None: not known."""


class _KnownTable(NamedTuple):
    table: weakref.ref[Any]
    version: int
    """What torch counts up when a tensor is written to."""

    addresses: tuple[int, ...]
    on_host: bool


class Gpu:
    """One GPU: its mover, and what is known of the memory that it reaches."""

    def __init__(self, index: int) -> None:
        loader = process_loader()
        self.index = index
        self.mover = RowMover(loader, index, disabled=disabled_gpu_paths())
        self._context: Context = loader.driver.context(index)
        self._pins = ContextPinDriver(self._context)
        self._pinned: dict[tuple[int, int], int] = {}
        self._tables: dict[int, _KnownTable] = {}

    def stream(self) -> Any:
        """The caller's current stream, as torch has it."""
        import torch

        return torch.cuda.current_stream(self.index)

    def tensors(self, planes: Sequence[tuple[str, Any, LayerView]]) -> Side:
        """A side of tensors with the views of their rows: all on the host, or all on this GPU.

        Raises:
            PlanError: They are of both kinds, or on another GPU.
            PinError: They are in host memory that is not pinned.
        """
        kinds = {bool(tensor.is_cuda) for _, tensor, _ in planes}
        if len(kinds) > 1:
            names = ", ".join(name for name, *_ in planes)
            raise PlanError(f"{names} are on the host and on a GPU; one side of a move is on one")
        on_host = not kinds.pop()
        views = []
        for name, tensor, view in planes:
            if on_host:
                at = self.pinned_address(name, view.address, view.end - view.address)
                view = moved(view, at)
            elif tensor.device.index != self.index:
                raise PlanError(f"{name} is on {tensor.device}, and the rest on GPU {self.index}")
            views.append(view)
        return Side(tuple(views), on_host, min(view.num_rows for view in views))

    def table(self, name: str, table: Any, stride: int, element_size: int) -> Side:
        """A side of a table of addresses, one a layer, with rows `stride` bytes apart.

        A table is read once, which waits for the stream; as long as it is the same, unchanged
        tensor it is not looked at again.

        Raises:
            PlanError: The addresses are of both kinds, or of rows that overlap.
            PinError: Some are no memory that the GPU reaches.
        """
        addresses, on_host = self._addresses(name, table)
        if not 0 < element_size <= stride:
            raise PlanError(
                f"{name}: rows of {element_size} bytes at {stride} bytes from each other overlap"
            )
        views = tuple(row_view(name, at, _MOST_ROWS, stride, element_size) for at in addresses)
        return Side(views, on_host, None)

    def pinned_address(self, name: str, address: int, num_bytes: int) -> int:
        """What the GPU calls pinned host memory. Raises PinError where it is not pinned."""
        found = self._pinned.get((address, num_bytes))
        if found is not None and self._is_still(address, num_bytes, found):
            return found
        self._pinned.pop((address, num_bytes), None)
        try:
            there = look_up(address, num_bytes, self._pins)
        except PinError as bad:
            raise PinError(
                f"{name} is in host memory that is not pinned, and kernels read it in place: pin "
                f"it, or keep the engine's own functions ({bad})"
            ) from bad
        self._pinned[address, num_bytes] = found = there.device_address(address, num_bytes)
        return found

    def _is_still(self, address: int, num_bytes: int, known: int) -> bool:
        """Whether memory that was pinned has not been let go since, as far as its ends tell."""
        ends = (address, address + num_bytes - 1)
        return (
            all(self._pins.is_pinned(end) for end in ends)
            and self._pins.device_pointer(address) == known
        )

    def _addresses(self, name: str, table: Any) -> tuple[tuple[int, ...], bool]:
        known = self._tables.get(id(table))
        version = 0 if table.is_inference() else int(table._version)
        if known is not None and known.table() is table and known.version == version:
            return known.addresses, known.on_host
        addresses = tuple(int(address) & (1 << 64) - 1 for address in table.tolist())
        if not addresses:
            raise PlanError(f"{name} has no addresses; give one a layer")
        kinds = {self._is_on_host(name, address) for address in addresses}
        if len(kinds) > 1:
            raise PlanError(f"{name} has addresses on the host and on the GPU")
        on_host = kinds.pop()
        gone = id(table)
        ref = weakref.ref(table, lambda _: self._tables.pop(gone, None))
        self._tables[gone] = _KnownTable(ref, version, addresses, on_host)
        return addresses, on_host

    def _is_on_host(self, name: str, address: int) -> bool:
        if self._pins.is_pinned(address):
            return True
        if self._pins.is_on_device(address):
            return False
        raise PinError(
            f"{name} has {address:#x}, neither pinned host memory nor memory of a GPU: pin the "
            f"host pool, and make the table of what the GPU calls it"
        )


_gpus: dict[int, Gpu] = {}
_lock = threading.Lock()


def gpu_of(*tensors: Any) -> Gpu:
    """The GPU that the first of `tensors` lies on which lies on one.

    Raises:
        PlanError: None does.
        DriverError, MissingDependencyError: It cannot be used.
    """
    index = next((tensor.device.index for tensor in tensors if tensor.is_cuda), None)
    if index is None:
        raise PlanError("everything given is in host memory; one side of a move is on a GPU")
    return gpu_at(index)


def gpu_at(index: int | None = None) -> Gpu:
    """A GPU by its number; None: the caller's current one. Raises as `gpu_of`."""
    if index is None:
        import torch

        index = torch.cuda.current_device()
    with _lock:
        found = _gpus.get(index)
        if found is None:
            found = _gpus[index] = Gpu(index)
        return found


def row_view(name: str, address: int, num_rows: int, stride: int, element_size: int) -> LayerView:
    """Evenly spaced rows."""
    return LayerView(
        address=address,
        num_rows=num_rows,
        row_stride=stride,
        block_rows=num_rows,
        block_stride=num_rows * stride,
        num_pieces=1,
        piece_size=element_size,
        piece_stride=element_size,
        name=name,
    )


def rows_of(name: str, tensor: Any, *, element_dim: int | None = None, rows: int = -1) -> LayerView:
    """The rows of a tensor: of `element_dim` numbers each, or so many of them.

    Raises:
        ViewError: It cannot be seen so without copying it, or a row has gaps.
    """
    try:
        flat = tensor.view(rows, -1 if element_dim is None else element_dim)
    except RuntimeError as bad:
        raise ViewError(
            f"{name} of shape {tuple(tensor.shape)} cannot be seen as rows of "
            f"{element_dim or 'one size'}: {bad}"
        ) from bad
    count, width = flat.shape
    if not count or not width:
        raise ViewError(f"{name} of shape {tuple(tensor.shape)} has no rows")
    if width > 1 and flat.stride(1) != 1:
        raise ViewError(f"{name}: the numbers of a row are {flat.stride(1)} apart, and must be one")
    size = flat.element_size()
    stride = flat.stride(0) * size if count > 1 else width * size
    return row_view(name, flat.data_ptr(), count, stride, width * size)


def moved(view: LayerView, address: int) -> LayerView:
    """`view` as the GPU has it, from another address on."""
    return row_view(view.name, address, view.num_rows, view.row_stride, view.piece_size)


def index_list(name: str, indices: Any, gpu: Gpu, *, for_host: bool) -> RowList:
    """An index list, with what keeps it until the stream has read it.

    `for_host`: of rows on the host, which kernels read as int64.
    """
    if getattr(indices, "is_cuda", False):
        import torch

        if indices.device.index != gpu.index:
            raise PlanError(f"{name} is on {indices.device}, and the pools on GPU {gpu.index}")
        if for_host and indices.dtype == torch.int32:
            indices = indices.to(torch.int64)
    rows = row_list(name, indices)
    if rows.tensor is not None:
        rows.tensor.record_stream(gpu.stream())
    return rows
