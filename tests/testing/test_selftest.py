"""The self-test finds movers that are wrong in any way, and passes those that are right."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.errors import ConfigError, TransferFaultError
from kvferry.geometry import LayerView
from kvferry.testing import (
    DeviceLayout,
    SelfTestCase,
    SelfTestReport,
    memory_at,
    run_selftest,
    selftest_cases,
)
from kvferry.transfer.numpy_mover import move_span_numpy
from kvferry.transfer.paths import CpuPath
from kvferry.transfer.span_move import SpanMove
from kvferry.types import Direction, Layout, SlotKind

_SIZES_OF_MODELS = {
    *(1, 2, 3, 7, 16, 64, 66, 100, 128, 131, 132, 160, 192, 256, 288, 384, 512, 528, 576, 584),
    *(640, 656, 768, 1024, 1152, 2048, 4096, 4100, 8448, 9216, 37440, 49152),
}

Good = npt.NDArray[np.bool_]


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes are enough to see a mover fail."""
    monkeypatch.setattr("kvferry.testing.selftest._QUICK_SIZES", (7, 132))


def test_every_combination_is_a_case() -> None:
    """All sizes × runs × layouts of both sides, each once, with both index types everywhere."""
    cases = list(selftest_cases())
    assert {case.element_size for case in cases} == _SIZES_OF_MODELS
    assert len({dataclasses.replace(case, store_index_type="") for case in cases}) == len(cases)
    assert len(cases) == 31 * 3 * 4 * 5 + 1 * 4 * 5
    assert {case.device_run for case in cases if case.kind is SlotKind.PAGE} == {1, 16, 64}
    assert {case.host_layout for case in cases} == {"host_pool", *Layout}
    assert {case.device_layout for case in cases} == set(DeviceLayout)
    types = Counter((case.element_size, case.store_index_type) for case in cases)
    assert len(types) == 2 * len(_SIZES_OF_MODELS)
    assert all(
        {case.store_index_type, case.load_index_type} == {"int32", "int64"} for case in cases
    )


def test_right_movers_pass() -> None:
    """Every path that is here passes; counts, bytes and progress add up."""
    seen: list[SelfTestCase] = []
    report = run_selftest(quick=True, progress=seen.append)
    assert report.ok
    assert report.failures == ()
    assert len(seen) == 2 * 3 * 20 + 20
    for path in {"cpu", "cpu_numpy", "realign"} & set(report.paths):  # the others are particular
        assert report.paths[path].cases == 2 * len(seen)
    assert report.num_bytes == sum(counts.num_bytes for counts in report.paths.values()) > 0
    known = {"cpu", "cpu_numpy", "flat", "realign", "grouped", "staged"}
    assert set(report.paths) | set(report.absent) == known
    assert not set(report.paths) & set(report.absent)


def _flip(address: int) -> None:
    byte = memory_at(address, 1)
    byte ^= 1


def _after_each(change: Callable[[SpanMove, LayerView], None], wanted: Direction) -> Any:
    def moved(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
        good = move_span_numpy(move, direction, verify=verify)
        if direction is wanted:
            change(move, move.host if wanted is Direction.STORE else move.device)
        return good

    return moved


def _drops_the_last_row(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    if direction is Direction.LOAD:
        last = int(move.device_rows[-1, -1])
        kept = memory_at(move.device.row_address(last), 1).copy()
        good = move_span_numpy(move, direction, verify=verify)
        memory_at(move.device.row_address(last), 1)[:] = kept
        return good
    return move_span_numpy(move, direction, verify=verify)


def _swaps_two_pages(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    slots = move.host_slots[[1, 0, *range(2, len(move.host_slots))]]
    return move_span_numpy(dataclasses.replace(move, host_slots=slots), direction, verify=verify)


def _believes_everything(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    move_span_numpy(move, direction, verify=verify and direction is Direction.STORE)
    return np.ones(len(move.host_slots), dtype=np.bool_)


def _makes_no_digests(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    return move_span_numpy(move, direction, verify=verify and direction is Direction.LOAD)


def _does_nothing(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    return np.ones(len(move.host_slots), dtype=np.bool_)


def _faults(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
    raise OSError("the link went away")


_BROKEN = {
    "a byte of a stored row": _after_each(
        lambda move, view: _flip(view.row_address(int(move.host_slots[0]) * move.span.rows)),
        Direction.STORE,
    ),
    "a byte of a loaded row": _after_each(
        lambda move, view: _flip(view.row_address(int(move.device_rows[-1, 0]))), Direction.LOAD
    ),
    "a byte before the device pool": _after_each(
        lambda _, view: _flip(view.address - 1), Direction.LOAD
    ),
    "a byte after the device pool": _after_each(lambda _, view: _flip(view.end), Direction.LOAD),
    "the source": _after_each(
        lambda move, _: _flip(move.device.row_address(int(move.device_rows[0, 0]))),
        Direction.STORE,
    ),
    "a dropped row": _drops_the_last_row,
    "pages that change places": _swaps_two_pages,
    "no check": _believes_everything,
    "no digest": _makes_no_digests,
    "no copy": _does_nothing,
    "a fault": _faults,
}


@pytest.mark.parametrize("broken", _BROKEN)
def test_a_broken_mover_fails(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a mover does wrong, its path fails in every case, is named, and no other path is."""
    monkeypatch.setattr("kvferry.transfer.paths._PORTABLE", CpuPath("cpu_numpy", _BROKEN[broken]))
    report = run_selftest(quick=True)
    assert not report.ok
    assert report.num_failures == report.paths["cpu_numpy"].num_failures == 140
    assert {failure.path for failure in report.failures} == {"cpu_numpy"}
    assert len(report.failures) == 20
    told = report.failures[0].to_dict()
    assert told["path"] == "cpu_numpy"
    assert told["element_size"] == 7
    kind = TransferFaultError.__name__ if broken == "a fault" else AssertionError.__name__
    assert told["message"].startswith(kind)


def test_paths_that_make_different_digests_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that verifies what it stored itself, but not what another path stored, fails."""
    if len(run_selftest(quick=True).paths) < 2:
        pytest.skip("there is one path only")

    def seeded_otherwise(move: SpanMove, direction: Direction, *, verify: bool) -> Good:
        other = dataclasses.replace(move, page_seeds=move.page_seeds + np.uint64(1))
        return move_span_numpy(other, direction, verify=verify)

    monkeypatch.setattr("kvferry.transfer.paths._PORTABLE", CpuPath("cpu_numpy", seeded_otherwise))
    report = run_selftest(quick=True)
    assert report.num_failures == report.paths["cpu_numpy"].num_failures > 0
    assert "digests, compared with the plain ones" in report.failures[0].message


def test_a_path_is_not_blamed_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first path damages is repaired before the second one runs."""
    if len(run_selftest(quick=True).paths) < 2:
        pytest.skip("there is one path only")
    broken = _BROKEN["a byte after the device pool"]
    monkeypatch.setattr("kvferry.transfer.paths._COMPILED", CpuPath("cpu", broken))
    report = run_selftest(quick=True)
    assert report.paths["cpu"].num_failures == 140
    assert report.paths["cpu_numpy"].num_failures == 0


def test_no_path_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every path switched off there is an error, and an empty report is not ok."""
    assert not SelfTestReport(paths={}, failures=(), absent=(), seconds=0).ok
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu,cpu_numpy")
    with pytest.raises(ConfigError, match="every path is switched off"):
        run_selftest(quick=True)


def test_a_path_that_is_switched_off_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not tested is said."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")
    report = run_selftest(quick=True)
    assert report.ok
    assert "cpu_numpy" in report.paths
    assert "cpu" not in report.paths
    assert "cpu" in report.absent
