"""A storage backend that misbehaves by script, one key and one call at a time."""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.errors import StorageError
from kvferry.storage import (
    Buffers,
    ItemResult,
    ItemStatus,
    MemoryBackend,
    StorageBackend,
    StorageStats,
    check_batch,
)
from kvferry.testing.patterns import memory_at

__all__ = ["Fault", "FaultKind", "FaultyBackend"]


class FaultKind(enum.StrEnum):
    """What a `Fault` does to an item."""

    OK = "ok"
    """Nothing: the call goes through. For scripts of several calls."""

    RAISE = "raise"
    """The whole call raises `Fault.error`, which no backend may."""

    STATUS = "status"
    """The item has the result `Fault.result`, and nothing is read or written."""

    SHORT = "short"
    """A read leaves out the last `Fault.num_bytes` bytes and says how many it read, with OK."""

    ZERO = "zero"
    """A read gives OK for no bytes; a write says that it took none."""

    WRONG_BYTES = "wrong_bytes"
    """One bit of what is read, or stored, is another: bit `Fault.bit` of the object."""

    SILENT = "silent"
    """OK for all bytes, and none was read, or kept."""

    NOT_A_RESULT = "not_a_result"
    """The item has `Fault.value` where a result should be, such as None or False."""

    BLOCK = "block"
    """The call waits for `Fault.release` before it does anything, then goes through."""

    SAYS_YES = "says_yes"
    """`contains` says that there is such an object; a read then misses, unless there is one."""

    EVICT_AFTER = "evict_after"
    """`contains` answers truly, and the object is gone right after."""


_FAILED = ItemResult(ItemStatus.FAILED, reason="as scripted")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong; the fields that `kind` does not name are passed over."""

    kind: FaultKind
    error: BaseException | None = None
    """None: an OSError."""
    result: ItemResult = _FAILED
    num_bytes: int = 1
    bit: int = 0
    value: Any = None
    release: threading.Event | None = None
    deadline_secs: float = 60.0
    """How long a BLOCK waits for its event before it raises StorageError."""


class FaultyBackend(StorageBackend):
    """Passes calls on to `inner` (a `MemoryBackend`), but for what `script` says.

    `script` adds a fault for a method and a key; None as key means any. Faults of a method and a
    key are used up one a call, in order, unless they are `always`.

    Attributes:
        calls: (method, keys) of every call so far.
        registered: Memory that is registered just now: bytes by address.
        blocked: Set as soon as a call waits in a BLOCK.
    """

    def __init__(self, inner: StorageBackend | None = None) -> None:
        self.inner = inner if inner is not None else MemoryBackend()
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.registered: dict[int, int] = {}
        self.blocked = threading.Event()
        self._lock = threading.Lock()
        self._once: dict[tuple[str, bytes | None], list[Fault]] = {}
        self._always: dict[tuple[str, bytes | None], Fault] = {}

    def script(
        self, method: str, key: bytes | None, *faults: Fault | FaultKind, always: bool = False
    ) -> None:
        """The next calls of `method` that name `key` meet `faults`, one each, in order.

        Args:
            method: ``contains``, ``read_into``, ``write_from``, ``delete`` or ``quarantine``.
            key: None: whatever the key is, one fault an item.
            faults: A kind alone stands for a `Fault` with defaults.
            always: There is one fault, and it is met from now on whenever there is no other.
        """
        made = [fault if isinstance(fault, Fault) else Fault(fault) for fault in faults]
        with self._lock:
            if always:
                (self._always[method, key],) = made
            else:
                self._once.setdefault((method, key), []).extend(made)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which objects there are, or as scripted."""

        def one(key: bytes, fault: Fault) -> Any:
            if fault.kind is FaultKind.SAYS_YES:
                return True
            if fault.kind is FaultKind.NOT_A_RESULT:
                return fault.value
            (answer,) = self.inner.contains([key])
            if fault.kind is FaultKind.EVICT_AFTER:
                self.inner.delete([key])
            return answer

        return self._each("contains", keys, one)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Scatter each object into its buffers, or as scripted."""
        check_batch(keys, buffers)
        into = iter(buffers)
        return self._each("read_into", keys, lambda key, fault: self._read(key, next(into), fault))

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Keep each object, or as scripted."""
        check_batch(keys, buffers)
        source = iter(buffers)
        return self._each(
            "write_from", keys, lambda key, fault: self._write(key, next(source), fault)
        )

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Remove objects, or as scripted."""
        return self._each("delete", keys, lambda key, _: self.inner.delete([key])[0])

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """Take damaged objects out of service, or as scripted."""
        return self._each("quarantine", keys, lambda key, _: self.inner.quarantine([key])[0])

    def register_memory(self, address: int, num_bytes: int) -> bool:
        """As the backend inside does; recorded in `registered`."""
        with self._lock:
            self.registered[address] = num_bytes
        return self.inner.register_memory(address, num_bytes)

    def unregister_memory(self, address: int) -> None:
        """As the backend inside does."""
        with self._lock:
            del self.registered[address]
        self.inner.unregister_memory(address)

    def stats(self) -> StorageStats:
        """Those of the backend inside."""
        return self.inner.stats()

    def close(self) -> None:
        """Close the backend inside."""
        self.inner.close()

    def count(self, method: str, key: bytes) -> int:
        """How often `method` was called with `key` so far."""
        with self._lock:
            return sum(name == method and key in keys for name, keys in self.calls)

    def _each(
        self, method: str, keys: Sequence[bytes], call: Callable[[bytes, Fault], Any]
    ) -> list[Any]:
        with self._lock:
            self.calls.append((method, tuple(keys)))
            faults = [self._next(method, key) for key in keys]
        for fault in faults:
            if fault.kind is FaultKind.RAISE:
                raise fault.error or OSError(5, "as scripted")
        answers = []
        for key, fault in zip(keys, faults, strict=True):
            if fault.kind is FaultKind.BLOCK:
                self._wait(fault)
            if fault.kind is FaultKind.STATUS and method != "contains":
                call(key, fault)
                answers.append(fault.result)
            elif fault.kind is FaultKind.NOT_A_RESULT and method != "contains":
                call(key, fault)
                answers.append(fault.value)
            else:
                answers.append(call(key, fault))
        return answers

    def _next(self, method: str, key: bytes) -> Fault:
        for which in (key, None):
            waiting = self._once.get((method, which))
            if waiting:
                return waiting.pop(0)
        for which in (key, None):
            if (method, which) in self._always:
                return self._always[method, which]
        return Fault(FaultKind.OK)

    def _wait(self, fault: Fault) -> None:
        if fault.release is None:
            raise StorageError("a BLOCK fault has no event to wait for; give Fault(release=...)")
        self.blocked.set()
        if not fault.release.wait(fault.deadline_secs):
            raise StorageError(f"nobody set the event of a BLOCK in {fault.deadline_secs} s")

    def _read(self, key: bytes, buffers: Buffers, fault: Fault) -> ItemResult:
        size = sum(length for _, length in buffers)
        if fault.kind in (FaultKind.STATUS, FaultKind.NOT_A_RESULT):
            return ItemResult(ItemStatus.MISS)
        if fault.kind is FaultKind.ZERO:
            return ItemResult(ItemStatus.OK, 0)
        if fault.kind is FaultKind.SILENT:
            return ItemResult(ItemStatus.OK, size)
        kept = [memory_at(address, length).copy() for address, length in buffers]
        (result,) = self.inner.read_into([key], [buffers])
        if result.ok and fault.kind is FaultKind.SHORT:
            _restore_tail(buffers, kept, fault.num_bytes)
            return result._replace(num_bytes=size - fault.num_bytes)
        if result.ok and fault.kind is FaultKind.WRONG_BYTES:
            _flip(buffers, fault.bit)
        return result

    def _write(self, key: bytes, buffers: Buffers, fault: Fault) -> ItemResult:
        if fault.kind in (FaultKind.STATUS, FaultKind.NOT_A_RESULT):
            return ItemResult(ItemStatus.MISS)
        if fault.kind is FaultKind.ZERO:
            return ItemResult(ItemStatus.OK, 0)
        size = sum(length for _, length in buffers)
        if fault.kind is FaultKind.SILENT:
            return ItemResult(ItemStatus.OK, size)
        if fault.kind not in (FaultKind.WRONG_BYTES, FaultKind.SHORT):
            return self.inner.write_from([key], [buffers])[0]
        # The caller's memory is not to be written, so a copy of it is what is wrong.
        copies = [memory_at(address, length).copy() for address, length in buffers]
        wrong: list[tuple[int, int]] = [(int(copy.ctypes.data), copy.size) for copy in copies]
        if fault.kind is FaultKind.WRONG_BYTES:
            _flip(wrong, fault.bit)
        else:
            address, length = wrong[-1]
            wrong[-1] = (address, length - fault.num_bytes)
        (result,) = self.inner.write_from([key], [wrong])
        return result._replace(num_bytes=size) if result.ok else result


def _flip(buffers: Buffers, bit: int) -> None:
    at, inside = divmod(bit, 8)
    for address, length in buffers:
        if at < length:
            memory_at(address, length)[at] ^= 1 << inside
            return
        at -= length
    raise StorageError(f"bit {bit} lies behind the object's end; give a smaller one")


def _restore_tail(buffers: Buffers, kept: Sequence[Any], num_bytes: int) -> None:
    for (address, length), before in zip(reversed(buffers), reversed(kept), strict=True):
        count = min(length, num_bytes)
        memory_at(address, length)[length - count :] = before[length - count :]
        num_bytes -= count
