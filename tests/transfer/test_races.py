"""Transfers that meet others, faults and interrupts: no wrong byte is ever verified."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.rig import each_path

from kvferry.errors import PlanError, TransferFaultError, ViewError
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool
from kvferry.testing import memory_at
from kvferry.transfer import TransferEngine, TransferPlan
from kvferry.transfer.cpu_carrier import CpuCarrier
from kvferry.types import Direction, SlotKind

_TOKENS = 64


def _geometry(num_layers: int = 4, element_size: int = 512) -> Geometry:
    plane = Plane(name="k", num_layers=num_layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=_TOKENS)


def _host(geometry: Geometry, num_pages: int) -> RegisteredHostPool:
    plane = geometry.planes[0]
    shape = (plane.num_layers, num_pages * geometry.page_size, plane.element_size)
    return RegisteredHostPool.from_tensors(geometry, {"k": np.zeros(shape, np.uint8)})


def _device(geometry: Geometry, fill: int, num_pages: int = 1) -> np.ndarray:
    plane = geometry.planes[0]
    shape = (plane.num_layers, num_pages * geometry.page_size, plane.element_size)
    return np.full(shape, fill, dtype=np.uint8)


@each_path
def test_a_page_that_is_overwritten_while_it_loads_is_never_wrong(path: str) -> None:
    """Two writers and a reader on one slot: what the reader calls verified is what one wrote."""
    geometry = _geometry()
    host = _host(geometry, 1)
    given: dict[str, Any] = {"host_slots": [0], "device_slots": np.arange(_TOKENS)}
    stop = threading.Event()
    wrong: list[int] = []
    verified = itertools.count()

    def write(fill: int) -> None:
        key = [b"%d" % fill]
        view = PoolView.from_tensors(geometry, {"k": _device(geometry, fill)})
        engine = TransferEngine(view, host, path=path, num_threads=1)
        plan = TransferPlan.store(geometry, **given, page_keys=key)
        while not stop.is_set():
            engine.store(plan)

    def read() -> None:
        target = _device(geometry, 0)
        view = PoolView.from_tensors(geometry, {"k": target})
        engine = TransferEngine(view, host, path=path, num_threads=1)
        plan = TransferPlan.load(geometry, **given, page_keys=[b"1"])
        deadline = time.monotonic() + 60
        for tries in itertools.count(1):
            if tries > 400 and (wrong or time.monotonic() > deadline):
                break
            target[:] = 0
            if engine.load(plan).verified_pages:
                next(verified)
                wrong.append(int((target != 1).sum()))
        stop.set()

    threads = [threading.Thread(target=write, args=(fill,)) for fill in (1, 2)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=110)
        assert not thread.is_alive()
    assert sum(wrong) == 0
    assert next(verified) > 0, "the reader never won: the test shows nothing"


@each_path
def test_a_bad_page_in_a_large_transfer_is_told(path: str) -> None:
    """However many threads share a load, the page that one of them finds damaged is bad."""
    geometry = _geometry(num_layers=6, element_size=1024)
    num_pages = 16  # 6 MiB: enough for several threads
    source = np.random.default_rng(1).integers(0, 256, (6, 1024, 1024), dtype=np.uint8)
    host = _host(geometry, num_pages)
    engine = TransferEngine(
        PoolView.from_tensors(geometry, {"k": source}), host, path=path, num_threads=3
    )
    given: dict[str, Any] = {"host_slots": range(num_pages), "device_slots": np.arange(1024)}
    assert engine.store(TransferPlan.store(geometry, **given)).verified_pages == num_pages
    for layer, page in ((0, 11), (5, 7)):
        row = host.view.view("k", layer).row_address(page * _TOKENS)
        byte = memory_at(row + 100, 1)
        byte ^= 1
    loaded = engine.load(TransferPlan.load(geometry, **given))
    assert loaded.bad_pages == (7, 11)
    assert loaded.verified_pages == 7


@each_path
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, MemoryError])
def test_a_store_that_ends_midway_leaves_nothing_to_load(
    path: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old and new layers in one slot are vouched for by no digest, whatever ended the store."""
    geometry = _geometry()
    host = _host(geometry, 2)
    given: dict[str, Any] = {"host_slots": [0, 1], "device_slots": np.arange(128)}
    store = TransferPlan.store(geometry, **given)
    old = TransferEngine(
        PoolView.from_tensors(geometry, {"k": _device(geometry, 1, 2)}), host, path=path
    )
    old.store(store).wait()
    new = TransferEngine(
        PoolView.from_tensors(geometry, {"k": _device(geometry, 2, 2)}), host, path=path
    )
    carrier = new._carrier
    assert isinstance(carrier, CpuCarrier)
    copy = carrier._move_span
    calls = itertools.count(1)

    def ends(move: Any, direction: Direction, *, verify: bool) -> Any:
        if next(calls) == 3:
            raise error("on purpose")
        return copy(move, direction, verify=verify)

    monkeypatch.setattr(carrier, "_move_span", ends)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            new.store(store)
    else:
        assert isinstance(new.store(store).error, TransferFaultError)
    assert old.load(TransferPlan.load(geometry, **given)).bad_pages == (0, 1)
    assert not host.digests.any()


@each_path
def test_no_digest_stands_over_bytes_that_are_being_replaced(path: str) -> None:
    """The old digest goes before the first new byte comes."""
    geometry = _geometry(num_layers=1)
    host = _host(geometry, 1)
    given: dict[str, Any] = {"host_slots": [0], "device_slots": np.arange(_TOKENS)}
    view = PoolView.from_tensors(geometry, {"k": _device(geometry, 1)})
    TransferEngine(view, host, path=path).store(TransferPlan.store(geometry, **given))
    assert host.digests.all()
    unchecked = TransferEngine(view, host, path=path, verify=False)
    unchecked.store(TransferPlan.store(geometry, **given))
    assert not host.digests.any()


def test_a_pool_of_another_geometry_is_refused() -> None:
    """Tensors viewed as smaller elements than the pool says would be written past their end."""
    small, large = _geometry(element_size=32), _geometry(element_size=64)
    view = PoolView.from_tensors(small, {"k": np.zeros((4, 256, 32), np.uint8)})
    with pytest.raises(ViewError, match=f"{small.fingerprint}.*{large.fingerprint}"):
        RegisteredHostPool(large, view)


@each_path
def test_a_plan_of_other_slots_is_refused(path: str) -> None:
    """A plan of checkpoints is nothing for a pool of pages."""
    state = Plane(
        name="state",
        num_layers=1,
        element_size=64,
        rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )
    k = Plane(name="k", num_layers=1, element_size=64)
    geometry = Geometry(planes=(k, state), page_size=4)
    device = PoolView.from_tensors(
        geometry, {"k": [np.zeros((8, 64), np.uint8)], "state": [np.zeros((2, 64), np.uint8)]}
    )
    plan = TransferPlan.store(
        geometry, kind=SlotKind.STATE, host_slots=[0], plane_slots={"state": [0]}
    )
    with HostPool(geometry, num_slots=2, unchecked_budget=True) as pool:
        engine = TransferEngine(device, pool, path=path)
        with pytest.raises(PlanError, match="moves state slots, but the host pool keeps page"):
            engine.store(plan)


@each_path
def test_planes_that_share_blocks_must_use_different_ones(path: str) -> None:
    """One load onto the same device bytes through two planes is refused; a store is not."""
    planes = tuple(Plane(name=name, num_layers=2, element_size=16) for name in ("full", "window"))
    geometry = Geometry(planes=planes, page_size=4)
    blocks = np.zeros((2, 32, 16), np.uint8)
    device = PoolView.from_tensors(
        geometry, {"full": blocks, "window": blocks}, shared_storage=True
    )
    host = RegisteredHostPool.from_tensors(
        geometry, {name: np.zeros((2, 16, 16), np.uint8) for name in ("full", "window")}
    )
    engine = TransferEngine(device, host, path=path)
    full, window = np.arange(8), np.arange(4, 12)

    def given(window_slots: np.ndarray) -> dict[str, Any]:
        return {
            "host_slots": [0, 1],
            "plane_slots": {"full": full, "window": window_slots},
        }

    engine.store(TransferPlan.store(geometry, **given(window))).wait()
    with pytest.raises(PlanError, match=r"'full' and 'window' share memory.*row 4"):
        engine.load(TransferPlan.load(geometry, **given(window)))
    assert not blocks.any()
    assert engine.load(TransferPlan.load(geometry, **given(np.arange(8, 16)))).verified_pages == 2


@each_path
def test_tensors_that_lost_their_memory_are_refused(path: str) -> None:
    """A tensor resized or rebound after registration is noticed before a byte moves."""
    geometry = _geometry()
    shape = (4, _TOKENS, 512)
    spoils: list[Callable[[torch.Tensor], object]] = [
        lambda tensor: tensor.untyped_storage().resize_(0),
        lambda tensor: tensor.set_(torch.zeros(1)),  # type: ignore[call-overload]
    ]
    for spoil in spoils:
        tensor = torch.zeros(shape)[..., :128].contiguous()
        device = PoolView.from_tensors(geometry, {"k": tensor})
        engine = TransferEngine(device, _host(geometry, 1), path=path)
        plan = TransferPlan.store(geometry, host_slots=[0], device_slots=np.arange(_TOKENS))
        assert engine.store(plan).verified_pages == 1
        spoil(tensor)
        with pytest.raises(ViewError, match="register them anew"):
            engine.store(plan)
