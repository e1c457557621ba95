"""Calibration over a fake GPU whose link is as fast as the test says."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.transfer.fake_gpu import FakeGpu, Status
from tests.transfer.fake_time import Work

from kvferry.errors import ConfigError, DriverError, TransferTimeoutError
from kvferry.kernels.jit import Context, Driver
from kvferry.transfer import BUILT_IN, DeviceProfile, calibrate, gpu_clock, link_bench
from kvferry.transfer.calibration import Measured
from kvferry.transfer.direct_trial import TrialSize
from kvferry.transfer.link_bench import FULL, QUOTAS, WIDTHS, Effort
from kvferry.types import Direction

LOAD, STORE = Direction.LOAD, Direction.STORE

SMALL = Effort(
    buffer_bytes=1 << 20,
    batch_bytes=64 << 10,
    delay_bytes=4096,
    num_calls=4,
    trial=TrialSize(num_pages=2, num_layers=4),
    repeats=3,
)

NAMES = (
    "link.load", "link.store", "copy_seconds", "piece_seconds", "widths.load", "widths.store",
    "direct.load", "direct.store", "launch_seconds",
)  # fmt: skip

CALL, LAUNCH = 3e-6, 12e-6
# Slow, as so little is moved that calls would cost more than bytes.
LINK = {LOAD: 0.24, STORE: 0.20}
DIRECT = {LOAD: 0.21, STORE: 0.18}
# Loads want few blocks, stores want many.
WANTED = {LOAD: 16, STORE: 48}


def curve(way: Direction, width: int) -> float:
    """A cliff for narrow rows, and one that stores alone have."""
    if width < 4000:
        return 0.10
    return 0.11 if way is STORE and 8500 < width < 12_000 else LINK[way]


def cost(work: Work) -> float:
    """Seconds on a GPU that a profile can describe exactly."""
    way = LOAD if work.to_device else STORE
    if work.kind == "copy":
        return work.num_bytes / LINK[way] / 1e9
    if work.kind == "rows":
        return CALL + work.num_bytes / curve(way, work.width) / 1e9
    loss = 1.0 if work.blocks == WANTED[way] else 1.3
    return LAUNCH + loss * work.num_bytes / DIRECT[way] / 1e9


@pytest.fixture
def context(gpu: FakeGpu) -> Context:
    """Of the fake GPU."""
    gpu.batches = True
    gpu.time.cost = cost
    return Driver(gpu, "13.0.0").context(0)


@pytest.fixture(autouse=True)
def _parks_nothing() -> Iterator[None]:
    link_bench._parked.clear()
    yield
    link_bench._parked.clear()


def ticking(step: float) -> Callable[[], float]:
    """A clock that goes on by `step` seconds whenever it is looked at."""
    return (tick * step for tick in itertools.count()).__next__


def test_the_profile_is_the_gpu_s(gpu: FakeGpu, context: Context) -> None:
    """Every figure comes out as the fake GPU has it, to half a percent."""
    profile = calibrate(context, effort=SMALL)
    assert (profile.source, profile.unmeasured) == ("calibrated", ())
    assert profile.copy_seconds == pytest.approx(CALL, rel=5e-3)
    assert profile.launch_seconds == pytest.approx(LAUNCH, rel=5e-3)
    assert profile.direct_blocks == WANTED
    for way in Direction:
        assert profile.link[way] == pytest.approx(LINK[way], rel=5e-3)
        assert profile.direct[way] == pytest.approx(DIRECT[way], rel=5e-3)
        assert [width for width, _ in profile.widths[way]] == list(WIDTHS)
        for width, rate in profile.widths[way]:
            assert rate == pytest.approx(curve(way, width), rel=5e-3), width
    assert DeviceProfile.from_dict(profile.to_dict()) == profile


def test_it_leaves_nothing_behind(gpu: FakeGpu, context: Context) -> None:
    """All memory and events are given back, and no context stays current."""
    calibrate(context, effort=SMALL)
    assert set(gpu.holdings.values()) == {0}
    assert gpu._depth == 0


def test_rows_are_at_the_pitch_of_a_page(gpu: FakeGpu, context: Context) -> None:
    """On the host each row is a page from the one before; on the device they touch."""
    pitches = set()

    def note(told: Any, _: int) -> None:
        device_first = told.dstMemoryType == gpu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        near, far = (told.dstPitch, told.srcPitch) if device_first else (
            told.srcPitch, told.dstPitch
        )  # fmt: skip
        pitches.add((near == told.WidthInBytes, far > max(WIDTHS), far % 4096))

    gpu.hooks["cuMemcpy2DAsync"] = note
    calibrate(context, effort=SMALL)
    assert pitches == {(True, True, 0)}


def test_each_figure_is_told(context: Context) -> None:
    """In order, with the bytes that it took: as many as were moved."""
    told: list[Measured] = []
    calibrate(context, effort=SMALL, report=told.append, clock=ticking(1e-3))
    assert tuple(one.name for one in told) == NAMES
    assert all(one.num_bytes > 0 and one.seconds > 0 for one in told)
    assert told[0].num_bytes == (1 + SMALL.repeats) * SMALL.buffer_bytes


@pytest.mark.parametrize("known", range(len(NAMES)))
def test_when_time_is_up_the_rest_stays_built_in(context: Context, known: int) -> None:
    """Whatever was measured by then counts, and what was not is named."""
    # The clock is read for the deadline, then before and after each figure.
    effort = dataclasses.replace(SMALL, seconds=2 * known + 0.5)
    profile = calibrate(context, effort=effort, clock=ticking(1.0))
    assert profile.unmeasured == NAMES[known:]
    assert profile.source == "calibrated"
    for name in NAMES:
        field, _, way = name.partition(".")
        found, built_in = getattr(profile, field), getattr(BUILT_IN, field)
        if way:
            found, built_in = found[Direction(way)], built_in[Direction(way)]
        assert (found == built_in) is (name in profile.unmeasured), name


def test_quotas_that_do_as_well_are_no_reason_for_more_blocks(
    gpu: FakeGpu, context: Context
) -> None:
    """The least of them is taken, as blocks are taken from what computes beside."""

    def alike(work: Work) -> float:
        return cost(work._replace(blocks=WANTED[LOAD if work.to_device else STORE]))

    gpu.time.cost = alike
    profile = calibrate(context, effort=SMALL)
    assert set(profile.direct_blocks.values()) == {QUOTAS[0]}


def test_a_small_gpu_gets_no_more_blocks_than_it_has(gpu: FakeGpu, context: Context) -> None:
    """Quotas beyond its multiprocessors are not tried."""
    context.num_multiprocessors = 20
    calibrate(context, effort=SMALL)
    assert {work.blocks for work in gpu.time.done if work.kind == "flat"} == {8, 16}


@pytest.mark.parametrize(
    ("function", "nth"),
    [
        *itertools.product(("cuMemAlloc", "cuMemHostAlloc", "cuEventCreate"), (0, 1)),
        ("cuStreamCreateWithPriority", 0),
        ("cuPointerGetAttribute", 0),
        *itertools.product(
            (
                "cuEventRecord", "cuEventElapsedTime", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync",
                "cuMemcpy2DAsync", "cuLaunchKernel", "cuEventQuery",
            ),
            (0, 1, 3),
        ),
    ],
)  # fmt: skip
def test_a_driver_that_refuses_is_a_typed_error_and_all_is_freed(
    gpu: FakeGpu, context: Context, function: str, nth: int
) -> None:
    """Whichever call it is, and however far the calibration came."""
    calls = itertools.count()
    with (
        gpu.failing(
            function, Status.CUDA_ERROR_LAUNCH_FAILED, when=lambda *_: next(calls) == nth
        ) as refused,
        pytest.raises(DriverError, match="CUDA_ERROR_LAUNCH_FAILED"),
    ):
        calibrate(context, effort=SMALL)
    assert len(refused) == 1
    assert set(gpu.holdings.values()) == {0}
    assert gpu._depth == 0
    assert not link_bench._parked


def test_what_is_under_way_when_a_call_fails_is_waited_for(gpu: FakeGpu, context: Context) -> None:
    """Memory is freed when the stream is through, not under a copy: else the GPU has a fault."""
    looks = itertools.count()
    pending = []

    def look(_: int) -> None:
        if next(looks) % 4 == 3:
            gpu.release()

    def hold_then_fail(_: Any, stream: int) -> Status | None:
        if gpu.num_pending(stream):
            pending.append(gpu.num_pending(stream))
            return Status.CUDA_ERROR_INVALID_VALUE
        gpu.hold(stream)
        return None

    gpu.hooks |= {"cuEventQuery": look, "cuMemcpy2DAsync": hold_then_fail}
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
        calibrate(context, effort=dataclasses.replace(SMALL, num_calls=2))
    assert pending == [1]
    assert set(gpu.holdings.values()) == {0}


def test_a_copy_that_does_not_end_keeps_its_memory(
    gpu: FakeGpu, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait has a deadline, and what the GPU may still write to is not given to others."""
    monkeypatch.setattr(gpu_clock, "PATIENCE_SECS", 0.02)
    gpu.hooks["cuMemcpyDtoHAsync"] = lambda *told: gpu.hold(told[-1])
    with pytest.raises(TransferTimeoutError, match=r"not over after 0\.02 s"):
        calibrate(context, effort=SMALL)
    assert len(link_bench._parked) == 1
    assert gpu.holdings["pinned bytes"] > 0
    assert gpu.holdings["device bytes"] > 0
    assert gpu._depth == 0


def test_an_interrupt_frees_all(gpu: FakeGpu, context: Context) -> None:
    """Control-C while a figure is measured."""

    def interrupt(told: Measured) -> None:
        if told.name == "widths.load":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(context, effort=SMALL, report=interrupt)
    assert set(gpu.holdings.values()) == {0}


def test_a_clock_that_stands_still_is_an_error(gpu: FakeGpu, context: Context) -> None:
    """No rate comes of it, and no division by zero."""
    gpu.time.cost = lambda _: 0.0
    with pytest.raises(DriverError, match="the GPU's clock went on by 0 s"):
        calibrate(context, effort=SMALL)
    assert set(gpu.holdings.values()) == {0}


@pytest.mark.parametrize(
    "changes",
    [{"buffer_bytes": 1024}, {"num_calls": 1}, {"trial": TrialSize(num_pages=1, num_layers=1)}],
)
def test_an_effort_that_compares_nothing_is_refused(changes: dict[str, Any]) -> None:
    """With its numbers, before anything is measured."""
    with pytest.raises(ConfigError, match="a calibration needs 262,144 bytes, 2 calls"):
        dataclasses.replace(SMALL, **changes)


def test_the_bytes_are_bounded() -> None:
    """At full effort a link of 12 GB/s carries all in less than two seconds."""
    room = FULL.trial.room
    assert max(room.host, room.device) <= FULL.buffer_bytes
    figures = 2 + 4 + 2 * len(WIDTHS) + 2 * len(QUOTAS) + 4
    most = (1 + FULL.repeats) * (
        (2 + 4) * FULL.buffer_bytes
        + 2 * len(WIDTHS) * (FULL.batch_bytes + max(WIDTHS))
        + (2 * len(QUOTAS) + 4) * FULL.trial.num_bytes
        + figures * FULL.delay_bytes
    )
    assert most < 2 * 12e9


def test_a_driver_without_copies_of_many_pieces(gpu: FakeGpu, context: Context) -> None:
    """What a piece costs is the built-in figure, for nobody asks there."""
    gpu.batches = False
    assert calibrate(context, effort=SMALL).piece_seconds == BUILT_IN.piece_seconds
    gpu.batches = True
    assert calibrate(context, effort=SMALL).piece_seconds != BUILT_IN.piece_seconds
