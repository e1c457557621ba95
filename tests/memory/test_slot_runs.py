"""The run allocator: every slot once, few and long runs, the same cost in any pool."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvferry.errors import ConfigError, SlotOwnershipError
from kvferry.memory import SlotRun, SlotRunAllocator

if TYPE_CHECKING:
    from _typeshed import TraceFunction


def _slots(runs: tuple[SlotRun, ...] | None) -> list[int]:
    assert runs is not None
    return [slot for run in runs for slot in run.slots]


def _state(allocator: SlotRunAllocator) -> tuple[object, ...]:
    free = [slot for slot in range(allocator.num_slots) if allocator.is_free(slot)]
    return free, allocator.num_free, allocator.num_free_runs


def test_takes_the_shortest_run_that_fits() -> None:
    """Free runs of 3, 5 and 9: a request for 4 takes the 5 and leaves the 9 whole."""
    allocator = SlotRunAllocator(20)
    assert allocator.allocate(20) == (SlotRun(0, 20),)
    allocator.free([SlotRun(0, 9), SlotRun(10, 3), SlotRun(14, 5)])
    assert allocator.allocate(4) == (SlotRun(14, 4),)
    assert allocator.allocate(9) == (SlotRun(0, 9),)


def test_splits_over_the_longest_runs() -> None:
    """When no run holds the request, the longest go first, so that there are few."""
    allocator = SlotRunAllocator(40)
    allocator.allocate(40)
    allocator.free([SlotRun(0, 2), SlotRun(3, 8), SlotRun(12, 3), SlotRun(20, 10)])
    runs = allocator.allocate(20)
    assert runs is not None
    assert [run.length for run in runs] == [10, 8, 2]
    allocator.check_integrity()


def test_long_runs_beyond_the_exact_bins() -> None:
    """Among runs of a thousand and more, one that fits is found, whatever bin it shares."""
    allocator = SlotRunAllocator(10_000)
    allocator.allocate(10_000)
    allocator.free([SlotRun(0, 1024), SlotRun(2000, 1087), SlotRun(4000, 3000)])
    assert sorted(_slots(allocator.allocate(1080))) == list(range(4000, 5080))
    allocator.check_integrity()
    assert len(_slots(allocator.allocate(1024 + 1087 + 3000 - 1080))) == 4031
    assert allocator.num_free == 0
    allocator.check_integrity()


def test_full_is_a_value_and_takes_nothing() -> None:
    """More than is free gives None, all or nothing; what is free can still be had."""
    allocator = SlotRunAllocator(10)
    allocator.allocate(4)
    before = _state(allocator)
    assert allocator.allocate(7) is None
    assert allocator.allocate(1000) is None
    assert _state(allocator) == before
    assert len(_slots(allocator.allocate(6))) == 6
    assert allocator.allocate(1) is None


def test_nothing_asked_nothing_given() -> None:
    """0 slots are no runs, in an empty and in a full pool; giving none back is a no-op."""
    allocator = SlotRunAllocator(3)
    assert allocator.allocate(0) == ()
    allocator.allocate(3)
    assert allocator.allocate(0) == ()
    allocator.free([])
    assert allocator.num_free == 0


def test_neighbours_join() -> None:
    """Runs given back in any order, as runs or single slots, become one run again."""
    allocator = SlotRunAllocator(64)
    allocator.allocate(64)
    pieces: list[SlotRun | int] = [SlotRun(start, 8) for start in range(0, 56, 8)]
    pieces += list(range(56, 64))
    random.Random(5).shuffle(pieces)
    for piece in pieces:
        allocator.free([piece])
        allocator.check_integrity()
    assert allocator.num_free_runs == 1
    assert allocator.allocate(64) == (SlotRun(0, 64),)


@pytest.mark.parametrize(
    ("freed", "named"),
    [
        ([3], "slot 3 is already free"),
        ([SlotRun(5, 5)], "slot 8 is already free"),
        ([6, SlotRun(4, 4)], "slot 6 is named twice"),
        ([4, 4], "slot 4 is named twice"),
        ([4, 10], r"\[10, 11\).*slots 0 to 9"),
        ([4, -1], r"\[-1, 0\).*slots 0 to 9"),
        ([SlotRun(4, 0)], r"\[4, 4\)"),
        ([SlotRun(4, -2)], r"\[4, 2\)"),
        ([4, 5.0], "5.0 is neither"),
        ([4, (5, 1)], r"\(5, 1\) is neither"),
    ],
)
def test_bad_frees_change_nothing(freed: list[SlotRun], named: str) -> None:
    """Double, doubled, unknown and senseless slots raise by name and leave all as it was."""
    allocator = SlotRunAllocator(10)
    allocator.allocate(10)
    allocator.free([SlotRun(0, 4), SlotRun(8, 2)])
    before = _state(allocator)
    with pytest.raises(SlotOwnershipError, match=named):
        allocator.free(freed)
    assert _state(allocator) == before
    allocator.check_integrity()


def test_numpy_integers_are_plain_numbers() -> None:
    """numpy integers work as counts, slots and runs, and leave plain numbers behind."""
    allocator = SlotRunAllocator(int(np.int64(100)))
    runs = allocator.allocate(np.int64(10))  # type: ignore[arg-type]
    assert _slots(runs) == list(range(10))
    allocator.free([SlotRun(np.int64(0), np.int32(4)), *np.arange(4, 10)])  # type: ignore[arg-type]
    allocator.check_integrity()
    assert allocator.num_free_runs == 1


@pytest.mark.parametrize("count", [-1, 2.0, None])
def test_bad_counts(count: int) -> None:
    """Negative and broken counts are errors, not misses."""
    with pytest.raises(ConfigError, match="num_slots="):
        SlotRunAllocator(10).allocate(count)
    with pytest.raises(ConfigError, match="num_slots="):
        SlotRunAllocator(count)


def _churn(num_slots: int, steps: int, seed: int) -> tuple[float, SlotRunAllocator]:
    """The mean run handed out for 32 slots, over random traffic of 1-64 slots at 90 % fill."""
    rng = random.Random(seed)
    allocator = SlotRunAllocator(num_slots)
    held: list[tuple[SlotRun, ...]] = []
    while num_slots - allocator.num_free < 0.9 * num_slots - 64:
        filled = allocator.allocate(rng.randint(1, 64))
        assert filled is not None
        held.append(filled)
    slots = runs = 0
    for step in range(steps):
        count = rng.randint(1, 64)
        if num_slots - allocator.num_free + count > 0.9 * num_slots:
            at = rng.randrange(len(held))
            held[at], held[-1] = held[-1], held[at]
            allocator.free(held.pop())
        else:
            taken = allocator.allocate(count)
            assert taken is not None
            held.append(taken)
        if step > steps // 2 and step % 50 == 0:
            probe = allocator.allocate(32)
            assert probe is not None
            slots, runs = slots + 32, runs + len(probe)
            allocator.free(probe)
    return slots / runs, allocator


@pytest.mark.parametrize("num_slots", [1024, 16384])
def test_runs_stay_long_under_churn(num_slots: int) -> None:
    """After 10^5 random steps at 90 % fill, 32 slots still come in runs of 8 or more."""
    mean_run, allocator = _churn(num_slots, steps=100_000, seed=1)
    allocator.check_integrity()
    assert mean_run >= 8


def test_cost_does_not_grow_with_the_pool() -> None:
    """A pool 1,000 times as large takes the same Python steps a call, give or take a tenth."""

    def lines_of(num_slots: int) -> float:
        _, allocator = _churn(num_slots, steps=8_000, seed=2)
        rng = random.Random(3)
        lines = 0

        def trace(_frame: FrameType, _event: str, _arg: object) -> TraceFunction:
            nonlocal lines
            lines += 1
            return trace

        previous = sys.gettrace()
        sys.settrace(trace)
        try:
            for _ in range(300):
                runs = allocator.allocate(rng.randint(1, 64))
                assert runs is not None
                allocator.free(runs)
        finally:
            sys.settrace(previous)
        return lines / 300

    small, large = lines_of(2_000), lines_of(2_000_000)
    assert large <= small * 1.1


@pytest.mark.parametrize("seed", [0, 1])
def test_fuzz_against_a_set(seed: int) -> None:
    """20,000 random calls agree with a plain set of free slots, proven after each."""
    rng = random.Random(seed)
    num_slots = rng.choice([48, 71])
    allocator = SlotRunAllocator(num_slots)
    free, taken = set(range(num_slots)), []
    for _ in range(20_000):
        if rng.random() < 0.5:
            count = rng.randint(0, 12)
            runs = allocator.allocate(count)
            assert (runs is None) == (count > len(free))
            if runs is not None:
                slots = _slots(runs)
                assert len(slots) == count
                assert set(slots) <= free
                free -= set(slots)
                taken += slots
        else:
            rng.shuffle(taken)
            count = min(len(taken), rng.randint(0, 12))
            given, taken = taken[:count], taken[count:]
            allocator.free(given)
            free |= set(given)
        allocator.check_integrity()
        assert allocator.num_free == len(free)
    assert {slot for slot in range(num_slots) if allocator.is_free(slot)} == free


def _lose_a_run(allocator: SlotRunAllocator) -> None:
    allocator._length_from.popitem()


def _double_a_slot(allocator: SlotRunAllocator) -> None:
    allocator._is_free[0] = 1


def _miscount(allocator: SlotRunAllocator) -> None:
    allocator._num_free += 1


def _misbin(allocator: SlotRunAllocator) -> None:
    allocator._bins[1][0] = None


def _unfill(allocator: SlotRunAllocator) -> None:
    allocator._filled_bins = 0


def _lose_an_end(allocator: SlotRunAllocator) -> None:
    allocator._start_before.popitem()


@pytest.mark.parametrize(
    "spoil", [_lose_a_run, _double_a_slot, _miscount, _misbin, _unfill, _lose_an_end]
)
def test_integrity_check_sees_each_spoilt_table(
    spoil: Callable[[SlotRunAllocator], None],
) -> None:
    """Whichever of its tables is wrong, the check raises."""
    allocator = SlotRunAllocator(10)
    allocator.allocate(4)
    allocator.check_integrity()
    spoil(allocator)
    with pytest.raises(SlotOwnershipError):
        allocator.check_integrity()
