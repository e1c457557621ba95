"""Ranks that are processes: agreement, faults and kill -9 with 2, 4 and 8 of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ranks import group_world

from kvferry.errors import ConfigError, MissingDependencyError
from kvferry.ranks import ProcessGroupRanks

_ROOT = Path(__file__).parents[2]
WORLDS = ("2:between", "2:waiting", "4:between", "8:waiting")

_Reports = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> _Reports:
    """What the ranks of each world reported, the last one left out, which was killed."""
    folder = tmp_path_factory.mktemp("worlds")
    ran = subprocess.run(
        [sys.executable, group_world.__file__, str(folder), *WORLDS],
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
    for world in WORLDS:
        size = int(world.partition(":")[0])
        ended = json.loads((folder / world / "ended.json").read_text())
        assert ended == [signal.SIGKILL, *[0] * (size - 1)], ran.stdout + ran.stderr
        found[world] = [
            json.loads((folder / world / f"{rank}.json").read_text()) for rank in range(size - 1)
        ]
    return found


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, reports: _Reports) -> tuple[int, list[dict[str, Any]]]:
    """The size of a world, and the reports of its ranks but the last."""
    return int(request.param.partition(":")[0]), reports[request.param]


def test_ranks_agree_and_make_the_same_collectives(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Each rank has each minimum; their logs are equal, two collectives a round."""
    size, ranks = world
    plan = group_world.plan_rounds(size)
    expected = [[min(column) for column in zip(*brought, strict=True)] for brought in plan]
    log = [wide for brought in plan for wide in (4 * size, max(len(brought[0]), 1))]
    for rank in ranks:
        assert rank["rounds"] == {"agreed": expected, "log": log}


def test_other_lengths_are_one_error_everywhere(world: tuple[int, list[dict[str, Any]]]) -> None:
    """One text on every rank after two collectives; the next call makes none."""
    size, ranks = world
    texts = set()
    for rank in ranks:
        (kind, text), (again, earlier) = rank["length"]["outcomes"]
        assert kind == "RankMismatchError"
        assert (again, "earlier agreement failed" in earlier) == ("RankError", True)
        assert rank["length"]["log"] == [4 * size, 1]
        texts.add(text)
    assert len(texts) == 1
    assert f"and 3 (rank {size - 1}) values" in texts.pop()


def test_a_rank_that_cannot_go_on_is_named(world: tuple[int, list[dict[str, Any]]]) -> None:
    """A value that is none is told to all, in the two collectives of always."""
    size, ranks = world
    for rank in ranks:
        told = f"rank {size - 1} of {size} brought values that are no integers of 64 bits"
        assert rank["value"]["outcomes"][0][0] == "RankError"
        assert told in rank["value"]["outcomes"][0][1]
        assert rank["value"]["log"] == [4 * size, 1]


def test_a_rank_without_time_does_not_let_others_wait(
    world: tuple[int, list[dict[str, Any]]],
) -> None:
    """The others fail long before their deadline, or they would have said that it passed."""
    for rank in world[1]:
        assert [kind for kind, _ in rank["no_time"]["outcomes"]] == ["RankError", "RankError"]


def test_a_late_rank_is_an_error_at_the_deadline(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Somebody's deadline passes, and with it everybody's agreement; later calls raise at once."""
    kinds = [rank["late"]["outcomes"][0][0] for rank in world[1]]
    assert "RankTimeoutError" in kinds
    assert set(kinds) <= {"RankTimeoutError", "RankError"}
    for rank in world[1]:
        assert rank["late"]["outcomes"][1][0] == "RankError"
        assert len(rank["late"]["log"]) == 1


def test_a_killed_rank_is_an_error_on_the_others(world: tuple[int, list[dict[str, Any]]]) -> None:
    """kill -9 in the middle of an agreement: not even the deadline has to be waited for."""
    for rank in world[1]:
        (kind, text), (again, _) = rank["death"]["outcomes"]
        assert (kind, again) == ("RankError", "RankError")
        assert "the group failed" in text
        assert 1 <= len(rank["death"]["log"]) <= 2


def test_ranks_of_a_group(world: tuple[int, list[dict[str, Any]]]) -> None:
    """Rank and size are the group's, and other groups are whole after one of them broke."""
    size, ranks = world
    assert [rank["plain"] for rank in ranks] == [[rank, size, [0]] for rank in range(size - 1)]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """torch.distributed with this process alone, until the test ends."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()


def test_what_is_no_gloo_group_is_refused(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another backend, and a group that this process is not in, are told with what to do."""
    group = alone.new_group(backend="gloo")
    assert ProcessGroupRanks(group).agree_min([4], timeout=60) == [4]
    with pytest.raises(ConfigError, match="no member"):
        ProcessGroupRanks(alone.GroupMember.NON_GROUP_MEMBER)
    monkeypatch.setattr(alone, "get_backend_config", lambda _group: "cpu:mpi,cuda:nccl")
    with pytest.raises(ConfigError, match=r"cpu:mpi,cuda:nccl.*new_group"):
        ProcessGroupRanks(group)


def test_without_torch_or_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is missing, and how to get it."""
    with pytest.raises(ConfigError, match="init_process_group"):
        ProcessGroupRanks(None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match="pip install torch"):
        ProcessGroupRanks(None)  # type: ignore[arg-type]
