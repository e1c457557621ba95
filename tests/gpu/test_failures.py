"""Transfers that fail midway: a typed error, no page called good, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import GpuRig, latent, scattered

from kvferry import TransferHandle, TransferPlan
from kvferry.errors import DriverError, JITError, LaunchError, TransferFaultError
from kvferry.kernels.jit import DeviceBuffer, KernelLoader, PreparedLaunch, Stream
from kvferry.types import Direction

pytestmark = pytest.mark.gpu

_PAGES = 5
_NUM_ROWS = 640
_SLOTS = [6, 0, 3, 5, 1]
_LAYERS = 6

_Make = Callable[..., GpuRig]


def _plan(rig: GpuRig, direction: Direction) -> TransferPlan:
    return TransferPlan.build(
        rig.geometry,
        direction,
        host_slots=_SLOTS,
        device_slots=scattered(1, _PAGES, 64, _NUM_ROWS),
    )


def _fail_from_call(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, number: int, error: Exception
) -> list[int]:
    """Let `kind.name` raise `error` at its call `number`, counted from 1; the calls so far."""
    calls: list[int] = []
    real = getattr(kind, name)

    def failing(self: Any, *args: Any) -> Any:
        calls.append(len(calls) + 1)
        if calls[-1] == number:
            raise error
        return real(self, *args)

    monkeypatch.setattr(kind, name, failing)
    return calls


def _check_failed(handle: TransferHandle) -> None:
    with pytest.raises(
        TransferFaultError, match=r"pages on path (staged )?(interpreted )?flat failed: injected"
    ):
        handle.wait()
    assert handle.done
    assert isinstance(handle.error, TransferFaultError)
    assert handle.verified_pages == 0
    waits: list[Callable[[], None]] = [
        handle.wait_all,
        lambda: handle.wait_layer(_LAYERS - 1),
    ]
    for wait in waits:
        with pytest.raises(TransferFaultError, match="injected"):
            wait()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_a_launch_that_fails(
    make_rig: _Make, monkeypatch: pytest.MonkeyPatch, direction: Direction, number: int
) -> None:
    """Whichever kernel does not start, the transfer ends as failed and its pages are not good."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")  # compiled code launches by itself
    rig = make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    store, load = _plan(rig, Direction.STORE), _plan(rig, Direction.LOAD)
    rig.fill(1)
    engine.store(store).wait()
    rig.fill(2)
    before = rig.slot_memory().copy()
    with monkeypatch.context() as patch:
        calls = _fail_from_call(patch, PreparedLaunch, "launch", number, LaunchError("injected"))
        handle = engine.store(store) if direction is Direction.STORE else engine.load(load)
        assert len(calls) == number
        _check_failed(handle)
    if direction is Direction.STORE:
        # A page that has new bytes is bad, whether all of its layers have them or some: no digest
        # vouches for it. One that is what it was is good, as all are where no kernel ran.
        torch.cuda.synchronize()
        changed = (rig.slot_memory() != before).any(axis=1)
        assert changed.any() == (number > 1)
        again = engine.load(load)
        again.wait()
        assert again.bad_pages == tuple(page for page, slot in enumerate(_SLOTS) if changed[slot])
    rig.fill(3)
    engine.store(store).wait()
    rows = {"latent": scattered(1, _PAGES, 64, _NUM_ROWS)}
    rig.check_stored(_SLOTS, rows)
    rig.poison()
    images = rig.after_load(_SLOTS, rows)
    last = engine.load(load)
    last.wait()
    assert last.verified_pages == _PAGES
    rig.check_device(images)


@pytest.mark.parametrize("direction", list(Direction), ids=str)
def test_a_copy_of_indices_that_fails(
    make_rig: _Make, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """Where the indices do not reach the GPU no kernel runs on those of an earlier transfer."""
    rig = make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    engine.store(_plan(rig, Direction.STORE)).wait()
    engine.load(_plan(rig, Direction.LOAD)).wait()
    rig.fill(2)
    images, slots = rig.images(), rig.slot_memory().copy()
    with monkeypatch.context() as patch:
        _fail_from_call(patch, Stream, "copy_in", 1, DriverError("injected"))
        plan = _plan(rig, direction)
        _check_failed(engine.store(plan) if direction is Direction.STORE else engine.load(plan))
    rig.check_device(images)
    assert np.array_equal(rig.slot_memory(), slots)
    engine.store(_plan(rig, Direction.STORE)).wait()


def test_no_device_memory_for_a_transfer(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer whose indices find no room is refused whole, the pool is free, the next works."""
    rig = make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    rig.poison()
    images = rig.images()

    def full(self: Any, context: Any, num_bytes: int) -> None:
        raise DriverError(f"injected: no room for {num_bytes} bytes")

    with monkeypatch.context() as patch:
        patch.setattr(DeviceBuffer, "__init__", full)
        with pytest.raises(DriverError, match="injected: no room"):
            engine.load(_plan(rig, Direction.LOAD))
    torch.cuda.synchronize()
    rig.check_device(images)
    engine.store(_plan(rig, Direction.STORE)).wait()


def test_a_kernel_that_does_not_compile(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's error reaches the caller, nothing is in flight, and the pool can close."""
    rig = make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    images = rig.images()

    def broken(self: Any, source: Any, device: int) -> Any:
        raise JITError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(KernelLoader, "load", broken)
        with pytest.raises(JITError, match="injected"):
            engine.load(_plan(rig, Direction.LOAD))
    torch.cuda.synchronize()
    rig.check_device(images)
    engine.store(_plan(rig, Direction.STORE)).wait()


def test_a_failed_transfer_keeps_nothing(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure the engine and the pool close as usual."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")  # compiled code launches by itself
    rig = make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    with monkeypatch.context() as patch:
        _fail_from_call(patch, PreparedLaunch, "launch", 2, LaunchError("injected"))
        handle = engine.store(_plan(rig, Direction.STORE))
        engine.close()
    assert handle.done
    assert handle.verified_pages == 0
    rig.host.close()
