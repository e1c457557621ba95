"""The budget: one verdict from one reading, and a message that hides nothing."""

from __future__ import annotations

import pickle

import pytest

from kvferry.errors import ConfigError
from kvferry.memory import (
    MAX_DEFAULT_RESERVE_BYTES,
    BudgetSource,
    MemoryReading,
    check_budget,
    default_reserve_bytes,
)

GIB = 1 << 30


def test_machine_refuses_with_every_number_in_the_message() -> None:
    """Asked, free, reserve, limit, total, the source and the override are all told."""
    reading = MemoryReading(total_bytes=64 * GIB, available_bytes=44 * GIB + 5)
    verdict = check_budget(40 * GIB, reading, reserve_bytes=10 * GIB)
    assert not verdict.allowed
    assert verdict.limited_by is BudgetSource.MACHINE
    assert verdict.limit_bytes == 34 * GIB + 5
    for number in (40 * GIB, 44 * GIB + 5, 10 * GIB, 34 * GIB + 5, 64 * GIB):
        assert f"({number} B)" in verdict.message
    assert "the machine" in verdict.message
    assert "unchecked_budget=True" in verdict.message


def test_limit_is_exact() -> None:
    """The last allowed byte is free less reserve; one more is refused."""
    reading = MemoryReading(total_bytes=8 * GIB, available_bytes=5 * GIB)
    assert check_budget(4 * GIB, reading, reserve_bytes=GIB).allowed
    assert not check_budget(4 * GIB + 1, reading, reserve_bytes=GIB).allowed


def test_default_reserve_is_shown_and_scales() -> None:
    """1/16 of the smaller of machine and cgroup, at most 4 GiB, and never hidden."""
    large = MemoryReading(total_bytes=512 * GIB, available_bytes=500 * GIB)
    small = MemoryReading(
        total_bytes=512 * GIB, available_bytes=500 * GIB, cgroup_limit_bytes=8 * GIB
    )
    assert default_reserve_bytes(large) == MAX_DEFAULT_RESERVE_BYTES == 4 * GIB
    assert default_reserve_bytes(small) == GIB // 2
    verdict = check_budget(GIB, small)
    assert verdict.reserve_bytes == GIB // 2
    assert f"({GIB // 2} B)" in verdict.message


def test_cgroup_below_the_machine_is_the_limit() -> None:
    """A container with less room than its machine is judged by its own limit and use."""
    reading = MemoryReading(
        total_bytes=256 * GIB,
        available_bytes=200 * GIB,
        cgroup_limit_bytes=16 * GIB,
        cgroup_used_bytes=6 * GIB,
    )
    verdict = check_budget(10 * GIB, reading, reserve_bytes=GIB)
    assert not verdict.allowed
    assert verdict.limited_by is BudgetSource.CGROUP
    assert (verdict.free_bytes, verdict.limit_bytes) == (10 * GIB, 9 * GIB)
    for number in (10 * GIB, GIB, 9 * GIB, 16 * GIB):
        assert f"({number} B)" in verdict.message
    assert "cgroup" in verdict.message


def test_cgroup_above_its_limit_allows_nothing() -> None:
    """A cgroup that uses more than its limit leaves 0 bytes, not a negative number."""
    reading = MemoryReading(
        total_bytes=8 * GIB,
        available_bytes=4 * GIB,
        cgroup_limit_bytes=GIB,
        cgroup_used_bytes=2 * GIB,
    )
    verdict = check_budget(1, reading)
    assert (verdict.free_bytes, verdict.limit_bytes, verdict.allowed) == (0, 0, False)


def test_memlock_counts_only_for_locked_memory() -> None:
    """The lock limit, less what is locked already, binds a locked pool and no other."""
    reading = MemoryReading(
        total_bytes=64 * GIB,
        available_bytes=60 * GIB,
        memlock_limit_bytes=8 << 20,
        memlock_used_bytes=1 << 20,
    )
    assert check_budget(GIB, reading).allowed
    verdict = check_budget(GIB, reading, locked=True)
    assert not verdict.allowed
    assert verdict.limited_by is BudgetSource.MEMLOCK
    assert verdict.limit_bytes == 7 << 20
    for number in (GIB, 7 << 20, 8 << 20):
        assert f"({number} B)" in verdict.message
    assert "ulimit -l" in verdict.message
    assert check_budget(7 << 20, reading, locked=True).allowed
    # Each process has a lock limit of its own.
    assert check_budget(7 << 20, reading, locked=True, processes=8).allowed


def test_free_huge_pages_suffice_though_they_count_as_used() -> None:
    """Reserved huge pages are not in available memory; a huge pool is judged by them alone."""
    reading = MemoryReading(total_bytes=64 * GIB, available_bytes=2 * GIB, huge_free_bytes=40 * GIB)
    assert not check_budget(40 * GIB, reading).allowed
    assert check_budget(40 * GIB, reading, huge=True).allowed
    refused = check_budget(40 * GIB + 1, reading, huge=True)
    assert not refused.allowed
    assert refused.limited_by is BudgetSource.HUGE_PAGES
    assert "huge pages" in refused.message


@pytest.mark.parametrize(("free_gib", "fits"), [(350, False), (399, False), (400, True)])
def test_processes_of_a_host_get_one_verdict(free_gib: int, fits: bool) -> None:
    """4 processes of 100 GiB are judged together, alike, however late each of them starts."""
    reading = MemoryReading(total_bytes=512 * GIB, available_bytes=free_gib * GIB)
    verdicts = [
        check_budget(100 * GIB, pickle.loads(told), reserve_bytes=0, processes=4)  # noqa: S301
        for told in [pickle.dumps(reading)] * 4
    ]
    assert [verdict.allowed for verdict in verdicts] == [fits] * 4
    assert len(set(verdicts)) == 1
    assert "each of 4 processes" in verdicts[0].message


@pytest.mark.parametrize("wrong", [{"asked_bytes": -1}, {"reserve_bytes": -1}, {"processes": 0}])
def test_senseless_questions_are_refused(wrong: dict[str, int]) -> None:
    """Negative bytes and no process at all are errors, not verdicts."""
    arguments = {"asked_bytes": 1, **wrong}
    reading = MemoryReading(total_bytes=GIB, available_bytes=GIB)
    with pytest.raises(ConfigError, match=r"-1|processes=0"):
        check_budget(arguments.pop("asked_bytes"), reading, **arguments)  # type: ignore[arg-type]
