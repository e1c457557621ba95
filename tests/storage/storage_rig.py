"""Pages, keys and objects for the tests of storage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.geometry import Geometry, Plane
from kvferry.storage import ItemResult, PageStore, StorageBackend
from kvferry.testing import FaultyBackend, memory_at

SMALL = Geometry(
    planes=(
        Plane(name="k", num_layers=2, element_size=20),
        Plane(name="v", num_layers=3, element_size=7),
    ),
    page_size=16,
)
"""A slot of one block, most of it padding, with five spans."""


def key_of(number: int) -> bytes:
    """A key like those of pages."""
    return number.to_bytes(4, "big") * 8


class Pages:
    """`count` slots of `geometry` on block borders (plus `offset`), random or poisoned."""

    def __init__(
        self, geometry: Geometry, count: int, *, seed: int | None = None, offset: int = 0
    ) -> None:
        size = geometry.slot_bytes()
        self._memory = np.full(count * size + 8192 + offset, 0xA5, dtype=np.uint8)
        base = int(self._memory.ctypes.data)
        begin = -base % 4096 + offset
        self.bytes = self._memory[begin : begin + count * size].reshape(count, size)
        self.addresses = [base + begin + number * size for number in range(count)]
        self.digests = np.zeros((count, len(geometry.spans())), dtype=np.uint64)
        if seed is not None:
            rng = np.random.default_rng(seed)
            self.bytes[:] = rng.integers(0, 256, self.bytes.shape, dtype=np.uint8)
            self.digests[:] = rng.integers(1, 1 << 63, self.digests.shape, dtype=np.uint64)


def object_of(number: int, num_bytes: int) -> NDArray[np.uint8]:
    """The bytes of object `number`, from its number alone."""
    return np.random.default_rng(number).integers(0, 256, num_bytes, dtype=np.uint8)


def put(backend: StorageBackend, numbers: Sequence[int], num_bytes: int) -> list[ItemResult]:
    """Write the objects `numbers` in one batch."""
    contents = [object_of(number, num_bytes) for number in numbers]
    buffers = [[(int(one.ctypes.data), one.size)] for one in contents]
    return backend.write_from([key_of(number) for number in numbers], buffers)


def get(
    backend: StorageBackend, numbers: Sequence[int], num_bytes: int
) -> tuple[list[ItemResult], list[bool]]:
    """Read the objects `numbers`: results, and whether each buffer holds exactly its object."""
    into = [np.full(num_bytes, 0xA5, dtype=np.uint8) for _ in numbers]
    buffers = [[(int(one.ctypes.data), one.size)] for one in into]
    results = backend.read_into([key_of(number) for number in numbers], buffers)
    whole = [
        bool(np.array_equal(one, object_of(number, num_bytes)))
        for one, number in zip(into, numbers, strict=True)
    ]
    return results, whole


def held(backend: StorageBackend, numbers: Sequence[int]) -> list[int]:
    """Which of the objects `numbers` the backend says it has."""
    found = backend.contains([key_of(number) for number in numbers])
    return [number for number, there in zip(numbers, found, strict=True) if there]


def open_descriptors() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def flip(address: int, bit: int) -> None:
    """Turn one bit over."""
    memory: Any = memory_at(address + bit // 8, 1)
    memory[0] ^= 1 << bit % 8


KEYS = [key_of(number) for number in range(8)]


def stored_pages(count: int = 8) -> tuple[FaultyBackend, PageStore, Pages]:
    """A store of `count` pages over a backend that can be made to fail."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages = Pages(SMALL, count, seed=1)
    assert all(one.ok for one in store.write(KEYS[:count], pages.addresses, pages.digests))
    return backend, store, pages


def statuses(results: list[ItemResult]) -> list[str]:
    """How each of them went, in words."""
    return [result.status.value for result in results]


def bytes_on_disk(folder: Path) -> int:
    """What all files below `folder` take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def objects_in(folder: Path) -> list[Path]:
    """The files of objects."""
    return sorted(folder.rglob("*.kvo"))


def temporaries_in(folder: Path) -> list[Path]:
    """The files that are being written, or were when their writer died."""
    return sorted(folder.rglob(".*.tmp"))
