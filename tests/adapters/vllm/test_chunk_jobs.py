"""Chunks on storage threads: never a wait, never a chunk that is not what was stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvferry.adapters.vllm.chunk_jobs import ChunkJobs, FinishedJob
from kvferry.storage import Buffers, ItemResult, MemoryBackend

CHUNK = 3000
KEYS = [b"one", b"two", b"three"]


class Gate(MemoryBackend):
    """Holds every call until it is opened."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 20)
        self.opened = threading.Event()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Held."""
        assert self.opened.wait(20)
        return super().contains(keys)

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """Held."""
        assert self.opened.wait(20)
        return super().write_from(keys, buffers)


@pytest.fixture
def gate() -> Gate:
    """A backend that is shut."""
    return Gate()


@pytest.fixture
def jobs(gate: Gate) -> Iterator[ChunkJobs]:
    """Jobs on it."""
    made = ChunkJobs(gate, CHUNK, b"prefix ", num_threads=2)
    yield made
    gate.opened.set()
    assert made.close(20)


def primary() -> np.ndarray:
    """vLLM's host tier: eight chunks."""
    return np.random.default_rng(1).integers(0, 256, (8, CHUNK), dtype=np.uint8)


def addresses(memory: np.ndarray, *chunks: int) -> list[int]:
    """Where chunks lie."""
    return [int(memory.ctypes.data) + chunk * CHUNK for chunk in chunks]


def finished(jobs: ChunkJobs) -> FinishedJob:
    """The one job that ends."""
    assert jobs.drain(20)
    (done,) = jobs.take_finished()
    return done


def asked(jobs: ChunkJobs, key: bytes) -> bool:
    """Whether there is such a chunk, asked for as often as it takes."""
    deadline = time.monotonic() + 20
    while (found := jobs.has(key)) is None:
        assert time.monotonic() < deadline
    return found


def test_nothing_waits_for_storage(jobs: ChunkJobs, gate: Gate) -> None:
    """With a backend that does not answer, every call returns, and says so."""
    memory = primary()
    jobs.write(1, KEYS, addresses(memory, 0, 1, 2))
    assert jobs.has(b"one") is None
    assert jobs.has(b"one") is None
    assert (jobs.num_open, jobs.take_finished()) == (1, [])
    assert not jobs.drain(0.01)
    gate.opened.set()
    done = finished(jobs)
    assert (done.number, done.good, done.is_whole) == (1, tuple(KEYS), True)
    assert jobs.num_open == 0
    assert jobs.has(b"two") is True


def test_chunks_come_back_where_they_are_wanted(jobs: ChunkJobs, gate: Gate) -> None:
    """Exactly, and nothing beside them is written; another prefix finds nothing."""
    gate.opened.set()
    memory = primary()
    jobs.write(1, KEYS, addresses(memory, 0, 1, 2))
    finished(jobs)
    before = memory.copy()
    jobs.read(2, KEYS, addresses(memory, 7, 3, 5))
    assert finished(jobs).is_whole
    expected = before.copy()
    expected[[7, 3, 5]] = before[[0, 1, 2]]
    assert (memory == expected).all()
    assert not asked(jobs, b"four")
    other = ChunkJobs(gate, CHUNK, b"another", num_threads=1)
    assert not asked(other, b"one")
    other._backend = MemoryBackend(capacity_bytes=1 << 20)  # the first one is still in use
    assert other.close(20)


def test_a_damaged_or_absent_chunk_fails_alone(jobs: ChunkJobs, gate: Gate) -> None:
    """The others of its job are good; it is a miss from then on."""
    gate.opened.set()
    memory = primary()
    jobs.write(1, KEYS, addresses(memory, 0, 1, 2))
    finished(jobs)
    # What another process put there under the same name.
    wrong = np.zeros(CHUNK + 500, dtype=np.uint8)
    gate.delete([b"prefix two"])
    gate.write_from([b"prefix two"], [[(int(wrong.ctypes.data), len(wrong))]])
    jobs.read(2, [*KEYS, b"four"], addresses(memory, 4, 5, 6, 7))
    done = finished(jobs)
    assert (done.good, done.is_whole) == ((b"one", b"three"), False)
    assert not asked(jobs, b"two")
    assert (memory[4] == memory[0]).all()
    assert (memory[6] == memory[2]).all()
