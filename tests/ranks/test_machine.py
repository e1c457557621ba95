"""How many ranks are on a machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import kvferry.ranks.machine
from kvferry.ranks import SingleRank, ThreadRanks, ranks_on_machine


def _on_each(machines: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What ranks on these machines are told."""
    here = threading.local()

    class BootId:
        def read_text(self) -> str:
            name: str = here.machine
            return (folder / name).read_text()

    for machine in set(machines) - {"none"}:
        (folder / machine).write_text(f"{machine}\n")
    monkeypatch.setattr(kvferry.ranks.machine, "_BOOT_ID", BootId())
    ranks = ThreadRanks.make(len(machines))

    def ask(rank: ThreadRanks) -> int:
        here.machine = machines[rank.rank]
        return ranks_on_machine(rank, timeout=20)

    with ThreadPoolExecutor(len(machines)) as pool:
        return list(pool.map(ask, ranks))


@pytest.mark.parametrize(
    ("machines", "told"),
    [
        ("aab", [2, 2, 1]),
        ("abca", [2, 1, 1, 2]),
        ("aaaa", [4, 4, 4, 4]),
    ],
)
def test_ranks_of_a_machine_are_counted(
    machines: str, told: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank learns how many are on its own machine, and nothing of the others."""
    assert _on_each(machines, tmp_path, monkeypatch) == told


def test_machines_without_a_boot_id_go_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be read is no reason to fail: the name of the machine will do."""
    assert _on_each(["none", "none"], tmp_path, monkeypatch) == [2, 2]


def test_one_rank_is_alone() -> None:
    """It is on its machine, with the real boot id."""
    assert ranks_on_machine(SingleRank(), timeout=1) == 1
