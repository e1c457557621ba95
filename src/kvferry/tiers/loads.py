"""From the host to the device: what is loaded, and what becomes of pages whose bytes are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.errors import KVFerryError
from kvferry.tiers.commands import Checked, CheckPages, Moved, MovePages
from kvferry.tiers.jobs import Job, answer
from kvferry.tiers.policy import Reason, Verify
from kvferry.tiers.state import Actor
from kvferry.types import Direction, SlotKind, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvferry.tiers.commands import Completion
    from kvferry.tiers.control import Control
    from kvferry.tiers.rows import DeviceSlots
    from kvferry.tiers.work import LoadWork

__all__ = ["Loads"]


class _Restore:
    """One load: its moves, and what they found."""

    def __init__(self, work: LoadWork, keys: Sequence[bytes], first_page: int) -> None:
        self.work = work
        self.keys = keys
        self.first_page = first_page
        self.loaded: set[int] = set()
        self.windows: set[int] = set()
        """Pages whose window planes were loaded too."""

        self.bad: set[int] = set()
        self.has_state = False
        self.state_is_bad = False
        self.all_verified = True


class _Move(NamedTuple):
    kind: SlotKind
    pages: list[int]
    planes: tuple[str, ...] | None
    """None: all of the kind."""

    device_slots: Any
    plane_slots: dict[str, Any] | None


class _LoadJob(Job):
    def __init__(
        self, loads: Loads, kind: SlotKind, restore: _Restore, pages: list[int], slots: list[int]
    ) -> None:
        self.kind = kind
        self.restore = restore
        self.pages = pages
        self.slots = slots
        self._loads = loads

    def finish(self, completion: Completion) -> None:
        self._loads.finish(self, answer(completion, Moved))


class _CheckJob(Job):
    def __init__(self, loads: Loads, kind: SlotKind, keys: list[bytes], slots: list[int]) -> None:
        self.kind = kind
        self.keys = keys
        self.slots = slots
        self._loads = loads

    def finish(self, completion: Completion) -> None:
        self._loads.checked(self, answer(completion, Checked))


class Loads:
    """Brings pages to the device.

    Args:
        control: What all parts share.
        quarantine: Takes pages with wrong bytes out of storage too: slot kind and keys.
    """

    def __init__(
        self, control: Control, quarantine: Callable[[SlotKind, Sequence[bytes]], None]
    ) -> None:
        self._control = control
        self._quarantine = quarantine
        self.num_transient = 0
        """Pages that failed their digest on the device, and were right when read once more."""

    def load(
        self,
        keys: Sequence[bytes],
        rows: DeviceSlots,
        work: LoadWork,
        *,
        limit: int,
        has_state_slots: bool,
        stream: int | None = None,
    ) -> None:
        """Load pages from `work.skip_tokens` on, up to page `limit`, as far as they are here.

        Raises PlanError where the rows do not fit; nothing moves then. Where it is those of a
        second transfer, of states or of windows, that are refused, nothing is raised: `work`
        has the error, and ends as one whose transfer failed.
        """
        control = self._control
        skip, size = work.skip_tokens, control.page_size
        work.done = True
        nodes = control.chain_nodes(keys[:limit])
        count = control.usable_on_host(nodes)
        work.reason = self._refusal(count, skip, has_state_slots=has_state_slots)
        if work.reason:
            return
        first = skip // size
        del nodes[count:]
        control.index.touch(nodes)
        restore = _Restore(work, keys[:count], first)
        work.first_page = first
        work.num_tokens = count * size
        work.num_pages = count - first
        # All rows are looked at before the first byte moves.
        moves = [self._with_rows(*move, rows) for move in self._moves(first, count)]
        if sum(move.kind is SlotKind.PAGE for move in moves) > 1:
            rows.check_apart(range(first, count), control.rule.whole_planes)
        try:
            for move in moves:
                self._move(restore, nodes, move, rows.device_run, stream)
        except KVFerryError as refused:
            # What moves already is the work's, so the caller must get it.
            if not work.num_running:
                raise
            work.error = f"{type(refused).__name__}: {refused}"
        finally:
            if work.num_running:
                work.done = False
            else:
                work.num_pages = 0

    def _refusal(self, count: int, skip: int, *, has_state_slots: bool) -> Reason:
        control = self._control
        size = control.page_size
        new = count * size - skip
        if not control.switches.load:
            return Reason.SWITCHED_OFF
        if new <= 0:
            return Reason.NOTHING_FOUND
        if skip % size:
            return Reason.UNALIGNED_SKIP
        if new < control.options.load_threshold_tokens:
            return Reason.BELOW_THRESHOLD
        if control.rule.needs_state and not has_state_slots:
            return Reason.NO_STATE_SLOTS
        return Reason.NONE

    def _moves(
        self, first: int, count: int
    ) -> list[tuple[SlotKind, list[int], tuple[str, ...] | None]]:
        """What has to move of pages `first` to `count`: kind, pages, planes (None: all)."""
        rule = self._control.rule
        moves: list[tuple[SlotKind, list[int], tuple[str, ...] | None]] = []
        if rule.needs_pages:
            start = max(first, rule.window_start(count))
            if not rule.windows:
                moves.append((SlotKind.PAGE, list(range(first, count)), None))
            else:
                # Window planes of earlier pages are not needed, and an engine may have no rows
                # for them.
                if rule.whole_planes and first < start:
                    moves.append((SlotKind.PAGE, list(range(first, start)), rule.whole_planes))
                if start < count:
                    moves.append((SlotKind.PAGE, list(range(start, count)), None))
        if rule.needs_state:
            moves.append((SlotKind.STATE, [count - 1], None))
        return moves

    def _with_rows(
        self,
        kind: SlotKind,
        pages: list[int],
        planes: tuple[str, ...] | None,
        rows: DeviceSlots,
    ) -> _Move:
        names = planes or tuple(
            dict.fromkeys(span.plane.name for span in self._control.geometry.spans(kind))
        )
        if kind is SlotKind.STATE:  # a prompt has rows for one checkpoint, the one at its end
            return _Move(kind, pages, planes, None, rows.planes([rows.first_page], names))
        return _Move(kind, pages, planes, rows.tokens(pages), rows.planes(pages, names))

    def _move(
        self,
        restore: _Restore,
        nodes: list[int],
        move: _Move,
        device_run: int,
        stream: int | None,
    ) -> None:
        control, kind, pages = self._control, move.kind, move.pages
        tier, work = control.tiers[kind], restore.work
        slots = tier.begin_reading([nodes[page] for page in pages])
        job = _LoadJob(self, kind, restore, pages, slots)
        work.num_running += 1
        sent = False
        try:
            answer = control.jobs.start(
                job,
                lambda number: MovePages(
                    job=number,
                    direction=Direction.LOAD,
                    kind=kind,
                    keys=tuple(restore.keys[page] for page in pages),
                    host_slots=tuple(slots),
                    device_slots=move.device_slots,
                    plane_slots=move.plane_slots,
                    planes=move.planes,
                    device_run=device_run,
                    stream=stream,
                ),
            )
            sent = True
        finally:
            if not sent:
                work.num_running -= 1
                tier.end_reading(slots)
        if kind is SlotKind.STATE:
            restore.has_state = True
        else:
            restore.loaded.update(pages)
            if move.planes is None:
                restore.windows.update(pages)
        if answer is not None:
            work.transfers.append(answer)  # type: ignore[arg-type]

    def finish(self, job: _LoadJob, done: Moved) -> None:
        """One of a load's transfers is over."""
        control, restore = self._control, job.restore
        work, is_state = restore.work, job.kind is SlotKind.STATE
        tier = control.tiers[job.kind]
        bad = [job.pages[position] for position in done.bad_pages]
        control.tell_moved(Direction.LOAD, job.kind, len(job.pages), done)
        if done.path:
            work.paths.append(done.path)
        if done.error:
            work.error = done.error
        if is_state:
            restore.state_is_bad = bool(bad or done.error)
        restore.bad.update(job.pages if done.error else bad)
        restore.all_verified &= done.verified
        if bad and not job.aborted and not done.error:
            control.metrics.digest_failed(Tier.HOST, len(bad))
            at = dict(zip(job.pages, job.slots, strict=True))
            self._check_again(job.kind, [(restore.keys[page], at[page]) for page in bad])
        tier.end_reading(job.slots)
        work.num_running -= 1
        if not work.num_running:
            self._conclude(restore)

    def _conclude(self, restore: _Restore) -> None:
        control, work = self._control, restore.work
        size, count = control.page_size, len(restore.keys)
        work.verified = restore.all_verified and control.options.verify is Verify.ALWAYS
        work.bad_pages = tuple(sorted(restore.bad))
        # What was before the load is the caller's own, and good.
        good = restore.loaded - restore.bad
        good_windows = restore.windows - restore.bad
        whole = [page < restore.first_page or page in good for page in range(count)]
        windows = [page < restore.first_page or page in good_windows for page in range(count)]
        has_state = restore.has_state and not restore.state_is_bad
        prefixes = control.rule.loaded_prefixes(whole, windows, has_state=has_state)
        if control.rule.loads_are_monotone:  # all shorter ones too: one number says it
            work.usable_prefixes = (next(prefixes, 0),)
        else:
            work.usable_prefixes = tuple(prefixes)
        usable = next(iter(work.usable_prefixes), 0) * size
        work.usable = max(usable, work.skip_tokens)
        if work.error:
            work.reason = Reason.TRANSFER_FAILED
        elif restore.bad:
            work.reason = Reason.BAD_PAGES
        work.done = True
        if control.events.active:
            loaded = control.chain_nodes(restore.keys)[restore.first_page : work.usable // size]
            control.tell_loaded(Tier.HOST, loaded)

    def _check_again(self, kind: SlotKind, pages: list[tuple[bytes, int]]) -> None:
        """Read pages that failed their digest once more, where they lie on the host.

        Never on the device: the caller may be computing into those rows already.
        """
        control, tier = self._control, self._control.tiers[kind]
        nodes, keys = [], []
        for key, slot in pages:
            node = control.index.node_of(key)
            # Another load of the same page may have had it checked, or thrown out.
            if node is not None and tier.slot_of(node) == slot and tier.is_readable(node):
                nodes.append(node)
                keys.append(key)
        if not nodes:
            return
        slots = tier.begin_reading(nodes)
        for node in nodes:
            tier.suspect(node, is_suspect=True)
        control.jobs.start(
            _CheckJob(self, kind, keys, slots),
            lambda number: CheckPages(
                job=number, kind=kind, keys=tuple(keys), host_slots=tuple(slots)
            ),
        )

    def checked(self, job: _CheckJob, done: Checked) -> None:
        """Pages were read once more: those that are still wrong go, here and in storage."""
        control, tier = self._control, self._control.tiers[job.kind]
        condemned: list[int] = []
        bad_keys: list[bytes] = []
        for key, slot, good in zip(job.keys, job.slots, done.good, strict=True):
            node = control.index.node_of(key)
            if job.aborted or node is None or tier.slot_of(node) != slot:
                continue
            if good:
                self.num_transient += 1
                tier.suspect(node, is_suspect=False)
                continue
            condemned.append(node)
            bad_keys.append(key)
        for node in condemned:
            tier.drop(node, Actor.INTEGRITY)
        control.tell_quarantined(Tier.HOST, job.kind, condemned, "digest")
        tier.end_reading(job.slots)
        self._quarantine(job.kind, bad_keys)
