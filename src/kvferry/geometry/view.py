"""A pool as base addresses and strides, checked once against the storage it lies in.

One `LayerView` describes one layer of one plane: where row r of it lies. Rows are token slots on a
device; on the host row ``s·R + i`` is row i of page slot s. An HND, padded, packed or permuted
pool is a matter of strides here, never a special case further up:

    address of byte b of piece p of row r = address
        + (r // block_rows)·block_stride + (r % block_rows)·row_stride + p·piece_stride + b

An element is its pieces in order. Everything is arithmetic; no tensor library is imported.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvferry.errors import ViewError
from kvferry.geometry.aliasing import find_overlap
from kvferry.geometry.spec import Geometry, Plane
from kvferry.geometry.storage import Storage, describe_storage

__all__ = ["LayerView", "PoolView", "SlotDims"]

SlotDims = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer of one plane in a pool. Sizes and strides are bytes, `num_rows` counts elements."""

    address: int
    """Of the first byte of row 0."""

    num_rows: int
    row_stride: int
    block_rows: int
    """Rows a block; equal to `num_rows` where rows are evenly spaced throughout."""

    block_stride: int
    num_pieces: int
    piece_size: int
    piece_stride: int
    device: str = "cpu"
    name: str = dataclasses.field(default="view", compare=False)
    """How error messages call it."""

    owner: Any = dataclasses.field(default=None, repr=False, compare=False)
    """Keeps the storage alive for as long as the view."""

    def __post_init__(self) -> None:
        if min(self.num_rows, self.block_rows, self.num_pieces, self.piece_size) < 1:
            raise ViewError(f"{self.name}: rows, blocks and pieces must be positive; got {self!r}")
        if self.num_rows % self.block_rows:
            raise ViewError(
                f"{self.name}: {self.num_rows} rows are not whole blocks of {self.block_rows}"
            )
        # Each level must step over all that the levels inside it cover.
        covered = self.piece_size
        for stride, count, level in sorted(
            (stride, count, level)
            for stride, count, level in (
                (self.block_stride, self.num_blocks, "blocks"),
                (self.row_stride, self.block_rows, "rows"),
                (self.piece_stride, self.num_pieces, "pieces of an element"),
            )
            if count > 1
        ):
            if stride < covered:
                raise ViewError(
                    f"{self.name}: neighbouring {level} are {stride} bytes apart but cover "
                    f"{covered}; they would overlap, so check the tensor's strides and slot_dims"
                )
            covered += (count - 1) * stride

    @property
    def element_size(self) -> int:
        """E: the bytes of one row, without gaps."""
        return self.num_pieces * self.piece_size

    @property
    def num_blocks(self) -> int:
        """How many blocks the rows lie in; the last one is always whole."""
        return self.num_rows // self.block_rows

    @property
    def element_extent(self) -> int:
        """Bytes from the first byte of an element to the end of its last piece, gaps included."""
        return (self.num_pieces - 1) * self.piece_stride + self.piece_size

    @property
    def end(self) -> int:
        """The address after the last byte of the last row."""
        return (
            self.address
            + (self.num_blocks - 1) * self.block_stride
            + (self.block_rows - 1) * self.row_stride
            + self.element_extent
        )

    def row_address(self, row: int) -> int:
        """The address of the first byte of `row`, in exact integers of any width."""
        block, within = divmod(row, self.block_rows)
        return self.address + block * self.block_stride + within * self.row_stride

    @property
    def rows_are_contiguous(self) -> bool:
        """Whether neighbouring rows of a block are one run of bytes."""
        return self.num_pieces == 1 and self.row_stride == self.piece_size

    @classmethod
    def from_tensor(
        cls, tensor: Any, *, slot_dims: SlotDims = (0,), what: str = "tensor"
    ) -> LayerView:
        """A view of one layer from a torch tensor or a numpy array of any dtype.

        Args:
            tensor: Any strided tensor. Shape for the default `slot_dims`: ``[rows, *element]``.
            slot_dims: The dimensions that count rows, slowest first: ``(0,)`` for
                ``[rows, heads, dim]``, ``(0, 1)`` for paged NHD ``[blocks, block, heads, dim]``,
                ``(0, 2)`` for paged HND ``[blocks, heads, block, dim]``. All other dimensions, in
                their order, are the element.
            what: How an error message calls the tensor.

        Raises:
            ViewError: The tensor has no strided storage, a stride of 0 or less, rows that overlap,
                bytes outside its storage, or an element that is not evenly spaced pieces. The
                message names the dimension.
        """
        storage = describe_storage(tensor, what)
        slots, pieces = _split_dims(storage, slot_dims, what)
        view = cls(
            address=storage.address,
            num_rows=slots.rows,
            row_stride=slots.row_stride,
            block_rows=slots.block_rows,
            block_stride=slots.block_stride,
            num_pieces=pieces.count,
            piece_size=pieces.size,
            piece_stride=pieces.stride,
            device=storage.device,
            name=what,
            owner=tensor,
        )
        _check_bounds(view, storage)
        return view


@dataclasses.dataclass(frozen=True)
class PoolView:
    """All layers of some or all planes of a geometry, on one device.

    Raises ViewError when a plane is unknown, has a wrong number of layers, an element size or row
    count that does not fit, lies on another device, or overlaps another layer.
    """

    geometry: Geometry
    layers: Mapping[str, tuple[LayerView, ...]]
    shared_storage: bool = False
    """True where planes knowingly share memory (an engine that gives the same blocks to one layer
    group or another). Then only the layers of one plane are checked against each other."""

    def __post_init__(self) -> None:
        layers = {name: tuple(views) for name, views in self.layers.items()}
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ViewError("a pool needs the views of at least one plane; got none")
        for name, views in layers.items():
            _check_plane(self.geometry.plane(name), views)
        devices = sorted({view.device for views in layers.values() for view in views})
        if len(devices) > 1:
            raise ViewError(
                f"a pool lies on one device, but its tensors are on {', '.join(devices)}; "
                f"register one pool a device"
            )
        groups = layers.values() if self.shared_storage else [sum(layers.values(), ())]
        for group in groups:
            overlap = find_overlap(group)
            if overlap is not None:
                first, second = (group[index].name for index in overlap)
                raise ViewError(
                    f"{first} and {second} overlap in memory; give each layer its own bytes, or "
                    f"shared_storage=True if planes share blocks on purpose"
                )

    @property
    def device(self) -> str:
        """The device all tensors lie on, such as ``cpu`` or ``cuda:0``."""
        return next(iter(self.layers.values()))[0].device

    def view(self, plane: str, layer: int) -> LayerView:
        """The view of the plane's own layer number `layer`."""
        return self.layers[plane][layer]

    def num_rows(self, plane: str) -> int:
        """How many rows every layer of `plane` has."""
        return self.layers[plane][0].num_rows

    def overlap_with(self, other: PoolView) -> tuple[str, str] | None:
        """The names of a layer of this pool and one of `other` that share a byte, or None."""
        views = [view for pool in (self, other) for group in pool.layers.values() for view in group]
        own = sum(len(group) for group in self.layers.values())
        overlap = find_overlap(views, [int(index >= own) for index in range(len(views))])
        return None if overlap is None else (views[overlap[0]].name, views[overlap[1]].name)

    @classmethod
    def from_tensors(
        cls,
        geometry: Geometry,
        tensors: Mapping[str, Any],
        *,
        slot_dims: SlotDims | Mapping[str, SlotDims] = (0,),
        layer_dim: int = 0,
        shared_storage: bool = False,
    ) -> PoolView:
        """A pool from the tensors an engine already has.

        Args:
            geometry: What the planes should be.
            tensors: For each plane a sequence of one tensor a layer, or one tensor that holds all
                layers along `layer_dim`. Any dtype: bytes count.
            slot_dims: As for `LayerView.from_tensor`, of one layer's tensor; a mapping gives each
                plane its own.
            layer_dim: Where a single tensor keeps its layers.
            shared_storage: See the class.

        Raises:
            ViewError: As for `LayerView.from_tensor` and the class.
        """
        layers: dict[str, tuple[LayerView, ...]] = {}
        for name, given in tensors.items():
            plane = geometry.plane(name)
            dims = slot_dims[name] if isinstance(slot_dims, Mapping) else slot_dims
            layers[name] = tuple(
                LayerView.from_tensor(tensor, slot_dims=dims, what=f"plane {name!r}, layer {layer}")
                for layer, tensor in enumerate(_layer_tensors(plane, given, layer_dim))
            )
        return cls(geometry, layers, shared_storage)


@dataclasses.dataclass(frozen=True)
class _Slots:
    rows: int
    row_stride: int
    block_rows: int
    block_stride: int


@dataclasses.dataclass(frozen=True)
class _Pieces:
    count: int
    size: int
    stride: int


def _layer_tensors(plane: Plane, given: Any, layer_dim: int) -> Iterable[Any]:
    if isinstance(given, Sequence):
        return given
    shape = getattr(given, "shape", None)
    if shape is None:
        raise ViewError(
            f"plane {plane.name!r}: {type(given).__name__} is neither a tensor nor a list of them"
        )
    shape = tuple(shape)
    if not -len(shape) <= layer_dim < len(shape) or shape[layer_dim] != plane.num_layers:
        raise ViewError(
            f"plane {plane.name!r}: one tensor of shape {shape} should keep {plane.num_layers} "
            f"layers along dimension {layer_dim}; give layer_dim, or a list of tensors"
        )
    index: list[Any] = [slice(None)] * len(shape)
    tensors = []
    for layer in range(plane.num_layers):
        index[layer_dim] = layer
        tensors.append(given[tuple(index)])
    return tensors


def _split_dims(storage: Storage, slot_dims: SlotDims, what: str) -> tuple[_Slots, _Pieces]:
    rank = len(storage.shape)
    dims = [dim + rank if dim < 0 else dim for dim in slot_dims]
    if (
        len(dims) not in (1, 2)
        or len(set(dims)) != len(dims)
        or not all(0 <= d < rank for d in dims)
    ):
        raise ViewError(
            f"{what}: slot_dims {tuple(slot_dims)} must name one or two different dimensions of "
            f"shape {storage.shape}"
        )
    for dim, (size, stride) in enumerate(zip(storage.shape, storage.strides, strict=True)):
        if size < 1:
            raise ViewError(f"{what}: dimension {dim} of shape {storage.shape} is empty")
        if size > 1 and stride <= 0:
            raise ViewError(
                f"{what}: dimension {dim} of shape {storage.shape} has stride {stride}; an "
                f"expanded or flipped tensor has no rows of its own: pass contiguous storage"
            )
    sizes = [storage.shape[dim] for dim in dims]
    strides = [storage.strides[dim] for dim in dims]
    element = [
        (storage.shape[dim], storage.strides[dim], dim) for dim in range(rank) if dim not in dims
    ]
    return _slots_of(sizes, strides), _pieces_of(element, storage, what)


def _slots_of(sizes: list[int], strides: list[int]) -> _Slots:
    rows = math.prod(sizes)
    if len(sizes) == 2 and sizes[0] > 1 and sizes[1] > 1:
        evenly_spaced = strides[0] == sizes[1] * strides[1]
        if not evenly_spaced:
            return _Slots(rows, strides[1], sizes[1], strides[0])
        return _Slots(rows, strides[1], rows, rows * strides[1])
    stride = next((t for s, t in zip(sizes, strides, strict=True) if s > 1), strides[-1])
    return _Slots(rows, stride, rows, rows * stride)


def _pieces_of(element: list[tuple[int, int, int]], storage: Storage, what: str) -> _Pieces:
    size = storage.item_size
    kept = [dim for dim in element if dim[0] > 1]
    while kept and kept[-1][1] == size:
        size *= kept.pop()[0]
    if not kept:
        return _Pieces(1, size, size)
    count, stride, _ = kept.pop()
    while kept:
        outer_count, outer_stride, dim = kept.pop()
        if outer_stride != count * stride:
            raise ViewError(
                f"{what}: dimension {dim} of shape {storage.shape} (stride {outer_stride}) breaks "
                f"the even spacing of an element's pieces (expected {count * stride}); register "
                f"its parts as planes of their own"
            )
        count *= outer_count
    return _Pieces(count, size, stride)


def _check_bounds(view: LayerView, storage: Storage) -> None:
    if view.address < storage.start or view.end > storage.start + storage.num_bytes:
        pairs = zip(storage.shape, storage.strides, strict=True)
        reach = [(size - 1) * stride for size, stride in pairs]
        dim = reach.index(max(reach))
        raise ViewError(
            f"{view.name}: dimension {dim} is too long: shape {storage.shape} with strides "
            f"{storage.strides} bytes reaches from byte {view.address - storage.start} to "
            f"{view.end - storage.start} of a storage of {storage.num_bytes} bytes; make the "
            f"storage larger or the view smaller"
        )


def _check_plane(plane: Plane, views: Sequence[LayerView]) -> None:
    if len(views) != plane.num_layers:
        raise ViewError(
            f"plane {plane.name!r} has {plane.num_layers} layers, but {len(views)} were given"
        )
    for layer, view in enumerate(views):
        if view.element_size != plane.element_size:
            raise ViewError(
                f"plane {plane.name!r}, layer {layer}: a row of the tensor is {view.element_size} "
                f"bytes, but the geometry says {plane.element_size}; check dtype and slot_dims"
            )
        if view.num_rows != views[0].num_rows:
            raise ViewError(
                f"plane {plane.name!r}, layer {layer}: {view.num_rows} rows, but layer 0 has "
                f"{views[0].num_rows}; all layers of a plane share one set of slots"
            )
