"""From the device to the host: what is stored when, by policy, and what follows when it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.tiers.commands import Moved, MovePages
from kvferry.tiers.jobs import Job, answer
from kvferry.tiers.policy import HitCounter, Reason, StorePolicy
from kvferry.tiers.state import Actor, PageState
from kvferry.types import Direction, SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.tiers.backup import Backup
    from kvferry.tiers.commands import Completion
    from kvferry.tiers.control import Control
    from kvferry.tiers.rows import DeviceSlots
    from kvferry.tiers.work import StoreWork

__all__ = ["Stores"]


class _StoreJob(Job):
    def __init__(
        self,
        stores: Stores,
        kind: SlotKind,
        work: StoreWork,
        slots: list[int],
    ) -> None:
        self.kind = kind
        self.slots = slots
        self.work = work
        self._stores = stores

    def abort(self) -> None:
        super().abort()
        self.work.reason = Reason.RESET

    def finish(self, completion: Completion) -> None:
        self._stores.finish(self, answer(completion, Moved))


class Stores:
    """Takes pages from the device.

    Args:
        control: What all parts share.
        backup: Where pages go from the host.
    """

    def __init__(self, control: Control, backup: Backup) -> None:
        self._control = control
        self._backup = backup
        self._hits = HitCounter()

    def forget_hits(self) -> None:
        """After a reset."""
        self._hits.forget()

    def store(
        self,
        keys: Sequence[bytes],
        rows: DeviceSlots,
        work: StoreWork,
        *,
        evicting: bool = False,
        state_page: int | None = None,
        priority: int = 0,
        stream: int | None = None,
    ) -> None:
        """Copy those of the pages `keys` that are not here, as the policy has it.

        Args:
            keys: Of all whole pages of a prompt that are filled, from its first on.
            rows: Where they lie on the device.
            work: What the caller gets a handle on; filled in.
            evicting: The engine is about to give the rows to others.
            state_page: The page at whose end a checkpoint lies in `rows`, or None.
            priority: For the eviction policy of that name.
            stream: The stream that wrote the rows.

        Raises:
            PlanError: The rows do not fit; nothing moves then. Where it is the checkpoint's that
                are refused, after pages began to move, the handle has the error instead.
        """
        offered = self._offered(keys, work, evicting=evicting)
        if not offered:
            work.done = True
            return
        control = self._control
        nodes = list(control.index.insert(keys[:offered], priority=priority))
        control.index.touch(nodes)
        control.index.pin(nodes)
        try:
            try:
                for kind, pages in self._wanted(nodes, state_page).items():
                    self._store_kind(kind, keys, nodes, pages, rows, work, stream)
            except KVFerryError as refused:
                # Rows that are read already must not be written: the caller needs the handle.
                if not work.num_running:
                    raise
                work.reason = Reason.TRANSFER_FAILED
                work.error = f"{type(refused).__name__}: {refused}"
            self._backup.offer(nodes)
        finally:
            control.index.unpin(nodes)
            control.index.forget(nodes[::-1])
        if not work.num_running:
            work.done = True
            if not work.reason and not work.num_submitted:
                work.reason = Reason.ALREADY_HERE

    def _offered(self, keys: Sequence[bytes], work: StoreWork, *, evicting: bool) -> int:
        """How many leading pages the policy stores; 0, with the reason in `work`, if none."""
        options = self._control.options
        if not self._control.switches.store:
            work.reason = Reason.SWITCHED_OFF
        elif not keys:
            work.reason = Reason.NO_WHOLE_PAGE
        elif evicting or options.store_policy is StorePolicy.WRITE_THROUGH:
            return len(keys)
        elif options.store_policy is StorePolicy.WRITE_BACK:
            work.reason = Reason.NOT_WRITTEN_BACK
        else:
            enough = self._hits.count(keys, options.selective_hits)
            if not enough:
                work.reason = Reason.TOO_FEW_HITS
            return enough
        return 0

    def _wanted(self, nodes: list[int], state_page: int | None) -> dict[SlotKind, list[int]]:
        wanted = {}
        if SlotKind.PAGE in self._control.tiers:
            wanted[SlotKind.PAGE] = list(range(len(nodes)))
        has_state = SlotKind.STATE in self._control.tiers
        if has_state and state_page is not None and state_page < len(nodes):
            wanted[SlotKind.STATE] = [state_page]
        return wanted

    def _store_kind(
        self,
        kind: SlotKind,
        keys: Sequence[bytes],
        nodes: list[int],
        pages: list[int],
        rows: DeviceSlots,
        work: StoreWork,
        stream: int | None,
    ) -> None:
        control = self._control
        tier = control.tiers[kind]
        missing = [
            page
            for page in pages
            if tier.slot_of(nodes[page]) < 0 and not tier.is_filling(nodes[page])
        ]
        work.num_already += len(pages) - len(missing)
        if not missing:
            return
        slots = tier.reserve([nodes[page] for page in missing], PageState.STORING)
        if len(slots) < len(missing):
            work.reason = Reason.HOST_FULL
            control.metrics.dropped(Reason.HOST_FULL, len(missing) - len(slots))
            del missing[len(slots) :]
        if not missing:
            return
        job = _StoreJob(self, kind, work, slots)
        names = tuple(dict.fromkeys(span.plane.name for span in control.geometry.spans(kind)))
        sent = False
        work.num_running += 1
        try:
            is_state = kind is SlotKind.STATE
            device_slots = None if is_state else rows.tokens(missing)
            # A prompt has rows of one checkpoint, the one at its end.
            plane_slots = rows.planes([rows.first_page] if is_state else missing, names)
            answer = control.jobs.start(
                job,
                lambda number: MovePages(
                    job=number,
                    direction=Direction.STORE,
                    kind=kind,
                    keys=tuple(keys[page] for page in missing),
                    host_slots=tuple(slots),
                    device_slots=device_slots,
                    plane_slots=plane_slots,
                    device_run=rows.device_run,
                    stream=stream,
                ),
            )
            sent = True
        finally:
            if not sent:
                work.num_running -= 1
                for slot in slots:
                    tier.abandon(slot, Actor.TRANSFER)
        if answer is not None:
            work.transfers.append(answer)  # type: ignore[arg-type]
        work.num_submitted += len(missing)

    def finish(self, job: _StoreJob, done: Moved) -> None:
        """A store's transfer is over."""
        control, tier = self._control, self._control.tiers[job.kind]
        work = job.work
        bad = set(range(len(job.slots)) if done.error else done.bad_pages)
        whole = []
        for position, slot in enumerate(job.slots):
            if job.aborted or position in bad:
                tier.abandon(slot, Actor.TRANSFER)
            else:
                whole.append(slot)
        stored = tier.publish(whole, Actor.TRANSFER)
        control.tell_moved(Direction.STORE, job.kind, len(job.slots), done)
        if bad:
            work.reason, work.error = Reason.TRANSFER_FAILED, done.error
            control.metrics.dropped(Reason.TRANSFER_FAILED, len(bad))
        work.num_stored += len(stored)
        if not job.aborted:
            control.tell_stored(Tier.HOST, job.kind, stored)
            self._backup.offer(stored)
        work.num_running -= 1
        work.done = not work.num_running
