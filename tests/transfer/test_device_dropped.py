"""Engines that nobody closed: what a GPU may still use stays, and nothing waits for ever."""

from __future__ import annotations

import gc
import itertools
import logging
import math
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType, SimpleNamespace

import pytest
from tests.transfer.device_rig import DeviceRig, latent
from tests.transfer.fake_gpu import FakeGpu, Status

import kvferry.memory
from kvferry.errors import DriverError, PoolInUseError, TransferTimeoutError
from kvferry.transfer import TransferEngine

_MEMORY = str(Path(kvferry.memory.__file__).parent)


@pytest.fixture
def hours_fly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let half a minute pass each time that a transfer looks at the clock."""
    now = iter(range(0, 1 << 40, 30))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    for name, module in list(sys.modules.items()):
        if name.startswith("kvferry.transfer.") and isinstance(
            getattr(module, "time", None), ModuleType
        ):
            monkeypatch.setattr(module, "time", clock)


@pytest.fixture
def collect_by_hand() -> Iterator[None]:
    """Leave garbage until a test collects it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _drop(engine: TransferEngine) -> None:
    """Leave the engine in a cycle that only the garbage collector finds."""
    app = SimpleNamespace(engine=engine)
    app.itself = app


def test_a_dropped_engine_whose_work_ends(gpu: FakeGpu) -> None:
    """It gives back everything, as if it were closed."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    gpu.hold()
    rig.store(engine, [0, 1], rig.rows(2))
    asked = []

    def go_on(_: int) -> None:
        asked.append(1)
        if len(asked) > 3:
            gpu.release()

    gpu.hooks["cuEventQuery"] = go_on
    del engine
    gc.collect()
    assert len(asked) > 3
    assert rig.pool.num_leases == 0
    assert set(gpu.holdings.values()) == {0}
    rig.host.close()


def test_a_dropped_engine_whose_work_never_ends(
    gpu: FakeGpu, hours_fly: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in the log, and all that the work uses is kept: pool, pinning and buffers."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    gpu.hold()
    rig.store(engine, [0, 1], rig.rows(2))
    held, registered = gpu.holdings, dict(gpu.registered)
    pool = weakref.ref(rig.pool)
    with caplog.at_level(logging.WARNING, logger="kvferry"):
        del engine
        gc.collect()
    assert any(record.levelno >= logging.WARNING for record in caplog.records)
    with pytest.raises(PoolInUseError):
        rig.host.close()
    del rig.host
    gc.collect()
    kept = pool()
    assert kept is not None
    assert gpu.registered == registered
    for name, amount in held.items():
        assert gpu.holdings[name] >= amount
    # Should it end after all, it finds everything where it was: the fixture looks for faults.
    gpu.release()
    assert gpu.num_pending() == 0
    assert kept.digests[:2].all()


def test_a_deadline_that_is_no_number_is_over(gpu: FakeGpu) -> None:
    """No time is later than it: such a wait would never end."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    gpu.hold()
    handle = rig.store(engine, [0, 1], rig.rows(2))
    with pytest.raises(TransferTimeoutError, match="not over after nan s"):
        handle.wait(timeout=math.nan)
    gpu.release()
    handle.wait()
    engine.close()


def test_closing_while_work_never_ends(gpu: FakeGpu, hours_fly: None) -> None:
    """`close` raises after its deadline and frees nothing; when the work is over it does."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    gpu.hold()
    handle = rig.store(engine, [0, 1], rig.rows(2))
    held = gpu.holdings
    with pytest.raises(TransferTimeoutError):
        engine.close()
    assert gpu.holdings == held
    assert not handle.done
    with pytest.raises(PoolInUseError):
        rig.host.close()
    gpu.release()
    assert handle.verified_pages == 2
    engine.close()
    assert set(gpu.holdings.values()) == {0}
    rig.host.close()


_GIVEN_BACK_BY = ["cuMemFree", "cuMemFreeHost", "cuEventDestroy", "cuStreamDestroy"]


@pytest.mark.parametrize("function", _GIVEN_BACK_BY)
@pytest.mark.parametrize("nth", [0, 2])
def test_a_driver_that_keeps_something(gpu: FakeGpu, function: str, nth: int) -> None:
    """It is told, all else is given back, and closing again has nothing left to do."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    streams = len(gpu._streams)
    before, count = dict(gpu.holdings), itertools.count()
    with (
        gpu.failing(function, when=lambda *_: next(count) == nth) as refused,
        pytest.raises(DriverError, match=f"carry out {function}: CUDA_ERROR_OUT_OF_MEMORY"),
    ):
        engine.close()
    assert len(refused) == 1
    kept = (len(gpu.device_memory), len(gpu.pinned_memory), len(gpu.events))
    assert sum(kept) + streams - len(gpu._destroyed) - 1 == 1
    called = len(gpu.calls)
    engine.close()
    assert not set(_GIVEN_BACK_BY) & set(gpu.calls[called:])
    assert gpu.holdings != before
    rig.host.close()


def test_a_dropped_engine_of_which_the_driver_keeps_something(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the log: nobody can catch what is raised there."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    assert engine.path
    with (
        gpu.failing("cuMemFree", Status.CUDA_ERROR_LAUNCH_FAILED),
        caplog.at_level(logging.WARNING, logger="kvferry"),
    ):
        del engine
        gc.collect()
    (record,) = caplog.records
    assert "LAUNCH_FAILED" in record.getMessage()
    assert (gpu.pinned_memory, gpu.events) == ({}, set())
    rig.host.close()


def test_two_threads_close_one_engine(gpu: FakeGpu) -> None:
    """Whichever comes back, all is given back by then, and once."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    freeing = threading.Event()
    left: list[dict[str, int]] = []

    def close() -> None:
        engine.close()
        left.append(gpu.holdings)

    other = threading.Thread(target=close, daemon=True)

    def begin(_: int) -> None:
        if not freeing.is_set():
            freeing.set()
            other.start()
            other.join(0.2)  # it waits for this thread, and ends after it

    gpu.hooks["cuMemFree"] = begin
    close()
    other.join(20)
    assert [set(found.values()) for found in left] == [{0}, {0}]
    rig.host.close()


class _CollectAt:
    """A collection of garbage at one function call inside `kvferry.memory`, by its number."""

    def __init__(self, number: int) -> None:
        self.calls = 0
        self._number = number

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_MEMORY):
            self.calls += 1
            if self.calls == self._number:  # calls that this one makes are not counted
                gc.collect()


@pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])
def test_a_collection_inside_the_pool_s_lock(
    gpu: FakeGpu, collect_by_hand: None, registered: bool
) -> None:
    """A dropped engine that is collected at any call inside of `close` does not lock it up."""
    number, last = 1, 2
    while number <= last:
        rig = DeviceRig(
            gpu, latent(64, num_layers=1), num_pages=4, num_slots=2, registered=registered
        )
        engine = rig.warm_engine()
        gpu.hold()
        rig.store(engine, [0], rig.rows(1))
        _drop(engine)
        del engine
        gpu.hooks["cuEventQuery"] = lambda _: gpu.release()
        collect = _CollectAt(number)
        said: list[str] = []

        def close(
            rig: DeviceRig = rig, collect: _CollectAt = collect, said: list[str] = said
        ) -> None:
            sys.setprofile(collect)
            try:
                rig.host.close()
                said.append("closed")
            except PoolInUseError:
                said.append("in use")
            finally:
                sys.setprofile(None)

        thread = threading.Thread(target=close, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive(), f"locked up by a collection at call {number}"
        assert len(said) == 1
        last = max(last, collect.calls)
        gc.collect()
        gpu.hooks.clear()
        rig.host.close()
        assert set(gpu.holdings.values()) == {0}
        number += 1
    assert last > 2
