"""Loads in shares: exact bytes, damage, faults, deadlines and kill -9, with 1 to 4 processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.exchange import exchange_world

_ROOT = Path(__file__).parents[2]
WORLDS = ("1:none", "2:none", "2:gather", "3:waiting", "4:end", "2:meet:only", "4:gather:only")

_WHOLE = ("whole cpu", "whole cpu_numpy")
_SHARDED = ("sharded cpu", "sharded cpu_numpy")

_Reports = dict[str, list[dict[str, Any]]]
_Run = Callable[..., _Reports]


def _ran(folder: Path, *worlds: str) -> _Reports:
    """What the ranks of each world reported, without one that was killed."""
    ran = subprocess.run(
        [sys.executable, exchange_world.__file__, str(folder), *worlds],
        env={
            **os.environ,
            "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=115,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: _Reports = {}
    for world in worlds:
        size, is_killed = int(world[0]), ":none" not in world
        ended = json.loads((folder / world / "ended.json").read_text())
        alive = size - is_killed
        assert ended == [0] * alive + [signal.SIGKILL] * is_killed, ran.stdout + ran.stderr
        found[world] = [
            json.loads((folder / world / f"{rank}.json").read_text()) for rank in range(alive)
        ]
        if is_killed:
            pids = json.loads((folder / world / "pids.json").read_text())
            for report in found[world]:
                report["killed"] = f"rank {size - 1} (process {pids[-1]}) is gone"
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> _Reports:
    """Of all worlds."""
    return _ran(tmp_path_factory.mktemp("worlds"), *WORLDS)


@pytest.fixture(params=[world for world in WORLDS if world.endswith(("gather", "waiting", "end"))])
def world(request: pytest.FixtureRequest, reports: _Reports) -> tuple[int, list[dict[str, Any]]]:
    """The size of a world of several ranks, and the reports of its ranks but the last."""
    return int(request.param[0]), reports[request.param]


@pytest.fixture(params=[world for world in WORLDS if ":none" not in world])
def deadly(request: pytest.FixtureRequest, reports: _Reports) -> list[dict[str, Any]]:
    """The reports of a world in which the last rank was killed."""
    return reports[request.param]


def test_bytes_are_exact_on_every_rank(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Odd sizes, two planes, uneven and empty shares, into poisoned rows of the rank's own."""
    for rank in world[1]:
        assert rank["exact"] == [True] * (5 * 2 * 4)
        assert set(rank["paths"]) <= set(_SHARDED)


def test_rooms_of_a_few_pages_take_more_rounds(world: tuple[int, list[dict[str, Any]]]) -> None:
    """As many exchanges on all ranks, more in small rooms, and none that one rank leaves out."""
    ranks = world[1]
    assert all(rank["gathers"] == ranks[0]["gathers"] for rank in ranks)
    small, large = ranks[0]["gathers"][::2], ranks[0]["gathers"][1::2]
    for few, many in zip(large, small, strict=True):
        assert many[-1] > few[-1] > 0
        assert len({few[0], few[1], few[2]}) == 1


def test_some_layers_and_some_planes(world: tuple[int, list[dict[str, Any]]]) -> None:
    """What a plan does not name is not touched, and loads behind each other are not mixed up."""
    for rank in world[1]:
        assert rank["parts"] == [True, True, True]
        assert rank["several"] is True


def test_a_layer_is_ready_before_the_next_is_exchanged(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """With the third exchange held up, layer 0 is whole, and the load is not over."""
    for rank in world[1]:
        assert rank["layers"] == [False, True, True]


def test_a_bad_page_of_one_rank_is_bad_on_all(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Host memory of the rank whose share it is: found on each, whose rows stay as they were."""
    for rank in world[1]:
        page, outcome, untouched = rank["host_bit"]
        assert (outcome["bad"], outcome["verified"], outcome["raised"]) == ([page], page, "")
        assert outcome["path"] in _SHARDED
        assert untouched is True


def test_a_page_that_was_damaged_on_its_way_to_one_rank_is_bad_on_all(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """Only one rank can see it; all are told. The next load is as good as any."""
    for rank in world[1]:
        assert rank["exchange_bit"]["bad"] == [0]
        outcome, holds = rank["after_bits"]
        assert (outcome["bad"], holds) == ([], True)
        assert rank["no_digest"]["bad"] == [2]


def test_a_rank_that_cannot_copy_fails_the_load_of_all(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """It still comes to every exchange; the others name it, and the exchange is whole."""
    size, ranks = world
    for rank in ranks:
        assert rank["copy"]["raised"] == "TransferFaultError"
        assert f"rank {size - 1} of {size} failed" in rank["copy"]["error"]
        assert rank["copy"]["verified"] == 0
        outcome, holds = rank["then"]
        assert (outcome["path"] in _SHARDED, outcome["error"], holds) == (True, "", True)


def test_plans_that_do_not_fit_together_move_nothing(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """One that is refused on a rank, or of other pages there: one agreement, and no byte moves."""
    size, ranks = world
    for rank in ranks:
        assert f"rank {size - 1} of {size} refused its plan" in rank["refused"]["error"]
        assert rank["other"]["cause"] == "RankMismatchError"
        assert f"rank {size - 1} of {size} loads other pages" in rank["other"]["error"]
        assert rank["nothing_moved"] is True
        # Two of a load that was exchanged, one of each that was not.
        assert rank["agreements"] == 2 + 1 + 1 + 2


def test_loaders_that_are_unlike_are_refused(world: tuple[int, list[dict[str, Any]]]) -> None:
    """One text on all ranks."""
    size, ranks = world
    for rank in ranks:
        kind, text = rank["unlike"]
        assert kind == "RankMismatchError"
        assert f"rank {size - 1} of {size} has another exchange_bytes" in text


def test_rates_are_the_slowest_of_all_ranks(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Each rank measured, and all choose by the same numbers."""
    ranks = world[1]
    assert all(rank["rates"] == ranks[0]["rates"] for rank in ranks)
    assert all(number > 0 for number in ranks[0]["rates"])
    assert all(rank["chosen"] == [ranks[0]["chosen"][0], True] for rank in ranks)


def test_the_rank_at_fault_knows_more(reports: _Reports) -> None:
    """What the others name it for, it says itself; and it loads as they do afterwards."""
    first, last = reports["2:none"]
    assert "no memory for this" in last["copy"]["error"]
    assert last["copy"]["cause"] == "TransferFaultError"
    assert last["refused"]["raised"] == "PlanError"
    assert "device slots of plane 'latent' holds" in last["refused"]["error"]
    assert last["other"] == first["other"]
    assert last["then"][0] == first["then"][0]
    assert last["exchange_bit"]["bad"] == [0]
    assert [load["raised"] for load in last["defect"]] == ["TransferFaultError"] * 2
    assert "unexpected error" in last["defect"][0]["error"]
    assert "ranks exchange no more" in last["defect"][1]["error"]
    for name in ("after_defect", "after_late"):
        assert (last[name][0] in _WHOLE, last[name][2]) == (True, True)
    assert last["late"]["raised"] == "TransferFaultError"


def test_agreements_go_on_beside_loads(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Forty of the caller's own, and five loads in flight: right values, right bytes."""
    for rank in world[1]:
        assert rank["beside"] == [True, [exchange_world.NUM_PAGES] * 5, True]


def test_a_thread_that_ends_leaves_no_handle_open(world: tuple[int, list[dict[str, Any]]]) -> None:
    """A defect on one rank: its load, the one behind it and those of the others are errors."""
    for rank in world[1]:
        assert [load["raised"] for load in rank["defect"]] == ["TransferFaultError"] * 2
        assert rank["after_defect"][0] in _WHOLE
        assert rank["after_defect"][2] is True


def test_a_late_rank_ends_the_load_at_its_deadline(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """Somebody's deadline passes, and everybody's load fails; later ones are whole, and say so."""
    ranks = world[1]
    assert "RankTimeoutError" in [rank["late"]["cause"] for rank in ranks]
    for rank in ranks:
        assert rank["late"]["raised"] == "TransferFaultError"
        path, reason, holds, agreed = rank["after_late"]
        assert path in _WHOLE
        assert reason.startswith("ranks exchange no more: ")
        assert (holds, agreed) == (True, False)


def test_a_killed_rank_is_named_and_the_others_load_whole(deadly: list[dict[str, Any]]) -> None:
    """kill -9 before, between, in and behind exchanges: an error long before the deadline, rows
    that are right or untouched, and loads that need nobody from then on."""
    for rank in deadly:
        assert rank["death"]["raised"] == "TransferFaultError"
        assert rank["killed"] in rank["death"]["error"]
        assert rank["death"]["cause"] == "RankError"  # and no RankTimeoutError
        assert rank["death"]["verified"] == 0
        assert rank["rows"] is True
        assert rank["agreement"] == "RankError"
        path, reason, holds, _ = rank["after_death"]
        assert path in _WHOLE
        assert rank["killed"] in reason
        assert holds is True


def test_one_rank_alone_loads_whole(reports: _Reports) -> None:
    """It has nobody to exchange with, whatever is asked for."""
    (rank,) = reports["1:none"]
    assert rank["exact"] == [True] * 40
    assert list(rank["paths"].values()) == ["there is one rank"]
    assert {count for gathers in rank["gathers"] for count in gathers} == {0}


@pytest.mark.soak
def test_kills_at_every_point(tmp_path: Path, soak_factor: int) -> None:
    """Again and again, with other numbers of ranks."""
    points = ("meet", "gather", "waiting", "end")
    for turn in range(soak_factor):
        # The worlds above are the short half.
        sizes = (2, 3, 4, 5) if soak_factor > 1 else ()
        worlds = [f"{size}:{where}:only" for size in sizes for where in points]
        worlds = worlds or ["3:meet:only"]
        folder = tmp_path / str(turn)
        folder.mkdir()
        for ranks in _ran(folder, *worlds).values():
            test_a_killed_rank_is_named_and_the_others_load_whole(ranks)
