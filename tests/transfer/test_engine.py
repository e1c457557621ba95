"""The engine: exact both ways on every CPU path, digests carried and checked, refusals first."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.compiler import needs_kernel

from kvferry.errors import (
    ConfigError,
    PlanError,
    PoolClosedError,
    SlotOwnershipError,
    TransferError,
    TransferFaultError,
    ViewError,
)
from kvferry.geometry import Geometry, LayerView, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
from kvferry.testing.numeric import assert_bytes_equal
from kvferry.transfer import TransferEngine, TransferPlan, available_cpu_paths
from kvferry.transfer.cpu_carrier import CpuCarrier
from kvferry.types import Direction

_POISON = 0xA5
_TOKENS = 64

_GEOMETRY = Geometry(
    planes=(
        Plane(name="k", num_layers=3, element_size=66),
        Plane(name="v", num_layers=3, element_size=40),
    ),
    page_size=8,
)


@pytest.fixture(params=[pytest.param("cpu", marks=needs_kernel), "cpu_numpy"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each CPU path in turn, chosen the way a user would: by switching the other off."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", ",".join({"cpu", "cpu_numpy"} - {request.param}))
    assert [found.name for found in available_cpu_paths()] == [request.param]
    return str(request.param)


@pytest.fixture
def pool() -> Iterator[HostPool]:
    """A small pool of ours, all of it allocated, its padding and unused slots poisoned."""
    with HostPool(_GEOMETRY, num_slots=16, unchecked_budget=True) as made:
        made.allocate(16, SlotOwner.INDEX)
        _memory(made)[:] = _POISON
        yield made


def _memory(pool: HostPool) -> np.ndarray:
    size = pool.num_slots * pool.slot_bytes
    memory: np.ndarray = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pool.address))
    return memory


def _device(seed: int | None = None) -> dict[str, np.ndarray]:
    made = {}
    for plane in _GEOMETRY.planes:
        shape = (plane.num_layers, _TOKENS, plane.element_size)
        if seed is None:
            made[plane.name] = np.full(shape, _POISON, dtype=np.uint8)
        else:
            made[plane.name] = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return made


def _plan(make: Callable[..., TransferPlan], slots: list[int], first: int = 0) -> TransferPlan:
    rows = np.arange(first, first + len(slots) * 8)
    return make(
        _GEOMETRY, host_slots=slots, device_slots=rows, page_keys=[b"%d" % slot for slot in slots]
    )


def test_round_trip_into_other_slots(path: str, pool: HostPool) -> None:
    """Pages come back byte for byte into other rows; nothing else on either side is written."""
    source, target = _device(1), _device()
    slots = [9, 2, 15]
    stored = TransferEngine(PoolView.from_tensors(_GEOMETRY, source), pool).store(
        _plan(TransferPlan.store, slots, first=5)
    )
    assert (stored.path, stored.done, stored.error, stored.verified_pages) == (path, True, None, 3)
    loaded = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool).load(
        _plan(TransferPlan.load, slots, first=30)
    )
    loaded.wait()
    assert (loaded.path, loaded.verified_pages, loaded.bad_pages) == (path, 3, ())
    for name, found in target.items():
        expected = np.full_like(found, _POISON)
        expected[:, 30:54] = source[name][:, 5:29]
        assert_bytes_equal(found, expected, name, ("layer", "token", "byte"))
    memory = _memory(pool).reshape(pool.num_slots, pool.slot_bytes)
    for slot in range(pool.num_slots):
        used = np.zeros(pool.slot_bytes, dtype=np.bool_)
        if slot in slots:
            for span in _GEOMETRY.spans():
                used[span.offset : span.offset + span.num_bytes] = True
        assert (memory[slot][~used] == _POISON).all(), f"slot {slot} was written outside its spans"


def test_pages_lie_in_the_slot_as_the_geometry_says(path: str, pool: HostPool) -> None:
    """A slot holds plane after plane, layer after layer, token after token."""
    source = _device(2)
    TransferEngine(PoolView.from_tensors(_GEOMETRY, source), pool).store(
        _plan(TransferPlan.store, [3], first=16)
    )
    slot = np.frombuffer(bytes(pool.slot_view(3)), dtype=np.uint8)
    for span in _GEOMETRY.spans():
        expected = source[span.plane.name][span.layer, 16:24].ravel()
        assert_bytes_equal(slot[span.offset : span.offset + span.num_bytes], expected)


def test_a_flipped_bit_is_a_bad_page(path: str, pool: HostPool) -> None:
    """One flipped bit in one layer of one plane makes that page bad, its rows untouched there."""
    source = _device(3)
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, source), pool)
    engine.store(_plan(TransferPlan.store, [4, 5, 6, 7]))
    span = _GEOMETRY.spans()[4]
    pool.slot_view(6)[span.offset + 100] ^= 0x10
    target = _device()
    loaded = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool).load(
        _plan(TransferPlan.load, [4, 5, 6, 7])
    )
    assert (loaded.verified_pages, loaded.bad_pages, loaded.error) == (2, (2,), None)
    assert (target[span.plane.name][span.layer, 16:24] == _POISON).all()
    assert_bytes_equal(target["k"][:, 24:32], source["k"][:, 24:32])


def test_digests_belong_to_a_page_key(path: str, pool: HostPool) -> None:
    """A page served under another page's key is bad, though slot and bytes are whole."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(4)), pool)
    engine.store(_plan(TransferPlan.store, [1, 2]))
    plan = TransferPlan.load(
        _GEOMETRY, host_slots=[1, 2], device_slots=np.arange(16), page_keys=[b"1", b"other"]
    )
    assert engine.load(plan).bad_pages == (1,)


def test_slots_that_change_places_are_bad(path: str, pool: HostPool) -> None:
    """Whole slots swapped behind our back, bytes and digests together, are found by their keys."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(5)), pool)
    engine.store(_plan(TransferPlan.store, [1, 2]))
    one, two = bytes(pool.slot_view(1)), bytes(pool.slot_view(2))
    pool.slot_view(1)[:], pool.slot_view(2)[:] = two, one
    pool.digests[[1, 2]] = pool.digests[[2, 1]]
    assert engine.load(_plan(TransferPlan.load, [1, 2])).bad_pages == (0, 1)


def test_what_was_never_stored_is_bad(path: str, pool: HostPool) -> None:
    """A slot without a digest, or whose slot was given to somebody else since, is never served."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(6)), pool)
    assert engine.load(_plan(TransferPlan.load, [0])).bad_pages == (0,)
    engine.store(_plan(TransferPlan.store, [5]))
    assert engine.load(_plan(TransferPlan.load, [5])).bad_pages == ()
    pool.free([5], SlotOwner.INDEX)
    assert pool.allocate(1, SlotOwner.INDEX) == ((5, 1),)
    assert engine.load(_plan(TransferPlan.load, [5])).bad_pages == (0,)


def test_slots_that_nobody_owns_are_refused(path: str, pool: HostPool) -> None:
    """Neither a store into a free slot nor a load from one moves a byte; the slot is named."""
    source = _device(7)
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, source), pool)
    engine.store(_plan(TransferPlan.store, [4, 5]))
    pool.free([5, 6], SlotOwner.INDEX)
    memory, rows = _memory(pool).copy(), {name: plane.copy() for name, plane in source.items()}
    digests = pool.digests.copy()
    with pytest.raises(SlotOwnershipError, match=r"slot 6 is free.*allocate\(\)"):
        engine.store(_plan(TransferPlan.store, [4, 6]))
    with pytest.raises(SlotOwnershipError, match="slot 5 is free"):
        engine.load(_plan(TransferPlan.load, [4, 5], first=16))
    assert_bytes_equal(_memory(pool), memory)
    assert_bytes_equal(pool.digests, digests)
    for name, plane in source.items():
        assert_bytes_equal(plane, rows[name])
    assert pool.num_leases == 0
    pool.allocate(2, SlotOwner.INDEX)
    assert engine.store(_plan(TransferPlan.store, [4, 6])).verified_pages == 2


def test_without_digests_nothing_is_called_verified(path: str, pool: HostPool) -> None:
    """With `verify` off bytes still move, and the handle says that nobody checked them."""
    source, target = _device(7), _device()
    unchecked = TransferEngine(PoolView.from_tensors(_GEOMETRY, source), pool, verify=False)
    assert unchecked.verify is False
    stored = unchecked.store(_plan(TransferPlan.store, [3, 4]))
    assert (stored.verified, stored.verified_pages, stored.bad_pages) == (False, 0, ())
    assert not pool.digests[[3, 4]].any()
    loads = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool, verify=False)
    assert loads.load(_plan(TransferPlan.load, [3, 4])).verified_pages == 0
    assert_bytes_equal(target["k"][:, :16], source["k"][:, :16])
    checked = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool)
    assert checked.load(_plan(TransferPlan.load, [3, 4])).bad_pages == (0, 1)


@needs_kernel
def test_paths_write_equal_digests(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one path stored another path verifies."""
    source = _device(8)
    view = PoolView.from_tensors(_GEOMETRY, source)
    for writer, reader in (("cpu", "cpu_numpy"), ("cpu_numpy", "cpu")):
        monkeypatch.setenv("KVFERRY_DISABLE_PATHS", reader)
        assert TransferEngine(view, pool).store(_plan(TransferPlan.store, [1, 2])).path == writer
        monkeypatch.setenv("KVFERRY_DISABLE_PATHS", writer)
        loaded = TransferEngine(view, pool).load(_plan(TransferPlan.load, [1, 2]))
        assert (loaded.path, loaded.verified_pages) == (reader, 2)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_large_transfers_are_spread_over_threads(path: str, num_threads: int) -> None:
    """However many threads share the work, bytes and digests are the same."""
    geometry = Geometry(planes=(Plane(name="k", num_layers=7, element_size=584),), page_size=64)
    source = np.random.default_rng(9).integers(0, 256, (7, 2048, 584), dtype=np.uint8)
    target = np.zeros_like(source)
    rows = np.random.default_rng(10).permutation(2048)
    with HostPool(geometry, num_slots=32, unchecked_budget=True) as pool:
        pool.allocate(32, SlotOwner.INDEX)
        plans = [
            make(geometry, host_slots=range(32), device_slots=rows)
            for make in (TransferPlan.store, TransferPlan.load)
        ]
        for tensor, direction in ((source, "store"), (target, "load")):
            engine = TransferEngine(
                PoolView.from_tensors(geometry, {"k": tensor}), pool, num_threads=num_threads
            )
            handle = getattr(engine, direction)(plans[direction == "load"])
            assert handle.verified_pages == 32
    assert_bytes_equal(target, source, "k", ("layer", "token", "byte"))


def test_registered_pools_serve_like_our_own(path: str) -> None:
    """An engine's layer_first, token_major and page_major tensors keep the same pages."""
    source = _device(11)
    device = PoolView.from_tensors(_GEOMETRY, source)
    sizes = {plane.name: plane.element_size for plane in _GEOMETRY.planes}
    layouts: dict[str, Any] = {
        "layer_first": ({n: (3, 128, e) for n, e in sizes.items()}, 0, (0,)),
        "token_major": ({n: (128, 3, e) for n, e in sizes.items()}, 1, (0,)),
        "page_major": ({n: (16, 3, 8, e) for n, e in sizes.items()}, 1, (0, 1)),
    }
    digests = []
    for shapes, layer_dim, slot_dims in layouts.values():
        tensors = {name: np.full(shape, _POISON, np.uint8) for name, shape in shapes.items()}
        pool = RegisteredHostPool.from_tensors(
            _GEOMETRY, tensors, layer_dim=layer_dim, slot_dims=slot_dims
        )
        assert pool.num_slots == 16
        TransferEngine(device, pool).store(_plan(TransferPlan.store, [11, 0], first=8))
        by_layer = np.moveaxis(tensors["k"], layer_dim, 0).reshape(3, 128, 66)
        assert_bytes_equal(by_layer[:, 88:96], source["k"][:, 8:16])
        assert_bytes_equal(by_layer[:, 0:8], source["k"][:, 16:24])
        assert (by_layer[:, 8:88] == _POISON).all()
        target = _device()
        loaded = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool).load(
            _plan(TransferPlan.load, [11, 0], first=40)
        )
        assert loaded.verified_pages == 2
        assert_bytes_equal(target["v"][:, 40:56], source["v"][:, 8:24])
        digests.append(pool.digests[[11, 0]].tolist())
    assert digests[0] == digests[1] == digests[2]


def test_no_pages_move_nothing(path: str, pool: HostPool) -> None:
    """An empty plan is done at once and verified."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(12)), pool)
    handle = engine.store(_plan(TransferPlan.store, []))
    handle.wait(timeout=0)
    assert (handle.done, handle.error, handle.verified_pages, handle.bad_pages) == (
        True,
        None,
        0,
        (),
    )


def test_layers_can_be_waited_for(path: str, pool: HostPool) -> None:
    """Every layer of a finished plan is ready; a layer it does not move is an error."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(13)), pool)
    handle = engine.store(_plan(TransferPlan.store, [1]))
    for layer in range(3):
        handle.wait_layer(layer)
    handle.wait_all()
    handle.wait(timeout=0)
    with pytest.raises(TransferError, match=r"layer 3 is not part.*0, 1, 2"):
        handle.wait_layer(3)
    with pytest.raises(TransferError, match="stream 7: path cpu"):
        handle.wait_layer(0, stream=7)


@pytest.mark.parametrize(
    ("slots", "first", "message"),
    [
        ([3, 16], 0, "host_slots holds 16, but there are only 16 slots"),
        ([3, 4], 49, "plane 'k' holds 64, but there are only 64 rows"),
    ],
)
def test_indices_outside_a_pool_are_refused(
    path: str, pool: HostPool, slots: list[int], first: int, message: str
) -> None:
    """An index past the end of a pool is named before a byte moves, both ways."""
    target = _device()
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, target), pool)
    for make, submit in ((TransferPlan.load, engine.load), (TransferPlan.store, engine.store)):
        with pytest.raises(PlanError, match=message):
            submit(_plan(make, slots, first=first))
    assert (_memory(pool) == _POISON).all()
    assert all((tensor == _POISON).all() for tensor in target.values())


def test_plans_that_do_not_fit_the_engine_are_refused(path: str, pool: HostPool) -> None:
    """A plan of another direction, geometry or plane set moves nothing."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(14)), pool)
    with pytest.raises(PlanError, match="is a store, not a load"):
        engine.load(_plan(TransferPlan.store, [1]))
    other = Geometry(planes=_GEOMETRY.planes, page_size=4)
    with pytest.raises(PlanError, match="another geometry"):
        engine.load(TransferPlan.load(other, host_slots=[1], device_slots=range(4)))
    only_k = PoolView.from_tensors(_GEOMETRY, {"k": _device(14)["k"]})
    with pytest.raises(PlanError, match="no plane 'v'"):
        TransferEngine(only_k, pool).load(_plan(TransferPlan.load, [1]))
    plan = TransferPlan.store(_GEOMETRY, host_slots=[1], device_slots=range(8), planes=["k"])
    assert TransferEngine(only_k, pool).store(plan).verified_pages == 1


def test_pools_that_do_not_fit_each_other_are_refused(pool: HostPool) -> None:
    """Pools of two geometries, or on a device no path serves, are refused at once."""
    other = Geometry(planes=_GEOMETRY.planes, page_size=4)
    with pytest.raises(ViewError, match="different geometries"):
        TransferEngine(PoolView.from_tensors(other, _device(15)), pool)
    views = {}
    for name, tensors in _device(15).items():
        views[name] = tuple(LayerView.from_tensor(tensor) for tensor in tensors)
        for view in views[name]:
            object.__setattr__(view, "device", "xpu:0")
    with pytest.raises(ViewError, match="no path serves device xpu:0"):
        TransferEngine(PoolView(_GEOMETRY, views), pool)


def test_closed_pools_are_refused(path: str) -> None:
    """A pool that was closed serves no transfer, our own or an engine's."""
    pool = HostPool(_GEOMETRY, num_slots=4, unchecked_budget=True)
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(16)), pool)
    pool.close()
    with pytest.raises(PoolClosedError):
        engine.store(_plan(TransferPlan.store, [1]))
    tensors = {
        plane.name: np.zeros((3, 32, plane.element_size), np.uint8) for plane in _GEOMETRY.planes
    }
    registered = RegisteredHostPool.from_tensors(_GEOMETRY, tensors)
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(16)), registered)
    registered.close()
    with pytest.raises(PoolClosedError):
        engine.store(_plan(TransferPlan.store, [1]))


def test_a_fault_in_a_copy_surfaces(
    path: str, pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that fails is the handle's error: no page verified, no digest left, pool usable."""
    engine = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(17)), pool)
    engine.store(_plan(TransferPlan.store, [1, 2]))
    carrier = engine._carrier
    assert isinstance(carrier, CpuCarrier)
    copy = carrier._move_span
    calls = itertools.count(1)

    def fails_late(move: Any, direction: Direction, *, verify: bool) -> Any:
        if next(calls) == 3:
            raise MemoryError("no room for a scratch buffer")
        return copy(move, direction, verify=verify)

    monkeypatch.setattr(carrier, "_move_span", fails_late)
    handle = engine.store(_plan(TransferPlan.store, [1, 2]))
    assert handle.done
    assert isinstance(handle.error, TransferFaultError)
    assert handle.verified_pages == 0
    for wait in ("wait", "wait_all"):
        with pytest.raises(TransferFaultError, match="store of 2 pages failed: no room"):
            getattr(handle, wait)()
    with pytest.raises(TransferFaultError, match="store of 2 pages failed: no room"):
        handle.wait_layer(0)
    assert not pool.digests[[1, 2]].any()
    monkeypatch.undo()
    again = TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(17)), pool)
    assert again.load(_plan(TransferPlan.load, [1, 2])).bad_pages == (0, 1)
    assert again.store(_plan(TransferPlan.store, [1, 2])).verified_pages == 2
    assert pool.num_leases == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [("cpu,cpu_numpy", "every path"), ("gpu", "gpu is no path"), ("cpu, warp", "warp is no path")],
)
def test_switching_off_everything_or_nothing_known(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    """All paths off, or an unknown name, is an error that says what there is."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", value)
    with pytest.raises(ConfigError, match=message):
        TransferEngine(PoolView.from_tensors(_GEOMETRY, _device(18)), pool)


def test_reprs_are_one_short_line(pool: HostPool) -> None:
    """What a session shows of plans, pools, engines and handles says what matters, shortly."""
    source = _device(12)
    view = PoolView.from_tensors(_GEOMETRY, source)
    engine = TransferEngine(view, pool, path="cpu_numpy")
    stored = engine.store(_plan(TransferPlan.store, [3, 4]))
    byte = pool.slot_view(4)
    byte[0] ^= 1
    del byte
    plan = _plan(TransferPlan.load, [3, 4], first=16)
    loaded = engine.load(plan)
    assert repr(loaded) == (
        "CompletedTransfer(path='cpu_numpy', load, pages=2, verified=True, verified_pages=1, "
        "bad_pages=(1,), error=None)"
    )
    unchecked = TransferEngine(view, pool, path="cpu_numpy", verify=False)
    assert "verified=False, verified_pages=0," in repr(unchecked.load(plan))
    assert "store" in repr(stored)
    assert repr(plan) == "TransferPlan(load, page slots: 2, spans of each: 6, bytes: 5088)"
    assert repr(view) == "PoolView(k: 3 x 64 rows of 66 bytes, v: 3 x 64 rows of 40 bytes; cpu)"
    assert repr(view.view("k", 1)) == "LayerView(plane 'k', layer 1: 64 rows of 66 bytes, cpu)"
    assert f"fingerprint='{_GEOMETRY.fingerprint}'" in repr(_GEOMETRY)
    assert "(k, v; page_bytes=2544," in repr(_GEOMETRY)
    registered = RegisteredHostPool.from_tensors(_GEOMETRY, _device())
    assert repr(registered).startswith("RegisteredHostPool(page slots: 8, PoolView(k: ")
    for shown in (engine, plan, view, loaded, _GEOMETRY, registered):
        assert len(repr(shown)) < 260
        assert "\n" not in repr(shown)
