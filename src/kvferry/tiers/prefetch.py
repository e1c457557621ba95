"""From storage to the host, ahead of a load: probes, reads, and what may be published when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.storage import ItemStatus
from kvferry.tiers.commands import Found, ProbeStorage, ReadPages, StorageDone
from kvferry.tiers.fetch import Fetch, FetchStage, PageFetch
from kvferry.tiers.fetch_reads import FetchReads
from kvferry.tiers.handles import FetchResult
from kvferry.tiers.interrupts import undivided
from kvferry.tiers.jobs import Job, answer
from kvferry.tiers.policy import Reason
from kvferry.tiers.restore import leading
from kvferry.tiers.state import Actor
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.tiers.commands import Completion
    from kvferry.tiers.control import Control

__all__ = ["Prefetch"]

_WHY = {
    ItemStatus.MISS: Reason.MISSING,
    ItemStatus.CORRUPT: Reason.CORRUPT,
    ItemStatus.REFUSED: Reason.STORAGE_REFUSED,
    ItemStatus.FAILED: Reason.STORAGE_FAILED,
}


class _ProbeJob(Job):
    kind = SlotKind.PAGE

    def __init__(self, desk: Prefetch, fetch: Fetch, kind: SlotKind, keys: list[bytes]):
        self.kind = kind
        self.keys = keys
        self.fetch = fetch
        self._desk = desk
        self.generation, self.deadline = desk.stamp()

    def late(self) -> None:
        super().late()
        self._desk.late_probe(self)

    def finish(self, completion: Completion) -> None:
        self._desk.probed(self, answer(completion, Found))


class _ReadJob(Job):
    def __init__(
        self,
        desk: Prefetch,
        fetch: Fetch,
        kind: SlotKind,
        positions: list[int],
        slots: list[int],
    ) -> None:
        self.kind = kind
        self.positions = positions
        self.slots = slots
        self.fetch = fetch
        self._desk = desk
        self.generation, self.deadline = desk.stamp()

    def late(self) -> None:
        super().late()
        self._desk.late_read(self)

    def finish(self, completion: Completion) -> None:
        self._desk.read(self, answer(completion, StorageDone))


class Prefetch:
    """Reads pages from storage into host slots.

    A slot that was given to a read is the read's until that returns, whatever became of the
    prefetch. Pages are published in order, so that what is here is always a prefix, and only when
    their bytes are in place and checked.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._open: list[Fetch] = []
        self.num_batches = 0
        """Reads in flight, late ones not counted."""

        self._changed = False
        self._reads = FetchReads(control, self)

    @property
    def num_open(self) -> int:
        """Prefetches that are not over."""
        return len(self._open)

    @property
    def is_at_rest(self) -> bool:
        """Whether `tick` would do nothing."""
        return not self._open and not self._changed

    def stamp(self) -> tuple[int, float]:
        """Generation and deadline of a storage job that starts now."""
        control = self._control
        return control.link.generation, control.clock() + control.options.prefetch_max_secs

    # ---------------------------------------------------------------- starting and ending

    def start(self, keys: Sequence[bytes], *, forced: bool = False) -> Fetch:
        """Begin to fetch what of `keys`, the pages of a prompt, is not on the host."""
        control = self._control
        nodes = control.chain_nodes(keys)
        here = control.usable_on_host(nodes)
        fetch = Fetch(keys, here)
        now = fetch.submitted_at = control.clock()
        missing = (len(keys) - here) * control.page_size
        if not control.options.prefetch:
            fetch.reason = Reason.SWITCHED_OFF
        elif missing <= 0:
            fetch.reason = Reason.ALREADY_HERE if here else Reason.NO_WHOLE_PAGE
        elif not forced and missing < control.options.prefetch_threshold_tokens:
            fetch.reason = Reason.BELOW_THRESHOLD
        else:
            fetch.reason = control.link.refusal()
        asked = here + control.link.misses.first_missing(keys[here:])
        if not fetch.reason and asked == here:
            fetch.reason = Reason.MISSING
        if fetch.reason:
            fetch.done = True
            return fetch
        fetch.look_deadline = now + control.options.fetch_seconds(missing)
        fetch.hard_deadline = now + control.options.prefetch_max_secs
        self.hold(fetch, nodes[:here])
        fetch.stage = FetchStage.PROBING
        self._open.append(fetch)
        for kind in control.tiers:
            self._probe(fetch, kind, list(keys[here:asked]))
        return fetch

    def hold(self, fetch: Fetch, nodes: Sequence[int]) -> None:
        """Keep what `fetch` builds on; without that its next pages could push out its first."""
        if nodes:
            # Longer than it may take: given back when the prefetch is over.
            seconds = 2 * self._control.options.prefetch_max_secs
            fetch.leases.append(self._control.index.lease(nodes, seconds=seconds))

    def _probe(self, fetch: Fetch, kind: SlotKind, keys: list[bytes]) -> None:
        job = _ProbeJob(self, fetch, kind, keys)
        fetch.statuses_left += 1
        self._control.jobs.start(
            job,
            lambda number: ProbeStorage(
                job=number, generation=job.generation, kind=kind, keys=tuple(keys)
            ),
        )

    @undivided
    def look(self, fetch: Fetch) -> FetchResult | None:
        """See `FetchHandle.look`."""
        if not fetch.done:
            if self._control.clock() < fetch.look_deadline:
                return None
            self.stop(fetch, Reason.DEADLINE)
        return self.result(fetch)

    def result(self, fetch: Fetch) -> FetchResult:
        """See `FetchHandle.result`."""
        control = self._control
        here = control.usable_on_host(control.chain_nodes(fetch.keys))
        return FetchResult(here * control.page_size, fetch.num_fetched, fetch.reason)

    @undivided
    def stop(self, fetch: Fetch, reason: Reason) -> None:
        """End `fetch`; what is being read is parked, what was read behind a hole goes."""
        if fetch.done:
            return
        control = self._control
        for position, slot in sorted(fetch.slots.items()):
            tier = control.tiers[SlotKind.PAGE]
            if fetch.pages[position] is PageFetch.READ:
                tier.abandon(slot, Actor.READ)
            else:
                tier.park(slot)
        if fetch.state_slot >= 0:
            tier = control.tiers[SlotKind.STATE]
            if fetch.state_fetch is PageFetch.READ:
                tier.abandon(fetch.state_slot, Actor.READ)
            else:
                tier.park(fetch.state_slot)
        fetch.slots.clear()
        fetch.state_slot = -1
        fetch.stage, fetch.done = FetchStage.OVER, True
        self._changed = True
        fetch.reason = reason
        for lease in fetch.leases:
            control.index.release(lease)
        fetch.leases.clear()
        self._open.remove(fetch)
        control.metrics.prefetched(
            reason or "complete",
            fetch.num_fetched,
            fetch.num_bytes,
            control.clock() - fetch.submitted_at,
        )

    def stop_all(self, reason: Reason) -> None:
        """End every prefetch."""
        for fetch in list(self._open):
            self.stop(fetch, reason)

    def tick(self, *, changed: bool) -> None:
        """Go on with those that waited for budget or for others, where something `changed`."""
        changed |= self._changed
        self._changed = False
        now = self._control.clock()
        down = self._control.link.refusal()
        for fetch in list(self._open):
            if now >= fetch.hard_deadline:
                self.stop(fetch, Reason.DEADLINE)
            elif down and fetch.stage is FetchStage.READING and not fetch.statuses_left:
                self.stop(fetch, down)
            elif changed and fetch.stage is FetchStage.READING:
                self._reads.advance(fetch)

    # ---------------------------------------------------------------- answers

    def late_probe(self, job: _ProbeJob) -> None:
        """A probe does not come back."""
        self._late(job.generation)
        self.stop(job.fetch, Reason.DEADLINE)

    def late_read(self, job: _ReadJob) -> None:
        """A read does not come back: its slots are parked with it."""
        self._late(job.generation)
        self.num_batches -= 1
        self.stop(job.fetch, Reason.DEADLINE)

    def _late(self, generation: int) -> None:
        link = self._control.link
        link.num_late += 1
        self._control.judge(generation, ok=False, why="a read or a question did not come back")
        self._control.metrics.worker_fault("late_read")

    def probed(self, job: _ProbeJob, done: Found) -> None:
        """Storage said what it has."""
        control, fetch = self._control, job.fetch
        fetch.statuses_left -= 1
        if done.error and not job.is_late and not done.refused:
            control.judge(job.generation, ok=False, why=done.error)
        if fetch.done:
            return
        if done.error:
            self.stop(fetch, Reason.STORAGE_REFUSED if done.refused else Reason.STORAGE_FAILED)
            return
        if control.link.is_current(job.generation):
            control.hints.correct(job.kind, job.keys, done.found)
        if job.kind is SlotKind.PAGE:
            fetch.end = fetch.start + leading(done.found)
            fetch.pages = [PageFetch.WANTED] * leading(done.found)
        else:
            fetch.states_found = list(done.found)
        if not fetch.statuses_left:
            self._plan(fetch)

    def _plan(self, fetch: Fetch) -> None:
        """All probes are answered: what is worth reading."""
        control = self._control
        count = fetch.end if control.rule.needs_pages else fetch.start + len(fetch.states_found)
        if control.rule.needs_state:
            # Pages behind the last checkpoint are of no use.
            count = next(
                (
                    page + 1
                    for page in range(count - 1, fetch.start - 1, -1)
                    if fetch.states_found[page - fetch.start]
                ),
                fetch.start,
            )
            fetch.state_page = count - 1 if count > fetch.start else None
            fetch.state_fetch = PageFetch.WANTED if fetch.state_page is not None else PageFetch.HERE
        fetch.end = count
        if not control.rule.needs_pages:
            fetch.pages = []
        else:
            del fetch.pages[count - fetch.start :]
        fetch.stage = FetchStage.READING
        if count == fetch.start:
            self.stop(fetch, Reason.MISSING)
            return
        self._reads.advance(fetch)

    def read(self, job: _ReadJob, done: StorageDone) -> None:
        """A batch of reads came back."""
        control, fetch, tier = self._control, job.fetch, self._control.tiers[job.kind]
        fetch.statuses_left -= 1
        if not job.is_late:
            self.num_batches -= 1
            failed = ItemStatus.FAILED in done.statuses
            control.judge(job.generation, ok=not failed, why=done.reason)
        is_over = fetch.done or job.aborted
        keys = [fetch.keys[fetch.start + position] for position in job.positions]
        self._tell_corrupt(job.kind, keys, done.statuses)
        for position, key, slot, status in zip(
            job.positions, keys, job.slots, done.statuses, strict=True
        ):
            if status in (ItemStatus.MISS, ItemStatus.CORRUPT):
                self._no_longer_stored(job.kind, key, job.generation)
            ok = status is ItemStatus.OK
            if is_over:
                tier.abandon(slot, Actor.READ)
            elif job.kind is SlotKind.STATE:
                fetch.state_fetch = PageFetch.READ if ok else PageFetch.FAILED
                if not ok:
                    fetch.state_slot = -1
                    tier.abandon(slot, Actor.READ)
            else:
                fetch.pages[position] = PageFetch.READ if ok else PageFetch.FAILED
                if not ok:
                    del fetch.slots[position]
                    tier.abandon(slot, Actor.READ)
            if not ok and not fetch.reason and not is_over:
                fetch.reason = _WHY[status]
        if not is_over:
            fetch.num_bytes += done.num_bytes
            self._reads.advance(fetch)

    def _tell_corrupt(
        self, kind: SlotKind, keys: Sequence[bytes], statuses: Sequence[ItemStatus]
    ) -> None:
        """While their nodes are there: one that nothing holds is forgotten with its slot."""
        control = self._control
        corrupt = [key for key, status in zip(keys, statuses, strict=True)
                   if status is ItemStatus.CORRUPT]  # fmt: skip
        if corrupt:
            control.metrics.digest_failed(Tier.STORAGE, len(corrupt))
            nodes = [node for key in corrupt if (node := control.index.node_of(key)) is not None]
            control.tell_quarantined(Tier.STORAGE, kind, nodes, "checksum")

    def _no_longer_stored(self, kind: SlotKind, key: bytes, generation: int) -> None:
        control = self._control
        if not control.link.is_current(generation):
            return
        if kind is SlotKind.PAGE:  # without a checkpoint, pages up to an earlier one will do
            control.link.misses.add(key)
        control.hints.drop(kind, [key])

    def send(self, fetch: Fetch, kind: SlotKind, positions: list[int], slots: list[int]) -> None:
        """Start one batch of reads, for which slots are reserved."""
        job = _ReadJob(self, fetch, kind, positions, slots)
        fetch.statuses_left += 1
        self.num_batches += 1
        keys = tuple(fetch.keys[fetch.start + position] for position in positions)
        self._control.jobs.start(
            job,
            lambda number: ReadPages(
                job=number,
                generation=job.generation,
                kind=kind,
                keys=keys,
                host_slots=tuple(slots),
            ),
        )
