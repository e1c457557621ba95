"""Stand-ins for the tables of an object, which count what is read and written of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from typing import Any


class _CountedTable:
    """A table of which every element touched counts as one, also inside a find() or a slice.

    What is not here, such as iteration, fails: it would touch the whole table.
    """

    __iter__ = None

    def __init__(self, table: Any) -> None:
        self._table = table
        self.touched = 0

    def __getitem__(self, at: Hashable | slice) -> Any:
        self._touch(at)
        return self._table[at]

    def __setitem__(self, at: Hashable | slice, value: Any) -> None:
        self._touch(at)
        self._table[at] = value

    def find(self, value: int, *bounds: int) -> int:
        self._touch(slice(*(bounds or (None,))))
        found: int = self._table.find(value, *bounds)
        return found

    def count(self, value: int, *bounds: int) -> int:
        self._touch(slice(*(bounds or (None,))))
        found: int = self._table.count(value, *bounds)
        return found

    def _touch(self, at: Hashable | slice) -> None:
        self.touched += len(range(len(self._table))[at]) if isinstance(at, slice) else 1


def count_touches(*owners: object) -> Callable[[], int]:
    """Swap every table that `owners` have for one that counts; the result says how many so far."""
    tables = []
    for owner in owners:
        for name, value in list(vars(owner).items()):
            if isinstance(value, list | dict | set | bytearray | array):
                tables.append(_CountedTable(value))
                setattr(owner, name, tables[-1])
    assert tables
    return lambda: sum(table.touched for table in tables)
