"""The run allocator: every slot once, few and long runs, the same cost in any pool."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

import numpy as np
import pytest
from benchmarks.host_runs import Evicted, Traffic
from tests.memory.counted_tables import count_touches

from kvferry.errors import ConfigError, SlotOwnershipError
from kvferry.memory import SlotRun, SlotRunAllocator
from kvferry.memory.slot_runs import Slots, merge_slots

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


class _Stack:
    """The usual free list: whatever slot came back last goes out first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num_slots: int) -> Sequence[SlotRun]:
        kept = len(self._free) - num_slots
        taken, self._free = self._free[kept:], self._free[:kept]
        return merge_slots(taken, self.num_slots)

    def free(self, slots: Slots) -> None:
        for run in merge_slots(slots, self.num_slots):
            self._free += run.slots


@pytest.mark.parametrize("evicted", [Evicted.ENTRY, Evicted.OLDEST])
@pytest.mark.parametrize("num_slots", [2048, 16384])
def test_runs_stay_long_under_traffic(num_slots: int, evicted: Evicted) -> None:
    """After 10^5 stores and evictions at 90 % fill, 32 slots still come in runs of 8 or more.

    They come in one, nearly always; 8 is what `benchmarks/host_runs.py` asks for after 10^6.
    """
    allocator = SlotRunAllocator(num_slots)
    traffic = Traffic(allocator, evicted, seed=1)
    traffic.run(100_000)
    allocator.check_integrity()
    assert traffic.mean_run(500) >= 8


def test_runs_of_a_plain_free_list_get_short() -> None:
    """The same traffic cuts the runs of a free list to less than 2: the test above can fail."""
    traffic = Traffic(_Stack(2048), Evicted.ENTRY, seed=1)
    traffic.run(20_000)
    assert traffic.mean_run(500) < 2


def _touches_per_slot(allocator: SlotRunAllocator, evicted: Evicted) -> float:
    """The most table elements that a call touched for each slot that it was about."""
    Traffic(allocator, evicted, seed=2).run(20_000)
    touches = count_touches(allocator)
    rng = random.Random(3)
    held: list[tuple[SlotRun, ...]] = []
    most = 0.0
    for _ in range(2_000):
        before = touches()
        if len(held) < 20:
            runs = allocator.allocate(rng.randint(1, 8))
            assert runs is not None
            held.append(runs)
        else:
            runs = held.pop(rng.randrange(len(held)))
            allocator.free(runs)
        most = max(most, (touches() - before) / len(_slots(runs)))
    return most


class _Scanning(SlotRunAllocator):
    """Looks for a free slot from the start of the pool on."""

    def allocate(self, num_slots: int) -> tuple[SlotRun, ...] | None:
        return super().allocate(num_slots) if self._is_free.find(1) >= 0 else None


@pytest.mark.parametrize("evicted", [Evicted.ENTRY, Evicted.PAGE])
@pytest.mark.parametrize("num_slots", [2_000, 200_000])
def test_a_call_touches_few_elements_in_any_pool(num_slots: int, evicted: Evicted) -> None:
    """No call, not the worst, looks at more than 40 table elements a slot; one that scans does."""
    assert _touches_per_slot(SlotRunAllocator(num_slots), evicted) <= 40
    assert _touches_per_slot(_Scanning(num_slots), evicted) > 40


def test_cost_does_not_grow_with_the_pool() -> None:
    """A pool 1,000 times as large takes the same Python steps a call, give or take a tenth."""

    def lines_of(num_slots: int) -> float:
        allocator = SlotRunAllocator(num_slots)
        Traffic(allocator, Evicted.ENTRY, seed=2).run(8_000)
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


def test_tables_have_a_fixed_size() -> None:
    """No table grows in use, which would make a single call as dear as the table is long."""
    allocator = SlotRunAllocator(2_000)

    def sizes() -> dict[str, int]:
        return {
            name: sys.getsizeof(table)
            for name, table in vars(allocator).items()
            if hasattr(table, "__len__")
        }

    before = sizes()
    assert len(before) == 5
    Traffic(allocator, Evicted.PAGE, seed=4).run(20_000)
    assert sizes() == before
    # Bins too are few, and grow with the logarithm of the pool.
    assert before.keys() >= {"_heads"}
    assert len(SlotRunAllocator(1 << 22)._heads) - len(allocator._heads) <= 16 * 12


@pytest.mark.parametrize(
    ("num_slots", "most", "calls"), [(48, 12, 20_000), (71, 12, 20_000), (6_000, 2_500, 1_500)]
)
def test_fuzz_against_a_set(num_slots: int, most: int, calls: int) -> None:
    """Random calls, over runs and single slots, agree with a plain set, proven after each."""
    rng = random.Random(num_slots)
    allocator = SlotRunAllocator(num_slots)
    free = set(range(num_slots))
    held: list[tuple[SlotRun, ...]] = []
    for _ in range(calls):
        if not held or rng.random() < 0.5:
            count = rng.randint(0, most)
            runs = allocator.allocate(count)
            assert (runs is None) == (count > len(free))
            if runs:
                slots = _slots(runs)
                assert len(slots) == count
                assert set(slots) <= free
                free -= set(slots)
                held.append(runs)
        else:
            entry = held.pop(rng.randrange(len(held)))
            given: list[SlotRun | int] = list(entry)
            if rng.random() < 0.5:
                slots = rng.sample(_slots(entry), len(_slots(entry)))
                count = rng.randint(0, len(slots))
                given = list(slots[:count])
                kept = tuple(SlotRun(slot, 1) for slot in slots[count:])
                held += [kept] if kept else []
                free |= set(slots[:count])
            else:
                free |= set(_slots(entry))
            allocator.free(given)
        allocator.check_integrity()
        assert allocator.num_free == len(free)
    assert {slot for slot in range(num_slots) if allocator.is_free(slot)} == free


def _lose_a_run(allocator: SlotRunAllocator) -> None:
    allocator._unlist(4, 6)


def _double_a_slot(allocator: SlotRunAllocator) -> None:
    allocator._is_free[0] = 1


def _miscount(allocator: SlotRunAllocator) -> None:
    allocator._num_free += 1


def _miscount_runs(allocator: SlotRunAllocator) -> None:
    allocator._num_free_runs += 1


def _misbin(allocator: SlotRunAllocator) -> None:
    allocator._heads[1], allocator._heads[6] = 4, -1


def _bin_twice(allocator: SlotRunAllocator) -> None:
    allocator._heads[1] = 4


def _unfill(allocator: SlotRunAllocator) -> None:
    allocator._filled_bins = 0


def _misjudge_a_length(allocator: SlotRunAllocator) -> None:
    allocator._length_at[4] = 5


def _lose_an_end(allocator: SlotRunAllocator) -> None:
    allocator._length_at[9] = 5


def _go_round(allocator: SlotRunAllocator) -> None:
    allocator._next[4] = 4


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (_lose_a_run, "slot 4 of length 6 is known to only one"),
        (_double_a_slot, "slot 0 of length 1 is known to only one"),
        (_miscount, "6 slots are free but 7 were counted"),
        (_miscount_runs, "1 free runs, but 1 were listed and 2 counted"),
        (_misbin, "not binned by their length"),
        (_bin_twice, "1 free runs, but 2 were listed and 1 counted"),
        (_unfill, "filled bins are 0x40 but"),
        (_misjudge_a_length, "slot 4 of length 5 is known to only one"),
        (_lose_an_end, "ends of the free runs disagree"),
        (_go_round, "slot 4 comes after the one at 4, but names the one at -1"),
    ],
)
def test_integrity_check_sees_each_spoilt_table(
    spoil: Callable[[SlotRunAllocator], None], named: str
) -> None:
    """Whichever of its tables is wrong, the check raises, and says what."""
    allocator = SlotRunAllocator(10)
    allocator.allocate(4)
    allocator.check_integrity()
    spoil(allocator)
    with pytest.raises(SlotOwnershipError, match=named):
        allocator.check_integrity()
