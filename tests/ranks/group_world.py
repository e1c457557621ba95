"""Processes joined by gloo that go through scenarios together; run as a script by the tests.

Arguments: a folder for what each rank reports, then worlds as ``SIZE:LAST``, where LAST says how
the last rank dies at the end: ``between`` two collectives, or ``waiting`` in the first.
torch is imported once and the ranks are forked, as its import takes longer than all scenarios.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.ranks.recorded import RecordedCollective

from kvferry.errors import KVFerryError
from kvferry.ranks import AgreedRanks, GroupCollective, ProcessGroupRanks

LONG = 20.0
NUM_ROUNDS = 40


def plan_rounds(size: int) -> list[list[list[int]]]:
    """What each rank brings in each round: [round][rank][value]."""
    plan = random.Random(size)
    lengths = [plan.choice([0, 1, 2, 33]) for _ in range(NUM_ROUNDS)]
    return [
        [[plan.randrange(-(1 << 63), 1 << 63) for _ in range(length)] for _ in range(size)]
        for length in lengths
    ]


class _Rank:
    """One process of a world."""

    def __init__(self, rank: int, size: int, tell: Callable[[], None], go: Callable[[], None]):
        self.rank, self.size = rank, size
        self._tell, self._go = tell, go
        self.report: dict[str, Any] = {}

    def _recorded(self, before: Callable[[int], None] | None = None) -> RecordedCollective:
        # A group for each scenario, as most of them end with a broken one.
        group = dist.new_group(backend="gloo")
        assert group is not None
        # Ranks leave new_group one by one. One that dies now would fail that of the others.
        dist.barrier()
        return RecordedCollective(GroupCollective(group), before)

    def _try(self, name: str, values: list[int], *, timeout: float = LONG) -> None:
        """Two calls in a scenario that fails: what either raised, and the log."""
        log = self._recorded()
        ranks = AgreedRanks(log)
        self._note(name, ranks, log, values, timeout)

    def _note(
        self,
        name: str,
        ranks: AgreedRanks,
        log: RecordedCollective,
        values: list[int],
        timeout: float,
    ) -> None:
        errors = []
        for _ in range(2):
            try:
                errors.append(["agreed", str(ranks.agree_min(values, timeout=timeout))])
            except KVFerryError as bad:
                errors.append([type(bad).__name__, str(bad)])
        self.report[name] = {"outcomes": errors, "log": log.log}

    def rounds(self) -> None:
        """Random capacities with delays that depend on the rank."""
        log = self._recorded()
        ranks = AgreedRanks(log)
        own, away = random.Random(self.rank), threading.Event()
        agreed = []
        for brought in plan_rounds(self.size):
            away.wait(own.choice([0, 0, 0, 0.003]))
            agreed.append(ranks.agree_min(brought[self.rank], timeout=LONG))
        self.report["rounds"] = {"agreed": agreed, "log": log.log}

    def faults(self) -> None:
        """One rank brings another length, no 64-bit number, no time, or comes late."""
        last = self.rank == self.size - 1
        self._try("length", [1, 2, 3] if last else [1, 2])
        self._try("value", [1 << 63] if last else [1])
        self._try("no_time", [1], timeout=0 if last else LONG)
        log = self._recorded()
        ranks = AgreedRanks(log)
        if last:
            dist.barrier()
        self._note("late", ranks, log, [1], LONG if last else 0.5)
        if not last:
            dist.barrier()
        group = dist.new_group(backend="gloo")
        assert group is not None
        plain = ProcessGroupRanks(group)
        self.report["plain"] = [plain.rank, plain.size, plain.agree_min([self.rank], timeout=LONG)]
        plain.close()

    def death(self, last: str) -> None:
        """The last rank is killed in the middle of an agreement, by itself or from outside."""
        dies = self.rank == self.size - 1

        def before(number: int) -> None:
            if dies and last == "between" and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if dies and last == "waiting":
                self._tell()

        log = self._recorded(before)
        if self.rank == 0 and last == "waiting":
            self._go()  # once the last rank is no more; until then it waits for this one
        self._note("death", AgreedRanks(log), log, [1], LONG)


def _run_rank(folder: Path, rank: int, size: int, last: str, pipes: tuple[int, int]) -> None:
    told, go = pipes
    signal.alarm(100)  # a rank that waits for one that failed does not outlive the test
    one = _Rank(rank, size, lambda: _write(told), lambda: _read(go))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    one.rounds()
    one.faults()
    one.death(last)
    (folder / f"{rank}.json").write_text(json.dumps(one.report))


def _write(pipe: int) -> None:
    os.write(pipe, b"x")


def _read(pipe: int) -> None:
    assert os.read(pipe, 1) == b"x"


def _run_world(folder: Path, size: int, last: str) -> None:
    folder.mkdir()
    told, tell = os.pipe()
    wait, go = os.pipe()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _run_rank(folder, rank, size, last, (tell, wait))
                status = 0
            finally:
                # Not through the parent's exit, and not through gloo's: groups are broken here.
                os._exit(status)
        children.append(child)
    os.close(tell)
    victim = children.pop()
    if last == "waiting" and os.read(told, 1):
        os.kill(victim, signal.SIGKILL)
    ended = {victim: os.waitpid(victim, 0)[1]}
    _write(go)
    for child in children:
        ended[child] = os.waitpid(child, 0)[1]
    (folder / "ended.json").write_text(json.dumps(list(ended.values())))
    for pipe in (told, wait, go):
        os.close(pipe)


if __name__ == "__main__":
    signal.alarm(110)
    for world in sys.argv[2:]:
        count, _, how = world.partition(":")
        _run_world(Path(sys.argv[1], world), int(count), how)
