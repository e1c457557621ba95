"""Reads, writes and questions on a storage backend, on threads; knows no engine.

A chunk is what vLLM's host tier keeps in one slot: opaque bytes under an opaque key.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.geometry import Geometry, Plane
from kvferry.kernels import NO_DIGEST
from kvferry.storage import PageStore

if TYPE_CHECKING:
    from kvferry.storage import StorageBackend

__all__ = ["ChunkJobs", "FinishedJob"]

_MAX_ANSWERS = 1 << 16
_ABSENT_SECONDS = 2.0


class _Job(NamedTuple):
    number: int
    keys: tuple[bytes, ...]
    addresses: tuple[int, ...]
    is_read: bool


class FinishedJob(NamedTuple):
    """What became of a job."""

    number: int
    good: tuple[bytes, ...]
    """The keys that were read or written."""

    is_whole: bool
    num_bytes: int
    seconds: float


class ChunkJobs:
    """A backend behind a queue. `has`, `read`, `write` and `take_finished` return at once.

    Args:
        backend: Closed with this object, once its threads have ended.
        chunk_bytes: Of every chunk.
        prefix: Goes before every key, at most 32 bytes: what the bytes of a chunk depend on.
        num_threads: How many jobs run at a time.
    """

    def __init__(
        self, backend: StorageBackend, chunk_bytes: int, prefix: bytes, *, num_threads: int = 4
    ) -> None:
        plane = Plane(name="chunk", num_layers=1, element_size=chunk_bytes, rows_per_page=1)
        geometry = Geometry(planes=(plane,), page_size=1, span_alignment=1, slot_alignment=1)
        self._backend = backend
        self._store = PageStore(backend, geometry)
        self._prefix = prefix
        self._lock = threading.Condition()
        self._answers: OrderedDict[bytes, tuple[bool, float]] = OrderedDict()
        self._asked: set[bytes] = set()
        self._finished: list[FinishedJob] = []
        self._num_open = 0
        self._waiting: queue.SimpleQueue[_Job | bytes | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvferry-chunks-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_open(self) -> int:
        """Jobs that are not over, or whose end was not taken yet."""
        with self._lock:
            return self._num_open + len(self._finished)

    def has(self, key: bytes) -> bool | None:
        """Whether there is such a chunk; None: it is being looked for, ask again."""
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None and (answer[0] or answer[1] > time.monotonic()):
                return answer[0]
            if key not in self._asked:
                self._asked.add(key)
                self._waiting.put(key)
        return None

    def read(self, number: int, keys: Sequence[bytes], addresses: Sequence[int]) -> None:
        """Begin to read chunks into memory that is the job's until it is over."""
        self._submit(_Job(number, tuple(keys), tuple(addresses), is_read=True))

    def write(self, number: int, keys: Sequence[bytes], addresses: Sequence[int]) -> None:
        """Begin to write chunks from memory that nobody changes until the job is over."""
        self._submit(_Job(number, tuple(keys), tuple(addresses), is_read=False))

    def _submit(self, job: _Job) -> None:
        with self._lock:
            self._num_open += 1
        self._waiting.put(job)

    def take_finished(self) -> list[FinishedJob]:
        """What ended since the last time."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def drain(self, timeout: float) -> bool:
        """Wait until no job runs, at most so many seconds; whether it came to that."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._num_open, timeout)

    def close(self, timeout: float) -> bool:
        """End the threads and close the backend; False if one of them did not end in time."""
        for _ in self._threads:
            self._waiting.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._backend.close()
        return True

    # ---------------------------------------------------------------- on a thread

    def _serve(self) -> None:
        while (task := self._waiting.get()) is not None:
            if isinstance(task, bytes):
                (found,) = self._store.contains([self._prefix + task])
                with self._lock:
                    self._asked.discard(task)
                    self._note(task, found=found)
            else:
                self._carry_out(task)

    def _carry_out(self, job: _Job) -> None:
        begun = time.monotonic()
        names = [self._prefix + key for key in job.keys]
        digests = np.full((len(names), 1), NO_DIGEST, dtype=np.uint64)
        good: tuple[bytes, ...] = ()
        num_bytes = 0
        try:
            # What a backend raises becomes results here, so only a bug of ours comes out.
            act = self._store.read if job.is_read else self._store.write
            results = act(names, list(job.addresses), digests)
            good = tuple(key for key, one in zip(job.keys, results, strict=True) if one.ok)
            num_bytes = sum(one.num_bytes for one in results)
        finally:
            with self._lock:
                for key in job.keys:
                    if job.is_read or key in good:
                        self._note(key, found=key in good)
                self._num_open -= 1
                self._finished.append(
                    FinishedJob(
                        job.number,
                        good,
                        len(good) == len(job.keys),
                        num_bytes,
                        time.monotonic() - begun,
                    )
                )
                self._lock.notify_all()

    def _note(self, key: bytes, *, found: bool) -> None:
        # Another process may write it: that it is absent is believed for a while only.
        self._answers[key] = (found, time.monotonic() + _ABSENT_SECONDS)
        self._answers.move_to_end(key)
        while len(self._answers) > _MAX_ANSWERS:
            self._answers.popitem(last=False)
