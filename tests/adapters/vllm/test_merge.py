"""Answers of several ranks, made into one."""

from __future__ import annotations

import pytest

from kvferry.adapters.vllm.merge import RankMerge
from kvferry.errors import RankMismatchError
from kvferry.storage import ItemStatus
from kvferry.tiers import (
    Checked,
    Completion,
    Found,
    Moved,
    StorageDetached,
    StorageDone,
    WorkerFault,
)

OK, MISS, CORRUPT, FAILED = (
    ItemStatus.OK,
    ItemStatus.MISS,
    ItemStatus.CORRUPT,
    ItemStatus.FAILED,
)

PAIRS: list[tuple[Completion, Completion, Completion]] = [
    (
        Moved(1, bad_pages=(2,), verified=True, path="cpu", num_bytes=5, seconds=1.0),
        Moved(1, bad_pages=(0, 2), verified=True, path="cpu", num_bytes=7, seconds=3.0),
        Moved(1, bad_pages=(0, 2), verified=True, path="cpu", num_bytes=12, seconds=3.0),
    ),
    (Moved(1, verified=True), Moved(1, error="broken"), Moved(1, error="broken")),
    (Checked(1, (True, True, False)), Checked(1, (True, False, True)),
     Checked(1, (True, False, False))),
    (Found(1, (True, True)), Found(1, (True, False)), Found(1, (True, False))),
    (Found(1, (True,)), Found(1, (False,), error="down"), Found(1, (False,), error="down")),
    (
        StorageDone(1, (OK, OK, MISS, FAILED), num_bytes=3),
        StorageDone(1, (OK, MISS, CORRUPT, OK), reason="damaged", num_bytes=4),
        StorageDone(1, (OK, MISS, CORRUPT, FAILED), reason="damaged", num_bytes=7),
    ),
    (StorageDetached(3), StorageDetached(3, error="late"), StorageDetached(3, error="late")),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other", "both"), PAIRS)
def test_only_what_all_ranks_did_is_done(
    one: Completion, other: Completion, both: Completion
) -> None:
    """The worst of each page, in whichever order ranks answer, and nothing before all have."""
    merge = RankMerge(2)
    assert merge.take({0: [one]}) == []
    assert merge.num_waiting == 1
    assert merge.take({1: [other]}) == [both]
    assert merge.take({1: [other]}) == []
    assert merge.take({0: [one]}) == [both]
    assert merge.num_waiting == 0
    assert RankMerge(1).take({0: [one]}) == [one]


def test_jobs_of_one_step_are_kept_apart() -> None:
    """A rank that is ahead of the other confuses nobody."""
    merge = RankMerge(2)
    assert merge.take({0: [Moved(1), Moved(2)], 1: [Moved(2)]}) == [Moved(2)]
    assert merge.take({1: [Moved(1), Moved(3)]}) == [Moved(1)]
    assert merge.num_waiting == 1


def test_a_fault_is_told_at_once_and_a_second_answer_is_an_error() -> None:
    """Faults are no answers; a command has one answer a rank."""
    merge = RankMerge(2)
    fault = WorkerFault("OSError", "no disk")
    assert merge.take({1: [fault]}) == [fault]
    merge.take({1: [Moved(1)]})
    with pytest.raises(RankMismatchError, match="rank 1 answered twice"):
        merge.take({1: [Moved(1)]})
