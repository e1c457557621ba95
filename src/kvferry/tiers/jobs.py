"""Jobs in flight: what the control plane has asked for and has no answer to yet."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvferry.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvferry.tiers.commands import Command, Completion
    from kvferry.types import SlotKind

__all__ = ["DataLink", "Job", "Jobs", "answer"]

_Kind = TypeVar("_Kind")


class DataLink(Protocol):
    """Where commands go and completions come from: a `DataPlane`, or a `CommandQueue` to one."""

    @property
    def has_news(self) -> bool: ...

    def submit(self, command: Command) -> Any: ...

    def poll(self) -> list[Completion]: ...


class Job(abc.ABC):
    """One command and what is to be done when it is over."""

    kind: SlotKind
    aborted = False
    """Its result is not wanted any more, but its slots are still its own."""

    deadline: float | None = None
    """When a storage job counts as late."""

    generation = 0
    """Which attachment of storage it goes to; 0: none."""

    is_late = False

    @abc.abstractmethod
    def finish(self, completion: Completion) -> None:
        """The command is over; also called after `abort`, and then it only gives back."""

    def abort(self) -> None:
        """Nobody wants the result. Slots that are being written are parked by the caller."""
        self.aborted = True

    def late(self) -> None:
        """The deadline passed; called once."""
        self.is_late = True


class Jobs:
    """Numbers jobs, sends their commands and finds them again.

    Args:
        submit: Takes a command to the data plane; may raise, and then there is no job.
    """

    def __init__(self, submit: Callable[[Command], object]) -> None:
        self._submit = submit
        self._next = 1
        self._open: dict[int, Job] = {}
        self._deadlines: dict[int, Job] = {}
        self.num_strays = 0
        """Completions of jobs that nobody knows: answers that came twice, or to another life."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._open.values()))

    def start(self, job: Job, command: Callable[[int], Command]) -> object:
        """Send the command made for the job's number; what the data plane returns."""
        number = self._next
        self._next += 1
        self._open[number] = job
        started = False
        try:
            answer = self._submit(command(number))
            started = True
        finally:
            if not started:
                self._open.pop(number, None)
        if job.deadline is not None:
            self._deadlines[number] = job
        return answer

    def finish(self, number: int, completion: Completion) -> None:
        """Hand a completion to its job."""
        self._deadlines.pop(number, None)
        job = self._open.pop(number, None)
        if job is None:
            self.num_strays += 1
            return
        job.finish(completion)

    def call_late(self, now: float) -> int:
        """Tell each job whose deadline passed, once; how many there were."""
        if not self._deadlines:
            return 0
        due = [
            (number, job)
            for number, job in self._deadlines.items()
            if job.deadline is not None and job.deadline <= now
        ]
        for number, job in due:
            del self._deadlines[number]
            job.late()
        return len(due)

    def give_up(self, generation: int) -> None:
        """Jobs of this attachment of storage are late as of now; those that are so already stay."""
        for number, job in list(self._open.items()):
            if job.generation == generation and not job.is_late:
                # Its time being up must not count it once more.
                self._deadlines.pop(number, None)
                job.late()


def answer(completion: Completion, kind: type[_Kind]) -> _Kind:
    """`completion`, as what it must be; CacheError if the data plane answered something else."""
    if not isinstance(completion, kind):
        raise CacheError(
            f"the data plane answered {completion!r} where {kind.__name__} was due: both planes "
            f"must run one version of kvferry"
        )
    return completion
