"""Moving batches: through which memory, how often tried, and what became of each object."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvferry.storage.base import Buffers, ItemResult, ItemStatus
from kvferry.storage.books import Books
from kvferry.storage.mooncake import codes
from kvferry.storage.mooncake.calls import CallError, Calls
from kvferry.storage.mooncake.lent import LentMemory, Room, Rooms, Way

__all__ = ["Method", "Moves"]

Method = Callable[[list[str], list[list[int]], list[list[int]]], list[int]]
"""Names, addresses and lengths of the parts of each; a code or a length for each."""

_FIRST_PAUSE_SECS = 0.05
_MAX_TRIES = 4


class _Item(NamedTuple):
    number: int
    name: str
    way: Way


class Moves:
    """Carries batches to the library, and tells what its answers mean. Thread-safe.

    Args:
        calls: Runs the calls.
        rooms: For memory that the library must not use in place.
        lent: The memory that it may.
        books: Where errors are counted.
        size_of: How long an object is, or a code.
        batch_keys: The most objects a call.
        deadline_secs: No try begins after that time.
    """

    def __init__(
        self,
        calls: Calls,
        rooms: Rooms,
        lent: LentMemory,
        books: Books,
        size_of: Callable[[str], int],
        *,
        batch_keys: int,
        deadline_secs: float,
    ) -> None:
        self._calls = calls
        self._rooms = rooms
        self._lent = lent
        self._books = books
        self._size_of = size_of
        self._batch_keys = batch_keys
        self._deadline_secs = deadline_secs

    def read(
        self, names: Sequence[str], buffers: Sequence[Buffers], method: Method
    ) -> list[ItemResult]:
        """Get objects into `buffers`: one result each."""
        return self._run(names, buffers, method, reads=True, lent=self._lent)

    def write(
        self,
        names: Sequence[str],
        buffers: Sequence[Buffers],
        method: Method,
        *,
        in_one_piece: bool = False,
    ) -> list[ItemResult]:
        """Put objects from `buffers`: one result each.

        Args:
            in_one_piece: `method` takes one part an object, so all go through a room.
        """
        lent = None if in_one_piece else self._lent
        return self._run(names, buffers, method, reads=False, lent=lent)

    def _run(
        self,
        names: Sequence[str],
        buffers: Sequence[Buffers],
        method: Method,
        *,
        reads: bool,
        lent: LentMemory | None,
    ) -> list[ItemResult]:
        results = [ItemResult(ItemStatus.MISS)] * len(names)
        items = []
        for number, (name, parts) in enumerate(zip(names, buffers, strict=True)):
            item = _Item(number, name, Way(parts, lent))
            if item.way.staged_bytes > self._rooms.room_bytes:
                results[number] = ItemResult(
                    ItemStatus.REFUSED if not reads else ItemStatus.FAILED,
                    reason=f"{item.way.staged_bytes} bytes of it are not in registered memory, and "
                    f"{self._rooms.room_bytes} may be: register that memory, or give a "
                    f"buffer_bytes of {4 * item.way.staged_bytes}",
                )
            elif not item.way.num_bytes:
                results[number] = self._empty(name)
            else:
                items.append(item)
        for some in self._groups(items):
            self._group(some, method, results, reads=reads)
        return results

    def _groups(self, items: Sequence[_Item]) -> Iterator[list[_Item]]:
        """As many as one call takes, and one room holds."""
        group: list[_Item] = []
        staged = 0
        for item in items:
            if group and (
                len(group) == self._batch_keys
                or staged + item.way.staged_bytes > self._rooms.room_bytes
            ):
                yield group
                group, staged = [], 0
            group.append(item)
            staged += item.way.staged_bytes
        if group:
            yield group

    def _group(
        self, items: Sequence[_Item], method: Method, results: list[ItemResult], *, reads: bool
    ) -> None:
        room: Room | None = None
        if any(item.way.staged_bytes for item in items):
            room = self._rooms.take(self._deadline_secs)
            if room is None:
                self._fail(items, results, "stuck", "all of the buffer is in use by other calls")
                return
        try:
            self._try(items, method, results, room, reads=reads)
        except CallError as refused:
            if refused.kind == "late":
                room = None  # it comes back with the call
            self._fail(items, results, refused.kind, str(refused))
        finally:
            if room is not None:
                self._rooms.give_back(room)

    def _try(
        self,
        items: Sequence[_Item],
        method: Method,
        results: list[ItemResult],
        room: Room | None,
        *,
        reads: bool,
    ) -> None:
        at = room.address if room else 0
        parts = {}
        for item in items:
            parts[item.number] = item.way.through(at)
            at += item.way.staged_bytes
            if not reads:
                item.way.copy_out()
        left, pause = list(items), _FIRST_PAUSE_SECS
        ends = time.monotonic() + self._deadline_secs
        for tries in range(1, _MAX_TRIES + 1):
            found = self._call(left, parts, method, room)
            again = []
            for item, code in zip(left, found, strict=True):
                result = self._read(item, code) if reads else _written(item, code)
                results[item.number] = result
                if result.ok:
                    continue
                if result.status is ItemStatus.FAILED or result.status is ItemStatus.REFUSED:
                    self._books.error(codes.kind_of(code))
                if result.status is ItemStatus.FAILED and codes.is_worth_another_try(
                    code, reads=reads
                ):
                    again.append(item)
            if not again or tries == _MAX_TRIES or time.monotonic() + pause > ends:
                return
            if not self._calls.pause(pause):
                return
            self._books.count(tried_again=len(again))
            left, pause = again, pause * 2

    def _call(
        self,
        items: Sequence[_Item],
        parts: dict[int, tuple[list[int], list[int]]],
        method: Method,
        room: Room | None,
    ) -> list[int]:
        names = [item.name for item in items]
        addresses = [parts[item.number][0] for item in items]
        lengths = [parts[item.number][1] for item in items]

        def work() -> list[int]:
            return method(names, addresses, lengths)

        in_place = sum(item.way.num_in_place for item in items)
        self._books.count(
            calls=1, in_place_parts=in_place, staged_parts=sum(map(len, lengths)) - in_place
        )
        if in_place or room is None:
            found = self._calls.here(work)
        else:
            given = room
            found = self._calls.aside(work, lambda: self._rooms.give_back(given))
        if len(found) != len(names):
            raise CallError("odd_answer", f"the library gave {len(found)} codes for {len(names)}")
        return found

    def _read(self, item: _Item, code: int) -> ItemResult:
        asked = item.way.num_bytes
        if code == asked:
            item.way.copy_in()
            return ItemResult(ItemStatus.OK, asked)
        if not codes.is_size_unclear(code):
            return codes.read_failure(code)
        try:
            size = self._calls.aside(lambda: self._size_of(item.name))
        except CallError as refused:
            self._books.error(refused.kind)
            return ItemResult(ItemStatus.FAILED, reason=str(refused))
        if size >= 0 and size != asked:
            return _other_length(size, asked)
        return codes.read_failure(size if size < 0 else code)

    def _empty(self, name: str) -> ItemResult:
        """The result of a read of no bytes: there is no empty object."""
        try:
            size = self._calls.aside(lambda: self._size_of(name))
        except CallError as refused:
            self._books.error(refused.kind)
            return ItemResult(ItemStatus.FAILED, reason=str(refused))
        return _other_length(size, 0) if size >= 0 else codes.read_failure(size)

    def _fail(
        self, items: Sequence[_Item], results: list[ItemResult], kind: str, reason: str
    ) -> None:
        self._books.error(kind)
        for item in items:
            if not results[item.number].ok:
                results[item.number] = ItemResult(ItemStatus.FAILED, reason=reason)


def _written(item: _Item, code: int) -> ItemResult:
    # A put of what is there already is answered with 0, or says so.
    if code in (0, codes.EXISTS):
        return ItemResult(ItemStatus.OK, item.way.num_bytes)
    return codes.write_failure(code)


def _other_length(size: int, asked: int) -> ItemResult:
    reason = f"the object has {size} bytes, and {asked} were asked for"
    return ItemResult(ItemStatus.CORRUPT, reason=reason)
