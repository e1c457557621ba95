"""When bytes were on the link: by events that note the time, of engines that are asked to."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import pytest
from tests.transfer.device_rig import DeviceRig
from tests.transfer.fake_gpu import CALLER, FakeGpu, Status
from tests.transfer.fake_time import Work

from kvferry.errors import ConfigError, DriverError, TransferFaultError
from kvferry.metrics import LinkMeter
from kvferry.transfer import link_clock
from kvferry.types import Direction

BYTES_PER_SEC = 1e9
DAY = 86_400.0


def charge_the_link(gpu: FakeGpu) -> None:
    """Bytes take time on the link, and nothing else does."""
    crossing = ("flat", "realign") if gpu.mover == "direct" else ("rows",)

    def cost(work: Work) -> float:
        return work.num_bytes / BYTES_PER_SEC if work.kind in crossing else 0.0

    gpu.time.cost = cost


def took(handle: Any) -> float:
    """Seconds from the first byte to the last."""
    begin, end = handle.link_seconds
    return float(end - begin)


def calls_of(gpu: FakeGpu, **options: Any) -> collections.Counter[str]:
    """How often each of the driver's functions is called for an engine and two transfers."""
    rig = DeviceRig(gpu)
    before = len(gpu.calls)
    engine = rig.engine(**options)
    rows = rig.rows(3)
    for handle in (rig.store(engine, [1, 2, 3], rows), rig.load(engine, [1, 2, 3], rows)):
        handle.wait()
        assert (handle.link_seconds is None) is not options.get("timed", False)
    engine.close()
    rig.host.close()
    return collections.Counter(gpu.calls[before:])


def test_off_costs_nothing(gpu: FakeGpu) -> None:
    """No event takes the time, and the calls are those of an engine that cannot."""
    timed_events = []

    def note(flags: int) -> None:
        if flags == gpu.CUevent_flags.CU_EVENT_DEFAULT:
            timed_events.append(flags)

    calls_of(gpu)  # what is asked of the driver once
    gpu.hooks["cuEventCreate"] = note
    off = calls_of(gpu)
    assert timed_events == []
    assert off["cuEventElapsedTime"] == 0
    on = calls_of(gpu, timed=True)
    assert len(timed_events) >= 3
    more = on - off
    # For each of two transfers: two events, a wait for the second, and two questions.
    assert (more["cuEventElapsedTime"], more["cuStreamWaitEvent"]) == (4, 2)
    assert more["cuEventRecord"] == 1 + 4
    assert off - on == collections.Counter()
    assert set(gpu.holdings.values()) == {0}


def test_the_link_alone_is_timed(gpu: FakeGpu) -> None:
    """Neither what comes before the first byte counts, nor what comes behind the last."""
    charge_the_link(gpu)
    rig = DeviceRig(gpu)
    engine = rig.engine(timed=True)
    rows = rig.rows(3)

    def wait_long() -> None:
        gpu.time.seconds += 5.0

    stored = rig.store(engine, [4, 5, 6], rows)
    gpu.hold(CALLER)
    gpu.enqueue(CALLER, wait_long)
    loaded = rig.load(engine, [4, 5, 6], rows)
    assert (loaded.done, loaded.link_seconds) == (False, None)
    gpu.release()
    for handle in (stored, loaded):
        handle.wait()
        assert took(handle) == pytest.approx(handle.plan.num_bytes / BYTES_PER_SEC, rel=1e-3)
    assert stored.link_seconds is not None
    assert loaded.link_seconds is not None
    assert loaded.link_seconds[0] - stored.link_seconds[1] == pytest.approx(5, abs=0.01)
    engine.close()
    rig.host.close()


def test_times_are_exact_after_days(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's 32 bits are measured from an anchor of late; anchors add up without loss."""
    monkeypatch.setattr(link_clock, "RENEW_SECS", 0.0)
    charge_the_link(gpu)
    rig = DeviceRig(gpu)
    engine = rig.engine(timed=True)
    rows = rig.rows(2)
    times = []
    for number in range(8):
        if number < 4:
            gpu.time.seconds += DAY
        handle = rig.store(engine, [1, 2], rows)
        handle.wait()
        times.append(handle.link_seconds)
    found = [time for time in times if time is not None]
    assert len(found) == 8
    # Behind a rest it stands where an old anchor says, to a part in 2²⁴; its length is exact.
    assert found[3][0] - found[0][0] == pytest.approx(3 * DAY, abs=0.02)
    lengths = [end - begin for begin, end in found]
    assert lengths == pytest.approx([lengths[0]] * 8, abs=1e-7)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(found[5:])]
    assert gaps == pytest.approx([0.0] * len(gaps), abs=1e-6)
    # Anchors come and go, and do not pile up.
    events = gpu.holdings["events"]
    for _ in range(20):
        rig.store(engine, [1, 2], rows).wait()
    assert gpu.holdings["events"] == events
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


def test_an_anchor_that_is_not_reached_is_not_used(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is known to be reached, transfers go by the one before it."""
    rig = DeviceRig(gpu)
    engine = rig.engine(timed=True)
    rows = rig.rows(2)
    monkeypatch.setattr(link_clock, "RENEW_SECS", 0.0)
    late = []

    def note(event: int, stream: int) -> None:
        if stream == engine._carrier._clock._stream.handle:  # type: ignore[attr-defined]
            late.append(event)

    gpu.hooks["cuEventRecord"] = note
    clock = engine._carrier._clock._stream.handle  # type: ignore[attr-defined]
    gpu.hold(clock)
    charge_the_link(gpu)
    first = [rig.store(engine, [1, 2], rows) for _ in range(3)]
    assert len(late) == 1
    gpu.release(clock)
    second = [rig.store(engine, [1, 2], rows) for _ in range(2)]
    begins = []
    for handle in (*first, *second):
        handle.wait()
        assert handle.link_seconds is not None
        begins.append(handle.link_seconds[0])
    assert begins == sorted(begins)
    engine.close()
    rig.host.close()


def test_anchors_of_transfers_in_flight_come_back(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was replaced meanwhile is kept until the last that is measured from it is over."""
    monkeypatch.setattr(link_clock, "RENEW_SECS", 0.0)
    charge_the_link(gpu)
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    rows = rig.rows(2)
    clock = engine._carrier._clock  # type: ignore[attr-defined]
    counts = []
    for _ in range(6):
        gpu.hold(gpu.stream_of[Direction.STORE])
        handles = [rig.store(engine, [1, 2], rows) for _ in range(4)]
        gpu.release()
        for handle in handles:
            handle.wait()
            assert took(handle) == pytest.approx(handle.plan.num_bytes / BYTES_PER_SEC, rel=1e-3)
        counts.append(len(clock._events))
    assert counts[1:] == [counts[1]] * 5
    engine.close()
    rig.host.close()


def test_both_ways_and_engines_share_a_clock(gpu: FakeGpu) -> None:
    """A meter that is fed by several engines of a GPU sees what overlapped and what did not."""
    charge_the_link(gpu)
    rig, meter = DeviceRig(gpu), LinkMeter()
    engines = [rig.engine(timed=True) for _ in range(2)]
    rows = rig.rows(2)
    handles = [rig.store(engine, [1, 2], rows) for engine in engines]
    handles.append(rig.load(engines[0], [1, 2], rows))
    for handle in handles:
        handle.wait()
        assert handle.link_seconds is not None
        meter.add(handle.plan.direction, handle.plan.num_bytes, *handle.link_seconds)
    told = meter.read(Direction.LOAD)
    assert told.gigabytes_per_second == pytest.approx(BYTES_PER_SEC / 1e9, rel=1e-2)
    # Made at different moments, their clocks differ by those moments and not by more.
    begins = [handle.link_seconds[0] for handle in handles if handle.link_seconds]
    assert max(begins) - min(begins) < 60
    for engine in engines:
        engine.close()
    rig.host.close()


def test_no_pages_are_no_time(gpu: FakeGpu) -> None:
    """An empty transfer begins where it ends."""
    rig = DeviceRig(gpu)
    engine = rig.engine(timed=True)
    handle = rig.store(engine, [], rig.rows(0))
    handle.wait()
    assert took(handle) == 0
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("function", ["cuEventCreate", "cuEventRecord"])
def test_a_clock_that_fails_when_it_is_made(gpu: FakeGpu, function: str) -> None:
    """The engine is refused, and nothing is left behind."""
    rig = DeviceRig(gpu)
    timing = gpu.CUevent_flags.CU_EVENT_DEFAULT

    def fails(*given: int) -> bool:
        return function == "cuEventRecord" or given[0] == timing

    with gpu.failing(function, when=fails), pytest.raises(DriverError):
        rig.engine(timed=True)
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


def test_a_transfer_that_fails_has_no_time(gpu: FakeGpu) -> None:
    """Its events come back, and the next transfer has its own."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    rows = rig.rows(2)
    clock = engine._carrier._clock  # type: ignore[attr-defined]
    events = len(clock._events)
    with gpu.failing("cuLaunchKernel", Status.CUDA_ERROR_LAUNCH_FAILED):
        failed = rig.store(engine, [1, 2], rows)
        with pytest.raises(TransferFaultError):
            failed.wait()
    assert failed.link_seconds is None
    good = rig.store(engine, [1, 2], rows)
    good.wait()
    assert good.link_seconds is not None
    assert len(clock._events) == events
    engine.close()
    rig.host.close()


def test_a_time_that_is_not_told_costs_no_bytes(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """The transfer is as good as it was; that there is no figure is logged."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine(timed=True)
    with gpu.failing("cuEventElapsedTime", Status.CUDA_ERROR_NOT_READY):
        handle = rig.store(engine, [1, 2], rig.rows(2))
        handle.wait()
    assert (handle.verified_pages, handle.error, handle.link_seconds) == (2, None, None)
    assert "does not say how long" in caplog.text
    engine.close()
    rig.host.close()


def test_host_memory_has_no_such_clock(gpu: FakeGpu) -> None:
    """An engine on the CPU is asked for it in vain, and says so."""
    rig = DeviceRig(gpu)
    layers = {
        name: tuple(dataclasses.replace(one, device="cpu") for one in views)
        for name, views in rig.device.layers.items()
    }
    from kvferry import PoolView, TransferEngine

    with pytest.raises(ConfigError, match="timed=True"):
        TransferEngine(PoolView(rig.geometry, layers), rig.host, timed=True)
    rig.host.close()
