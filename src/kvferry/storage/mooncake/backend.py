"""The Mooncake backend: batches, deadlines, leases, and results a key."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvferry.errors import ConfigError, StorageError
from kvferry.storage.base import (
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
    StorageStats,
    check_batch,
    key_complaint,
    total_bytes,
)
from kvferry.storage.books import Books
from kvferry.storage.mooncake import codes
from kvferry.storage.mooncake.calls import CallError, Calls
from kvferry.storage.mooncake.leased import LeasedKeys
from kvferry.storage.mooncake.lent import LentMemory, Rooms
from kvferry.storage.mooncake.library import connect, split_address
from kvferry.storage.mooncake.moves import Moves

__all__ = ["MooncakeBackend"]

_MISS = ItemResult(ItemStatus.MISS)
_LEFT: list[object] = []
"""Clients that could not be ended, and what they may still use."""


class MooncakeBackend(StorageBackend):
    """Keeps objects in the memory pool of a Mooncake master.

    What lies in memory that was registered goes between there and the pool without a copy of ours;
    all other goes through a buffer of the backend, which the counts `staged_parts` and
    `in_place_parts` show. Calls that use the buffer alone return by the deadline, whatever the
    library does. A call that was handed registered memory returns when the library has let go of
    it; the library gives up by itself, after half a minute.

    There is no breaker here, as the tier above has one. But while two calls are past the deadline,
    no other begins, so that a dead master costs two threads and not all.

    Args:
        address: Of the master, ``host:port``.
        local_hostname: What other clients of the pool reach this process by.
        segment_bytes: Memory that this process gives to the pool; 0: none.
        buffer_bytes: For what is not registered: four calls at a time use a quarter each.
        protocol: ``tcp``, or another that the library was built with, such as ``rdma``.
        devices: For ``rdma``: the names of the devices, separated by commas.
        replicas: Copies that the pool keeps of each object, on as many clients.
        deadline_secs: The longest that one call of the library is waited for.
        setup_secs: How long the master may take to answer when the backend is opened.
        batch_keys: The most keys in one call of the library.
        key_prefix: Of every key in the pool. What others keep there has other prefixes.

    Raises:
        ConfigError: An option has a bad value.
        MissingDependencyError: Mooncake's package is not installed.
        StorageError: The master cannot be reached, or the set-up failed.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        local_hostname: str = "127.0.0.1",
        segment_bytes: int = 0,
        buffer_bytes: int = 64 << 20,
        protocol: str = "tcp",
        devices: str = "",
        replicas: int = 1,
        deadline_secs: float = 10.0,
        setup_secs: float = 30.0,
        batch_keys: int = 128,
        key_prefix: str = "kvferry/",
    ) -> None:
        split_address(address)
        for name, value, least in (
            ("segment_bytes", segment_bytes, 0),
            ("buffer_bytes", buffer_bytes, 4 * 4096),
            ("replicas", replicas, 1),
            ("batch_keys", batch_keys, 1),
        ):
            if value < least:
                raise ConfigError(f"{name}={value}: give at least {least}")
        for name, seconds in (("deadline_secs", deadline_secs), ("setup_secs", setup_secs)):
            if not seconds > 0:
                raise ConfigError(f"{name}={seconds}: give more than 0")
        self._batch_keys = batch_keys
        self._deadline_secs = deadline_secs
        self._prefix = key_prefix
        self._gives_memory = segment_bytes > 0
        self._client, self._config = connect(
            address,
            local_hostname=local_hostname,
            segment_bytes=segment_bytes,
            protocol=protocol,
            devices=devices,
            replicas=replicas,
            timeout=setup_secs,
        )
        self._rooms = Rooms(buffer_bytes)
        self._lent = LentMemory()
        self._leased = LeasedKeys(time.monotonic)
        self._books = Books()
        self._calls = Calls(deadline_secs, self._end)
        self._moves = Moves(
            self._calls,
            self._rooms,
            self._lent,
            self._books,
            self._client.get_size,
            batch_keys=batch_keys,
            deadline_secs=deadline_secs,
        )
        block = self._rooms.block
        if code := self._client.register_buffer(block.address, block.num_bytes):
            self._calls.close()
            raise StorageError(
                f"Mooncake's library does not take a buffer of {block.num_bytes} bytes (code "
                f"{code}); give a smaller buffer_bytes, or raise the limit on locked memory"
            )

    # ---------------------------------------------------------------- memory

    def register_memory(self, address: int, num_bytes: int) -> bool:
        """Let the library use this memory in place; it may pin it, which takes time."""
        try:
            code = self._calls.here(lambda: self._client.register_buffer(address, num_bytes))
        except CallError as refused:
            self._books.error(refused.kind)
            return False
        if code:
            self._books.error("register_failed")
            return False
        self._lent.add(address, num_bytes)
        return True

    def unregister_memory(self, address: int) -> None:
        """The library may not use the memory that begins here any more."""
        if not self._lent.drop(address):
            return
        try:
            code = self._calls.here(lambda: self._client.unregister_buffer(address))
        except CallError as refused:
            self._books.error(refused.kind)
        else:
            if code:
                self._books.error("unregister_failed")

    # ---------------------------------------------------------------- objects

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are. This gives each a lease, so that it stays for a read."""
        there = [False] * len(keys)
        for some in self._batches(self._visible(keys)):
            names = [self._name(keys[number]) for number in some]
            found = self._answers(self._client.batch_is_exist, names)
            for number, code in zip(some, found, strict=True):
                there[number] = code == 1
        return there

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Scatter each object into its buffers."""
        check_batch(keys, buffers)
        results = [_MISS] * len(keys)
        asked = self._visible(keys)
        found = self._moves.read(
            [self._name(keys[number]) for number in asked],
            [buffers[number] for number in asked],
            self._client.batch_get_into_multi_buffers,
        )
        for number, result in zip(asked, found, strict=True):
            results[number] = result
            if result.status is ItemStatus.MISS:
                self._books.gone([keys[number]])
        return results

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Put each object. The pool keeps the first under a key, unless that was to be removed."""
        check_batch(keys, buffers)
        self._remove_leased()
        results = [_MISS] * len(keys)
        fresh: list[int] = []
        stale: list[int] = []
        hidden = self._leased.hidden(keys)
        for number, key in enumerate(keys):
            complaint = key_complaint(key)
            if not complaint and not total_bytes(buffers[number]):
                complaint = "an object has at least one byte"
            if complaint:
                results[number] = ItemResult(ItemStatus.REFUSED, reason=complaint)
            else:
                (stale if hidden[number] else fresh).append(number)
        for numbers, method, one_piece in (
            (fresh, self._put, False), (stale, self._replace, True),
        ):  # fmt: skip
            found = self._moves.write(
                [self._name(keys[number]) for number in numbers],
                [buffers[number] for number in numbers],
                method,
                in_one_piece=one_piece,
            )
            for number, result in zip(numbers, found, strict=True):
                results[number] = result
                if result.ok:
                    self._books.wrote(keys[number], result.num_bytes)
        replaced = [keys[number] for number in stale if results[number].ok]
        self._leased.discard(replaced)
        self._books.count(replaced=len(replaced))
        return results

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove objects. One that somebody has a lease on is hidden now, and removed later."""
        self._remove_leased()
        # A write that ended just now may have counted what another call had hidden.
        hidden = self._leased.hidden(keys)
        self._books.gone(key for key, is_hidden in zip(keys, hidden, strict=True) if is_hidden)
        results = [_MISS] * len(keys)
        for some in self._batches(self._visible(keys)):
            found = self._remove([keys[number] for number in some])
            for number, result in zip(some, found, strict=True):
                results[number] = result
        return results

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove damaged objects, and count them."""
        results = self.delete(keys)
        self._books.count(quarantined=sum(result.ok for result in results))
        return results

    def stats(self) -> StorageStats:
        """What this process wrote and has not seen gone; the pool as a whole is the master's."""
        return self._books.stats(
            waiting_for_lease=len(self._leased), calls_running=self._calls.num_running
        )

    def close(self) -> None:
        """Take this process out of the pool, with what lies in the memory that it gave."""
        self._calls.close()

    # ---------------------------------------------------------------- how

    def _name(self, key: bytes) -> str:
        return self._prefix + key.hex()

    def _visible(self, keys: Sequence[bytes]) -> list[int]:
        """Positions of keys that the pool may be asked for."""
        hidden = self._leased.hidden(keys)
        return [
            number
            for number, key in enumerate(keys)
            if not hidden[number] and not key_complaint(key)
        ]

    def _batches(self, numbers: Sequence[int]) -> Iterator[Sequence[int]]:
        for at in range(0, len(numbers), self._batch_keys):
            yield numbers[at : at + self._batch_keys]

    def _answers(self, method: Callable[[list[str]], list[int]], names: list[str]) -> list[int]:
        """A code a name, by the deadline; those of a call that failed say so."""
        try:
            found = self._calls.aside(lambda: method(names))
        except CallError as refused:
            self._books.error(refused.kind)
            return [codes.RPC_TIMED_OUT] * len(names)
        if len(found) != len(names):
            self._books.error("odd_answer")
            return [codes.RPC_FAILED] * len(names)
        for code in found:
            if code < 0 and not codes.is_gone(code):
                self._books.error(codes.kind_of(code))
        return found

    def _put(self, names: list[str], at: list[list[int]], sizes: list[list[int]]) -> list[int]:
        return self._client.batch_put_from_multi_buffers(names, at, sizes, self._config)

    def _replace(self, names: list[str], at: list[list[int]], sizes: list[list[int]]) -> list[int]:
        firsts, lengths = [one[0] for one in at], [one[0] for one in sizes]
        return self._client.batch_upsert_from(names, firsts, lengths, self._config)

    def _remove(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """One batch; what is leased goes on the list for later, and counts as removed."""
        results, leased = [], []
        found = self._answers(self._client.batch_remove, [self._name(key) for key in keys])
        for key, code in zip(keys, found, strict=True):
            if code in (codes.HAS_LEASE, codes.HAS_TASK):
                leased.append(key)
            if code == 0 or code in (codes.HAS_LEASE, codes.HAS_TASK):
                results.append(ItemResult(ItemStatus.OK))
            else:
                results.append(codes.read_failure(code))
        self._leased.add(leased)
        self._books.gone(
            key for key, result in zip(keys, results, strict=True)
            if result.status is not ItemStatus.FAILED
        )  # fmt: skip
        return results

    def _remove_leased(self) -> None:
        """Try again to remove some of what could not be removed, if it is time."""
        due = self._leased.due(self._batch_keys)
        if not due:
            return
        found = self._answers(self._client.batch_remove, [self._name(key) for key in due])
        gone = [key for key, code in zip(due, found, strict=True)
                if code == 0 or code == codes.NOT_FOUND]  # fmt: skip
        self._leased.discard(gone)
        self._leased.postpone(set(due) - set(gone))
        self._books.count(removed_later=len(gone))

    def _end(self) -> None:
        """Runs once, when no call does."""
        for address in self._lent.all():
            self._client.unregister_buffer(address)
        # To take its memory out of the pool the library asks the master, and holds the interpreter
        # lock meanwhile; this question does not. Better a client that stays than a process that
        # stands still.
        if self._gives_memory and self._client.batch_is_exist([self._prefix])[0] < 0:
            self._books.error("not_ended")
            _LEFT.append((self._client, self._rooms))
            return
        self._client.unregister_buffer(self._rooms.block.address)
        self._client.close()
