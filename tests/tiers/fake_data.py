"""A data plane of words instead of bytes: it does as it is told, late, in any order, and badly."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from kvferry.storage import ItemStatus
from kvferry.tiers import (
    Checked,
    CheckPages,
    Command,
    Completion,
    DetachStorage,
    Found,
    Moved,
    MovePages,
    ProbeStorage,
    Quarantine,
    ReadPages,
    StorageAttached,
    StorageDetached,
    StorageDone,
    TryStorage,
    WritePages,
)
from kvferry.types import Direction, SlotKind

GARBAGE = (b"garbage", False)
Content = tuple[bytes, bool]
"""What a slot holds: the page's key, and whether a bit of it was flipped."""


@dataclasses.dataclass
class FakeData:
    """Carries out commands one by one when `step` says so. It fails where a slot is used by two.

    Attributes:
        host: What each slot holds.
        device: What loads brought, by the device page that `MovePages` names.
        storage: What storage holds.
        pending: Commands that were not carried out.
    """

    rng: random.Random
    failing: float = 0.0
    """How often an item of storage, or a transfer, fails."""

    def __post_init__(self) -> None:
        self.host: dict[tuple[SlotKind, int], Content] = {}
        self.device: dict[tuple[SlotKind, int], Content] = {}
        self.storage: dict[tuple[SlotKind, bytes], Content] = {}
        self.pending: list[Command] = []
        self.answers: list[Completion] = []
        self.writers: dict[tuple[SlotKind, int], int] = {}
        self.readers: dict[tuple[SlotKind, int], int] = {}
        self.generation = 0
        self.hung: list[Command] = []

    # ------------------------------------------------------------ as the control plane sees it

    def submit(self, command: Command) -> None:
        """Note the command, and that nobody else has the slots it needs."""
        for place in self._places(command):
            if self._writes(command):
                assert place not in self.writers, f"{place} is written by two: {command}"
                assert not self.readers.get(place), f"{place} is written while read: {command}"
                self.writers[place] = command.job
                self.host[place] = GARBAGE
            else:
                assert place not in self.writers, f"{place} is read while written: {command}"
                self.readers[place] = self.readers.get(place, 0) + 1
        self.pending.append(command)

    @property
    def has_news(self) -> bool:
        """Whether there are answers."""
        return bool(self.answers)

    def poll(self) -> list[Completion]:
        """Answers so far."""
        answers, self.answers = self.answers, []
        return answers

    @staticmethod
    def _places(command: Command) -> list[tuple[SlotKind, int]]:
        slots = getattr(command, "host_slots", ())
        return [(command.kind, slot) for slot in slots] if slots else []  # type: ignore[union-attr]

    @staticmethod
    def _writes(command: Command) -> bool:
        is_store = isinstance(command, MovePages) and command.direction is Direction.STORE
        return is_store or isinstance(command, ReadPages)

    # ------------------------------------------------------------ what the test does with it

    def attach(self) -> None:
        """A backend with what the last one had."""
        self.generation += 1
        self.answers.append(StorageAttached(self.generation))

    def step(self) -> bool:
        """Carry out one command, any; whether there was one."""
        if not self.pending:
            return False
        command = self.pending.pop(self.rng.randrange(len(self.pending)))
        self._release(command)
        self.answers.append(self._answer(command))
        return True

    def hang(self) -> None:
        """One storage command will not come back for a while."""
        for position, command in enumerate(self.pending):
            if isinstance(command, ReadPages | WritePages | ProbeStorage):
                self.hung.append(self.pending.pop(position))
                return

    def unhang(self) -> None:
        """All of these come back."""
        self.pending += self.hung
        self.hung.clear()

    def _release(self, command: Command) -> None:
        for place in self._places(command):
            if self._writes(command):
                assert self.writers.pop(place) == command.job
            else:
                self.readers[place] -= 1

    def _fails(self) -> bool:
        return self.rng.random() < self.failing

    def _answer(self, command: Command) -> Completion:
        if isinstance(command, MovePages):
            return self._move(command)
        if isinstance(command, CheckPages):
            return Checked(command.job, tuple(self.host[at][1] for at in self._places(command)))
        if isinstance(command, DetachStorage):
            return StorageDetached(command.generation, command.job)
        if isinstance(command, TryStorage):
            failed = command.generation != self.generation or self._fails()
            return StorageDone(command.job, (ItemStatus.FAILED if failed else ItemStatus.OK,))
        if command.generation != self.generation:
            statuses = (ItemStatus.REFUSED,) * len(command.keys)
            if isinstance(command, ProbeStorage):
                return Found(command.job, (False,) * len(command.keys), error="gone")
            return StorageDone(command.job, statuses)
        if isinstance(command, ProbeStorage):
            if self._fails():
                return Found(command.job, (False,) * len(command.keys), error="as told")
            lies = [self._fails() for _ in command.keys]
            found = [(command.kind, key) in self.storage for key in command.keys]
            return Found(command.job, tuple(f ^ lie for f, lie in zip(found, lies, strict=True)))
        if isinstance(command, Quarantine):
            for key in command.keys:
                self.storage.pop((command.kind, key), None)
            return StorageDone(command.job, (ItemStatus.OK,) * len(command.keys))
        each = self._write if isinstance(command, WritePages) else self._read
        statuses = tuple(
            each(command.kind, key, place)
            for key, place in zip(command.keys, self._places(command), strict=True)
        )
        return StorageDone(command.job, statuses, num_bytes=statuses.count(ItemStatus.OK))

    def _move(self, command: MovePages) -> Moved:
        if self._fails():
            return Moved(command.job, error="as told", path="fake")
        bad = []
        for position, (key, place) in enumerate(
            zip(command.keys, self._places(command), strict=True)
        ):
            if command.direction is Direction.STORE:
                self.host[place] = (key, True)
                continue
            content = self.host[place]
            assert content[0] == key, f"{place} was given away while it was loaded: {content}"
            self.device[command.kind, self._device_page(command, position)] = content
            if not content[1]:
                bad.append(position)
        return Moved(command.job, bad_pages=tuple(bad), verified=True, path="fake")

    @staticmethod
    def _device_page(command: MovePages, position: int) -> int:
        if command.kind is SlotKind.STATE:
            plane_slots: Any = command.plane_slots
            return int(next(iter(plane_slots.values()))[position][0])
        tokens = command.device_slots[position]
        return int(tokens[0]) // len(tokens)

    def _write(self, kind: SlotKind, key: bytes, place: tuple[SlotKind, int]) -> ItemStatus:
        content = self.host[place]
        assert content[0] == key, f"{place} was given away while it was written: {content}"
        if self._fails():
            return self.rng.choice([ItemStatus.FAILED, ItemStatus.REFUSED])
        self.storage.setdefault((kind, key), content)
        return ItemStatus.OK

    def _read(self, kind: SlotKind, key: bytes, place: tuple[SlotKind, int]) -> ItemStatus:
        if self._fails():
            return self.rng.choice([ItemStatus.FAILED, ItemStatus.CORRUPT, ItemStatus.MISS])
        content = self.storage.get((kind, key))
        if content is None:
            return ItemStatus.MISS
        self.host[place] = content
        return ItemStatus.OK
