"""Answers of all ranks to one command, made into one: what every rank did, and no more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from kvferry.errors import RankMismatchError
from kvferry.storage import ItemStatus
from kvferry.tiers import (
    Checked,
    Completion,
    Found,
    Moved,
    StorageAttached,
    StorageDetached,
    StorageDone,
    WorkerFault,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["RankMerge"]

# The worst first. A page that one rank lacks is of no use to the others.
_WORST = (
    ItemStatus.FAILED,
    ItemStatus.REFUSED,
    ItemStatus.CORRUPT,
    ItemStatus.MISS,
    ItemStatus.OK,
)


class RankMerge:
    """Collects completions until every rank has answered.

    Args:
        num_ranks: How many ranks get every command.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._waiting: dict[tuple[str, int], dict[int, Completion]] = {}

    @property
    def num_waiting(self) -> int:
        """Commands that some ranks have answered, and some have not."""
        return len(self._waiting)

    def take(self, by_rank: Mapping[int, Iterable[Completion]]) -> list[Completion]:
        """What all ranks have now answered, in the order of the last answers."""
        ready: list[Completion] = []
        for rank, completions in sorted(by_rank.items()):
            for completion in completions:
                if isinstance(completion, WorkerFault):
                    ready.append(completion)
                    continue
                told = self._waiting.setdefault(_name(completion), {})
                if rank in told:
                    raise RankMismatchError(
                        f"rank {rank} answered twice: {completion!r}; each rank answers a command "
                        f"once, so its worker is not of this version of kvferry"
                    )
                told[rank] = completion
                if len(told) == self._num_ranks:
                    del self._waiting[_name(completion)]
                    ready.append(_merged([told[at] for at in sorted(told)]))
        return ready


def _name(completion: Completion) -> tuple[str, int]:
    kind = type(completion).__name__
    if isinstance(completion, StorageAttached | StorageDetached):
        return kind, completion.generation
    return kind, completion.job


def _merged(told: list[Completion]) -> Completion:
    first = told[0]
    if len(told) == 1:
        return first
    if isinstance(first, Moved):
        moved = [one for one in told if isinstance(one, Moved)]
        return dataclasses.replace(
            first,
            error=next((one.error for one in moved if one.error), ""),
            bad_pages=tuple(sorted({page for one in moved for page in one.bad_pages})),
            verified=all(one.verified for one in moved),
            num_bytes=sum(one.num_bytes for one in moved),
            seconds=max(one.seconds for one in moved),
        )
    if isinstance(first, Checked):
        good = zip(*(one.good for one in told if isinstance(one, Checked)), strict=True)
        return dataclasses.replace(first, good=tuple(all(page) for page in good))
    if isinstance(first, Found):
        answers = [one for one in told if isinstance(one, Found)]
        found = zip(*(one.found for one in answers), strict=True)
        return dataclasses.replace(
            first,
            found=tuple(all(page) for page in found),
            error=next((one.error for one in answers if one.error), ""),
        )
    if isinstance(first, StorageDone):
        done = [one for one in told if isinstance(one, StorageDone)]
        statuses = zip(*(one.statuses for one in done), strict=True)
        return dataclasses.replace(
            first,
            statuses=tuple(min(page, key=_WORST.index) for page in statuses),
            reason=next((one.reason for one in done if one.reason), ""),
            num_bytes=sum(one.num_bytes for one in done),
            seconds=max(one.seconds for one in done),
        )
    if isinstance(first, StorageDetached):
        errors = (one.error for one in told if isinstance(one, StorageDetached))
        return dataclasses.replace(first, error=next((one for one in errors if one), ""))
    return first
