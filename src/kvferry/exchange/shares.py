"""Who loads which pages of a plan, and where they lie while they are exchanged: pure functions.

All ranks compute the same of the same numbers. Letters: N pages, n ranks.

    pages of the plan      [0 ……… a)[a ……… b)[b ……… N)      a share each, in the plan's order
    a round takes of each     [..)      [..)      [..)       equally many, the last of a share fewer
    exchange slots         [rank 0 |rank 1 |rank 2 ]         chunks of equal length
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Round", "cut_shares", "rounds_of"]


class Round(NamedTuple):
    """Pages that are exchanged at once."""

    chunk_slots: int
    """Exchange slots of each rank; at least one page of some rank fills its last."""

    pages: tuple[range, ...]
    """By rank: positions in the plan. Page i of rank r is in slot ``r·chunk_slots + i``."""

    @property
    def all_pages(self) -> NDArray[np.int64]:
        """Positions in the plan of all of them."""
        return np.concatenate([np.arange(one.start, one.stop) for one in self.pages])

    @property
    def all_slots(self) -> NDArray[np.int64]:
        """The exchange slot of each of `all_pages`."""
        return np.concatenate([self.slots_of(rank) for rank in range(len(self.pages))])

    def slots_of(self, rank: int) -> NDArray[np.int64]:
        """The exchange slots of the pages of one rank."""
        return np.arange(len(self.pages[rank])) + rank * self.chunk_slots


def cut_shares(num_pages: int, size: int) -> tuple[range, ...]:
    """The pages of each of `size` ranks: neighbours, and no share longer by more than one page."""
    least, longer = divmod(num_pages, size)
    begins = [rank * least + min(rank, longer) for rank in range(size + 1)]
    return tuple(range(begins[rank], begins[rank + 1]) for rank in range(size))


def rounds_of(shares: tuple[range, ...], most_slots: int) -> tuple[Round, ...]:
    """The rounds in which `shares` are exchanged, with at most `most_slots` slots for each rank."""
    longest = max(len(share) for share in shares)
    rounds = []
    for first in range(0, longest, most_slots):
        pages = tuple(share[first : first + most_slots] for share in shares)
        rounds.append(Round(max(map(len, pages)), pages))
    return tuple(rounds)
