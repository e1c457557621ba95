"""An interrupt at any line of a transfer's way: it surfaces, and nothing stays without an owner.

Not in here are the two lines where the host pool itself counts a lease, and those of the driver's
own objects.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from tests.transfer.device_rig import DeviceRig, latent, same
from tests.transfer.fake_gpu import FakeGpu

from kvferry.errors import PlanError, TransferError
from kvferry.memory import HostPool, SlotOwner
from kvferry.transfer import device_transfer, gpu_carrier, in_flight, link_clock
from kvferry.types import Direction

_FILES = {module.__file__ for module in (device_transfer, gpu_carrier, in_flight, link_clock)}


class _Stop(KeyboardInterrupt):
    """Not one that somebody types meanwhile."""


class _StopAt:
    """Raises at one line, by its number, of those that `_FILES` have on the way."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.where = ""

    def __call__(self, frame: FrameType, _: str, __: object) -> Any:
        return self._line if frame.f_code.co_filename in _FILES else None

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            self._left -= 1
            if self._left < 0 and not self.where:
                self.where = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
                sys.settrace(None)
                raise _Stop
        return self._line

    def carry_out(self, work: Callable[[], object]) -> bool:
        """`work`; whether it was stopped."""
        before = sys.gettrace()
        gc.disable()  # an engine that is collected just then is closed, by lines that are not meant
        sys.settrace(self)
        try:
            work()
        except _Stop:
            assert self.where
            return True
        finally:
            sys.settrace(before)
            gc.enable()
        return False


@pytest.fixture
def _deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for what never ends is over soon."""
    monkeypatch.setattr(device_transfer.DeviceTransfer.wait, "__defaults__", (5.0,))


def _check_all_is_given_back(gpu: FakeGpu, rig: DeviceRig, engine: Any) -> None:
    """A transfer after the interrupt is right, and then nothing is held by anybody."""
    rows = rig.rows(2)
    wanted = rig.on_device(rows)
    stored = rig.store(engine, [4, 5], rows)
    gpu.release()
    stored.wait()
    assert stored.verified_pages == 2
    same(rig.on_host([4, 5]), wanted, "the next store")
    loaded = rig.load(engine, [4, 5], rows)  # which looks at all before it
    loaded.wait()
    assert loaded.verified_pages == 2
    assert rig.pool.num_leases == 0
    rig.pool.free(range(12), SlotOwner.INDEX)
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


@pytest.mark.usefixtures("_deadline")
@pytest.mark.parametrize("direction", list(Direction))
def test_submitting_is_interrupted_at_any_line(gpu: FakeGpu, direction: Direction) -> None:
    """While all streams stand still. What was enqueued is over before its buffers are another's."""
    number, stopped = 0, True
    while stopped:
        rig = DeviceRig(gpu, latent(48, num_layers=2), num_pages=16)
        engine = rig.warm_engine(timed=True)
        rows = rig.rows(2)
        rig.store(engine, [0, 1], rows).wait()
        move = rig.load if direction is Direction.LOAD else rig.store
        stop = _StopAt(number)
        gpu.hold_all()
        stopped = stop.carry_out(lambda m=move, e=engine, r=rows: m(e, [0, 1], r))  # type: ignore[misc]
        try:
            _check_all_is_given_back(gpu, rig, engine)
        except BaseException as bad:
            bad.add_note(f"interrupted in {stop.where}")
            raise
        number += 1
    assert number > 40


@pytest.mark.usefixtures("_deadline")
def test_waiting_is_interrupted_at_any_line(gpu: FakeGpu) -> None:
    """Waiting again tells how the transfer went, and all that it held is given back once."""
    number, stopped = 0, True
    while stopped:
        rig = DeviceRig(gpu, latent(48, num_layers=2), num_pages=16)
        engine = rig.warm_engine(timed=True)
        rows = rig.rows(2)
        handle = rig.store(engine, [0, 1], rows)
        stop = _StopAt(number)
        stopped = stop.carry_out(handle.wait)
        try:
            other = rig.load(engine, [0], rig.rows(1, besides=rows))
            handle.wait()
            assert handle.verified_pages == 2
            other.wait()
            assert other.verified_pages == 1
            _check_all_is_given_back(gpu, rig, engine)
        except BaseException as bad:
            bad.add_note(f"interrupted in {stop.where}")
            raise
        number += 1
    assert number > 15


def test_two_interrupts_where_a_transfer_ends(gpu: FakeGpu) -> None:
    """The second comes while the first is dealt with; the engine's next call deals with both."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    rows = rig.rows(2)
    launched, left = len(gpu.kernels), iter(range(2))

    def interrupt(*_: Any) -> None:
        done = len(gpu.kernels) > launched and gpu.kernels[-1] == "finish"
        if done and next(left, None) is not None:
            raise KeyboardInterrupt

    gpu.hold_all()
    gpu.hooks["cuEventRecord"] = gpu.hooks["cuStreamSynchronize"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.store(engine, [0, 1], rows)
    assert rig.pool.num_leases == 1
    with pytest.raises(KeyboardInterrupt):
        rig.store(engine, [2, 3], rows)
    gpu.hooks.clear()
    gpu.release()
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


def test_a_closed_engine_makes_no_event(gpu: FakeGpu) -> None:
    """Nobody would destroy it."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    engine.close()
    with pytest.raises(TransferError, match="closed"):
        rig.store(engine, [0], rig.rows(1))
    assert gpu.holdings["events"] == 0
    rig.host.close()


def test_done_means_given_back(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sees on another thread that a transfer is done may free its slots and close the pool."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    seen: list[tuple[bool, int]] = []
    release = HostPool.release

    def look() -> None:
        done = handle.done
        seen.append((done, rig.pool.num_leases))

    other = threading.Thread(target=look, daemon=True)

    def later(self: HostPool, *given: Any) -> None:
        other.start()
        other.join(0.2)  # where looking waits for this to be over it ends afterwards
        release(self, *given)

    with gpu.held():
        handle = rig.store(engine, [0, 1], rig.rows(2))
    monkeypatch.setattr(HostPool, "release", later)
    handle.wait()
    other.join(20)
    assert seen == [(True, 0)]
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("refused", [True, False], ids=["refused", "failed"])
def test_a_failure_keeps_no_frames(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    """Who catches it and lets go of it has let go of all that its callers held."""
    rig = DeviceRig(gpu, latent(48, num_layers=2), num_pages=16)
    engine = rig.warm_engine(timed=True)
    rows = rig.rows(2)

    def attempt() -> weakref.ref[_Held]:
        held = _Held()
        try:
            handle = rig.store(engine, [0, 1], rows)
            with contextlib.suppress(TransferError):
                handle.wait()
            handle.wait_all()
        except (PlanError, TransferError):
            return weakref.ref(held)
        raise AssertionError("nothing was raised")

    with contextlib.ExitStack() as undo:
        if refused:
            monkeypatch.setattr(gpu_carrier, "row_tables", _refuse)
        else:
            undo.enter_context(gpu.failing("cuLaunchKernel"))
        gc.collect()
        gc.disable()
        undo.callback(gc.enable)
        assert attempt()() is None


class _Held:
    """What a caller has on its stack."""


def _refuse(_: object) -> None:
    raise PlanError("too much")
