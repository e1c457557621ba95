"""One rank that is alone: it agrees with itself."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.ranks.agreement import AgreedRanks

__all__ = ["SingleRank"]


class _Alone:
    rank = 0
    size = 1

    def all_min(self, values: Sequence[int], *, timeout: float) -> list[int]:  # noqa: ARG002
        return list(values)

    def close(self) -> None:
        pass


class SingleRank(AgreedRanks):
    """The only rank: what it says is agreed. Arguments are checked as those of several are."""

    def __init__(self) -> None:
        super().__init__(_Alone())
