"""From the host to storage: a bounded queue of pages, written in batches beside all else."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvferry.storage import ItemStatus
from kvferry.tiers.commands import StorageDone, WritePages
from kvferry.tiers.jobs import Job, answer
from kvferry.tiers.policy import Reason
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.tiers.commands import Completion
    from kvferry.tiers.control import Control

__all__ = ["Backup"]


class _WriteJob(Job):
    def __init__(self, backup: Backup, kind: SlotKind, keys: list[bytes], slots: list[int]) -> None:
        self.kind = kind
        self.keys = keys
        self.slots = slots
        self._backup = backup
        self.generation = backup.generation
        self.deadline = backup.write_deadline()

    def late(self) -> None:
        super().late()
        self._backup.late(self)

    def finish(self, completion: Completion) -> None:
        self._backup.finish(self, answer(completion, StorageDone))


class Backup:
    """Writes pages of the host to storage.

    Pages wait by key, not by slot: until its batch is sent, a page that waits may be evicted from
    the host like any other. Those being written may not.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        self._queues: dict[SlotKind, OrderedDict[bytes, None]] = {
            kind: OrderedDict() for kind in control.tiers
        }
        self._writing: dict[SlotKind, int] = dict.fromkeys(control.tiers, 0)
        self._num_batches = 0

    @property
    def depth(self) -> int:
        """Pages that wait."""
        return sum(map(len, self._queues.values()))

    @property
    def num_writing(self) -> int:
        """Pages that are being written, late ones not counted."""
        return self._control.num_writing

    @property
    def generation(self) -> int:
        """Of the attachment that is written to."""
        return self._control.link.generation

    def write_deadline(self) -> float:
        """When a write that starts now is late."""
        return self._control.clock() + self._control.options.write_max_secs

    def offer(self, nodes: Iterable[int], *, counted: bool = True) -> None:
        """Pages and checkpoints that are on the host should be in storage too.

        What is not taken is counted as dropped, unless it was offered, and `counted`, before.
        """
        control = self._control
        refusal = control.link.refusal()
        if not control.options.writes_storage or refusal not in (Reason.NONE, Reason.STORAGE_DOWN):
            return
        skipped = 0
        room = 0 if refusal else control.options.max_queue_pages - self.depth
        for node in nodes:
            for kind, tier in control.tiers.items():
                if tier.slot_of(node) < 0 or control.hints.is_stored(kind, node):
                    continue
                key = control.index.key_of(node)
                if key in self._queues[kind]:
                    continue
                if room <= 0:
                    skipped += 1
                    continue
                self._queues[kind][key] = None
                room -= 1
        if skipped and counted:
            control.metrics.dropped(refusal or Reason.QUEUE_FULL, skipped)
        self.dispatch()

    def last_chance(self, kind: SlotKind, node: int) -> bool:
        """`node` is about to be evicted from the host: True if it is being written first.

        So is a checkpoint at its end, which would go with it.
        """
        kept = self._last_chance(kind, node)
        states = self._control.tiers.get(SlotKind.STATE)
        if kind is SlotKind.PAGE and states is not None and states.slot_of(node) >= 0:
            kept |= self._last_chance(SlotKind.STATE, node)
        return kept

    def _last_chance(self, kind: SlotKind, node: int) -> bool:
        control = self._control
        if not control.options.writes_storage or control.hints.is_stored(kind, node):
            return False
        if control.link.refusal() is not Reason.NONE:
            # One that was offered while storage was down has been counted then.
            key = control.index.key_of(node)
            if key in self._queues[kind]:
                del self._queues[kind][key]
                control.metrics.dropped(control.link.refusal(), 1)
            return False
        if not self._room(kind) or not self._send(kind, [(control.index.key_of(node), node)]):
            control.metrics.dropped(Reason.EVICTED_UNSTORED, 1)
            return False
        return True

    def _room(self, kind: SlotKind) -> int:
        """How many more pages may be held by writes: half of the tier stays free of them."""
        if self._num_batches >= self._control.options.max_batches:
            return 0
        limit = max(1, self._control.tiers[kind].num_slots // 2)
        return max(0, limit - self._writing[kind])

    def dispatch(self) -> None:
        """Send batches of what waits, as far as there is room in flight."""
        for kind in self._queues:
            while self._queues[kind] and self._send_next(kind):
                pass
        self._control.metrics.queue("backup", self.depth)

    def _send_next(self, kind: SlotKind) -> bool:
        """Send one batch of what waits; False if none may be sent just now."""
        control, waiting, tier = self._control, self._queues[kind], self._control.tiers[kind]
        room = min(self._room(kind), control.options.batch_pages)
        if not room or control.link.refusal() is not Reason.NONE:
            return False
        batch: list[tuple[bytes, int]] = []
        while waiting and len(batch) < room:
            key, _ = waiting.popitem(last=False)
            node = control.index.node_of(key)
            # Meanwhile it may have been evicted, written, or found to be in doubt.
            if (
                node is not None
                and tier.is_readable(node)
                and not control.hints.is_stored(kind, node)
            ):
                batch.append((key, node))
        return not batch or self._send(kind, batch)

    def _send(self, kind: SlotKind, batch: Sequence[tuple[bytes, int]]) -> bool:
        control = self._control
        if control.link.refusal() is not Reason.NONE:
            return False
        tier = control.tiers[kind]
        if not all(tier.is_readable(node) for _, node in batch):
            return False
        keys = [key for key, _ in batch]
        slots = tier.begin_reading([node for _, node in batch])
        job = _WriteJob(self, kind, keys, slots)
        self._num_batches += 1
        self._writing[kind] += len(slots)
        control.num_writing += len(slots)
        control.jobs.start(
            job,
            lambda number: WritePages(
                job=number,
                generation=job.generation,
                kind=kind,
                keys=tuple(keys),
                host_slots=tuple(slots),
            ),
        )
        return True

    def late(self, job: _WriteJob) -> None:
        """A write does not come back: its slots stay with it, others go on."""
        self._control.link.num_late += 1
        self._control.judge(job.generation, ok=False, why="a write did not come back")
        self._control.metrics.worker_fault("late_write")
        self._num_batches -= 1
        self._writing[job.kind] -= len(job.slots)
        self._control.num_writing -= len(job.slots)

    def finish(self, job: _WriteJob, done: StorageDone) -> None:
        """A batch was written, or not; each page counts by itself."""
        control = self._control
        control.tiers[job.kind].end_reading(job.slots)
        if not job.is_late:
            self._num_batches -= 1
            self._writing[job.kind] -= len(job.slots)
            control.num_writing -= len(job.slots)
        failed = [status is ItemStatus.FAILED for status in done.statuses]
        if not job.is_late:
            control.judge(job.generation, ok=not any(failed), why=done.reason)
        if job.aborted or not control.link.is_current(job.generation):
            return
        written = [key for key, status in zip(job.keys, done.statuses, strict=True)
                   if status is ItemStatus.OK]  # fmt: skip
        for key in written:
            control.link.misses.clear(key)
        stored = [node for key in written if (node := control.index.node_of(key)) is not None]
        control.tell_stored(Tier.STORAGE, job.kind, stored)
        control.hints.note(job.kind, written)
        if any(failed):
            control.metrics.dropped(Reason.STORAGE_FAILED, sum(failed))
        refused = done.statuses.count(ItemStatus.REFUSED)
        if refused:
            control.metrics.dropped(Reason.STORAGE_REFUSED, refused)
        self.dispatch()

    def clear(self) -> None:
        """Nothing that waits is to be written."""
        for waiting in self._queues.values():
            waiting.clear()
