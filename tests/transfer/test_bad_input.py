"""Bad input: a clear error, with the value and the limit, before a byte moves, on every path."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.rig import Rig, each_path

from kvferry.errors import (
    ConfigError,
    GeometryError,
    KVFerryError,
    PlanError,
    PoolClosedError,
    PoolInUseError,
    ViewError,
)
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool
from kvferry.transfer import TransferEngine, TransferPlan, blocks_to_rows
from kvferry.transfer.cpu_carrier import CpuCarrier
from kvferry.types import Direction, Layout

_GEOMETRY = Geometry(
    planes=(
        Plane(name="k", num_layers=2, element_size=24),
        Plane(name="packed", num_layers=1, element_size=40, rows_per_page=1),
    ),
    page_size=4,
)
_ROWS = 32
_SLOTS = 3


def _rig(host_layout: Layout | None = None) -> Rig:
    rows = {"k": _ROWS, "packed": 8}
    return Rig.make(_GEOMETRY, num_rows=rows, num_slots=_SLOTS, host_layout=host_layout)


def _good() -> dict[str, Any]:
    return {
        "host_slots": [2, 0],
        "device_slots": np.arange(8).reshape(2, 4),
        "plane_slots": {"packed": [[1], [7]]},
    }


_BAD_PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "device index out of range": (
        {"device_slots": [0, 1, 2, 3, 4, 5, 6, 32]},
        "'k' holds 32, but there are only 32 rows",
    ),
    "packed index out of range": (
        {"plane_slots": {"packed": [8, 0]}},
        "'packed' holds 8, but there are only 8 rows",
    ),
    "host slot out of range": ({"host_slots": [2, 3]}, "host_slots holds 3, but .* only 3 slots"),
    "index beyond any pool": ({"host_slots": [0, 1 << 62]}, f"host_slots holds {1 << 62}"),
    "index beyond 64 bits": ({"host_slots": [0, 1 << 70]}, "host_slots must be whole numbers"),
    "negative device index": (
        {"device_slots": [0, 1, 2, 3, -4, 5, 6, 7]},
        "device_slots holds -4; indices lie between 0",
    ),
    "negative host slot": ({"host_slots": [-1, 0]}, "host_slots holds -1"),
    "unequal lengths": (
        {"host_slots": [0, 1, 2]},
        r"shape \(2, 4\), but 3 host slots with 4 rows a page need \[3, 4\]",
    ),
    "one row short": ({"device_slots": np.arange(7)}, r"shape \(7,\), but 2 host slots"),
    "pages of unequal length": (
        {"device_slots": [[0, 1, 2, 3], [4, 5, 6]]},
        "device_slots is no array .* lists of equal length",
    ),
    "packed rows short": (
        {"plane_slots": {"packed": [1]}},
        r"plane_slots\['packed'\] has shape \(1,\), but 2 host slots with 1 rows",
    ),
    "transposed": ({"device_slots": np.arange(8).reshape(4, 2)}, r"shape \(4, 2\)"),
    "host slots in two dimensions": ({"host_slots": [[2, 0]]}, r"not shape \(1, 2\)"),
    "float indices": ({"host_slots": [2.0, 0.0]}, "whole numbers, not float64"),
    "boolean mask": ({"host_slots": [True, False]}, "whole numbers, not bool"),
    "text": ({"host_slots": "20"}, "whole numbers, not <U2"),
    "nothing": ({"host_slots": None}, "host_slots must be whole numbers, not object"),
    "index tensor without memory": (
        {"host_slots": torch.zeros(2, dtype=torch.int64, device="meta")},
        "host_slots is no array of indices .*in host memory",
    ),
    "sparse index tensor": (
        {"host_slots": torch.zeros(2, dtype=torch.int64).to_sparse()},
        "host_slots is no array of indices",
    ),
    "unknown plane": ({"planes": ["k", "v"]}, r"\['v'\] .* there are: k, packed"),
    "slots of an unknown plane": (
        {"plane_slots": {"packed": [1, 7], "v": [0, 0]}},
        r"plane_slots names \['v'\]",
    ),
    "plane without slots": ({"plane_slots": None}, r"'packed' keeps 1 rows a page"),
    "no device slots": (
        {"device_slots": None},
        r"'k' keeps 4 rows .* shape \[2, 4\]",
    ),
    "unknown layer": ({"layers": [2]}, r"model layers \[2\] have no rows"),
    "too few keys": ({"page_keys": [b"a"]}, "1 page keys for 2 host slots"),
    "keys of text": ({"page_keys": ["a", "b"]}, "page key must be bytes, not str"),
}


@each_path
@pytest.mark.parametrize("host_layout", [None, Layout.TOKEN_MAJOR], ids=str)
@pytest.mark.parametrize("direction", list(Direction), ids=str)
@pytest.mark.parametrize("bad", _BAD_PLANS)
def test_bad_transfers_move_nothing(
    bad: str, direction: Direction, host_layout: Layout | None, path: str
) -> None:
    """Whatever is wrong with a transfer is named with its value, and no byte of a pool changes."""
    changes, message = _BAD_PLANS[bad]
    rig = _rig(host_layout)
    rig.store(path, **_good())
    with rig.nothing_moves(), pytest.raises(PlanError, match=message):
        _attempt(rig, direction, path, **{**_good(), **changes})


@each_path
@pytest.mark.parametrize(
    ("direction", "changes", "message"),
    [
        (Direction.STORE, {"host_slots": [2, 2]}, "host_slots names 2 twice"),
        (
            Direction.LOAD,
            {"device_slots": [0, 1, 2, 3, 4, 5, 6, 0]},
            "device slots of plane 'k' names 0 twice",
        ),
        (
            Direction.LOAD,
            {"plane_slots": {"packed": [7, 7]}},
            "device slots of plane 'packed' names 7 twice",
        ),
    ],
)
def test_a_destination_named_twice_moves_nothing(
    direction: Direction, changes: dict[str, Any], message: str, path: str
) -> None:
    """Two sources for one destination are refused, whichever side the destination is on."""
    rig = _rig()
    rig.store(path, **_good())
    with rig.nothing_moves(), pytest.raises(PlanError, match=message):
        _attempt(rig, direction, path, **{**_good(), **changes})


def _attempt(rig: Rig, direction: Direction, path: str, **given: Any) -> None:
    engine = TransferEngine(rig.device, rig.host, path=path)
    plan = TransferPlan.build(rig.geometry, direction, **given)
    (engine.load if direction is Direction.LOAD else engine.store)(plan)


@each_path
def test_a_plan_keeps_the_indices_that_were_checked(path: str) -> None:
    """A caller who reuses its index buffers between plan and transfer does not change the plan."""
    rig = _rig()
    slots, rows = np.array([2, 0]), torch.arange(8)
    packed = np.array([1, 7])
    plan = TransferPlan.store(
        _GEOMETRY, host_slots=slots, device_slots=rows, plane_slots={"packed": packed}
    )
    slots[:], packed[:] = 1, -1
    rows.fill_(1 << 40)
    assert plan.host_slots.tolist() == [2, 0]
    rig.transfer(plan, path)
    with pytest.raises(ValueError, match="read-only"):
        plan.rows_on_host("k")[0, 0] = 5


@pytest.mark.parametrize("block", [1 << 58, 1 << 60, (1 << 61) + 1, 1 << 62])
def test_block_numbers_that_would_wrap_are_refused(block: int) -> None:
    """A block whose token slots need more than 62 bits is refused, not wrapped round to slot 0."""
    with pytest.raises(PlanError, match=f"block_ids holds {block}"):
        blocks_to_rows([block], block_size=16, page_size=16)
    largest = (1 << 58) - 1
    assert blocks_to_rows([largest], block_size=16, page_size=16)[0, -1] == (1 << 62) - 1


@pytest.mark.parametrize("name", ["block_size", "page_size"])
@pytest.mark.parametrize("size", [0, -16, 1.5, True])
def test_bad_block_and_page_sizes(name: str, size: Any) -> None:
    """A size that is no positive whole number is named with its value."""
    sizes: dict[str, Any] = {"block_size": 16, "page_size": 16, name: size}
    with pytest.raises(PlanError, match=f"{name} must be .*, not {re.escape(repr(size))}"):
        blocks_to_rows([0], **sizes)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
@pytest.mark.parametrize("field", ["num_layers", "element_size"])
def test_sizes_of_planes_must_be_positive(field: str, value: Any) -> None:
    """A negative, zero or fractional size of a plane is named with its value."""
    with pytest.raises(GeometryError, match=f"{field} must be .*, not {re.escape(repr(value))}"):
        Plane(**{"name": "k", "num_layers": 1, "element_size": 8, field: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_slots": -1}, "num_slots"),
        ({"num_slots": 0}, "num_slots"),
        ({"num_bytes": -1}, "num_bytes"),
        ({"num_bytes": 100}, "num_bytes=100 holds no slot"),
    ],
)
def test_host_pools_of_no_size(given: dict[str, Any], message: str) -> None:
    """A host pool of a negative size, or too short for one slot, is refused."""
    with pytest.raises(ConfigError, match=message):
        HostPool(_GEOMETRY, **given)


def _tensors(**changes: Any) -> dict[str, Any]:
    pool = {"k": torch.zeros(2, _ROWS, 12).bfloat16(), "packed": np.zeros((1, 8, 40), np.uint8)}
    return {**pool, **changes}


_BAD_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "three layers": (lambda: torch.zeros(3, _ROWS, 24), r"'k'.*should keep 2 layers"),
    "list of three": (lambda: [torch.zeros(_ROWS, 6)] * 3, "has 2 layers, but 3 were given"),
    "dtype too wide": (
        lambda: torch.zeros(2, _ROWS, 12),
        r"shape \(32, 12\) .*rows of 48 bytes, but .* has 24",
    ),
    "row too narrow": (lambda: torch.zeros(2, _ROWS, 5), "rows of 20 bytes, but .* has 24"),
    "layers of unequal length": (
        lambda: [torch.zeros(_ROWS, 6), torch.zeros(_ROWS - 1, 6)],
        "layer 1: 31 rows, but layer 0 has 32",
    ),
    "one dimension": (
        lambda: [torch.zeros(_ROWS), torch.zeros(_ROWS)],
        "32 rows of 4 bytes, but .* 24",
    ),
    "no dimension": (lambda: [torch.zeros(()), torch.zeros(())], r"dimensions of shape \(\)"),
    "empty": (lambda: torch.zeros(2, 0, 6), r"dimension 0 of shape \(0, 6\) is empty"),
    "no memory": (lambda: torch.zeros(2, _ROWS, 6, device="meta"), "on device meta"),
    "sparse": (
        lambda: [torch.zeros(_ROWS, 6).to_sparse()] * 2,
        "layout torch.sparse_coo on device cpu",
    ),
    "expanded": (
        lambda: [torch.zeros(1, 6).expand(_ROWS, 6), torch.zeros(_ROWS, 6)],
        r"dimension 0 of shape \(32, 6\) has stride 0",
    ),
    "flipped": (lambda: np.zeros((2, _ROWS, 24), np.uint8)[:, ::-1], "stride -24"),
    "read-only": (
        lambda: np.frombuffer(bytes(2 * _ROWS * 24), np.uint8).reshape(2, _ROWS, 24),
        "'k': the array is read-only",
    ),
    "Python objects": (lambda: np.full((2, _ROWS, 3), None), "dtype object is not plain bytes"),
    "no tensor": (lambda: None, "'k': NoneType is neither a tensor nor a list"),
    "a list of lists": (lambda: [[0] * 24, [0] * 24], "list is neither a torch tensor nor a numpy"),
    "one layer twice": (
        lambda: [torch.ones(_ROWS, 6)[:]] * 2,
        "'k', layer 0 and plane 'k', layer 1 overlap in memory",
    ),
    "layers one byte into each other": (
        lambda: [*_a_byte_into_each_other()],
        "overlap in memory; give each layer its own bytes",
    ),
    "longer than its storage": (
        lambda: list(
            np.lib.stride_tricks.as_strided(
                np.zeros(2 * _ROWS * 24 - 1, np.uint8), (2, _ROWS, 24), (_ROWS * 24, 24, 1)
            )
        ),
        "dimension 0 is too long: .* storage of 1535 bytes",
    ),
    "storage given back": (lambda: [_without_storage(), torch.zeros(_ROWS, 6)], "of 0"),
}


def _a_byte_into_each_other() -> list[Any]:
    buffer, size = np.zeros(2 * _ROWS * 24 - 1, np.uint8), _ROWS * 24
    return [part.reshape(_ROWS, 24) for part in (buffer[:size], buffer[size - 1 :])]


def _without_storage() -> torch.Tensor:
    tensor = torch.zeros(_ROWS, 6)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("bad", _BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(bad: str) -> None:
    """A pool of a wrong shape, dtype or device, too short or overlapping, is never registered."""
    make, message = _BAD_TENSORS[bad]
    PoolView.from_tensors(_GEOMETRY, _tensors())
    with pytest.raises(ViewError, match=message):
        PoolView.from_tensors(_GEOMETRY, _tensors(k=make()))


@each_path
def test_pools_that_overlap_each_other_are_refused(path: str) -> None:
    """A device pool and a host pool with a byte in common are refused, close neighbours are not."""
    geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=16),), page_size=4)
    buffer = np.zeros(2 * _ROWS * 16, np.uint8)

    def pool(start: int) -> PoolView:
        rows = buffer[start : start + _ROWS * 16].reshape(_ROWS, 16)
        return PoolView.from_tensors(geometry, {"k": [rows]})

    for start in (0, 16, _ROWS * 16 - 1):
        with pytest.raises(ViewError, match=r"device's plane 'k'.* host's plane 'k'.* overlap"):
            TransferEngine(pool(0), RegisteredHostPool(geometry, pool(start)), path=path)
    neighbour = RegisteredHostPool(geometry, pool(_ROWS * 16))
    assert TransferEngine(pool(0), neighbour, path=path).path == path


@each_path
def test_a_device_that_no_path_serves_is_refused(path: str) -> None:
    """Tensors elsewhere than in host memory are refused by name, as device and as host pool."""
    rig = _rig()
    elsewhere = {
        name: tuple(_on("xpu:0", view) for view in views)
        for name, views in rig.device.layers.items()
    }
    with pytest.raises(ViewError, match="no path serves device xpu:0"):
        TransferEngine(PoolView(_GEOMETRY, elsewhere), rig.host, path=path)
    with pytest.raises(ViewError, match="not on xpu:0"):
        RegisteredHostPool(_GEOMETRY, PoolView(_GEOMETRY, elsewhere))
    with pytest.raises(ViewError, match=r"on one device, but .* cpu, xpu:0"):
        PoolView(_GEOMETRY, {**elsewhere, "packed": rig.device.layers["packed"]})


def _on(device: str, view: LayerView) -> LayerView:
    fields = {name: getattr(view, name) for name in view.__dataclass_fields__}
    return LayerView(**{**fields, "device": device})


@pytest.mark.parametrize("threads", [0, -2])
def test_a_negative_number_of_threads_is_refused(threads: int) -> None:
    """There is no transfer on fewer threads than one."""
    rig = _rig()
    with pytest.raises(ConfigError, match=f"num_threads={threads}: give at least 1"):
        TransferEngine(rig.device, rig.host, num_threads=threads)


def test_an_unknown_path_is_refused() -> None:
    """A path that is not there is named, with those that are."""
    rig = _rig()
    with pytest.raises(ConfigError, match=r"path 'gpu' is not to be had .*: .*cpu_numpy"):
        TransferEngine(rig.device, rig.host, path="gpu")


@each_path
@pytest.mark.parametrize("host_layout", [None, Layout.LAYER_FIRST], ids=str)
def test_a_pool_cannot_be_closed_while_a_transfer_uses_it(
    host_layout: Layout | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`close` in the middle of a copy is refused, and the copy goes on to the right end."""
    rig = _rig(host_layout)
    refused = []

    run = CpuCarrier._run

    def closing(carrier: CpuCarrier, *given: Any) -> Any:
        with pytest.raises(PoolInUseError, match="1 ") as told:
            rig.host.close()
        refused.append(str(told.value))
        return run(carrier, *given)

    monkeypatch.setattr(CpuCarrier, "_run", closing)
    rig.store(path, **_good())
    rig.poison_device()
    rig.load(path, **_good())
    assert len(refused) == 2
    assert all("wait for" in message for message in refused)


@each_path
@pytest.mark.parametrize("host_layout", [None, Layout.LAYER_FIRST], ids=str)
def test_a_closed_pool_serves_nothing(host_layout: Layout | None, path: str) -> None:
    """After `close` a transfer raises before it touches memory, both ways."""
    rig = _rig(host_layout)
    engine = TransferEngine(rig.device, rig.host, path=path)
    before = [memory.inside.copy() for memory in rig.device_memory]
    rig.host.close()
    for transfer, direction in ((engine.store, Direction.STORE), (engine.load, Direction.LOAD)):
        with pytest.raises(PoolClosedError, match=r"closed|close\(\)"):
            transfer(TransferPlan.build(_GEOMETRY, direction, **_good()))
    for memory, image in zip(rig.device_memory, before, strict=True):
        memory.check(image, "device")


def test_bad_input_has_one_root() -> None:
    """Every error above can be caught as one, and those about values as ValueError too."""
    for error in (ConfigError, GeometryError, PlanError, ViewError):
        assert issubclass(error, KVFerryError)
        assert issubclass(error, ValueError)
