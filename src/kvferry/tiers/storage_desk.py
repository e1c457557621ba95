"""Storage comes and goes while requests run; pages with wrong bytes leave it; it can be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import CacheError
from kvferry.storage import ItemStatus
from kvferry.tiers.commands import (
    DetachStorage,
    Found,
    ProbeStorage,
    Quarantine,
    StorageDetached,
    StorageDone,
    TryStorage,
)
from kvferry.tiers.jobs import Job, answer
from kvferry.tiers.link import LinkState
from kvferry.tiers.policy import Reason
from kvferry.tiers.work import Probe
from kvferry.types import SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.tiers.backup import Backup
    from kvferry.tiers.commands import Completion
    from kvferry.tiers.control import Control
    from kvferry.tiers.prefetch import Prefetch

__all__ = ["StorageDesk"]


class _ProbeJob(Job):
    def __init__(self, desk: StorageDesk, probe: Probe, kind: SlotKind) -> None:
        self.kind = kind
        self.probe = probe
        self._desk = desk
        self.generation, self.deadline = desk.stamp()

    def late(self) -> None:
        super().late()
        self.probe.reason, self.probe.done = Reason.DEADLINE, True

    def finish(self, completion: Completion) -> None:
        self._desk.probed(self, answer(completion, Found))


class _QuarantineJob(Job):
    def __init__(self, desk: StorageDesk, kind: SlotKind, keys: Sequence[bytes]) -> None:
        self.kind = kind
        self.keys = keys
        self._desk = desk
        self.generation, _ = desk.stamp()

    def finish(self, completion: Completion) -> None:
        self._desk.quarantined(self, answer(completion, StorageDone))


class _TrialJob(Job):
    kind = SlotKind.PAGE

    def __init__(self, desk: StorageDesk) -> None:
        self._desk = desk
        self.generation, self.deadline = desk.stamp()

    def late(self) -> None:
        super().late()
        self._desk.late_trial(self)

    def finish(self, completion: Completion) -> None:
        self._desk.tried(self, answer(completion, StorageDone))


class _DetachJob(Job):
    kind = SlotKind.PAGE

    def finish(self, completion: Completion) -> None:
        completion = answer(completion, StorageDetached)


class StorageDesk:
    """Attaches, detaches, quarantines and asks."""

    def __init__(self, control: Control, backup: Backup, prefetch: Prefetch) -> None:
        self._control = control
        self._backup = backup
        self._prefetch = prefetch
        self._next_generation = 1
        self._trial: _TrialJob | None = None

    def new_generation(self) -> int:
        """A number for the next attachment. CacheError while another one is there."""
        if self._control.link.state is not LinkState.NONE:
            raise CacheError(
                f"storage is {self._control.link.state} already: detach_storage() first"
            )
        number = self._next_generation
        self._next_generation += 1
        return number

    def attached(self, generation: int) -> None:
        """A backend is there."""
        self._control.link.attach(generation)
        self._control.tell_storage("attached")
        self._next_generation = max(self._next_generation, generation + 1)

    def detach(self, *, force: bool = False) -> bool:
        """Use storage no more; True if it is gone already.

        Waiting writes are dropped, prefetches end with what they have, and what is in flight ends
        by itself. With `force` it is not waited for: slots that are being read into stay parked
        until those reads return.
        """
        control, link = self._control, self._control.link
        if link.state is LinkState.NONE:
            return True
        if link.state is LinkState.ATTACHED:
            link.begin_detach()
            self._backup.clear()
            self._prefetch.stop_all(Reason.NO_STORAGE)
            generation = link.generation
            control.jobs.start(
                _DetachJob(), lambda number: DetachStorage(job=number, generation=generation)
            )
        if force:
            control.jobs.give_up(link.generation)
            self.gone(link.generation, "given up, with what was in flight")
        return self._is_gone()

    def _is_gone(self) -> bool:
        return self._control.link.state is LinkState.NONE

    def gone(self, generation: int, reason: str = "") -> None:
        """The backend was closed, or is given up."""
        link = self._control.link
        if generation == link.generation and link.state is not LinkState.NONE:
            link.detached(generation)
            # The next backend has none of it, as far as anybody knows.
            self._control.hints.forget()
            self._control.tell_storage("detached", reason)

    def stamp(self) -> tuple[int, float]:
        """Generation and deadline of a question that is asked now."""
        control = self._control
        return control.link.generation, control.clock() + control.options.prefetch_max_secs

    def try_again(self) -> None:
        """Have storage that is down tried, where that is due: no request has to be the one."""
        control, link = self._control, self._control.link
        if not link.is_trial_due:
            return
        # One that hangs is not joined by others: its answer, however late, is as good.
        if self._trial is not None and self._trial.generation == link.generation:
            return
        self._trial = job = _TrialJob(self)
        control.jobs.start(job, lambda number: TryStorage(job=number, generation=job.generation))

    def late_trial(self, job: _TrialJob) -> None:
        """A trial does not come back."""
        self._control.link.num_late += 1
        self._control.judge(job.generation, ok=False, why="a trial did not come back")

    def tried(self, job: _TrialJob, done: StorageDone) -> None:
        """A trial is over."""
        if self._trial is job:
            self._trial = None
        (status,) = done.statuses
        if status is not ItemStatus.REFUSED:  # by nobody who asked the backend
            self._control.judge(job.generation, ok=status is ItemStatus.OK, why=done.reason)

    def probe(self, keys: Sequence[bytes]) -> Probe:
        """Ask storage which of these pages it has."""
        return self._ask(self._control.kinds[0], keys)

    def confirm(self) -> list[Probe]:
        """Ask storage for what it is thought to have of the host: one question a kind of slot.

        What it dropped meanwhile counts as unstored again, and is written when it is offered.
        """
        control, probes = self._control, []
        for kind, tier in control.tiers.items():
            nodes = [node for node in tier.resident_nodes() if control.hints.is_stored(kind, node)]
            if nodes:
                probes.append(self._ask(kind, [control.index.key_of(node) for node in nodes]))
        return probes

    def _ask(self, kind: SlotKind, keys: Sequence[bytes]) -> Probe:
        control = self._control
        probe = Probe(keys=keys)
        probe.reason = control.link.refusal()
        if probe.reason:
            probe.done = True
            return probe
        job = _ProbeJob(self, probe, kind)
        control.jobs.start(
            job,
            lambda number: ProbeStorage(
                job=number, generation=job.generation, kind=kind, keys=tuple(keys)
            ),
        )
        return probe

    def probed(self, job: _ProbeJob, done: Found) -> None:
        """Storage said what it has."""
        control, probe = self._control, job.probe
        if done.error and not job.is_late and not done.refused:
            control.judge(job.generation, ok=False, why=done.error)
        if probe.done:  # too late
            return
        if done.error:
            probe.reason = Reason.STORAGE_REFUSED if done.refused else Reason.STORAGE_FAILED
            probe.error = done.error
        else:
            probe.found = done.found
            if control.link.is_current(job.generation):
                control.hints.correct(job.kind, probe.keys, done.found)
        probe.done = True

    def quarantine(self, kind: SlotKind, keys: Sequence[bytes]) -> None:
        """Copies of these pages had wrong bytes. Storage looks whether its own have, too.

        They may be good: bytes that changed on the host did so after they were written, or before.
        """
        control = self._control
        if not keys or control.link.state is not LinkState.ATTACHED:
            control.hints.drop(kind, keys)
            return
        job = _QuarantineJob(self, kind, keys)
        control.jobs.start(
            job,
            lambda number: Quarantine(
                job=number, generation=job.generation, kind=kind, keys=tuple(keys)
            ),
        )

    def quarantined(self, job: _QuarantineJob, done: StorageDone) -> None:
        """Storage has looked at its copies."""
        control, kind = self._control, job.kind
        if not control.link.is_current(job.generation):
            return
        found = list(zip(job.keys, done.statuses, strict=True))
        bad = [key for key, status in found if status is ItemStatus.CORRUPT]
        nodes = [node for key in bad if (node := control.index.node_of(key)) is not None]
        control.tell_quarantined(Tier.STORAGE, kind, nodes, "digest")
        # One that cannot be read just now is not to be waited for either.
        lost = [key for key, status in found if status is not ItemStatus.OK]
        control.hints.drop(kind, lost)
        if kind is SlotKind.PAGE:
            for key in lost:
                control.link.misses.add(key)
