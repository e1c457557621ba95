"""The cache as engines use it: tiers, transfers and storage put together from a config."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.cache.explanation import explain
from kvferry.cache.life import CacheLife
from kvferry.cache.parts import (
    backend_options,
    make_engines,
    make_pools,
    resolved_config,
    tier_options,
)
from kvferry.cache.request import Offer, Prompt
from kvferry.errors import ConfigError
from kvferry.events import EventLog
from kvferry.index import PrefixIndex
from kvferry.memory import read_memory
from kvferry.metrics import Metrics, NullMetrics
from kvferry.ranks import ranks_on_machine
from kvferry.sharing import SharedDataPlane
from kvferry.tiers import DataPlane, DeviceSlots, TierManager, Verify, check_seconds, check_whole
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvferry.cache.reports import Explanation
    from kvferry.config import Config
    from kvferry.geometry import Geometry, PoolView
    from kvferry.index import ContentSpan, Namespace
    from kvferry.metrics import MetricsSink
    from kvferry.ranks import Ranks
    from kvferry.sharing import SharedHost
    from kvferry.storage import StorageBackend
    from kvferry.switches import Switches
    from kvferry.tiers import FetchHandle, LoadHandle, Match, StoreHandle

__all__ = ["KVFerry"]

_START_SECS = 300.0
"""How long ranks wait for the last of them to begin its cache."""


class KVFerry(CacheLife):
    """A tiered cache between one device pool, host memory and storage.

    Every call but `flush`, `close`, `attach_storage`, `detach_storage` and the `wait` of handles
    returns at once. One thread uses a cache; it calls `poll` now and then, as in each step of an
    engine, and every call does so too.

    Args:
        geometry: The planes.
        device_pool: Where the engine keeps them.
        config: All settings; None: from the environment and its file, see `Config.resolve`.
        namespace: What separates this model's keys from others; None of its fields may lie.
        storage: A backend, or its URL, instead of the one in the config; it is closed with the
            cache. Or the section of the config, as for `overrides`.
        writes_storage: False on all ranks but one of those that have the same bytes, whose
            namespaces have the same `shard`: they read what that one writes.
        ranks: Who must agree on prefixes, where several processes serve one model. All of them make
            their caches at the same time: it is an agreement on how many share this machine.
        shared: The peers that load from this cache's host copy too, as their bytes are the same;
            closed with the cache. Each of them is a `HostPeer`.
        metrics: Is told of what happens; None: as the config says. Or the section of the config.
        events: Takes events; None: a new log as the config says.
        clock: Seconds that never go back.
        overrides: Settings by section, which win over `config`:
            ``host={"num_bytes": "8GiB"}``.

    Raises:
        ConfigError: A setting is wrong, or the namespace is of another geometry.
        BudgetError: There is not that much host memory.
        RankError: A rank did not make its cache.
        ControlError: No control socket can be made where the config says.
        StorageError: The backend cannot be opened, or does not do what it should.
        ViewError, NoDeviceError, ...: As `TransferEngine` says.
    """

    def __init__(
        self,
        geometry: Geometry,
        device_pool: PoolView,
        config: Config | None = None,
        *,
        namespace: Namespace,
        storage: StorageBackend | str | Mapping[str, Any] | None = None,
        writes_storage: bool = True,
        ranks: Ranks | None = None,
        shared: SharedHost | None = None,
        metrics: MetricsSink | Mapping[str, Any] | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        **overrides: Mapping[str, Any],
    ) -> None:
        if namespace.geometry != geometry.fingerprint:
            raise ConfigError(
                f"the namespace is of geometry {namespace.geometry}, and the cache of "
                f"{geometry.fingerprint}: give Namespace(..., geometry=geometry.fingerprint)"
            )
        # Two sections have the names of arguments.
        if isinstance(storage, Mapping):
            overrides["storage"], storage = storage, None
        if isinstance(metrics, Mapping):
            overrides["metrics"], metrics = metrics, None
        self.config = config = resolved_config(config, overrides)
        self.geometry = geometry
        self.namespace = namespace
        self.events = EventLog(config.metrics.max_events) if events is None else events
        self.metrics: MetricsSink
        if metrics is not None:
            self.metrics = metrics
        else:
            self.metrics = Metrics() if config.metrics.enabled else NullMetrics()
        verify = Verify(config.integrity.verify)
        reading, ranks_here = None, 1
        if ranks is not None and ranks.size > 1:
            # All look before any of them takes: who comes later would find less than its share.
            reading = read_memory()
            ranks_here = ranks_on_machine(ranks, timeout=_START_SECS)
        pools = make_pools(
            geometry,
            device_pool,
            config,
            shared=shared is not None,
            ranks_here=ranks_here,
            reading=reading,
        )
        self.switches: Switches = config.switches()
        if storage is not None:
            self.switches.flip(storage=True)
        with contextlib.ExitStack() as unless_made:  # who gets no cache cannot give memory back
            for pool in pools.values():
                unless_made.callback(pool.close)
            is_checked = verify is Verify.ALWAYS
            engines = make_engines(
                device_pool, pools, config, verify=is_checked, timed=self.metrics.enabled
            )
            for engine in engines.values():
                unless_made.callback(engine.close)
            data = (
                DataPlane(geometry, engines, pools, verify=verify)
                if shared is None
                else SharedDataPlane(geometry, engines, pools, verify=verify, host=shared)
            )
            manager = TierManager(
                geometry,
                PrefixIndex(policy=config.host.eviction_policy, clock=clock),
                pools,
                data,
                options=tier_options(
                    config,
                    next(iter(pools.values())).num_slots,
                    verify,
                    writes_storage=writes_storage,
                ),
                switches=self.switches,
                ranks=ranks,
                metrics=self.metrics,
                events=self.events,
                clock=clock,
                pump=self._pump,
            )
            super().__init__(manager, data, engines, pools, num_threads=config.storage.workers)
            unless_made.pop_all()
            unless_made.callback(self.close)  # from here on it does all that
            if storage is not None:
                self.attach_storage(storage)
            elif config.storage.enabled and config.storage.target is not None:
                self.attach_storage(config.storage.target, **backend_options(config))
            if config.control.socket is not None:
                several = ranks is not None and ranks.size > 1
                self._listen(config.control.socket, ranks.rank if ranks and several else None)
            unless_made.pop_all()

    # ---------------------------------------------------------------- prompts

    def keys(
        self,
        tokens: Any,
        *,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
    ) -> list[bytes]:
        """The keys of the whole pages of a prompt; see `kvferry.index.page_keys`."""
        return self._keys(Prompt(tokens, lora, salt, content))

    def match(
        self,
        tokens: Any,
        *,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
    ) -> Match:
        """What of a prompt can be loaded. Its pages are kept until `Match.release`, or 30 s.

        Args:
            tokens: The prompt, from its first token on.
            lora: The adapter; None: the namespace's.
            salt: None: the namespace's.
            content: Images and the like in the prompt.
        """
        self.poll()
        return self._manager.match(self._keys(Prompt(tokens, lora, salt, content)))

    def load(
        self,
        found: Match,
        *,
        device_slots: Any = None,
        plane_slots: Mapping[str, Any] | None = None,
        skip_tokens: int = 0,
        device_run: int = 1,
        stream: int | None = None,
    ) -> LoadHandle:
        """Load what was found, from token `skip_tokens` on.

        Args:
            found: From `match`.
            device_slots: The token slot of each token from `skip_tokens` on; shape ``[tokens]`` or
                ``[pages, P]``, as in `TransferPlan.build`.
            plane_slots: Of planes with another number of rows a page, pages from `skip_tokens` on;
                of state planes one row, where the state is to go.
            skip_tokens: What the caller has already; whole pages. Nothing below is written.
            device_run: A promise about device slots that lie on the device.
            stream: Of the device; None: the caller's current one.

        Returns:
            A handle that may have accepted nothing; its `reason` says why.

        Raises PlanError where the slots do not fit.
        """
        self.poll()
        skip_tokens = check_whole("skip_tokens", skip_tokens)
        state_planes = {span.plane.name for span in self.geometry.spans(SlotKind.STATE)}
        rows = DeviceSlots(
            self.geometry,
            device_slots,
            plane_slots,
            first_page=skip_tokens // self.geometry.page_size,
            device_run=device_run,
            stream=stream,
        )
        handle = self._manager.load(
            found,
            rows,
            skip_tokens=skip_tokens,
            has_state_slots=state_planes <= set(plane_slots or ()),
            stream=stream,
        )
        self.poll()
        return handle

    def store(
        self,
        tokens: Any,
        *,
        device_slots: Any = None,
        plane_slots: Mapping[str, Any] | None = None,
        valid_tokens: int | None = None,
        has_state: bool = False,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
        priority: int = 0,
        device_run: int = 1,
        stream: int | None = None,
    ) -> StoreHandle:
        """Offer what was computed for a prompt; the policy decides what is stored. Never blocks.

        Args:
            tokens: The prompt, from its first token on.
            device_slots: The token slot of each of its tokens.
            plane_slots: Of planes with another number of rows a page; of state planes one row.
            valid_tokens: How many leading tokens are filled; None: all. Whole pages of these are
                stored, and nothing behind.
            has_state: `plane_slots` have the state after `valid_tokens` tokens. It is kept where
                these are whole pages.
            lora, salt, content: As for `match`.
            priority: For the eviction policy of that name.
            device_run, stream: As for `load`.
        """
        offer = Offer(
            device_slots=device_slots, plane_slots=plane_slots, valid_tokens=valid_tokens,
            has_state=has_state, priority=priority, device_run=device_run, stream=stream,
        )  # fmt: skip
        return self._offer(Prompt(tokens, lora, salt, content), offer, evicting=False)

    def evicting(
        self,
        tokens: Any,
        *,
        device_slots: Any = None,
        plane_slots: Mapping[str, Any] | None = None,
        valid_tokens: int | None = None,
        has_state: bool = False,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
        priority: int = 0,
        device_run: int = 1,
        stream: int | None = None,
    ) -> StoreHandle:
        """`store`, by an engine that is about to give these device slots to others.

        Whatever the policy, what is not on the host is copied there. The slots are the handle's
        until it is `done`; on a GPU, a stream that did its `wait_all` may write them before. Where
        the host has no room the pages are lost, and `reason` says so.
        """
        offer = Offer(
            device_slots=device_slots, plane_slots=plane_slots, valid_tokens=valid_tokens,
            has_state=has_state, priority=priority, device_run=device_run, stream=stream,
        )  # fmt: skip
        return self._offer(Prompt(tokens, lora, salt, content), offer, evicting=True)

    def _offer(self, prompt: Prompt, offer: Offer, *, evicting: bool) -> StoreHandle:
        self.poll()
        filled = offer.filled(prompt)
        # Making keys is most of the work of a call that has nothing to do.
        keys = self._keys(filled) if self.switches.store else []
        is_whole = len(keys) * self.geometry.page_size == filled.num_tokens
        at_boundary = offer.has_state and bool(keys) and is_whole
        handle = self._manager.store(
            keys,
            offer.rows(self.geometry),
            evicting=evicting,
            state_page=len(keys) - 1 if at_boundary else None,
            priority=offer.priority,
            stream=offer.stream,
        )
        self.poll()
        return handle

    def prefetch(
        self,
        tokens: Any,
        *,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
    ) -> FetchHandle:
        """Begin to bring what storage has of a prompt to the host.

        Ask `FetchHandle.look` before the request is scheduled; `cancel` when it is aborted.
        """
        self.poll()
        return self._manager.prefetch(self._keys(Prompt(tokens, lora, salt, content)))

    def explain(
        self,
        tokens: Any,
        *,
        lora: str | None = None,
        salt: str | None = None,
        content: Iterable[ContentSpan] = (),
        storage_timeout: float = 0.0,
    ) -> Explanation:
        """Why a prompt hits as far as it does. Changes nothing.

        Args:
            tokens, lora, salt, content: As for `match`.
            storage_timeout: Ask storage itself, and wait so many seconds for its answer; 0: tell
                what is known of it.
        """
        check_seconds("storage_timeout", storage_timeout)
        self.poll()
        prompt = Prompt(tokens, lora, salt, content)
        return explain(
            self._manager,
            prompt.namespace(self.namespace),
            self._keys(prompt),
            prompt.num_tokens,
            self.geometry.page_size,
            storage_timeout,
        )

    def __repr__(self) -> str:
        slots = {str(kind): pool.num_slots for kind, pool in self._pools.items()}
        return f"KVFerry(slots={slots}, storage={self._manager.storage_state})"

    def _keys(self, prompt: Prompt) -> list[bytes]:
        return prompt.keys(self.namespace, self.geometry.page_size)
