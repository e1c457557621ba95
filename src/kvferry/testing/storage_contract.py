"""What any storage backend must do, as checks that need no test framework.

    from kvferry.testing import check_storage_backend

    check_storage_backend(lambda capacity_bytes: MyBackend(capacity_bytes))

or one by one, under a test runner of your choice: ``for check in STORAGE_CHECKS: check(make)``.
Each check makes empty backends, closes them, and raises AssertionError where one is not as
`StorageBackend` says.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import StorageError
from kvferry.storage import (
    INTERFACE_VERSION,
    MAX_KEY_BYTES,
    Buffers,
    ItemResult,
    ItemStatus,
    StorageBackend,
)
from kvferry.testing.patterns import GuardedBuffer, mix64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["STORAGE_CHECKS", "BackendFactory", "check_storage_backend"]

BackendFactory = Callable[[int | None], StorageBackend]
"""Makes an empty backend of so many bytes; None: of as many as a check needs, 64 MiB at most."""

_SIZES = (1, 7, 576, 4095, 4096, 4097, 37376, 131072)
_OFFSETS = (0, 64, 512)
_BLOCK = 4096
_DEADLINE_SECS = 60.0


def check_storage_backend(make: BackendFactory) -> None:
    """Run every check; AssertionError names the first that fails."""
    for check in STORAGE_CHECKS:
        try:
            check(make)
        except AssertionError as failed:
            raise AssertionError(f"{check.__name__.removeprefix('_')}: {failed}") from failed


class _Memory:
    """`num_bytes` of guarded memory that begins `offset` bytes behind a block border."""

    def __init__(self, num_bytes: int, offset: int = 0) -> None:
        self._buffer = GuardedBuffer(num_bytes + _BLOCK + offset)
        self._at = -self._buffer.address % _BLOCK + offset
        self.num_bytes = num_bytes
        self.address = self._buffer.address + self._at

    @property
    def inside(self) -> NDArray[np.uint8]:
        return self._buffer.inside[self._at : self._at + self.num_bytes]

    def check(self, expected: NDArray[np.uint8] | None, what: str) -> None:
        """The inside is `expected`, None: untouched; and so is all around it."""
        image = np.full(self._buffer.num_bytes, 0xA5, dtype=np.uint8)
        if expected is not None:
            image[self._at : self._at + self.num_bytes] = expected
        self._buffer.check(image, what)

    def whole(self) -> Buffers:
        return [(self.address, self.num_bytes)]


def _content(seed: int, num_bytes: int) -> NDArray[np.uint8]:
    words = np.arange(-(-num_bytes // 8), dtype=np.uint64)
    return np.ascontiguousarray(mix64(seed, words)).view(np.uint8)[:num_bytes].copy()


@contextmanager
def _opened(make: BackendFactory, capacity: int | None = None) -> Iterator[StorageBackend]:
    backend = make(capacity)
    try:
        yield backend
    finally:
        backend.close()


def _put(backend: StorageBackend, key: bytes, content: NDArray[np.uint8]) -> ItemResult:
    memory = _Memory(content.size)
    memory.inside[:] = content
    (result,) = backend.write_from([key], [memory.whole()])
    memory.check(content, "the memory that a write only reads")
    return result


def _get(backend: StorageBackend, key: bytes, num_bytes: int) -> tuple[ItemResult, _Memory]:
    memory = _Memory(num_bytes)
    (result,) = backend.read_into([key], [memory.whole()])
    return result, memory


def _holds(backend: StorageBackend, key: bytes, content: NDArray[np.uint8]) -> None:
    result, memory = _get(backend, key, content.size)
    assert result == ItemResult(ItemStatus.OK, content.size), f"{key!r}: {result}"
    memory.check(content, f"what {key!r} was read into")


def _is_absent(backend: StorageBackend, key: bytes, num_bytes: int = 64) -> None:
    assert backend.contains([key]) == [False], f"{key!r} should be absent"
    result, memory = _get(backend, key, num_bytes)
    assert result.status is ItemStatus.MISS, f"{key!r}: {result}"
    memory.check(None, f"memory for {key!r}, which is absent")


def _empty(make: BackendFactory) -> None:
    """A new backend has nothing, and a miss touches no memory."""
    with _opened(make) as backend:
        assert backend.interface_version == INTERFACE_VERSION
        assert backend.contains([b"a", b"b"]) == [False, False]
        assert backend.contains([]) == []
        assert backend.read_into([], []) == []
        assert backend.write_from([], []) == []
        assert backend.delete([]) == []
        _is_absent(backend, b"a")
        stats = backend.stats()
        assert (stats.objects, stats.num_bytes) == (0, 0)


def _every_size(make: BackendFactory) -> None:
    """Objects of any size come back exactly, from and to memory at any address."""
    with _opened(make) as backend:
        for number, size in enumerate(_SIZES):
            for offset in _OFFSETS:
                key = f"{size} {offset}".encode()
                content = _content(number, size)
                source, target = _Memory(size, offset), _Memory(size, offset)
                source.inside[:] = content
                wrote = backend.write_from([key], [source.whole()])
                assert wrote == [ItemResult(ItemStatus.OK, size)], f"{key!r}: {wrote}"
                source.check(content, f"the source of {key!r}")
                read = backend.read_into([key], [target.whole()])
                assert read == [ItemResult(ItemStatus.OK, size)], f"{key!r}: {read}"
                target.check(content, f"the target of {key!r}")


def _scattered(make: BackendFactory) -> None:
    """Lists of buffers are gathered and scattered in order, however they are cut."""
    cuts: tuple[Sequence[int], ...] = (
        (4096, 8192), (4096, 4096, 100), (1, 4095, 8192), (12288,), (0, 12288, 0), (5, 7, 4084),
        (4,) * 1500,
    )  # fmt: skip
    with _opened(make) as backend:
        for number, lengths in enumerate(cuts):
            content = _content(number, sum(lengths))
            for others in (lengths, lengths[::-1]):
                key = b"%d %d" % (number, others[0])
                source, target = _Memory(content.size), _Memory(content.size)
                source.inside[:] = content
                for memory, cut, call in (
                    (source, lengths, backend.write_from), (target, others, backend.read_into),
                ):  # fmt: skip
                    ends = np.cumsum(cut).tolist()
                    buffers = [
                        (memory.address + end - length, length)
                        for end, length in zip(ends, cut, strict=True)
                    ]
                    (result,) = call([key], [buffers])
                    assert result.ok, f"{lengths}: {result}"
                target.check(content, f"{lengths} read as {others}")


def _mixed_batch(make: BackendFactory) -> None:
    """Every item of a batch has its own result, in order, whatever the others have."""
    with _opened(make) as backend:
        there = [bool(number % 3) for number in range(41)]
        keys = [b"key %d" % number for number in range(41)]
        contents = [_content(number, 5000 + number) for number in range(41)]
        for key, content, put in zip(keys, contents, there, strict=True):
            if put:
                assert _put(backend, key, content).ok
        assert backend.contains(keys) == there
        memories = [_Memory(content.size) for content in contents]
        results = backend.read_into(keys, [memory.whole() for memory in memories])
        for key, content, put, memory, result in zip(
            keys, contents, there, memories, results, strict=True
        ):
            assert result.status is (ItemStatus.OK if put else ItemStatus.MISS), f"{key!r}"
            memory.check(content if put else None, f"memory of {key!r}")


def _exact_length(make: BackendFactory) -> None:
    """An object is never read in part, nor with something behind it."""
    with _opened(make) as backend:
        for size in (100, 4096, 8192 + 17):
            key, content = b"of %d" % size, _content(size, size)
            assert _put(backend, key, content).ok
            for asked in (size - 1, size + 1, size - 50, size + _BLOCK, 1):
                result, _ = _get(backend, key, asked)
                assert result.status is ItemStatus.CORRUPT, f"{asked} of {size}: {result}"
                assert result.num_bytes == 0
                assert result.reason, "a corrupt object has a reason"
            _holds(backend, key, content)


def _written_again(make: BackendFactory) -> None:
    """Writing what is there is OK and changes neither bytes nor counts."""
    with _opened(make) as backend:
        content = _content(1, 5000)
        assert _put(backend, b"twice", content).ok
        before = backend.stats()
        assert _put(backend, b"twice", content) == ItemResult(ItemStatus.OK, 5000)
        after = backend.stats()
        assert (before.objects, before.num_bytes) == (after.objects, after.num_bytes)
        _holds(backend, b"twice", content)


def _removed(make: BackendFactory) -> None:
    """Deleted and quarantined objects are absent, and may be written anew."""
    with _opened(make) as backend:
        for name in ("delete", "quarantine"):
            key, content = name.encode(), _content(2, 4096)
            assert _put(backend, key, content).ok
            call = getattr(backend, name)
            (result,) = call([key])
            assert result.ok, f"{name}: {result}"
            _is_absent(backend, key, 4096)
            (result,) = call([key])
            assert result.status is ItemStatus.MISS, f"{name} of nothing: {result}"
            assert _put(backend, key, content).ok
            _holds(backend, key, content)
            backend.delete([key])


def _counted(make: BackendFactory) -> None:
    """Objects and bytes are counted, and the counts return to where they began."""
    with _opened(make) as backend:
        keys = [b"%d" % number for number in range(20)]
        for key in keys:
            assert _put(backend, key, _content(3, 8192)).ok
        stats = backend.stats()
        assert stats.objects == 20
        assert stats.num_bytes >= 20 * 8192
        assert all(result.ok for result in backend.delete(keys))
        stats = backend.stats()
        assert (stats.objects, stats.num_bytes) == (0, 0)


def _any_key(make: BackendFactory) -> None:
    """Keys are bytes: any bytes, and no two are taken for each other."""
    keys = [bytes(1), bytes(2), b"a", b"A", b"aa", b"a/../b", b".", b".."]
    keys += [b"\xff" * MAX_KEY_BYTES, bytes(MAX_KEY_BYTES)]
    keys += [bytes([number]) * 32 for number in range(0, 256, 15)]
    with _opened(make) as backend:
        for number, key in enumerate(keys):
            assert backend.contains([key]) == [False], f"{key!r} before it was written"
            assert _put(backend, key, _content(number, 300)).ok, f"{key!r}"
        for number, key in enumerate(keys):
            _holds(backend, key, _content(number, 300))
        for key in (b"", bytes(MAX_KEY_BYTES + 1)):
            assert _put(backend, key, _content(0, 300)).status is ItemStatus.REFUSED
            _is_absent(backend, key)


def _bad_call(make: BackendFactory) -> None:
    """Arguments that do not fit together raise, and nothing is kept."""
    with _opened(make) as backend:
        memory = _Memory(10)
        for call in (backend.write_from, backend.read_into):
            try:
                call([b"one", b"two"], [memory.whole()])
            except StorageError:
                pass
            else:
                raise AssertionError(f"{call.__name__} took two keys with one list of buffers")
        assert backend.contains([b"one", b"two"]) == [False, False]


def _bounded(make: BackendFactory) -> None:
    """A backend with a capacity keeps to it, and what does not fit at all is refused."""
    size, capacity = 8192, 10 * 8192
    with _opened(make, capacity) as backend:
        if backend.stats().capacity_bytes is None:
            return
        keys = [b"%d" % number for number in range(30)]
        for number, key in enumerate(keys):
            assert _put(backend, key, _content(number, size)).ok, "old objects make room"
            assert backend.stats().num_bytes <= capacity
        stats = backend.stats()
        there = backend.contains(keys)
        assert stats.evicted == 30 - sum(there)
        assert stats.evicted_bytes == stats.evicted * size
        assert there[-1], "the newest object was evicted"
        assert sum(there) == stats.objects > 1
        for number, key in enumerate(keys):
            if there[number]:
                _holds(backend, key, _content(number, size))
        large = _put(backend, b"large", _content(0, capacity + 1))
        assert large.status is ItemStatus.REFUSED, f"{large}"
        assert large.reason, "a refusal has a reason"
        assert backend.contains(keys) == there, "a refusal evicts nothing"


def _closed(make: BackendFactory) -> None:
    """A closed backend finds and keeps nothing, and raises nothing; closing twice is once."""
    backend = make(None)
    assert _put(backend, b"key", _content(1, 100)).ok
    backend.close()
    backend.close()
    assert backend.contains([b"key"]) == [False]
    assert not _get(backend, b"key", 100)[0].ok
    assert not _put(backend, b"other", _content(1, 100)).ok
    assert not backend.delete([b"key"])[0].ok


def _many_threads(make: BackendFactory) -> None:
    """Threads that write, read and delete the same keys see whole objects or none."""
    keys = [b"%d" % number for number in range(8)]
    contents = [_content(number, 4096 * 3 + number) for number in range(8)]
    failures: list[str] = []

    def work(backend: StorageBackend, begin: threading.Barrier, seed: int) -> None:
        rng = np.random.default_rng(seed)
        begin.wait(_DEADLINE_SECS)
        try:
            for _ in range(60):
                number, action = int(rng.integers(8)), int(rng.integers(4))
                if action == 0:
                    (result,) = backend.delete([keys[number]])
                    assert result.status in (ItemStatus.OK, ItemStatus.MISS), f"{result}"
                elif action == 1:
                    assert _put(backend, keys[number], contents[number]).ok
                else:
                    result, memory = _get(backend, keys[number], contents[number].size)
                    assert result.status in (ItemStatus.OK, ItemStatus.MISS), f"{result}"
                    if result.ok:
                        memory.check(contents[number], f"object {number}")
        except AssertionError as failed:
            failures.append(str(failed))

    with _opened(make) as backend:
        begin = threading.Barrier(4)
        threads = [
            threading.Thread(target=work, args=(backend, begin, seed), daemon=True)
            for seed in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_DEADLINE_SECS)
            assert not thread.is_alive(), "a call did not return"
        assert not failures, failures[0]
        backend.delete(keys)
        stats = backend.stats()
        assert (stats.objects, stats.num_bytes) == (0, 0), f"{stats}"


STORAGE_CHECKS: tuple[Callable[[BackendFactory], None], ...] = (
    _empty,
    _every_size,
    _scattered,
    _mixed_batch,
    _exact_length,
    _written_again,
    _removed,
    _counted,
    _any_key,
    _bad_call,
    _bounded,
    _closed,
    _many_threads,
)
"""Each takes a `BackendFactory`, and raises AssertionError."""
