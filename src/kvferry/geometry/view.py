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
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvferry.errors import GeometryError, ViewError
from kvferry.geometry.aliasing import find_overlap
from kvferry.geometry.element_dims import SlotDims, split_dims
from kvferry.geometry.spec import Geometry, Plane
from kvferry.geometry.storage import RegisteredStorage, Storage, describe_storage

__all__ = ["LayerView", "PoolView", "SlotDims"]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
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

    registered: RegisteredStorage | None = dataclasses.field(default=None, compare=False)
    """The storage as it was found, kept alive for as long as the view. None: made from numbers."""

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

    def __repr__(self) -> str:
        pieces = f"{self.num_pieces} x {self.piece_size}" if self.num_pieces != 1 else ""
        blocks = f", {self.block_rows} a block" if self.block_rows != self.num_rows else ""
        return (
            f"LayerView({self.name}: {self.num_rows} rows of {pieces or self.piece_size} bytes"
            f"{blocks}, {self.device})"
        )

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
    def owner(self) -> Any:
        """What keeps the memory alive: a torch storage, a numpy array, or None."""
        return None if self.registered is None else self.registered.owner

    def still_there(self) -> bool:
        """Whether the memory is where it was when the view was made.

        A view keeps its storage alive, but ``resize_`` may move it, and ``tensor.data = …`` or
        ``set_`` may give the tensor another one. Then this is False: leave the rows alone and make
        the view anew. A view made from numbers cannot tell, and counts as there.
        """
        return self.registered is None or self.registered.still_there()

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
                message names the dimension. Also where a tensor's values are not the bytes in its
                memory (fake, conjugated, negated, masked), or `slot_dims` are no dimensions.
        """
        storage = describe_storage(tensor, what)
        slots, pieces = split_dims(storage, slot_dims, what)
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
            registered=storage.registered,
        )
        _check_bounds(view, storage)
        return view


@dataclasses.dataclass(frozen=True, repr=False)
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

    in_turn: bool = False
    """True where layers take turns on the same memory, as in a buffer that a few of them pass
    through at a time. Then nothing is checked: whoever fills it says whose turn it is."""

    def __post_init__(self) -> None:
        _check_mapping("the layers of a pool", self.layers, "sequences of LayerView")
        layers = {name: tuple(views) for name, views in self.layers.items()}
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ViewError("a pool needs the views of at least one plane; got none")
        for name, views in layers.items():
            _check_plane(_known_plane(self.geometry, name), views)
        devices = sorted({view.device for views in layers.values() for view in views})
        if len(devices) > 1:
            raise ViewError(
                f"a pool lies on one device, but its tensors are on {', '.join(devices)}; "
                f"register one pool a device"
            )
        if self.in_turn:
            return
        groups = layers.values() if self.shared_storage else [sum(layers.values(), ())]
        for group in groups:
            overlap = find_overlap(group)
            if overlap is not None:
                first, second = (group[index].name for index in overlap)
                raise ViewError(
                    f"{first} and {second} overlap in memory; give each layer its own bytes, or "
                    f"shared_storage=True if planes share blocks on purpose"
                )

    def __repr__(self) -> str:
        planes = [
            f"{name}: {len(views)} x {views[0].num_rows} rows of {views[0].element_size} bytes"
            for name, views in self.layers.items()
        ]
        return f"PoolView({', '.join(planes)}; {self.device})"

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

    @functools.cached_property
    def _registered(self) -> tuple[RegisteredStorage, ...]:
        found = {
            id(one): one
            for views in self.layers.values()
            for one in (view.registered for view in views)
            if one is not None
        }
        return tuple(found.values())

    def still_there(self) -> bool:
        """Whether all memory is where it was; see `LayerView.still_there`.

        Takes about a microsecond a registered tensor; one tensor for all layers counts once.
        """
        return all(one.still_there() for one in self._registered)

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
        _check_mapping("tensors", tensors, "tensors, or lists of them")
        layers: dict[str, tuple[LayerView, ...]] = {}
        for name, given in tensors.items():
            plane = _known_plane(geometry, name)
            if isinstance(slot_dims, Mapping) and name not in slot_dims:
                raise ViewError(
                    f"slot_dims has {', '.join(map(repr, slot_dims)) or 'no plane'}, but nothing "
                    f"for plane {name!r}; give the dimensions that count its rows, such as (0,)"
                )
            dims = slot_dims[name] if isinstance(slot_dims, Mapping) else slot_dims
            if isinstance(given, Sequence):
                views = [_layer_view(plane, layer, one, dims) for layer, one in enumerate(given)]
            else:
                views = list(_views_of_one(plane, given, layer_dim, dims))
            layers[name] = tuple(views)
        return cls(geometry, layers, shared_storage)


def _check_mapping(what: str, given: Any, values: str) -> None:
    if not isinstance(given, Mapping):
        raise ViewError(
            f"{what} must be a mapping of plane names to {values}, not {type(given).__name__}"
        )


def _known_plane(geometry: Geometry, name: str) -> Plane:
    try:
        return geometry.plane(name)
    except GeometryError as bad:
        raise ViewError(f"{bad}; give tensors for these only") from bad


def _views_of_one(
    plane: Plane, given: Any, layer_dim: int, slot_dims: SlotDims
) -> Iterator[LayerView]:
    what = f"plane {plane.name!r}"
    if not hasattr(given, "untyped_storage") and getattr(given, "shape", None) is None:
        raise ViewError(f"{what}: {type(given).__name__} is neither a tensor nor a list of them")
    whole = describe_storage(given, what)
    rank = len(whole.shape)
    is_dim = isinstance(layer_dim, int) and -rank <= layer_dim < rank
    if not is_dim or whole.shape[layer_dim] != plane.num_layers:
        raise ViewError(
            f"{what}: one tensor of shape {whole.shape} should keep {plane.num_layers} "
            f"layers along dimension {layer_dim!r}; give layer_dim, or a list of tensors"
        )
    index: list[Any] = [slice(None)] * rank
    for layer in range(plane.num_layers):
        index[layer_dim] = layer
        view = _layer_view(plane, layer, given[tuple(index)], slot_dims)
        # The slice is gone at once. It is the whole tensor whose memory may be replaced.
        yield dataclasses.replace(view, registered=whole.registered)


def _layer_view(plane: Plane, layer: int, tensor: Any, slot_dims: SlotDims) -> LayerView:
    what = f"plane {plane.name!r}, layer {layer}"
    view = LayerView.from_tensor(tensor, slot_dims=slot_dims, what=what)
    if view.element_size != plane.element_size:
        raise ViewError(
            f"{what}: slot_dims {tuple(slot_dims)} make a tensor of shape {tuple(tensor.shape)} "
            f"and {tensor.dtype} {view.num_rows} rows of {view.element_size} bytes, but a row of "
            f"the geometry has {plane.element_size}; name the dimensions that count tokens, such "
            f"as (0, 2) in [blocks, heads, block, dim], and check the dtype"
        )
    return view


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
        if not isinstance(view, LayerView):
            raise ViewError(
                f"plane {plane.name!r}, layer {layer}: {type(view).__name__} is no LayerView; "
                f"make one with LayerView.from_tensor"
            )
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
