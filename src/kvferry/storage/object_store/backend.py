"""The object-store backend: one request an object, many at a time, by a deadline."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvferry.errors import ConfigError
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
from kvferry.storage.object_store.client import open_client
from kvferry.storage.raw_memory import copy_bytes

__all__ = ["ObjectStoreBackend"]

_VERSION = "v1"
_MISS = ItemResult(ItemStatus.MISS)
_Result = TypeVar("_Result")


class _NotMadeError(Exception):
    """A request that was not made, or not waited for."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


_CLOSED = _NotMadeError("closed", "the backend is closed")


class ObjectStoreBackend(StorageBackend):
    """Keeps objects in a bucket, or in whatever the URL names; the store bounds what it keeps.

    An object is called ``<prefix>/v1/<two hex digits>/<key in hex>``. It is put whole or not at
    all, and over one that is there. Bytes come and go through memory of the backend, so that a
    request that is late may be given up: every call returns at `deadline_secs`, with what was not
    done by then FAILED, and such requests end by themselves when the library gives up.

    Args:
        url: ``s3://bucket/prefix``, ``gs://``, ``az://``, or ``https://`` of one of these; for a
            try ``file:///folder`` and ``memory:///``.
        deadline_secs: The longest that a call takes. A request that fails in a way that may pass
            is tried again for half of it.
        num_requests: Requests at a time.
        part_bytes: Longer objects are put in parts of so many bytes, four at a time; S3 takes no
            less than 5 MiB.
        settings: Those of obstore for this kind of store, by its names: ``endpoint``, ``region``,
            ``access_key_id``, ... What is not given comes from the store's own environment
            variables, such as ``AWS_ACCESS_KEY_ID``.

    Raises:
        ConfigError: A bad value, URL or setting.
        MissingDependencyError: obstore is not installed.
        StorageError: A folder that cannot be made.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_secs: float = 30.0,
        num_requests: int = 16,
        part_bytes: int = 16 << 20,
        **settings: Any,
    ) -> None:
        if not 0 < deadline_secs < math.inf:
            raise ConfigError(f"deadline_secs={deadline_secs}: give seconds above 0")
        if num_requests < 1:
            raise ConfigError(f"num_requests={num_requests}: give at least 1")
        if part_bytes < 5 << 20:
            raise ConfigError(f"part_bytes={part_bytes}: give at least {5 << 20}, as S3 wants")
        self._client = open_client(
            url, settings, request_secs=deadline_secs / 2, retry_secs=deadline_secs / 2
        )
        self._deadline_secs = deadline_secs
        self._part_bytes = part_bytes
        self._books = Books()
        self._threads = concurrent.futures.ThreadPoolExecutor(
            num_requests, thread_name_prefix="kvferry-objects"
        )
        self._lock = threading.Lock()
        self._closed = False
        self._num_running = 0

    # ---------------------------------------------------------------- objects

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are: one request each, and False where none has an answer."""
        there = [False] * len(keys)
        asked = [number for number, key in enumerate(keys) if not key_complaint(key)]

        def look(number: int) -> bool:
            return self._client.has(_name(keys[number]))

        def note(number: int, found: bool) -> None:
            there[number] = found

        def fail(_: int, error: Exception) -> None:
            self._failed(error)

        self._each(asked, look, note, fail)
        return there

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Get each object, and scatter it once it is there whole."""
        check_batch(keys, buffers)
        results = [_MISS] * len(keys)
        asked = [number for number, key in enumerate(keys) if not key_complaint(key)]

        def get(number: int) -> Any:
            return self._client.get(_name(keys[number]), total_bytes(buffers[number]))

        def note(number: int, found: Any) -> None:
            results[number] = _scattered(found, buffers[number])

        def fail(number: int, error: Exception) -> None:
            results[number] = self._failed(error, reads=True)

        self._each(asked, get, note, fail)
        self._books.gone(
            keys[number] for number in asked if results[number].status is ItemStatus.MISS
        )
        return results

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Put each object, over what may be there."""
        check_batch(keys, buffers)
        results = [_MISS] * len(keys)
        asked = []
        for number, key in enumerate(keys):
            if complaint := key_complaint(key):
                results[number] = ItemResult(ItemStatus.REFUSED, reason=complaint)
            else:
                asked.append(number)
        contents = {number: _gathered(buffers[number]) for number in asked}

        def put(number: int) -> int:
            content = contents[number]
            self._client.put(_name(keys[number]), content, self._part_bytes, 4)
            return len(content)

        def note(number: int, num_bytes: int) -> None:
            results[number] = ItemResult(ItemStatus.OK, num_bytes)
            self._books.wrote(keys[number], num_bytes)

        def fail(number: int, error: Exception) -> None:
            results[number] = self._failed(error)

        self._each(asked, put, note, fail)
        return results

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove objects, asking first whether there is one: most stores do not tell."""
        results = [_MISS] * len(keys)
        asked = [number for number, key in enumerate(keys) if not key_complaint(key)]

        def remove(number: int) -> bool:
            name = _name(keys[number])
            is_there = self._client.has(name)
            if is_there:
                self._client.delete(name)
            return is_there

        def note(number: int, was_there: bool) -> None:
            results[number] = ItemResult(ItemStatus.OK) if was_there else _MISS

        def fail(number: int, error: Exception) -> None:
            results[number] = self._failed(error, reads=True)

        self._each(asked, remove, note, fail)
        self._books.gone(
            keys[number] for number in asked if results[number].status is not ItemStatus.FAILED
        )
        return results

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove damaged objects, and count them."""
        results = self.delete(keys)
        self._books.count(quarantined=sum(result.ok for result in results))
        return results

    def stats(self) -> StorageStats:
        """What this process wrote and has not seen gone; the bucket as a whole is the store's."""
        with self._lock:
            running = self._num_running
        return self._books.stats(requests_running=running)

    def close(self) -> None:
        """Begin no more requests; those that run end by themselves."""
        with self._lock:
            self._closed = True
        self._threads.shutdown(wait=False)

    # ---------------------------------------------------------------- how

    def _each(
        self,
        numbers: Sequence[int],
        work: Callable[[int], _Result],
        note: Callable[[int, _Result], None],
        fail: Callable[[int, Exception], None],
    ) -> None:
        """`work` for each on the threads; then, on this one, `note` what it returned or `fail`."""
        ends = time.monotonic() + self._deadline_secs
        futures: dict[concurrent.futures.Future[_Result], int] = {}
        for number in numbers:
            future = self._begin(work, number)
            if future is None:
                fail(number, _CLOSED)
            else:
                futures[future] = number
        left = dict(futures)
        try:
            for future in concurrent.futures.as_completed(
                futures, timeout=max(0.0, ends - time.monotonic())
            ):
                number = left.pop(future)
                try:
                    found = future.result()
                except Exception as error:  # noqa: BLE001  whatever a library raises is a value
                    fail(number, error)
                else:
                    note(number, found)
        except concurrent.futures.TimeoutError:
            for future, number in left.items():
                future.cancel()
                late = f"not done within {self._deadline_secs} s; see to the store"
                fail(number, _NotMadeError("late", late))

    def _begin(
        self, work: Callable[[int], _Result], number: int
    ) -> concurrent.futures.Future[_Result] | None:
        def counted() -> _Result:
            with self._lock:
                if self._closed:
                    raise _CLOSED
                self._num_running += 1
            try:
                return work(number)
            finally:
                with self._lock:
                    self._num_running -= 1

        with self._lock:
            return None if self._closed else self._threads.submit(counted)

    def _failed(self, error: Exception, *, reads: bool = False) -> ItemResult:
        if isinstance(error, _NotMadeError):
            self._books.error(error.kind)
            return ItemResult(ItemStatus.FAILED, reason=str(error))
        result = self._client.result_of(error, reads=reads)
        if result.status is ItemStatus.FAILED:
            self._books.error(type(error).__name__)
        return result


def _name(key: bytes) -> str:
    # Some stores and all folders spread load by the beginning of a name.
    return f"{_VERSION}/{key.hex()[:2]}/{key.hex()}"


def _gathered(buffers: Buffers) -> memoryview:
    """A copy of the parts, one behind another: a request that is late must not use the caller's."""
    content = np.empty(total_bytes(buffers), dtype=np.uint8)
    at = int(content.ctypes.data)
    for address, length in buffers:
        copy_bytes(at, address, length)
        at += length
    return content.data


def _scattered(found: Any, buffers: Buffers) -> ItemResult:
    """Into the parts, if it has their length."""
    wanted = total_bytes(buffers)
    size = found if isinstance(found, int) else len(found)
    if size != wanted:
        reason = f"the object has {size} bytes, and {wanted} were asked for"
        return ItemResult(ItemStatus.CORRUPT, reason=reason)
    if size:
        content = np.frombuffer(found, dtype=np.uint8)
        at = int(content.ctypes.data)
        for address, length in buffers:
            copy_bytes(address, at, length)
            at += length
    return ItemResult(ItemStatus.OK, size)
