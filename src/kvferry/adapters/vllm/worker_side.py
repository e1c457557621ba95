"""The half of the connector that lives in a worker: pools, transfers, storage threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvferry.adapters.vllm.messages import LoadTicket, RankHandshake, RankReport, StepMetadata
from kvferry.adapters.vllm.pools import BlockGroup, EnginePools
from kvferry.adapters.vllm.rank_backend import RankBackend
from kvferry.cache import backend_options, make_engines, make_pools
from kvferry.errors import CacheError, PoolInUseError, StorageError
from kvferry.memory import SlotOwner
from kvferry.storage import ItemStatus, open_backend, try_backend
from kvferry.tiers import (
    DataPlane,
    Moved,
    MovePages,
    Quarantine,
    StorageAttached,
    StorageDone,
    Verify,
    WritePages,
)
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.config import Config
    from kvferry.memory import HostPool
    from kvferry.tiers import Command, Completion, RunningTransfer
    from kvferry.transfer import TransferEngine
    from kvferry.types import SlotKind

__all__ = ["WorkerSide"]

_GENERATION = 1
_LOAD_SECONDS = 60.0
_CLOSE_SECONDS = 10.0


class WorkerSide:
    """Carries out what the scheduler's side says, on this worker's tensors.

    Args:
        config: All settings.
        groups: The layers that are carried.
        rank, num_ranks: Of the tensor parallel group.
        replicated: Every rank has the same bytes: the first one writes them, all read them.
        between_steps: As on the scheduler's side.
    """

    def __init__(
        self,
        config: Config,
        groups: Sequence[BlockGroup],
        *,
        rank: int = 0,
        num_ranks: int = 1,
        replicated: bool = False,
        between_steps: bool = True,
    ) -> None:
        self._config = config
        self._groups = groups
        self._rank = rank
        self._num_ranks = num_ranks
        self._replicated = replicated
        self._between_steps = between_steps
        self._parts: EnginePools | None = None
        self._data: DataPlane | None = None
        self._pools: dict[SlotKind, HostPool] = {}
        self._engines: dict[SlotKind, TransferEngine] = {}
        self._tickets: dict[int, LoadTicket] = {}
        self._open_jobs: dict[str, int] = {}
        """By request: loads that are not over."""

        self._stores: list[Command] = []
        self._in_step: list[RunningTransfer] = []
        self._storing: list[RunningTransfer] = []
        self._completions: list[Completion] = []
        self._answers: list[Completion] = []
        self._loaded: set[str] = set()
        self._lost_blocks: set[int] = set()

    # ---------------------------------------------------------------- start and end

    def register(
        self, kv_caches: Mapping[str, Any], num_blocks: int, origin: Sequence[str]
    ) -> None:
        """Take the engine's tensors, and make pools that go with them."""
        parts = EnginePools(self._groups, kv_caches, num_blocks, origin=origin)
        if self._parts is not None:
            if parts.geometry != self._parts.geometry:
                raise CacheError("the KV caches came back with other sizes: start the engine anew")
            self._close_data()
        verify = Verify(self._config.integrity.verify)
        pools = self._pools or make_pools(parts.geometry, parts.view, self._config)
        for pool in pools.values() if not self._pools else ():
            # The scheduler's side says who has which slot.
            pool.allocate(pool.num_slots, SlotOwner.INDEX)
        self._pools = pools
        self._engines = make_engines(
            parts.view, pools, self._config, verify=verify is Verify.ALWAYS, timed=False
        )
        self._parts = parts
        self._data = DataPlane(parts.geometry, self._engines, pools, verify=verify)
        self._attach()

    def _attach(self) -> None:
        storage = self._config.storage
        if not storage.enabled or storage.target is None:
            return
        backend = open_backend(storage.target, **backend_options(self._config))
        result = try_backend(backend)
        if not result.ok:
            backend.close()
            raise StorageError(f"storage does not do what it should: {result.reason}")
        if self._num_ranks > 1 and not self._replicated:
            backend = RankBackend(backend, f":{self._rank}of{self._num_ranks}".encode())
        self.data.attach_storage(_GENERATION, backend, num_threads=storage.workers)

    @property
    def data(self) -> DataPlane:
        """The data plane; CacheError while the engine has no KV caches."""
        if self._data is None:
            raise CacheError("there are no KV caches: vLLM has not registered them, or sleeps")
        return self._data

    def handshake(self) -> RankHandshake | None:
        """What the scheduler's side must know; None before there are KV caches."""
        if self._parts is None:
            return None
        (pool,) = self._pools.values()
        stored = self._config.storage
        return RankHandshake(
            rank=self._rank,
            num_ranks=self._num_ranks,
            geometry=self._parts.geometry.to_dict(),
            layout=self._parts.layout,
            num_slots=pool.num_slots,
            storage_generation=_GENERATION if stored.enabled and stored.backend else 0,
            groups_of_plane=self._parts.groups_of_plane,
        )

    def let_go(self) -> None:
        """The engine is about to give its KV caches away, as in sleep: wait for what uses them."""
        for running in [*self._in_step, *self._storing]:
            running.handle.wait(_LOAD_SECONDS)
        for engine in self._engines.values():
            engine.close()
        self._engines = {}

    def _close_data(self) -> None:
        if self._data is not None:
            self._completions.extend(self._data.poll())
            self._data.close(_CLOSE_SECONDS)
            self._completions.extend(
                done for done in self._data.poll() if not isinstance(done, StorageAttached)
            )
            self._data = None
        for engine in self._engines.values():
            engine.close()
        self._engines = {}

    def close(self) -> None:
        """Wait for what runs, at most some seconds, and give host memory back."""
        self._close_data()
        for pool in self._pools.values():
            pool.free(range(pool.num_slots), SlotOwner.INDEX)
            try:
                pool.close()
            except PoolInUseError:  # a read of storage that does not return keeps its memory
                continue
        self._pools = {}

    # ---------------------------------------------------------------- a step

    def order_after_stores(self) -> None:
        """Before a step writes KV: its stream waits for stores that still read blocks."""
        for running in self._storing:
            running.wait_all()
        self._storing = [running for running in self._storing if not running.handle.done]

    def begin(self, meta: StepMetadata) -> None:
        """Start the loads of a step, and what goes between host and storage."""
        for request_id, blocks in meta.lost_blocks.items():
            self._lost_blocks.update(blocks)
            self._open_jobs.setdefault(request_id, 0)
        for job, ticket in meta.tickets.items():
            self._tickets[job] = ticket
            jobs = self._open_jobs.get(ticket.request_id, 0)
            self._open_jobs[ticket.request_id] = jobs + 1
        for command in meta.commands:
            if isinstance(command, MovePages) and command.direction is Direction.STORE:
                self._stores.append(command)  # the step has yet to write these blocks
            elif isinstance(command, WritePages | Quarantine) and not self._writes:
                done = (ItemStatus.OK,) * len(command.keys)
                self._answers.append(StorageDone(command.job, done))
            else:
                running = self.data.execute(command)
                if running is not None:
                    self._in_step.append(running)
        if self._between_steps:
            self._in_step = []

    @property
    def _writes(self) -> bool:
        return self._rank == 0 or not self._replicated

    def wait_layer(self, name: str) -> None:
        """The current stream waits for the bytes of one layer that this step loads."""
        if not self._in_step or self._parts is None:
            return
        layer = self._parts.layer_of.get(name)
        for running in self._in_step:
            if layer is not None and running.has_layer(layer):
                running.wait_layer(layer)

    def end(self) -> None:
        """The step has been computed, or is on its way: store what it wrote."""
        bad = bool(self._lost_blocks) and not self._between_steps
        for running in self._in_step:
            # Its tokens leave with this step, so what they were made from must be known now.
            running.handle.wait(_LOAD_SECONDS)
            handle = running.handle
            bad |= handle.error is not None or bool(handle.bad_pages)
        self._in_step = []
        stores, self._stores = self._stores, []
        for command in stores:
            if bad:
                # Requests of one step may share blocks: nothing computed beside bad ones is kept.
                error = "a load of the same step failed"
                self._answers.append(Moved(command.job, error=error))
                continue
            running_store = self.data.execute(command)
            if running_store is not None and not running_store.handle.done:
                self._storing.append(running_store)

    def results(self) -> tuple[set[str], set[int]]:
        """Requests whose loads are over, and blocks of all requests that were not loaded."""
        if self._data is not None:
            self._completions.extend(
                done for done in self._data.poll() if not isinstance(done, StorageAttached)
            )
        self._completions.extend(self._answers)
        self._answers = []
        for done in self._completions:
            if isinstance(done, Moved) and done.job in self._tickets:
                self._judge(done, self._tickets.pop(done.job))
        for request_id in [name for name, jobs in self._open_jobs.items() if not jobs]:
            del self._open_jobs[request_id]
            self._loaded.add(request_id)
        loaded, self._loaded = self._loaded, set()
        lost, self._lost_blocks = self._lost_blocks, set()
        return (loaded if self._between_steps else set()), lost

    def _judge(self, done: Moved, ticket: LoadTicket) -> None:
        pages = range(len(ticket.blocks_of_page)) if done.error else done.bad_pages
        for page in pages:
            self._lost_blocks.update(ticket.blocks_of_page[page])
        self._open_jobs[ticket.request_id] -= 1

    def report(self) -> RankReport | None:
        """What is over since the last report; None: nothing."""
        completions, self._completions = self._completions, []
        return RankReport({self._rank: completions}) if completions else None
