"""The control plane: index, page bookkeeping, policies. One thread, no I/O, and it never waits."""

from __future__ import annotations

import functools
import time
from collections import deque
from typing import TYPE_CHECKING

from kvferry.errors import CacheError
from kvferry.events import EventLog
from kvferry.metrics import NullMetrics
from kvferry.switches import Switches
from kvferry.tiers.agreement import Agreement
from kvferry.tiers.backup import Backup
from kvferry.tiers.commands import (
    Completion,
    StorageAttached,
    StorageDetached,
    WorkerFault,
)
from kvferry.tiers.control import Control
from kvferry.tiers.fetch import FetchHandle
from kvferry.tiers.handles import EvictHandle, LoadHandle, Match, ProbeHandle, StoreHandle
from kvferry.tiers.host_tier import HostTier
from kvferry.tiers.interrupts import undivided
from kvferry.tiers.jobs import Jobs
from kvferry.tiers.link import LinkState, StorageLink
from kvferry.tiers.loads import Loads
from kvferry.tiers.policy import Reason, TierOptions
from kvferry.tiers.prefetch import Prefetch
from kvferry.tiers.restore import RestoreRule, longest
from kvferry.tiers.rows import check_whole
from kvferry.tiers.stats import LookUp, TierStats, backup_gaps, look_up, tier_stats
from kvferry.tiers.storage_desk import StorageDesk
from kvferry.tiers.stores import Stores
from kvferry.tiers.work import LoadWork, StoreWork
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvferry.geometry import Geometry
    from kvferry.index import PrefixIndex
    from kvferry.metrics import MetricsSink
    from kvferry.ranks import Ranks
    from kvferry.tiers.handles import Pump
    from kvferry.tiers.host_tier import SlotPool
    from kvferry.tiers.jobs import DataLink
    from kvferry.tiers.rows import DeviceSlots

__all__ = ["TierManager"]


class TierManager:
    """Knows what is where, decides what moves, and keeps account of what is in flight.

    Every call returns at once. What it starts goes to the data plane as commands; `poll` takes the
    answers. Belongs to one thread.

    Args:
        geometry: The planes.
        index: What is known of prompts. Nobody else may change it.
        pools: Host slots by kind, all free.
        data: The data plane, or the way to it.
        options: Policies and limits.
        switches: What is on; may be changed at any time.
        ranks: Who must agree on prefixes; None: nobody.
        metrics: Is told of what happens.
        events: Takes events for routers.
        clock: Seconds that never go back.
        pump: Lets a handle's `wait` pass time; by default it only polls.
    """

    def __init__(
        self,
        geometry: Geometry,
        index: PrefixIndex,
        pools: Mapping[SlotKind, SlotPool],
        data: DataLink,
        *,
        options: TierOptions | None = None,
        switches: Switches | None = None,
        ranks: Ranks | None = None,
        metrics: MetricsSink | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        pump: Pump | None = None,
    ) -> None:
        self._data = data
        options = options or TierOptions()
        switches = switches or Switches()
        tiers = {
            kind: HostTier(
                kind,
                pool,
                index,
                evicted=functools.partial(self._evicted, kind),
                keep=functools.partial(self._last_chance, kind),
            )
            for kind, pool in pools.items()
        }
        self._control = Control(
            geometry=geometry,
            rule=RestoreRule(geometry),
            index=index,
            tiers=tiers,
            options=options,
            switches=switches,
            jobs=Jobs(data.submit),
            link=StorageLink(options, switches, clock=clock),
            metrics=metrics if metrics is not None else NullMetrics(),
            events=events if events is not None else EventLog(0),
            clock=clock,
            pump=pump if pump is not None else self._only_poll,
        )
        self._agreement = Agreement(ranks, options.agree_timeout_secs)
        self._backup = Backup(self._control)
        self._stores = Stores(self._control, self._backup)
        self._prefetch = Prefetch(self._control)
        self._storage = StorageDesk(self._control, self._backup, self._prefetch)
        self._loads = Loads(self._control, self._storage.quarantine)
        self._num_faults = 0
        self._due: deque[Completion] = deque()

    @property
    def switches(self) -> Switches:
        """What is on."""
        return self._control.switches

    @property
    def options(self) -> TierOptions:
        """Policies and limits."""
        return self._control.options

    @property
    def storage_state(self) -> LinkState:
        """Whether storage is attached."""
        return self._control.link.state

    @property
    def storage_generation(self) -> int:
        """The number of the attachment that is, or was last, there."""
        return self._control.link.generation

    def _only_poll(self, timeout: float) -> None:  # noqa: ARG002
        self.poll()

    # ---------------------------------------------------------------- what engines call

    def match(self, keys: Sequence[bytes]) -> Match:
        """What is cached of a prompt, given the keys of all its whole pages.

        With several ranks it is what all of them have: one agreement a call, whatever is found.
        """
        self._check_open()
        control = self._control
        known = control.index.match(keys)
        nodes = known.nodes
        if control.rule.is_monotone:
            here = control.first_suspect(nodes, known.num_on_host)
            agreed = self._agreement.count(here)
        else:
            pages, states = control.readable_pages(nodes), control.readable_states(nodes)
            usable = control.rule.usable_prefixes(pages, states)
            here = longest(usable)
            agreed = self._agreement.prefix(usable, len(keys))
        stored = here if control.link.refusal() else max(here, known.num_held)
        size = control.page_size
        reason = Reason.NONE if agreed == len(keys) else Reason.NOTHING_FOUND
        by_tier = {Tier.HOST: here * size, Tier.STORAGE: (stored - here) * size}
        control.metrics.matched(by_tier, (len(keys) - stored) * size)
        life = control.life
        return Match(
            keys,
            agreed * size,
            tokens_by_tier=by_tier,
            reason=reason,
            is_stale=lambda: control.life != life,
            release=self._keep(nodes[:agreed]) if agreed else None,
        )

    @undivided
    def _keep(self, nodes: Sequence[int]) -> Callable[[], bool]:
        """Keep pages for a match; what lets them go. They go by themselves after a while, too."""
        index = self._control.index
        lease = index.lease(nodes, seconds=self._control.options.lease_secs)
        return undivided(functools.partial(index.release, lease))

    @undivided
    def load(
        self,
        found: Match,
        rows: DeviceSlots,
        *,
        skip_tokens: int = 0,
        has_state_slots: bool = False,
        stream: int | None = None,
    ) -> LoadHandle:
        """Load what was found, from `skip_tokens` on. Nothing below that is written."""
        self._check_open()
        skip = check_whole("skip_tokens", skip_tokens)
        work = LoadWork(skip_tokens=skip, of_pages=len(found.keys), num_tokens=skip, usable=skip)
        if found.is_stale:
            work.done, work.reason = True, Reason.STALE_MATCH
        else:
            self._loads.load(
                found.keys,
                rows,
                work,
                limit=found.num_tokens // self._control.page_size,
                has_state_slots=has_state_slots,
                stream=stream,
            )
        return LoadHandle(work, self._control.pump, self._agree_loaded)

    @undivided
    def store(
        self,
        keys: Sequence[bytes],
        rows: DeviceSlots,
        *,
        evicting: bool = False,
        state_page: int | None = None,
        priority: int = 0,
        stream: int | None = None,
    ) -> StoreHandle:
        """Offer filled pages of a prompt, from its first on, as `Stores.store` says."""
        self._check_open()
        work = StoreWork(num_pages=len(keys))
        self._stores.store(
            keys,
            rows,
            work,
            evicting=evicting,
            state_page=state_page,
            priority=priority,
            stream=stream,
        )
        return (EvictHandle if evicting else StoreHandle)(work, self._control.pump)

    @undivided
    def prefetch(self, keys: Sequence[bytes], *, forced: bool = False) -> FetchHandle:
        """Begin to bring what storage has of a prompt to the host. `forced`: however little."""
        self._check_open()
        fetch = self._prefetch.start(keys, forced=forced)
        return FetchHandle(fetch, self._control.pump, self._prefetch)

    def poll(self) -> int:
        """Take the data plane's answers, and do what follows; how many there were. Never blocks."""
        # Engines poll in every step, and in most of them nothing is under way.
        count = 0 if self._is_at_rest() else self._advance()
        events = self._control.events
        if events.has_undelivered:
            # A subscriber may take its time, and is nobody's bookkeeping.
            self._control.listeners.call("a subscriber of events", events.dispatch)
        return count

    def _is_at_rest(self) -> bool:
        """Whether `_advance` would change nothing, and would have nothing to tell."""
        stirring = self._data.has_news or self._due or self._backup.depth
        return not stirring and self._control.is_at_rest and self._prefetch.is_at_rest

    @undivided
    def _advance(self) -> int:
        control, due = self._control, self._due
        due.extend(self._data.poll())
        count = len(due)
        while due:  # one by one: what raises must not take the others along
            self._take(due.popleft())
        control.index.expire()
        control.jobs.call_late(control.clock())
        self._prefetch.tick(changed=count > 0)
        self._storage.try_again()
        self._backup.dispatch()
        control.tell_levels()
        return count

    def _agree_loaded(self, load: LoadWork, timeout: float | None) -> int:
        return self._agreement.loaded(load, self._control.rule, self._control.page_size, timeout)

    # ---------------------------------------------------------------- storage

    @undivided
    def new_generation(self) -> int:
        """A number for the next attachment. CacheError while another one is there."""
        self._check_open()
        return self._storage.new_generation()

    @undivided
    def detach_storage(self, *, force: bool = False) -> bool:
        """Use storage no more; True if it is gone already. See `StorageDesk.detach`."""
        return self._storage.detach(force=force)

    @undivided
    def probe(self, keys: Sequence[bytes]) -> ProbeHandle:
        """Ask storage which of these pages it has."""
        self._check_open()
        return ProbeHandle(self._storage.probe(keys), self._control.pump)

    @undivided
    def confirm_stored(self) -> list[ProbeHandle]:
        """Ask storage for the host's pages that it is thought to have, see `StorageDesk`."""
        return [ProbeHandle(one, self._control.pump) for one in self._storage.confirm()]

    # ---------------------------------------------------------------- ends

    @undivided
    def reset(self) -> None:
        """Forget every page. What is in flight ends by itself, and its results are thrown away."""
        control = self._control
        control.life += 1
        self._prefetch.stop_all(Reason.RESET)
        self._backup.clear()
        for job in control.jobs:
            job.abort()
        for tier in control.tiers.values():
            if tier.kind is SlotKind.PAGE:
                control.tell_evicted(Tier.HOST, tier.resident_nodes(), "reset")
            tier.wipe()
        control.hints.reset()
        self._stores.forget_hits()

    @undivided
    def offer_all(self) -> int:
        """Queue every page of the host that storage lacks; `num_unwritten` then."""
        for tier in self._control.tiers.values():
            self._backup.offer(tier.resident_nodes(), counted=False)
        return self.num_unwritten

    @property
    def num_unwritten(self) -> int:
        """Pages that wait to be written to storage, or are being written."""
        return self._backup.depth + self._backup.num_writing

    def backup_gaps(self) -> tuple[int, int]:
        """Pages of the host that storage lacks, and those it has without all before them."""
        return backup_gaps(self._control)

    def look_up(self, keys: Sequence[bytes]) -> LookUp:
        """What is known of a prompt; changes nothing, and asks no rank."""
        return look_up(self._control, keys)

    def storage_refusal(self) -> Reason:
        """Why storage cannot be used just now; NONE if it can."""
        return self._control.link.refusal()

    @undivided
    def close(self) -> None:
        """Take no more calls but `poll`, `stats` and `detach_storage`."""
        if not self._control.closed:
            self._prefetch.stop_all(Reason.CLOSED)
            self._backup.clear()
            self._control.closed = True

    @property
    def num_jobs(self) -> int:
        """Commands without an answer."""
        return len(self._control.jobs)

    def stats(self) -> TierStats:
        """What is where, and what is in flight."""
        return tier_stats(
            self._control,
            waiting_for_storage=self._backup.depth,
            prefetches=self._prefetch.num_open,
            worker_faults=self._num_faults,
            transient_pages=self._loads.num_transient,
        )

    def check_integrity(self) -> None:
        """Prove that index, ledger and pools agree; raises the first difference."""
        for tier in self._control.tiers.values():
            tier.check_integrity()
        self._control.index.check_integrity()

    # ---------------------------------------------------------------- inside

    def _check_open(self) -> None:
        if self._control.closed:
            raise CacheError("the cache is closed: make a new one")

    def _take(self, completion: Completion) -> None:
        control = self._control
        if isinstance(completion, WorkerFault):
            self._num_faults += 1
            control.metrics.worker_fault(completion.kind)
        elif isinstance(completion, StorageAttached):
            self._storage.attached(completion.generation)
        elif completion.job >= 0:
            control.jobs.finish(completion.job, completion)
        if isinstance(completion, StorageDetached):
            self._storage.gone(completion.generation, completion.error)

    def _last_chance(self, kind: SlotKind, node: int) -> bool:
        return self._backup.last_chance(kind, node)

    def _evicted(self, kind: SlotKind, node: int) -> None:
        self._control.evicted(kind, node)
