"""The data plane: carries commands out on the pools of this process and says when they are over."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError, TransferError
from kvferry.storage import ItemStatus
from kvferry.tiers.commands import (
    Checked,
    CheckPages,
    Command,
    Completion,
    DetachStorage,
    Found,
    Moved,
    MovePages,
    ProbeStorage,
    StorageAttached,
    StorageDetached,
    StorageDone,
    TryStorage,
)
from kvferry.tiers.host_check import page_digests
from kvferry.tiers.policy import Verify
from kvferry.tiers.storage_workers import StorageWorkers
from kvferry.transfer import TransferPlan
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.geometry import Geometry
    from kvferry.memory import HostPool
    from kvferry.storage import StorageBackend
    from kvferry.transfer import TransferEngine, TransferHandle
    from kvferry.types import SlotKind

__all__ = ["DataPlane", "RunningTransfer"]


class RunningTransfer:
    """A transfer of this process, to wait for by layer."""

    def __init__(self, job: int, handle: TransferHandle, started: float) -> None:
        self.job = job
        self.handle = handle
        self.started = started
        self._layers = frozenset(handle.plan.model_layers)

    def has_layer(self, layer: int) -> bool:
        """Whether it moves any of model layer `layer`."""
        return layer in self._layers

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """See `TransferHandle.wait_layer`."""
        self.handle.wait_layer(layer, stream)

    def wait_all(self, stream: int | None = None) -> None:
        """See `TransferHandle.wait_all`."""
        self.handle.wait_all(stream)


class DataPlane:
    """Pools, transfer engines and storage workers of one process.

    `submit`, `poll`, `wait`, `attach_storage` and `close` belong to one thread. Host slots are
    written and read as commands say; who owns which is the control plane's business. Where that is
    another process, all slots of the pools here must have been allocated.

    Args:
        geometry: The planes.
        engines: By kind of slot.
        pools: By kind of slot; those of the engines.
        verify: What is checked; the engines must have been made accordingly.
    """

    def __init__(
        self,
        geometry: Geometry,
        engines: Mapping[SlotKind, TransferEngine],
        pools: Mapping[SlotKind, HostPool],
        *,
        verify: Verify = Verify.ALWAYS,
    ) -> None:
        self._geometry = geometry
        self._engines = engines
        self._pools = pools
        self._verify = verify
        self._running: list[RunningTransfer] = []
        self._ready: list[Completion] = []
        self._from_threads: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # Apart from the queue: a wait that is interrupted has taken nothing then.
        self._came = threading.Event()
        self._attachments: dict[int, StorageWorkers] = {}

    @property
    def num_running(self) -> int:
        """Transfers that are not over."""
        return len(self._running)

    @property
    def num_threads(self) -> int:
        """Storage threads that have not ended, those of detached backends too."""
        return sum(workers.num_alive for workers in self._attachments.values())

    @property
    def queue_depth(self) -> int:
        """Storage commands that wait for a thread."""
        return sum(workers.depth for workers in self._attachments.values())

    def attach_storage(
        self, generation: int, backend: StorageBackend, *, num_threads: int = 4
    ) -> None:
        """Serve storage commands of `generation` on `backend`, which is closed in the end."""
        self._attachments[generation] = StorageWorkers(
            generation,
            backend,
            self._geometry,
            self._pools,
            self._take_answer,
            num_threads=num_threads,
            verify=self._verify is not Verify.OFF,
            digests=self._verify is Verify.ALWAYS,
        )
        self._ready.append(StorageAttached(generation))

    def submit(self, command: Command) -> RunningTransfer | None:
        """Start a command and return at once; a transfer, where it is one.

        Raises:
            PlanError, SlotOwnershipError, ...: A transfer was refused, as `TransferEngine.load`
                says; it has no completion then.
        """
        if isinstance(command, MovePages):
            return self._move(command)
        if isinstance(command, CheckPages):
            self._ready.append(self._check(command))
        elif isinstance(command, DetachStorage):
            workers = self._attachments.get(command.generation)
            if workers is None:
                self._ready.append(StorageDetached(command.generation, command.job))
            else:
                workers.stop(command.job)
        else:
            workers = self._attachments.get(command.generation)
            if workers is not None:
                workers.submit(command)
            elif isinstance(command, ProbeStorage):
                nothing = (False,) * len(command.keys)
                self._ready.append(
                    Found(command.job, nothing, error="no such storage", refused=True)
                )
            else:
                items = 1 if isinstance(command, TryStorage) else len(command.keys)
                statuses = (ItemStatus.REFUSED,) * items
                self._ready.append(StorageDone(command.job, statuses, reason="no such storage"))
        return None

    def execute(self, command: Command) -> RunningTransfer | None:
        """`submit`, for commands of another process: what is refused is answered as failed."""
        try:
            return self.submit(command)
        except KVFerryError as refused:
            if not isinstance(command, MovePages):
                raise
            self._ready.append(Moved(command.job, error=f"{type(refused).__name__}: {refused}"))
            return None

    def _move(self, command: MovePages) -> RunningTransfer:
        engine = self._engines[command.kind]
        plan = TransferPlan.build(
            self._geometry,
            command.direction,
            host_slots=command.host_slots,
            device_slots=command.device_slots,
            plane_slots=command.plane_slots,
            planes=command.planes,
            page_keys=command.keys,
            kind=command.kind,
            device_run=command.device_run,
        )
        started = time.perf_counter()
        if command.direction is Direction.LOAD:
            handle = engine.load(plan, command.stream)
        else:
            handle = engine.store(plan, command.stream)
        running = RunningTransfer(command.job, handle, started)
        self._running.append(running)
        self._collect()
        return running

    def _check(self, command: CheckPages) -> Checked:
        pool = self._pools[command.kind]
        good = []
        for slot, key in zip(command.host_slots, command.keys, strict=True):
            found = page_digests(pool, self._geometry, command.kind, slot, key)
            good.append(bool((found == pool.digests[slot]).all()))
        return Checked(command.job, tuple(good))

    def _collect(self) -> None:
        """Turn transfers that are over into completions."""
        left = []
        for running in self._running:
            handle = running.handle
            if not handle.done:
                left.append(running)
                continue
            error, route, on_link = handle.error, handle.route, handle.link_seconds
            self._ready.append(
                Moved(
                    running.job,
                    error="" if error is None else f"{type(error).__name__}: {error}",
                    bad_pages=() if error is not None else handle.bad_pages,
                    verified=handle.verified,
                    path=handle.path,
                    num_bytes=handle.plan.num_bytes,
                    seconds=time.perf_counter() - running.started
                    if on_link is None
                    else on_link[1] - on_link[0],
                    link_seconds=on_link,
                    mover="" if route is None else route.mover.value,
                    route_reason="" if route is None else route.reason,
                )
            )
        self._running = left

    @property
    def has_news(self) -> bool:
        """Whether `poll` may have something to tell: something ended, or may have."""
        return bool(self._running or self._ready) or self._came.is_set()

    def poll(self) -> list[Completion]:
        """What is over since the last time; never blocks."""
        if self._running:
            self._collect()
        self._came.clear()
        while True:
            try:
                completion = self._from_threads.get_nowait()
            except queue.Empty:
                break
            if isinstance(completion, StorageDetached):
                self._attachments.pop(completion.generation, None)
            self._ready.append(completion)
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout: float) -> bool:
        """Block until `poll` may have something to tell, at most `timeout` seconds."""
        if self._ready:
            return True
        if self._running:
            # A transfer on a GPU ends soon; storage is looked at again behind it.
            running = self._running[0]
            with contextlib.suppress(TransferError):  # late, or failed: `poll` tells
                running.handle.wait(min(timeout, 0.05) if self._attachments else timeout)
            self._collect()
            return bool(self._ready)
        return self._came.wait(max(timeout, 0.0))

    def wake(self) -> None:
        """Let `wait` return: there is something else to look at. From any thread."""
        self._came.set()

    def _take_answer(self, completion: Completion) -> None:
        """On any thread."""
        self._from_threads.put(completion)
        self._came.set()

    def close(self, timeout: float) -> bool:
        """Stop storage and wait for it, at most `timeout` seconds; whether all of it ended."""
        deadline = time.monotonic() + timeout
        for workers in self._attachments.values():
            workers.stop()
        ended = True
        for workers in self._attachments.values():
            ended &= workers.join(max(0.0, deadline - time.monotonic()))
        return ended
