"""Threads that carry out storage commands on one backend, one attachment long.

A command that raises is answered as failed, counted and told; its thread goes on with the next. A
call of the backend that never returns keeps its thread and its slots, and nothing else.
"""

from __future__ import annotations

import mmap
import queue
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvferry.kernels import NO_DIGEST
from kvferry.storage import ItemResult, ItemStatus, PageStore, try_backend
from kvferry.tiers.commands import (
    Completion,
    Found,
    ProbeStorage,
    Quarantine,
    ReadPages,
    StorageDetached,
    StorageDone,
    TryStorage,
    WorkerFault,
    WritePages,
)
from kvferry.tiers.host_check import bytes_digests, page_digests
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvferry.geometry import Geometry
    from kvferry.memory import HostPool
    from kvferry.storage import StorageBackend

__all__ = ["StorageCommand", "StorageWorkers", "storage_key"]

StorageCommand: TypeAlias = ProbeStorage | ReadPages | WritePages | Quarantine | TryStorage


def storage_key(kind: SlotKind, key: bytes) -> bytes:
    """What a page, or the checkpoint at its end, is called in a backend."""
    return key if kind is SlotKind.PAGE else key + b":state"


class StorageWorkers:
    """One backend and its threads.

    Args:
        generation: The number of this attachment.
        backend: Closed when the threads are done.
        geometry: Of the pages.
        pools: Whose slots are read and written.
        answer: Takes completions, on any thread.
        num_threads: How many.
        max_commands: How many may wait; more are refused.
        verify: Compare checksums of what is read.
        digests: Make digests for pages that were stored without.
    """

    def __init__(
        self,
        generation: int,
        backend: StorageBackend,
        geometry: Geometry,
        pools: Mapping[SlotKind, HostPool],
        answer: Callable[[Completion], object],
        *,
        num_threads: int = 4,
        max_commands: int = 1024,
        verify: bool = True,
        digests: bool = True,
    ) -> None:
        self.generation = generation
        self.num_restarts = 0
        """How often a thread met what a command raised, and went on."""

        self._backend = backend
        self._geometry = geometry
        self._pools = pools
        self._answer = answer
        self._makes_digests = digests
        self._stores = {
            kind: PageStore(backend, geometry, kind=kind, verify=verify) for kind in pools
        }
        # Other people's class may lack what came to the interface later.
        has_hook = hasattr(backend, "register_memory") and hasattr(backend, "unregister_memory")
        self._unregistered = list(pools.values()) if has_hook else []
        self._registered: list[HostPool] = []
        self._waiting: queue.Queue[StorageCommand | None] = queue.Queue(max_commands)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._detach_job = -1
        self._num_alive = num_threads
        self._threads = [
            threading.Thread(
                target=self._serve, name=f"kvferry-storage-{generation}-{number}", daemon=True
            )
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def depth(self) -> int:
        """Commands that wait."""
        return self._waiting.qsize()

    @property
    def num_alive(self) -> int:
        """Threads that have not ended."""
        return self._num_alive

    def submit(self, command: StorageCommand) -> None:
        """Take a command; it is answered in any case."""
        if self._stopping.is_set():
            self._refuse(command, "storage is being detached")
            return
        self._lease(command)
        try:
            self._waiting.put_nowait(command)
        except queue.Full:
            self._unlease(command)
            self._refuse(command, "too many storage commands wait")

    def stop(self, job: int = -1) -> None:
        """Refuse what waits, and end when what runs has returned. Does not wait for that."""
        if job >= 0:  # a close after a detach does not take that one's answer away
            self._detach_job = job
        self._stopping.set()
        while True:
            try:
                command = self._waiting.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                self._unlease(command)
                self._refuse(command, "storage is being detached")
        for _ in self._threads:
            try:
                self._waiting.put_nowait(None)
            except queue.Full:  # as many wake-ups as fit will do: each thread passes one on
                break

    def join(self, timeout: float) -> bool:
        """Wait for the threads to end, at most so many seconds in all; whether they did."""
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    # ---------------------------------------------------------------- on a worker thread

    def _serve(self) -> None:
        try:
            self._register_pools()
            while not self._stopping.is_set():
                command = self._waiting.get()
                if command is None:
                    break
                self._carry_out(command)
        finally:
            with self._lock:
                self._num_alive -= 1
                is_last = not self._num_alive
            if is_last:
                self._finish()

    def _register_pools(self) -> None:
        """Tell the backend of the host pools. It may take long: other threads serve meanwhile."""
        while not self._stopping.is_set():
            with self._lock:
                if not self._unregistered:
                    return
                pool = self._unregistered.pop()
            try:
                with pool.in_use():
                    num_bytes = pool.num_slots * pool.slot_bytes
                    if not self._backend.register_memory(pool.address, num_bytes):
                        continue
                    pool.acquire()  # until it is unregistered: what a library knows is not freed
                with self._lock:
                    self._registered.append(pool)
            except BaseException as fault:  # noqa: BLE001  as below; and it works without
                self._answer(WorkerFault(type(fault).__name__, str(fault)[:500]))

    def _carry_out(self, command: StorageCommand) -> None:
        started = time.perf_counter()
        answer: Completion | None = None
        try:
            answer = self._answer_to(command, started)
        except BaseException as fault:  # noqa: BLE001  a thread must outlive whatever a backend raises
            self.num_restarts += 1
            self._answer(WorkerFault(type(fault).__name__, str(fault)[:500], job=command.job))
        self._unlease(command)
        if answer is None:
            self._fail(command)
        else:
            self._answer(answer)

    def _answer_to(self, command: StorageCommand, started: float) -> Completion:
        if isinstance(command, TryStorage):
            return self._try(command, started)
        store = self._stores[command.kind]
        keys = [storage_key(command.kind, key) for key in command.keys]
        if isinstance(command, ProbeStorage):
            return Found(command.job, tuple(store.contains(keys)))
        if isinstance(command, Quarantine):
            results: Sequence[ItemResult] = self._put_away(command, store, keys)
        elif isinstance(command, WritePages):
            pool = self._pools[command.kind]
            slots = list(command.host_slots)
            addresses = [pool.slot_address(slot) for slot in slots]
            results = store.write(keys, addresses, pool.digests[slots])
        else:
            results = self._read(command, store, keys)
        reason = next((result.reason for result in results if not result.ok), "")
        return StorageDone(
            command.job,
            tuple(result.status for result in results),
            reason=reason,
            num_bytes=sum(result.num_bytes for result in results),
            seconds=time.perf_counter() - started,
        )

    def _try(self, command: TryStorage, started: float) -> StorageDone:
        tried = try_backend(self._backend)
        # One that keeps nothing more, or is only read, has answered, and nothing of it is broken.
        works = tried.status in (ItemStatus.OK, ItemStatus.REFUSED)
        return StorageDone(
            command.job,
            (ItemStatus.OK if works else ItemStatus.FAILED,),
            reason="" if works else tried.reason,
            seconds=time.perf_counter() - started,
        )

    def _read(
        self, command: ReadPages, store: PageStore, keys: list[bytes]
    ) -> Sequence[ItemResult]:
        pool = self._pools[command.kind]
        slots = list(command.host_slots)
        digests = np.zeros((len(slots), store.num_spans), dtype=np.uint64)
        results = store.read(keys, [pool.slot_address(slot) for slot in slots], digests)
        for number, result in enumerate(results):
            if not result.ok:
                continue
            if self._makes_digests and (digests[number] == NO_DIGEST).any():
                # Stored without. The checksum vouches for the bytes up to here; from here on
                # digests do.
                digests[number] = page_digests(
                    pool, self._geometry, command.kind, slots[number], command.keys[number]
                )
            pool.digests[slots[number]] = digests[number]
        return results

    def _put_away(
        self, command: Quarantine, store: PageStore, keys: list[bytes]
    ) -> list[ItemResult]:
        """See `Quarantine`. A copy of a page is no proof against the page that it was made from."""
        digests = np.zeros((1, store.num_spans), dtype=np.uint64)
        results = []
        # One page of memory, not of the pool: what is in doubt takes no slot of what is good.
        with mmap.mmap(-1, store.slot_bytes) as memory, memoryview(memory) as slot:
            address = np.frombuffer(slot, dtype=np.uint8).ctypes.data
            for key, name in zip(command.keys, keys, strict=True):
                (result,) = store.read([name], [address], digests)
                if result.ok:
                    found = bytes_digests(slot, self._geometry, command.kind, key)
                    # Where none was kept, the checksum is all there is to go by.
                    if ((found != digests[0]) & (digests[0] != NO_DIGEST)).any():
                        self._backend.quarantine([name])
                        result = ItemResult(ItemStatus.CORRUPT, reason="its digests are others")
                results.append(result)
        return results

    # ---------------------------------------------------------------- on any thread

    def _lease(self, command: StorageCommand) -> None:
        if isinstance(command, ReadPages | WritePages):
            self._pools[command.kind].acquire(np.array(command.host_slots, dtype=np.int64))

    def _unlease(self, command: StorageCommand) -> None:
        if isinstance(command, ReadPages | WritePages):
            self._pools[command.kind].release(np.array(command.host_slots, dtype=np.int64))

    def _refuse(self, command: StorageCommand, why: str) -> None:
        if isinstance(command, ProbeStorage):
            nothing = (False,) * len(command.keys)
            self._answer(Found(command.job, nothing, error=why, refused=True))
        else:
            self._end(command, ItemStatus.REFUSED, why)

    def _fail(self, command: StorageCommand) -> None:
        self._end(command, ItemStatus.FAILED, "the worker met an error")

    def _end(self, command: StorageCommand, status: ItemStatus, why: str) -> None:
        if isinstance(command, ProbeStorage):
            self._answer(Found(command.job, (False,) * len(command.keys), error=why))
        else:
            items = 1 if isinstance(command, TryStorage) else len(command.keys)
            self._answer(StorageDone(command.job, (status,) * items, reason=why))

    def _finish(self) -> None:
        error = ""
        for pool in self._registered:
            try:
                self._backend.unregister_memory(pool.address)
            except BaseException as bad:  # noqa: BLE001  as below
                error = f"{type(bad).__name__}: {bad}"
            pool.release()
        try:
            self._backend.close()
        except BaseException as bad:  # noqa: BLE001  other people's code: told, and over all the same
            error = f"{type(bad).__name__}: {bad}"
        self._answer(StorageDetached(self.generation, self._detach_job, error))
