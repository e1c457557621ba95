"""The half of the connector that lives with vLLM's scheduler: the control plane.

It never waits and does no I/O. What it wants done goes to the workers with the metadata of the next
step, and what they have done comes back with the output of that step.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.adapters.vllm.block_events import BlockEvents, BlocksGone, BlocksKept
from kvferry.adapters.vllm.counts import StepCounts
from kvferry.adapters.vllm.merge import RankMerge
from kvferry.adapters.vllm.messages import LoadTicket, RankHandshake, RankReport, StepMetadata
from kvferry.adapters.vllm.requests import TrackedRequest
from kvferry.cache import tier_options
from kvferry.errors import CacheError, ConfigError
from kvferry.events import EventLog
from kvferry.geometry import Geometry
from kvferry.index import Namespace, PrefixIndex
from kvferry.memory import SlotOwners
from kvferry.tiers import (
    CommandQueue,
    DeviceSlots,
    MovePages,
    StorageAttached,
    TierManager,
    Verify,
)
from kvferry.types import Direction, SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.config import Config
    from kvferry.tiers import Command

__all__ = ["SchedulerSide"]


class SchedulerSide:
    """Looks prompts up, and decides what is loaded and stored, step by step.

    Args:
        config: All settings.
        namespace: Without geometry and layout, which the workers tell.
        between_steps: Loads run between steps, and a request waits for its own; otherwise a step
            begins with its loads, and layers wait for them one by one.
        tells_events: Somebody wants to know which blocks are where.
        hash_tokens: Tokens that one of vLLM's block hashes stands for; 0: not known.
        clock: Seconds that never go back.

    Raises:
        ConfigError: The config asks for what vLLM cannot do.
    """

    def __init__(
        self,
        config: Config,
        namespace: Mapping[str, str],
        *,
        between_steps: bool = True,
        tells_events: bool = False,
        hash_tokens: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if config.store.policy == "write_back":
            raise ConfigError(
                "store.policy is write_back, and vLLM does not say when it evicts blocks: give "
                "write_through or write_through_selective"
            )
        self._config = config
        self._told = dict(namespace)
        self._between_steps = between_steps
        self._clock = clock
        self._hash_tokens = hash_tokens
        self.counts = StepCounts()
        """What happened since it was last asked."""

        self._events = EventLog(config.metrics.max_events if tells_events else 0)
        self._blocks_of_page = BlockEvents()
        self._requests: dict[str, TrackedRequest] = {}
        self._queue = CommandQueue()
        self._meta = StepMetadata()
        self._manager: TierManager | None = None
        self._merge = RankMerge(1)
        self._groups: dict[str, int] = {}
        self._rows_of: dict[str, int] = {}
        self._page_size = 0
        self._geometry: Geometry
        self._namespace: Namespace

    # ---------------------------------------------------------------- the workers

    def start(self, handshakes: Sequence[RankHandshake]) -> None:
        """Take note of what every worker has.

        Raises:
            ConfigError: Ranks do not fit together.
        """
        first = handshakes[0]
        for other in handshakes:
            if (other.geometry, other.layout) != (first.geometry, first.layout):
                raise ConfigError(
                    f"rank {other.rank} keeps its KV in another way than rank {first.rank} "
                    f"({other.layout} and {first.layout}): all ranks must run the same kernels"
                )
        if len(handshakes) != first.num_ranks:
            raise ConfigError(
                f"{len(handshakes)} workers answered, and a rank says that there are "
                f"{first.num_ranks}: only tensor parallel ranks are served"
            )
        self._geometry = geometry = Geometry.from_dict(first.geometry)
        self._page_size = geometry.page_size
        self._groups = first.groups_of_plane
        self._rows_of = {plane.name: geometry.rows_per_page(plane) for plane in geometry.planes}
        dtype = f"{self._told.pop('dtype')} {first.layout}"
        self._namespace = Namespace(**self._told, dtype=dtype, geometry=geometry.fingerprint)
        self._merge = RankMerge(len(handshakes))
        slots = min(one.num_slots for one in handshakes)
        options = tier_options(
            self._config, slots, Verify(self._config.integrity.verify), writes_storage=True
        )
        self._manager = TierManager(
            geometry,
            PrefixIndex(policy=self._config.host.eviction_policy, clock=self._clock),
            {SlotKind.PAGE: SlotOwners(slots)},
            self._queue,
            options=options,
            switches=self._config.switches(),
            metrics=self.counts,
            events=self._events,
            clock=self._clock,
        )
        if first.storage_generation:
            self._queue.deliver([StorageAttached(first.storage_generation)])
            self._manager.poll()

    @property
    def manager(self) -> TierManager:
        """The control plane; CacheError before the workers have told of themselves."""
        if self._manager is None:
            raise CacheError("no worker has registered its KV caches yet: start the engine first")
        return self._manager

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self._page_size

    def take_report(self, report: RankReport | None) -> None:
        """What the workers did in a step."""
        if report is not None:
            self._queue.deliver(self._merge.take(report.completions))
        self.manager.poll()

    @property
    def has_work(self) -> bool:
        """Whether something is in flight, or waits for the next step."""
        if self._manager is None:
            return False
        self._collect()
        return bool(self._manager.num_jobs or self._meta.commands or self._meta.lost_blocks)

    # ---------------------------------------------------------------- requests

    def _track(self, request: Any) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            tracked = TrackedRequest(request, self._namespace, self._page_size, self._hash_tokens)
            self._requests[request.request_id] = tracked
        return tracked

    def look_up(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens behind `num_computed` can be loaded; None: ask again in a later step."""
        manager, size = self.manager, self._page_size
        tracked = self._track(request)
        tracked.let_go()
        if not tracked.may_load or not manager.switches.load or num_computed % size:
            return 0, False
        # At least one token is left to compute, or there would be nothing to sample from.
        keys = tracked.keys((request.num_tokens - 1) // size)
        if len(keys) * size <= num_computed:
            return 0, False
        if tracked.fetch is None:
            tracked.fetch = manager.prefetch(keys)
        if tracked.fetch.look() is None:
            return None, False
        found = manager.match(keys)
        new = found.num_tokens - num_computed
        if new < max(1, manager.options.load_threshold_tokens):
            found.release()
            return 0, False
        tracked.found, tracked.skip = found, num_computed
        return new, self._between_steps

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """vLLM gave a request its blocks: begin the load, if one was promised and taken."""
        tracked = self._track(request)
        tracked.blocks = [list(group) for group in blocks]
        found, tracked.found = tracked.found, None
        if found is not None:
            if num_external > 0:
                self._load(tracked, found, num_external)
            found.release()
        # A request that is preempted later is looked up anew, in storage too.
        tracked.stop_fetch()

    def _load(self, tracked: TrackedRequest, found: Any, num_external: int) -> None:
        manager, size = self.manager, self._page_size
        end = (tracked.skip + num_external) // size
        first = tracked.skip // size
        wanted = found.up_to(end * size)
        self._collect()
        handle = manager.load(wanted, self._rows(tracked, first, end), skip_tokens=tracked.skip)
        for command in self._queue.take():
            if isinstance(command, MovePages) and command.direction is Direction.LOAD:
                pages = range(first, first + len(command.keys))
                self._meta.tickets[command.job] = LoadTicket(
                    tracked.request_id, tuple(self._blocks(tracked, page) for page in pages)
                )
            self._meta.commands.append(command)
        lost = range(handle.num_tokens // size, end)
        if lost:
            blocks = [block for page in lost for block in self._blocks(tracked, page)]
            self._meta.lost_blocks[tracked.request_id] = tuple(blocks)
        fetched = 0 if tracked.fetch is None else tracked.fetch.num_pages * size
        tracked.from_storage = min(fetched, num_external)

    def tokens_by_tier(self, request: Any, num_external: int) -> dict[Tier, int]:
        """Where the tokens of a load come from."""
        tracked = self._requests.get(request.request_id)
        stored = 0 if tracked is None else min(tracked.from_storage, num_external)
        told = {Tier.HOST: num_external - stored, Tier.STORAGE: stored}
        return {tier: tokens for tier, tokens in told.items() if tokens}

    def _blocks(self, tracked: TrackedRequest, page: int) -> tuple[int, ...]:
        found: list[int] = []
        for plane, group in self._groups.items():
            rows = self._rows_of[plane]
            found.extend(tracked.blocks[group][page * rows : (page + 1) * rows])
        return tuple(dict.fromkeys(found))

    def _rows(self, tracked: TrackedRequest, first: int, end: int) -> DeviceSlots:
        slots = {}
        for plane, group in self._groups.items():
            rows = self._rows_of[plane]
            slots[plane] = tracked.blocks[group][first * rows : end * rows]
        return DeviceSlots(self._geometry, None, slots, first_page=first)

    def finished(self, request_id: str) -> None:
        """A request ended, well or not. What is in flight for it ends by itself."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            tracked.let_go()
            tracked.stop_fetch()

    # ---------------------------------------------------------------- steps

    def new_blocks(
        self, request_id: str, blocks: Sequence[Sequence[int]] | None, *, replaces: bool
    ) -> None:
        """vLLM gave blocks to a request, behind those that it has or in their place."""
        tracked = self._requests.get(request_id)
        if tracked is None or blocks is None:
            return
        if replaces or not tracked.blocks:
            tracked.blocks = [list(group) for group in blocks]
            return
        for have, new in zip(tracked.blocks, blocks, strict=True):
            have.extend(new)

    def scheduled(self, request_id: str, num_computed: int, num_new: int) -> None:
        """A step computes `num_new` tokens of a request: whole pages are stored behind it."""
        tracked = self._requests.get(request_id)
        if tracked is None or not tracked.may_store:
            return
        size = self._page_size
        # Fewer than before: a load failed, and what follows it is computed once more.
        tracked.offered = min(tracked.offered, num_computed // size)
        # Tokens that are not known yet, as of a step that still runs, name no page.
        pages = min(num_computed + num_new, tracked.num_tokens) // size
        if pages <= tracked.offered:
            return
        tracked.offered = pages
        rows = self._rows(tracked, 0, pages)
        keys = tracked.keys(pages)
        if self._events.active:
            self._blocks_of_page.learn(keys, tracked.block_hashes(pages))
        self.manager.store(keys, rows, priority=tracked.priority)

    def take_step(self) -> StepMetadata:
        """What the workers are to do in this step."""
        self.manager.poll()
        self._collect()
        meta, self._meta = self._meta, StepMetadata()
        return meta

    def take_events(self) -> list[BlocksKept | BlocksGone]:
        """Which blocks came to be somewhere, or are there no more, since the last time."""
        return list(self._blocks_of_page.tell(self._events.drain()))

    def _collect(self) -> None:
        commands: list[Command] = self._queue.take()
        self._meta.commands.extend(commands)

    # ---------------------------------------------------------------- ends

    def reset(self) -> None:
        """Forget all pages, and let no later prompt find those that are in storage.

        vLLM asks for it when weights change. What is in storage was computed with the old ones, so
        a name that nobody had before goes into the keys from here on.
        """
        self.manager.reset()
        self._namespace = dataclasses.replace(
            self._namespace, revision=f"{self._told['revision']} reset {uuid.uuid4().hex}"
        )
        for tracked in self._requests.values():
            tracked.let_go()
            tracked.stop_fetch()
            tracked.rename(self._namespace)

    def close(self) -> None:
        """Take no more requests."""
        if self._manager is not None:
            self._manager.close()
