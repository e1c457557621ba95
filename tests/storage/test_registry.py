"""Backends by name, and what a class must have to be one."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import BackendInterfaceError, ConfigError, StorageError
from kvferry.storage import (
    FileBackend,
    ItemResult,
    ItemStatus,
    MemoryBackend,
    StorageBackend,
    StorageStats,
    open_backend,
    try_backend,
)
from kvferry.testing import Fault, FaultKind, FaultyBackend, check_storage_backend


class Smallest(StorageBackend):
    """A backend of somebody else: only what must be there."""

    def __init__(self, *, capacity_bytes: int | None = None) -> None:
        self._inner = MemoryBackend(capacity_bytes=capacity_bytes)

    def contains(self, keys: Any) -> list[bool]:
        return self._inner.contains(keys)

    def read_into(self, keys: Any, buffers: Any) -> list[ItemResult]:
        return self._inner.read_into(keys, buffers)

    def write_from(self, keys: Any, buffers: Any) -> list[ItemResult]:
        return self._inner.write_from(keys, buffers)

    def delete(self, keys: Any) -> list[ItemResult]:
        return self._inner.delete(keys)

    def stats(self) -> StorageStats:
        return self._inner.stats()

    def close(self) -> None:
        self._inner.close()


class Forgetful(Smallest):
    """One without two of the methods."""

    write_from = None  # type: ignore[assignment]
    stats = None  # type: ignore[assignment]


class Later(Smallest):
    """One written for another interface."""

    interface_version = 2


class Unrelated:
    """A class that is no subclass and has nothing."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that can be imported and holds the classes above."""
    made = types.ModuleType("somebody_elses_backends")
    for cls in (Smallest, Forgetful, Later, Unrelated):
        setattr(made, cls.__name__, cls)
    made.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


def test_kvferry_s_own(tmp_path: Path) -> None:
    """Both built-in backends open by name, with their options."""
    with pytest.raises(ConfigError, match="capacity_bytes"):
        open_backend("memory", capacity=3)
    memory = open_backend("memory", capacity_bytes=1 << 20)
    assert memory.stats().capacity_bytes == 1 << 20
    file = open_backend("file", path=tmp_path / "store", fsync="data")
    assert isinstance(file, FileBackend)
    with pytest.raises(ConfigError, match="path"):
        open_backend("file")
    for backend in (memory, file):
        assert try_backend(backend) == ItemResult(ItemStatus.OK, 8192)
        assert backend.stats().objects == 0
        backend.close()


def test_somebody_else_s(module: str) -> None:
    """A class with the required methods alone opens, and has defaults for the others."""
    backend = open_backend(f"{module}:Smallest", capacity_bytes=1 << 20)
    assert backend.quarantine([b"k"])[0].status is ItemStatus.MISS
    check_storage_backend(lambda capacity: open_backend(f"{module}:Smallest",
                                                        capacity_bytes=capacity))  # fmt: skip


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("redis", ConfigError, "file, memory"),
        ("no.such.module:Class", StorageError, "cannot be imported"),
        ("{}:Nothing", StorageError, "no class Nothing"),
        ("{}:number", StorageError, "no class number"),
        ("{}:Forgetful", BackendInterfaceError, "write_from, stats"),
        ("{}:Unrelated", BackendInterfaceError, "contains, read_into, write_from, delete"),
        ("{}:Later", BackendInterfaceError, "interface_version 2"),
        ("kvferry.storage:StorageBackend", BackendInterfaceError, "close"),
    ],
)
def test_what_is_no_backend(module: str, name: str, error: type[Exception], words: str) -> None:
    """The message says what is wrong or missing, before anything is opened."""
    with pytest.raises(error, match=words):
        open_backend(name.format(module))


@pytest.mark.parametrize(
    ("method", "fault", "words"),
    [
        ("write_from", Fault(FaultKind.STATUS), "the write of a probe: failed"),
        ("read_into", Fault(FaultKind.WRONG_BYTES, bit=70000 % 65536), "other bytes"),
        ("write_from", Fault(FaultKind.SILENT), "the read of a probe: miss"),
    ],
)
def test_a_backend_that_does_not_work_here(method: str, fault: Fault, words: str) -> None:
    """Trying it out says at which step it does not do what it should."""
    backend = FaultyBackend()
    backend.script(method, None, fault, always=True)
    result = try_backend(backend)
    assert not result.ok
    assert words in result.reason
    assert backend.stats().objects == 0


class Raising(MemoryBackend):
    """Cannot be made."""

    def __init__(self) -> None:
        raise LookupError("as told")


def test_a_class_that_raises_as_it_is_opened() -> None:
    """What is raised is kvferry's, with what the class said."""
    with pytest.raises(StorageError, match="LookupError: as told"):
        open_backend(f"{__name__}:Raising")
