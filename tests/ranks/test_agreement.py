"""Agreement between ranks: one result, one error, and two collectives whatever happens."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.ranks.recorded import RecordedCollective

from kvferry.errors import (
    ConfigError,
    KVFerryError,
    RankError,
    RankMismatchError,
    RankTimeoutError,
)
from kvferry.ranks import AgreedRanks, Collective, Ranks, SingleRank, ThreadRanks

SIZES = (2, 4, 8)
LONG = 60.0

_Call = Callable[[int], list[int]]


def _recorded(size: int) -> tuple[list[AgreedRanks], list[RecordedCollective]]:
    """Ranks of threads, and the log of each."""
    logs = [RecordedCollective(ranks._collective) for ranks in ThreadRanks.make(size)]
    return [AgreedRanks(log) for log in logs], logs


def _at_once(size: int, call: _Call) -> list[list[int] | KVFerryError]:
    """What `call(rank)` gives or raises, in a thread for each rank."""

    def outcome(rank: int) -> list[int] | KVFerryError:
        try:
            return call(rank)
        except KVFerryError as bad:
            return bad

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(outcome, range(size)))


def _errors(outcomes: Sequence[list[int] | KVFerryError]) -> list[KVFerryError]:
    assert all(isinstance(one, KVFerryError) for one in outcomes), outcomes
    return [one for one in outcomes if isinstance(one, KVFerryError)]


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_on_what_all_have(size: int) -> None:
    """Random values, lengths, delays and order of arrival: every rank gets each minimum."""
    ranks, logs = _recorded(size)
    plan = random.Random(size)
    lengths = [plan.choice([0, 1, 2, 17]) for _ in range(60)]
    values = [
        [[plan.randrange(-(1 << 63), 1 << 63) for _ in range(length)] for _ in range(size)]
        for length in lengths
    ]

    def rounds(rank: int) -> list[int]:
        own = random.Random(rank)
        away = threading.Event()
        for brought in values:
            away.wait(own.choice([0, 0, 0.001]))
            agreed = ranks[rank].agree_min(brought[rank], timeout=LONG)
            assert agreed == [min(column) for column in zip(*brought, strict=True)]
        return []

    assert _at_once(size, rounds) == [[]] * size
    assert [log.log for log in logs] == [logs[0].log] * size
    assert logs[0].log == [wide for length in lengths for wide in (4 * size, max(length, 1))]


def test_a_page_that_one_rank_lacks_is_used_by_none() -> None:
    """The usable prefix is what every rank has verified; the others give back the rest."""
    ranks = ThreadRanks.make(2)
    verified = (8, 5)
    assert _at_once(2, lambda rank: ranks[rank].agree_min([verified[rank]], timeout=LONG)) == [
        [5],
        [5],
    ]


def test_pages_are_reserved_on_all_ranks_or_on_none() -> None:
    """One rank has room for 10 pages, another for 8: 9 are given back on both, 8 kept on both."""
    ranks = ThreadRanks.make(2)
    room = [10, 8]

    def reserve(rank: int) -> list[int]:
        for pages in (9, 8):
            is_reserved = room[rank] >= pages
            room[rank] -= pages * is_reserved
            if ranks[rank].agree_min([is_reserved], timeout=LONG) == [0]:
                room[rank] += pages * is_reserved
        return [room[rank]]

    assert _at_once(2, reserve) == [[2], [0]]


@pytest.mark.parametrize("size", SIZES)
def test_other_lengths_are_one_error_everywhere(size: int) -> None:
    """Both lengths are told with their ranks, in one text, after the two collectives of always."""
    ranks, logs = _recorded(size)
    outcomes = _at_once(
        size, lambda rank: ranks[rank].agree_min([7] * (2 + (rank == 1)), timeout=LONG)
    )
    errors = _errors(outcomes)
    assert {type(error) for error in errors} == {RankMismatchError}
    assert len({str(error) for error in errors}) == 1
    others = ", ".join(str(rank) for rank in range(size) if rank != 1)
    assert f"2 (rank{'s' * (size > 2)} {others}) and 3 (rank 1) values" in str(errors[0])
    assert [log.log for log in logs] == [[4 * size, 1]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("values", "timeout", "own", "told"),
    [
        ([1, 1 << 63], LONG, ConfigError, "no integers of 64 bits"),
        ([1, -(1 << 63) - 1], LONG, ConfigError, "no integers of 64 bits"),
        ([1, 2.0], LONG, ConfigError, "no integers of 64 bits"),
        ([1, None], LONG, ConfigError, "no integers of 64 bits"),
    ],
)
def test_a_rank_that_cannot_go_on_tells_the_others(
    size: int, values: list[int], timeout: float, own: type[KVFerryError], told: str
) -> None:
    """Its own error is about the argument; theirs names it, and nobody waits for the deadline."""
    ranks, logs = _recorded(size)
    bad = size - 1

    def call(rank: int) -> list[int]:
        if rank == bad:
            return ranks[rank].agree_min(values, timeout=timeout)
        return ranks[rank].agree_min([3, 4], timeout=LONG)

    errors = _errors(_at_once(size, call))
    assert type(errors[bad]) is own
    assert "value 1 of an agreement" in str(errors[bad])
    assert {(type(one), str(one)) for rank, one in enumerate(errors) if rank != bad} == {
        (RankError, f"rank {bad} of {size} brought values that are {told}: see the error there")
    }
    assert [log.log for log in logs] == [[4 * size, 1]] * size


@pytest.mark.parametrize("timeout", [0, -1.5, float("nan"), float("inf"), 86_401, "5", None])
def test_a_rank_without_a_timeout_does_not_let_the_others_wait(timeout: float) -> None:
    """It raises for itself, and the others at once, whether they are there before it or not."""
    for is_last in (True, False):
        ranks = ThreadRanks.make(2)
        gone = threading.Event()
        waiting = threading.Event()

        def call(
            rank: int,
            ranks: list[ThreadRanks] = ranks,
            gone: threading.Event = gone,
            waiting: threading.Event = waiting,
            is_last: bool = is_last,
        ) -> list[int]:
            if rank == 0:
                assert is_last or gone.wait(LONG)
                waiting.set()
                return ranks[0].agree_min([1], timeout=LONG)
            assert not is_last or waiting.wait(LONG)
            try:
                return ranks[1].agree_min([1], timeout=timeout)
            finally:
                gone.set()

        other, own = _errors(_at_once(2, call))
        is_late = isinstance(timeout, int | float) and timeout <= 0
        assert type(own) is (RankTimeoutError if is_late else ConfigError)
        assert repr(timeout) in str(own)
        assert isinstance(other, RankError)


@pytest.mark.parametrize("size", SIZES)
def test_a_late_rank_is_named(size: int) -> None:
    """The others raise at their deadline and name it; it learns of it when it comes."""
    ranks = ThreadRanks.make(size)
    others_are_done = threading.Barrier(size)

    def call(rank: int) -> list[int]:
        if rank == 1:
            others_are_done.wait(LONG)
            return ranks[rank].agree_min([1], timeout=LONG)
        try:
            return ranks[rank].agree_min([1], timeout=0.2)
        finally:
            others_are_done.wait(LONG)

    errors = _errors(_at_once(size, call))
    assert {type(error) for error in errors} == {RankTimeoutError}
    assert {"rank 1 of" in str(error) for error in errors} == {True}
    assert isinstance(errors[0], TimeoutError)


def test_a_rank_that_closes_is_an_error_at_once() -> None:
    """Those who wait for it, and those who come later, are told which one it was."""
    ranks, logs = _recorded(3)
    waiting = threading.Event()
    logs[0]._before = lambda _number: waiting.set()

    def call(rank: int) -> list[int]:
        if rank == 2:
            assert waiting.wait(LONG)
            ranks[rank].close()
            ranks[rank].close()
            return []
        return ranks[rank].agree_min([1], timeout=LONG)

    first, second, third = _at_once(3, call)
    assert third == []
    for error in (first, second):
        assert type(error) is RankError
        assert "rank 2 of 3 has closed" in str(error)
    with pytest.raises(RankError, match=r"rank 2 of 3: agree_min was called after close"):
        ranks[2].agree_min([1], timeout=LONG)


def test_after_a_failure_nothing_is_asked_of_the_group() -> None:
    """Later calls raise at once, tell the first failure, and make no collective."""
    ranks, logs = _recorded(2)
    outcomes = _at_once(2, lambda rank: ranks[rank].agree_min([0] * rank, timeout=LONG))
    assert {type(one) for one in outcomes} == {RankMismatchError}
    for rank in ranks:
        for _ in range(2):
            with pytest.raises(RankError, match=r"earlier agreement failed.*0 \(rank 0\) and 1"):
                rank.agree_min([1], timeout=LONG)
    assert [log.log for log in logs] == [[8, 1], [8, 1]]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_collective_that_fails_breaks_the_ranks(failing: int) -> None:
    """Whatever it raised comes through, in either of the two; an interrupt counts as well."""
    for raised in (RankError("the network is gone"), KeyboardInterrupt()):

        def fail(number: int, raised: BaseException = raised) -> None:
            if number == failing:
                raise raised

        log = RecordedCollective(SingleRank()._collective, fail)
        ranks = AgreedRanks(log)
        with pytest.raises(type(raised)):
            ranks.agree_min([1], timeout=LONG)
        told = "network" if isinstance(raised, RankError) else "KeyboardInterrupt"
        with pytest.raises(RankError, match=f"earlier agreement failed.*{told}"):
            ranks.agree_min([1], timeout=LONG)
        assert len(log.log) == failing + 1


def test_the_deadline_is_for_the_whole_agreement() -> None:
    """The second collective has what the first left, and is made also when that is nothing."""
    log = RecordedCollective(SingleRank()._collective)
    AgreedRanks(log).agree_min([1], timeout=5)
    assert log.timeouts[0] == 5
    assert 0 < log.timeouts[1] < 5

    def dawdle(number: int) -> None:
        if number == 0:
            threading.Event().wait(0.02)

    slow = RecordedCollective(SingleRank()._collective, dawdle)
    AgreedRanks(slow).agree_min([1], timeout=0.01)
    assert 0 < slow.timeouts[1] < 0.01
    assert len(slow.log) == 2


class _Scripted:
    """A collective of two ranks; the other one's headers and values are given."""

    rank, size = 0, 2

    def __init__(self, *others: list[int]) -> None:
        self._others = list(others)

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        other = self._others.pop(0)
        assert timeout > 0
        return [min(pair) for pair in zip(values, other, strict=True)]

    def close(self) -> None:
        pass


_FREE = [(1 << 63) - 1] * 4


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ([1, 2, 1, 0], r"agreement number 1 \(rank 0\) and 2 \(rank 1\)"),
        ([2, 1, 1, 0], r"speak 1 \(rank 0\) and 2 \(rank 1\) for the version"),
        (_FREE, "let nothing else use"),
        ([1, 1, 1, 77], "rank 1 of 2 has fault 77"),
    ],
)
def test_ranks_out_of_step_are_seen(header: list[int], told: str) -> None:
    """Another call, another version of kvferry, and traffic that is not ours are told apart."""
    with pytest.raises(RankError, match=told):
        AgreedRanks(_Scripted([*_FREE, *header], [0])).agree_min([5], timeout=LONG)


def test_two_threads_of_one_rank_are_refused() -> None:
    """The second caller raises; the first still gets its result, and the ranks are broken."""
    inside, go_on = threading.Event(), threading.Event()

    def stop(number: int) -> None:
        if number == 0:
            inside.set()
            assert go_on.wait(LONG)

    ranks = AgreedRanks(RecordedCollective(SingleRank()._collective, stop))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks.agree_min, [4], timeout=LONG)
        assert inside.wait(LONG)
        with pytest.raises(RankError, match="two threads"):
            ranks.agree_min([3], timeout=LONG)
        go_on.set()
        assert first.result(LONG) == [4]
    with pytest.raises(RankError, match=r"earlier agreement failed.*two threads"):
        ranks.agree_min([3], timeout=LONG)


def test_a_single_rank_agrees_with_itself() -> None:
    """Any whole numbers, numpy's too, come back as int; wrong ones are refused as with several."""
    ranks: Ranks = SingleRank()
    assert (ranks.rank, ranks.size) == (0, 1)
    agreed = ranks.agree_min([np.int64(3), True, -(1 << 63)], timeout=1)  # type: ignore[list-item]
    assert agreed == [3, 1, -(1 << 63)]
    assert {type(value) for value in agreed} == {int}
    assert ranks.agree_min([], timeout=1) == []
    with pytest.raises(ConfigError, match="value 0 of an agreement"):
        ranks.agree_min([1.5], timeout=1)  # type: ignore[list-item]
    ranks.close()
    with pytest.raises(RankError, match="after close"):
        ranks.agree_min([1], timeout=1)


def test_no_ranks_at_all() -> None:
    """Less than one is refused; one is enough."""
    with pytest.raises(ConfigError, match="size=0"):
        ThreadRanks.make(0)
    (alone,) = ThreadRanks.make(1)
    assert alone.agree_min([5], timeout=1) == [5]


class _EarlyEnd(AgreedRanks):
    """A double that leaves out the second collective where it has nothing to bring."""

    def agree_min(self, values: Sequence[int], *, timeout: float) -> list[int]:
        if not values:
            return []
        return super().agree_min(values, timeout=timeout)


def test_the_log_shows_an_early_return() -> None:
    """A rank that skips its collectives is seen in the logs, and as a late rank by the others."""
    seats: list[Collective] = [ranks._collective for ranks in ThreadRanks.make(2)]
    logs = [RecordedCollective(seat) for seat in seats]
    ranks = [_EarlyEnd(logs[0]), AgreedRanks(logs[1])]
    outcomes = _at_once(2, lambda rank: ranks[rank].agree_min([], timeout=0.2))
    assert outcomes[0] == []
    assert isinstance(outcomes[1], RankTimeoutError)
    assert [len(log.log) for log in logs] == [0, 1]


def test_torch_is_not_needed() -> None:
    """Ranks of threads and single ones load no torch."""
    code = (
        "import sys, kvferry.ranks as r; r.SingleRank().agree_min([1], timeout=1);"
        "r.ThreadRanks.make(1)[0].agree_min([1], timeout=1); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
