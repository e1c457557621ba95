"""Objects of one size: a header in front, and nothing believed that was not checked."""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import StorageError
from kvferry.storage.base import (
    MAX_KEY_BYTES,
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
    check_batch,
    key_complaint,
    total_bytes,
)
from kvferry.storage.format import (
    HeaderFault,
    HeaderProblem,
    ObjectHeader,
    checksum,
    header_bytes,
    new_checksum,
    parse_header,
)
from kvferry.storage.header_room import HeaderRoom, HeaderRooms
from kvferry.storage.missing_keys import MissingKeys
from kvferry.storage.raw_memory import view_of
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CheckedObjects", "PageStoreCounts"]


@dataclasses.dataclass(frozen=True)
class PageStoreCounts:
    """What went wrong since a `PageStore` was made, in pages but for `backend_faults`."""

    reread: int = 0
    """Not what was stored at the first read."""
    healed: int = 0
    """Of these, whole at the second."""
    corrupt: int = 0
    """Of these, damaged at the second too, and so quarantined."""
    foreign: int = 0
    """Whole, and of another format, geometry or kind of slot: left alone, a miss."""
    missing: int = 0
    """Not there when they were read."""
    failed: int = 0
    """The backend failed to read or to write them."""
    refused: int = 0
    """The backend would not keep them."""
    backend_faults: int = 0
    """Calls in which the backend raised, or returned what no backend may."""


class CheckedObjects:
    """Objects of `payload_bytes` in `backend`. Thread-safe; calls block until the batch is done.

    An object is read and written where its bytes lie, in one buffer or several. Those of a read
    belong to it until it returns, and what they hold after a result that is not OK is undefined.
    Nothing that a backend does is raised: a call that raises, or that returns what no backend may,
    is a FAILED batch.

    Args:
        backend: Stays the caller's; it is not closed.
        fingerprint: 32 digits, part of every object; a read of another one is a MISS.
        payload_bytes: Of every object, without its header.
        num_digests: That travel with every object.
        kind: Which slots these are of.
        verify: Compare the checksum of what was read. The header is checked in any case.
        missing_secs: How long a key that was not there when it was read is taken for absent,
            whatever the backend says. Writing it ends that.

    Raises MissingDependencyError where xxhash is not installed.
    """

    def __init__(
        self,
        backend: StorageBackend,
        *,
        fingerprint: str,
        payload_bytes: int,
        num_digests: int = 0,
        kind: SlotKind = SlotKind.PAGE,
        verify: bool = True,
        missing_secs: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        new_checksum()  # now, and not in the first read
        self._backend = backend
        self._fingerprint = fingerprint
        self._kind = kind
        self._verify = verify
        self._payload_bytes = payload_bytes
        self._num_digests = num_digests
        self._rooms = HeaderRooms(header_bytes(MAX_KEY_BYTES, self._num_digests))
        self._missing = MissingKeys(missing_secs, clock)
        # Of objects of other versions: a backend that has a key already may keep what it has.
        self._outdated = MissingKeys(math.inf, clock)
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    @property
    def backend(self) -> StorageBackend:
        """Where the objects are."""
        return self._backend

    @property
    def payload_bytes(self) -> int:
        """Bytes of every object, without its header."""
        return self._payload_bytes

    def object_bytes(self, key: bytes) -> int:
        """What the object called `key` takes in storage, with its header."""
        return header_bytes(len(key), self._num_digests) + self._payload_bytes

    def counts(self) -> PageStoreCounts:
        """What went wrong so far."""
        with self._lock:
            return PageStoreCounts(**self._counts)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are, as far as the backend knows; a read may still miss."""
        asked = self._missing.unknown(keys)
        wanted = [key for key, ask in zip(keys, asked, strict=True) if ask]
        if not wanted:
            return [False] * len(keys)
        try:
            found: Any = self._backend.contains(wanted)
        except Exception:  # noqa: BLE001  other people's code: whatever it raises, they are absent
            found = None
        if not isinstance(found, list) or len(found) != len(wanted):
            self._count(backend_faults=1)
            return [False] * len(keys)
        answers = iter(found)
        return [ask and next(answers) is True for ask in asked]

    def write_objects(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[Buffers],
        digests: NDArray[np.uint64] | None = None,
    ) -> list[ItemResult]:
        """Store what lies in `payloads`.

        Args:
            keys: One an object.
            payloads: Of each, `payload_bytes` in all; nothing may write there until this returns.
            digests: Shape ``[objects, num_digests]``, uint64; None where there are none.

        Returns:
            One result an object; `ItemResult.num_bytes` counts its header too.
        """
        digests = self._checked_digests(keys, payloads, digests)
        results: list[ItemResult] = [_refused(key_complaint(key)) for key in keys]
        good = [number for number, result in enumerate(results) if not result.reason]
        if not good:
            return results
        wanted = [keys[number] for number in good]
        asked = self._outdated.unknown(wanted)
        outdated = [key for key, is_ours in zip(wanted, asked, strict=True) if not is_ours]
        if outdated:
            self._remove(self._backend.delete, outdated)
        room = self._rooms.take(len(keys))
        for number in good:
            packed = ObjectHeader(
                self._fingerprint,
                keys[number],
                self._kind,
                self._payload_bytes,
                _checksum_of(payloads[number]),
                digests[number],
            ).pack()
            room.view(number)[: len(packed)] = packed
        found = self._call(self._backend.write_from, good, keys, payloads, room)
        stored = []
        for number, result in zip(good, found, strict=True):
            expected = self.object_bytes(keys[number])
            if result.ok and result.num_bytes != expected:
                result = _failed(f"the backend took {result.num_bytes} of {expected} bytes")
            if result.ok:
                stored.append(keys[number])
            results[number] = result
        self._missing.discard(stored)
        self._outdated.discard(stored)
        self._count(
            failed=sum(result.status is ItemStatus.FAILED for result in results),
            refused=sum(result.status is ItemStatus.REFUSED for result in results),
        )
        return results

    def read_objects(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[Buffers],
        digests_out: NDArray[np.uint64] | None = None,
    ) -> list[ItemResult]:
        """Read objects into `payloads`.

        Args:
            keys: One an object.
            payloads: Where each goes; they belong to this call until it returns.
            digests_out: Shape ``[objects, num_digests]``, uint64; rows of those that are OK are
                set. None where there are none.

        Returns:
            One result an object. CORRUPT ones were read twice, and are quarantined.
        """
        digests_out = self._checked_digests(keys, payloads, digests_out)
        results = [ItemResult(ItemStatus.MISS, reason=key_complaint(key)) for key in keys]
        numbers = [number for number, result in enumerate(results) if not result.reason]
        first = self._read_some(numbers, keys, payloads, digests_out)
        for number, result in zip(numbers, first, strict=True):
            results[number] = result
        again = [number for number in numbers if results[number].status is ItemStatus.CORRUPT]
        second = self._read_some(again, keys, payloads, digests_out)
        for number, result in zip(again, second, strict=True):
            results[number] = result
        by_status = collections.Counter(result.status for result in results)
        bad = [keys[number] for number in again if results[number].status is ItemStatus.CORRUPT]
        if bad:
            self._remove(self._backend.quarantine, bad)
        gone = [
            key
            for key, result in zip(keys, results, strict=True)
            if result.status in (ItemStatus.MISS, ItemStatus.CORRUPT)
        ]
        self._missing.add(gone)
        self._count(
            reread=len(again),
            healed=sum(result.ok for result in second),
            corrupt=len(bad),
            missing=by_status[ItemStatus.MISS],
            failed=by_status[ItemStatus.FAILED],
        )
        return results

    def _read_some(
        self,
        numbers: Sequence[int],
        keys: Sequence[bytes],
        payloads: Sequence[Buffers],
        digests_out: NDArray[np.uint64],
    ) -> list[ItemResult]:
        """One result for each of `numbers`, in their order."""
        if not numbers:
            return []
        room = self._rooms.take(len(keys))
        # A backend that says OK and writes nothing must not be believed for what was here before.
        room.block.view[:] = bytes(room.block.num_bytes)
        found = self._call(self._backend.read_into, numbers, keys, payloads, room, keep=True)
        results = []
        for number, result in zip(numbers, found, strict=True):
            if result.ok:
                size = self.object_bytes(keys[number])
                header = bytes(room.view(number)) if result.num_bytes == size else b""
                checked = self._checked(keys[number], payloads[number], header, result)
                if isinstance(checked, ObjectHeader):
                    digests_out[number] = checked.digests
                    result = ItemResult(ItemStatus.OK, size)
                else:
                    result = checked
            results.append(result)
        self._rooms.give_back(room)
        return results

    def _checked(
        self, key: bytes, payload: Buffers, data: bytes, result: ItemResult
    ) -> ObjectHeader | ItemResult:
        if not data:
            return _corrupt(f"the backend read {result.num_bytes} bytes of it")
        header = parse_header(data)
        if isinstance(header, HeaderProblem):
            if header.fault is HeaderFault.FOREIGN:
                self._outdated.add([key])
                return self._foreign(header.reason)
            return _corrupt(header.reason)
        if header.key != key:
            return _corrupt(f"it is the object of another key, {header.key.hex()}")
        if header.fingerprint != self._fingerprint:
            return self._foreign(f"stored with the geometry {header.fingerprint}")
        if header.kind is not self._kind:
            return self._foreign(f"stored as a {header.kind.value} slot")
        if header.payload_bytes != self._payload_bytes or len(header.digests) != self._num_digests:
            return _corrupt("its header has other sizes than its geometry")
        if self._verify and _checksum_of(payload) != header.payload_checksum:
            return _corrupt("its bytes have another checksum than its header says")
        return header

    def _foreign(self, reason: str) -> ItemResult:
        self._count(foreign=1)
        return ItemResult(ItemStatus.MISS, reason=reason)

    def _call(
        self,
        method: Callable[[Sequence[bytes], Sequence[Buffers]], Any],
        numbers: Sequence[int],
        keys: Sequence[bytes],
        payloads: Sequence[Buffers],
        room: HeaderRoom,
        *,
        keep: bool = False,
    ) -> list[ItemResult]:
        """Call `method` for the items `numbers`; unless `keep`, `room` is given back."""
        wanted = [keys[number] for number in numbers]
        buffers = [
            [
                (room.address(number), header_bytes(len(keys[number]), self._num_digests)),
                *payloads[number],
            ]
            for number in numbers
        ]
        try:
            found: Any = method(wanted, buffers)
        except Exception as bad:  # noqa: BLE001  other people's code: whatever it raises is a value
            found = None
            reason = f"the backend raised {type(bad).__name__}: {bad}"
        else:
            reason = f"the backend returned {str(found)[:80]} for {len(wanted)} items"
            if not keep:
                self._rooms.give_back(room)
        if not isinstance(found, list) or len(found) != len(wanted):
            self._count(backend_faults=1)
            return [_failed(reason)] * len(wanted)
        results = [_item(one) for one in found]
        self._count(backend_faults=int(any(one is None for one in results)))
        return [_failed(f"the backend said {was!r}") if one is None else one
                for one, was in zip(results, found, strict=True)]  # fmt: skip

    def _remove(self, method: Callable[[Sequence[bytes]], Any], keys: Sequence[bytes]) -> None:
        try:
            method(keys)
        except Exception:  # noqa: BLE001  as above; the keys are taken for absent in any case
            self._count(backend_faults=1)

    def _checked_digests(
        self,
        keys: Sequence[bytes],
        payloads: Sequence[Buffers],
        digests: NDArray[np.uint64] | None,
    ) -> NDArray[np.uint64]:
        check_batch(keys, payloads)
        for payload in payloads:
            if total_bytes(payload) != self._payload_bytes:
                raise StorageError(
                    f"buffers of {total_bytes(payload)} bytes for an object of "
                    f"{self._payload_bytes}: give as many as it has"
                )
        shape = (len(keys), self._num_digests)
        if digests is None:
            digests = np.zeros(shape, np.uint64)
        if digests.shape != shape or digests.dtype != np.uint64:
            raise StorageError(
                f"digests have shape {list(digests.shape)} and type {digests.dtype}, not "
                f"{list(shape)} and uint64: one row a page, one column a span"
            )
        return digests

    def _count(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


def _checksum_of(payload: Buffers) -> bytes:
    return checksum(*(view_of(address, num_bytes) for address, num_bytes in payload))


def _item(found: object) -> ItemResult | None:
    """What a backend returned for an item; None if it is no result."""
    if isinstance(found, ItemResult) and isinstance(found.status, ItemStatus):
        return found
    return None


def _corrupt(reason: str) -> ItemResult:
    return ItemResult(ItemStatus.CORRUPT, reason=reason)


def _failed(reason: str) -> ItemResult:
    return ItemResult(ItemStatus.FAILED, reason=reason)


def _refused(reason: str) -> ItemResult:
    return ItemResult(ItemStatus.REFUSED, reason=reason)
