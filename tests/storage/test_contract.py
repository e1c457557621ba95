"""Every backend of kvferry, in every mode, does what any backend must; and the checks can fail."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvferry.storage import (
    Buffers,
    FileBackend,
    ItemResult,
    ItemStatus,
    MemoryBackend,
    StorageBackend,
)
from kvferry.testing import (
    STORAGE_CHECKS,
    BackendFactory,
    FaultKind,
    FaultyBackend,
    check_storage_backend,
)

_BOUND = 64 << 20


def _files(folder: Path, **options: object) -> BackendFactory:
    numbers = itertools.count()
    return lambda capacity: FileBackend(
        folder / str(next(numbers)), capacity_bytes=capacity or _BOUND, **options  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(params=["memory", "file", "file, one thread, page cache", "file, fsync", "tmpfs",
                        "faulty"])  # fmt: skip
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BackendFactory]:
    """A factory of one kind of backend."""
    shm = Path("/dev/shm")  # noqa: S108  a file system in memory, where there is one
    other = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else tmp_path)
    kinds: dict[str, BackendFactory] = {
        "memory": lambda capacity: MemoryBackend(capacity_bytes=capacity),
        "file": _files(tmp_path),
        "file, one thread, page cache": _files(tmp_path, num_threads=1, direct_io=False),
        "file, fsync": _files(tmp_path, fsync="full"),
        "tmpfs": _files(Path(other.name)),
        "faulty": lambda capacity: FaultyBackend(MemoryBackend(capacity_bytes=capacity)),
    }
    with other:
        yield kinds[request.param]


@pytest.mark.parametrize("check", STORAGE_CHECKS, ids=lambda check: check.__name__.strip("_"))
def test_backends_keep_the_contract(
    make: BackendFactory, check: Callable[[BackendFactory], None]
) -> None:
    """Each check passes for each kind of backend."""
    check(make)


class _Broken(MemoryBackend):
    """A backend with one fault, by name."""

    def __init__(self, fault: str, capacity_bytes: int | None) -> None:
        super().__init__(capacity_bytes=None if fault == "no bound" else capacity_bytes)
        self._fault = fault
        self._asked = capacity_bytes
        self._shut = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._fault == "says yes":
            return [True] * len(keys)
        if self._fault == "folds case":
            keys = [key.lower() for key in keys]
        return super().contains(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if self._fault == "order of results":
            return super().read_into(keys[::-1], buffers[::-1])
        if self._fault == "writes on a miss" and buffers:
            super().write_from([b"\0none"], [[(buffers[0][0][0], 1)]])
        results = super().read_into(keys, buffers)
        if self._fault == "any length":
            return [one._replace(status=ItemStatus.OK) if one.reason else one for one in results]
        if self._fault == "no bytes counted":
            return [one._replace(num_bytes=0) for one in results]
        return results

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if self._fault == "first buffer alone":
            return super().write_from(keys, [list(one)[:1] for one in buffers])
        if self._fault == "folds case":
            keys = [key.lower() for key in keys]
        if self._fault == "short of keys":
            keys = keys[: len(buffers)]
        if self._fault == "drops long ones" and buffers and buffers[0][0][1] > 1 << 16:
            return [ItemResult(ItemStatus.OK, sum(n for _, n in one)) for one in buffers]
        return super().write_from(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        if self._fault == "deletes nothing":
            return [ItemResult(ItemStatus.OK)] * len(keys)
        return super().delete(keys)

    def close(self) -> None:
        if self._fault == "works on when closed":
            return
        if self._fault == "closes once" and self._shut:
            raise AssertionError("closed twice")
        self._shut = True
        super().close()


@pytest.mark.parametrize(
    "fault",
    ["says yes", "folds case", "order of results", "any length", "no bytes counted",
     "first buffer alone", "short of keys", "drops long ones", "deletes nothing",
     "works on when closed", "closes once"],
)  # fmt: skip
def test_a_broken_backend_is_seen(fault: str) -> None:
    """A backend with any one of these faults fails the checks."""
    with pytest.raises(AssertionError, match=": "):
        check_storage_backend(lambda capacity: _Broken(fault, capacity))


def test_a_backend_that_passes() -> None:
    """The double without a fault passes, so each fault above is what was seen."""
    check_storage_backend(lambda capacity: _Broken("none", capacity))


@pytest.mark.parametrize(
    ("method", "kind"),
    [("read_into", FaultKind.WRONG_BYTES), ("write_from", FaultKind.WRONG_BYTES),
     ("read_into", FaultKind.SHORT), ("read_into", FaultKind.SILENT),
     ("read_into", FaultKind.ZERO), ("write_from", FaultKind.SILENT)],
)  # fmt: skip
def test_a_scripted_fault_is_seen(method: str, kind: FaultKind) -> None:
    """What a faulty backend does to bytes does not pass for a backend that works."""

    def make(capacity: int | None) -> StorageBackend:
        backend = FaultyBackend(MemoryBackend(capacity_bytes=capacity))
        backend.script(method, None, kind, always=True)
        return backend

    with pytest.raises(AssertionError, match=": "):
        check_storage_backend(make)
