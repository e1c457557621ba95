"""Views: what a tensor's strides become, and which tensors are refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import ViewError
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.testing.reference import reference_row


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, shape, dtype=np.uint8)


def _geometry(element_size: int, num_layers: int = 1) -> Geometry:
    return Geometry(planes=(Plane(name="k", num_layers=num_layers, element_size=element_size),))


@pytest.mark.parametrize(
    ("shape", "slot_dims", "expected"),
    [
        # rows, row_stride, block_rows, block_stride, pieces, piece_size, piece_stride
        ((10, 3, 8), (0,), (10, 24, 10, 240, 1, 24, 24)),
        ((4, 16, 3, 8), (0, 1), (64, 24, 64, 1536, 1, 24, 24)),
        ((4, 3, 16, 8), (0, 2), (64, 8, 16, 384, 3, 8, 128)),
        ((3, 10, 8), (1,), (10, 8, 10, 80, 3, 8, 80)),
        ((10, 1, 8), (-3,), (10, 8, 10, 80, 1, 8, 8)),
        ((1, 16, 8), (0, 1), (16, 8, 16, 128, 1, 8, 8)),
        ((4, 1, 8), (0, 1), (4, 8, 4, 32, 1, 8, 8)),
    ],
)
def test_strides_of_common_layouts(
    shape: tuple[int, ...], slot_dims: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """Flat, paged NHD, paged HND and one-sequence HND tensors become rows, blocks and pieces."""
    view = LayerView.from_tensor(_random(*shape), slot_dims=slot_dims)
    found = (
        view.num_rows,
        view.row_stride,
        view.block_rows,
        view.block_stride,
        view.num_pieces,
        view.piece_size,
        view.piece_stride,
    )
    assert found == expected


@pytest.mark.parametrize("slot_dims", [(0,), (0, 1), (0, 2), (2, 0), (2,), (3, 0)])
def test_rows_are_what_indexing_gives(slot_dims: tuple[int, ...]) -> None:
    """Row r of a view holds the bytes that indexing gives, element dimensions in order."""
    tensor = _random(4, 6, 5, 8)
    if 3 in slot_dims:
        tensor = np.ascontiguousarray(tensor[..., :3])
    view = LayerView.from_tensor(tensor, slot_dims=slot_dims)
    by_row = np.moveaxis(tensor, slot_dims, range(len(slot_dims)))
    by_row = by_row.reshape(view.num_rows, -1)
    for row in range(view.num_rows):
        assert reference_row(view, row) == by_row[row].tobytes()


def test_torch_and_numpy_give_the_same_view() -> None:
    """A torch tensor over a numpy array's memory is the same view."""
    array = np.random.default_rng(1).standard_normal((6, 4, 2, 5)).astype(np.float32)
    tensor = torch.from_numpy(array)
    assert LayerView.from_tensor(tensor, slot_dims=(0, 2)) == LayerView.from_tensor(
        array, slot_dims=(0, 2)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_any_dtype_is_bytes(dtype: torch.dtype) -> None:
    """An element's bytes are its values times the width of the dtype."""
    tensor = torch.zeros(8, 3, dtype=dtype)
    assert LayerView.from_tensor(tensor).element_size == 3 * tensor.element_size()


def test_padding_between_rows_and_blocks() -> None:
    """A slice of a wider tensor keeps the wide strides and the narrow element."""
    padded = _random(4, 16, 64)
    view = LayerView.from_tensor(padded[:, :12, 8:48], slot_dims=(0, 1))
    assert (view.num_rows, view.row_stride, view.block_rows, view.block_stride) == (
        48,
        64,
        12,
        1024,
    )
    assert view.element_size == 40
    assert reference_row(view, 12 + 5) == padded[1, 5, 8:48].tobytes()


@pytest.mark.parametrize(
    ("tensor", "slot_dims", "message"),
    [
        (torch.zeros(1, 8).expand(4, 8), (0,), r"dimension 0 .* stride 0"),
        (np.zeros((4, 8), np.uint8)[::-1], (0,), r"dimension 0 .* stride -8"),
        (torch.zeros(4, 8, device="meta"), (0,), "meta"),
        (torch.zeros(4, 8).to_sparse(), (0,), "sparse"),
        (torch.zeros(0, 8), (0,), r"dimension 0 .* empty"),
        (torch.zeros(4, 8), (0, 0), "slot_dims"),
        (torch.zeros(4, 8), (2,), "slot_dims"),
        (torch.zeros(4, 8), (), "slot_dims"),
        ([[1, 2], [3, 4]], (0,), "list is neither a torch tensor nor a numpy array"),
    ],
)
def test_unusable_tensors_are_refused(
    tensor: object, slot_dims: tuple[int, ...], message: str
) -> None:
    """A tensor without rows of its own is refused, with the dimension or type at fault."""
    with pytest.raises(ViewError, match=message):
        LayerView.from_tensor(tensor, slot_dims=slot_dims)


def test_overlapping_rows_are_refused() -> None:
    """Rows closer together than they are long cannot be told apart."""
    tensor = torch.zeros(100, dtype=torch.uint8).as_strided((10, 16), (8, 1))
    with pytest.raises(ViewError, match="rows are 8 bytes apart but cover 16"):
        LayerView.from_tensor(tensor)


def test_view_outside_its_storage_is_refused() -> None:
    """Strides that reach past the storage are refused with both sizes."""
    short = np.zeros(100, np.uint8)
    beyond = np.lib.stride_tricks.as_strided(short, (10, 16), (16, 1))
    with pytest.raises(ViewError, match="to 160 of a storage of 100 bytes"):
        LayerView.from_tensor(beyond)
    storage = torch.zeros(160, dtype=torch.uint8)
    tensor = storage.as_strided((10, 16), (16, 1))
    storage.untyped_storage().resize_(100)
    with pytest.raises(ViewError, match="to 160 of a storage of 100 bytes"):
        LayerView.from_tensor(tensor)


def test_uneven_pieces_are_refused() -> None:
    """An element whose pieces are not evenly spaced names the dimension that breaks the spacing."""
    tensor = _random(2, 3, 8, 16)[:, :, ::2, :4]
    with pytest.raises(ViewError, match=r"dimension 0 .* breaks the even spacing"):
        LayerView.from_tensor(tensor[:, :2], slot_dims=(1,))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_rows", 0, "positive"),
        ("piece_size", -1, "positive"),
        ("block_rows", 3, "whole blocks"),
    ],
)
def test_views_by_hand_are_checked(field: str, value: int, message: str) -> None:
    """A view built from numbers obeys the same rules."""
    numbers: dict[str, Any] = {
        "address": 4096,
        "num_rows": 8,
        "row_stride": 16,
        "block_rows": 8,
        "block_stride": 128,
        "num_pieces": 1,
        "piece_size": 16,
        "piece_stride": 16,
    }
    with pytest.raises(ViewError, match=message):
        LayerView(**{**numbers, field: value})


def test_pool_from_one_tensor_or_many() -> None:
    """Separate tensors, one packed tensor, and layers along any dimension give equal rows."""
    packed = _random(3, 10, 16)
    geometry = _geometry(16, num_layers=3)
    pools = [
        PoolView.from_tensors(geometry, {"k": packed}),
        PoolView.from_tensors(geometry, {"k": [layer.copy() for layer in packed]}),
        PoolView.from_tensors(
            geometry, {"k": np.ascontiguousarray(packed.swapaxes(0, 1))}, layer_dim=1
        ),
    ]
    for pool in pools:
        rows = [reference_row(pool.view("k", layer), 4) for layer in range(3)]
        assert rows == [packed[layer, 4].tobytes() for layer in range(3)]


def test_more_tensors_than_1024() -> None:
    """A pool of thousands of separate tensors is one pool."""
    tensors = [np.zeros((4, 16), np.uint8) for _ in range(2500)]
    pool = PoolView.from_tensors(_geometry(16, num_layers=2500), {"k": tensors})
    assert len(pool.layers["k"]) == 2500


def test_each_plane_may_have_its_own_slot_dims() -> None:
    """Groups of different layouts live in one pool."""
    geometry = Geometry(
        planes=(
            Plane(name="k", num_layers=1, element_size=24),
            Plane(name="index_key", num_layers=2, element_size=132 * 16, rows_per_page=1),
        ),
        page_size=16,
    )
    pool = PoolView.from_tensors(
        geometry,
        {"k": [_random(4, 3, 16, 8)], "index_key": _random(2, 4, 16, 132)},
        slot_dims={"k": (0, 2), "index_key": (0,)},
    )
    assert (pool.num_rows("k"), pool.num_rows("index_key")) == (64, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "at least one plane"),
        ({"v": [_random(4, 16)]}, "no plane 'v'"),
        ({"k": [_random(4, 16)]}, "2 layers, but 1 were given"),
        (
            {"k": [_random(4, 16), _random(4, 8)]},
            "rows of 8 bytes, but a row of the geometry has 16",
        ),
        ({"k": [_random(4, 16), _random(5, 16)]}, "5 rows, but layer 0 has 4"),
        ({"k": _random(3, 4, 16)}, "should keep 2 layers along dimension 0"),
    ],
)
def test_pools_that_do_not_fit_their_geometry(tensors: dict[str, object], message: str) -> None:
    """A wrong plane, layer count, element size or row count is named with both numbers."""
    with pytest.raises(ValueError, match=message):
        PoolView.from_tensors(_geometry(16, num_layers=2), tensors)


def test_planes_may_share_storage_when_they_say_so() -> None:
    """Overlap between planes is refused, unless the engine shares blocks on purpose."""
    geometry = Geometry(
        planes=(
            Plane(name="full", num_layers=1, element_size=16),
            Plane(name="window", num_layers=1, element_size=16),
        )
    )
    shared = _random(8, 16)
    with pytest.raises(ViewError, match=r"'full', layer 0 and plane 'window', layer 0 overlap"):
        PoolView.from_tensors(geometry, {"full": [shared], "window": [shared]})
    PoolView.from_tensors(geometry, {"full": [shared], "window": [shared]}, shared_storage=True)
    with pytest.raises(ViewError, match="overlap"):
        PoolView.from_tensors(
            _geometry(16, num_layers=2), {"k": [shared, shared]}, shared_storage=True
        )


def test_one_pool_is_on_one_device() -> None:
    """Tensors on two devices are refused with both names."""
    view = LayerView.from_tensor(_random(4, 16))
    other = LayerView.from_tensor(_random(4, 16))
    object.__setattr__(other, "device", "cuda:1")
    with pytest.raises(ViewError, match="cpu, cuda:1"):
        PoolView(_geometry(16, num_layers=2), {"k": (view, other)})


def test_a_view_keeps_its_storage_alive() -> None:
    """The memory of a registered tensor outlives the tensor, and what takes its place."""
    tensor = torch.arange(64, dtype=torch.uint8).reshape(4, 16)
    view = PoolView.from_tensors(_geometry(16), {"k": [tensor]}).view("k", 0)
    assert view.owner.data_ptr() == view.address
    tensor.set_()  # type: ignore[call-overload]
    assert view.owner.data_ptr() == view.address
    del tensor
    assert reference_row(view, 3) == bytes(range(48, 64))
    assert view.still_there()  # the storage is, and no tensor is left to say otherwise


def test_storage_goes_with_its_last_view() -> None:
    """A view keeps memory alive no longer than it lives itself."""
    array = np.zeros((4, 16), np.uint8)
    gone = weakref.ref(array)
    pool = PoolView.from_tensors(_geometry(16), {"k": [array[:]]})
    del array
    assert gone() is not None
    del pool
    assert gone() is None


_REPLACED: dict[str, Callable[[torch.Tensor], object]] = {
    "data": lambda t: setattr(t, "data", torch.zeros(2, 8, 16, dtype=torch.uint8)),
    "set_": lambda t: t.set_(torch.zeros(2, 8, 16, dtype=torch.uint8)),  # type: ignore[call-overload]
    "resize_": lambda t: t.resize_(2, 1 << 16, 16),
    "storage.resize_": lambda t: t.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("how", _REPLACED)
@pytest.mark.parametrize("packed", [True, False])
def test_memory_that_is_moved_or_replaced_is_noticed(how: str, packed: bool) -> None:
    """still_there turns False when a tensor no longer lies where it was registered."""
    tensor = torch.zeros(2, 8, 16, dtype=torch.uint8)
    layers = [torch.zeros(8, 16, dtype=torch.uint8), torch.zeros(8, 16, dtype=torch.uint8)]
    tensors = tensor if packed else layers
    pool = PoolView.from_tensors(_geometry(16, num_layers=2), {"k": tensors})
    tensor.fill_(1)
    layers[1].add_(1)
    assert pool.still_there()
    _REPLACED[how](tensor if packed else layers[1])
    assert not pool.still_there()
    assert pool.view("k", 0).still_there() != packed
    assert not pool.view("k", 1).still_there()


def test_a_numpy_array_that_is_resized_is_noticed() -> None:
    """numpy moves the memory under a slice when it is told not to count references."""
    array = np.zeros((4, 16), np.uint8)
    pool = PoolView.from_tensors(_geometry(16), {"k": [array[:]]})
    assert pool.still_there()
    array.resize((1 << 16, 16), refcheck=False)
    assert not pool.still_there()


def test_a_pool_looks_at_each_tensor_once() -> None:
    """One tensor for many layers is one look at its storage; a view by hand is none."""
    geometry = _geometry(16, num_layers=200)
    packed = PoolView.from_tensors(geometry, {"k": torch.zeros(200, 4, 16, dtype=torch.uint8)})
    assert len(packed._registered) == 1
    layers = [torch.zeros(4, 16, dtype=torch.uint8) for _ in range(200)]
    assert len(PoolView.from_tensors(geometry, {"k": layers})._registered) == 200
    numbers: dict[str, Any] = {"address": 4096, "num_rows": 4, "row_stride": 16, "block_rows": 4}
    by_hand = LayerView(**numbers, block_stride=64, num_pieces=1, piece_size=16, piece_stride=16)
    assert by_hand.owner is None
    assert PoolView(_geometry(16), {"k": (by_hand,)}).still_there()


class _OnlyAnInterface:
    """Lends out the memory of an array without being one."""

    def __init__(self, array: np.ndarray) -> None:
        self.__array_interface__ = array.__array_interface__
        self.shape = array.shape


def _fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.zeros(1, 4, 4)


def _read_only() -> np.ndarray:
    array = _random(1, 4, 16)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (lambda: torch.zeros(1, 4, 2, dtype=torch.complex64).conj(), "lazy conj view"),
        (lambda: torch._neg_view(torch.zeros(1, 4, 4)), "lazy neg view"),
        (_fake, "FakeTensor has no memory"),
        (lambda: torch.nested.nested_tensor([torch.zeros(4, 4)]), "layout nested"),
        (torch.nn.parameter.UninitializedParameter, "uninitialised"),
        (lambda: np.ma.masked_array(_random(1, 4, 16)), "masked array"),
        (lambda: _OnlyAnInterface(_random(1, 4, 16)), "numpy.asarray"),
        (_read_only, "read-only"),
        (lambda: np.zeros((1, 4, 2), object), "dtype object"),
        (lambda: 7, "int is neither"),
        (lambda: None, "NoneType is neither"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_whose_bytes_are_not_their_values(
    tensor: Callable[[], Any], message: str, packed: bool
) -> None:
    """What has no memory of its own, or lazy values, is refused alone and in a list."""
    given = tensor() if packed else [tensor()]
    with pytest.raises(ViewError, match=message):
        PoolView.from_tensors(_geometry(16), {"k": given})


def test_a_tensor_under_vmap_is_refused() -> None:
    """A tensor that stands for a batch of tensors has no memory."""

    def register(tensor: torch.Tensor) -> torch.Tensor:
        with pytest.raises(ViewError, match="has no memory of its own"):
            PoolView.from_tensors(_geometry(16), {"k": tensor})
        return tensor

    torch.vmap(register)(torch.zeros(3, 1, 4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"slot_dims": {}}, "no plane, but nothing for plane 'k'"),
        ({"slot_dims": {"v": (0,)}}, "'v', but nothing for plane 'k'"),
        ({"slot_dims": 0}, "slot_dims must be a tuple"),
        ({"slot_dims": ("0",)}, "slot_dims must be a tuple"),
        ({"slot_dims": (0.0,)}, "slot_dims must be a tuple"),
        ({"slot_dims": {"k": None}}, "slot_dims must be a tuple"),
        ({"layer_dim": "0"}, "layer_dim"),
        ({"layer_dim": None}, "layer_dim"),
        ({"layer_dim": 3}, "layer_dim"),
        ({"tensors": [_random(1, 4, 16)]}, "mapping of plane names to tensors"),
        ({"tensors": _random(1, 4, 16)}, "mapping of plane names to tensors"),
        ({"tensors": {"v": _random(1, 4, 16)}}, "no plane 'v'"),
        ({"tensors": {"k": "ab"}}, "str is neither"),
    ],
)
def test_bad_arguments_of_a_pool_are_view_errors(arguments: dict[str, Any], message: str) -> None:
    """Whatever is handed to from_tensors, the answer is a pool or a ViewError."""
    given = {"tensors": {"k": _random(1, 4, 16)}, **arguments}
    with pytest.raises(ViewError, match=message):
        PoolView.from_tensors(_geometry(16), **given)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1], "mapping of plane names to sequences"),
        ({"v": ()}, "no plane 'v'"),
        ({"k": (3,)}, "int is no LayerView"),
    ],
)
def test_bad_layers_of_a_pool_are_view_errors(layers: Any, message: str) -> None:
    """A pool made of views is checked as one made of tensors is."""
    with pytest.raises(ViewError, match=message):
        PoolView(_geometry(16), layers)
