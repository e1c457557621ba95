"""The contract of backends against what a URL names."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ConfigError, StorageError
from kvferry.storage import (
    Buffers,
    FileBackend,
    ItemResult,
    ItemStatus,
    MemoryBackend,
    StorageStats,
)
from kvferry.testing import STORAGE_CHECKS, StorageChecked, check_storage_at

_HERE = __name__
_NAMES = ["usable", *(check.__name__.removeprefix("_") for check in STORAGE_CHECKS)]


def _failed(url: str, **more: float) -> dict[str, str]:
    told = list(check_storage_at(url, **more))
    assert [one.check for one in told] == _NAMES[: len(told)]
    assert all(one.about for one in told)
    return {one.check: one.complaint for one in told if one.complaint}


class Kept(MemoryBackend):
    """One whose objects outlive it, as those of a server."""

    shared = MemoryBackend()

    def __init__(self, *, is_closed: bool = False) -> None:
        super().__init__()
        self.is_closed = is_closed

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys) if self.is_closed else self.shared.contains(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if self.is_closed:
            return super().read_into(keys, buffers)
        return self.shared.read_into(keys, buffers)

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if self.is_closed:
            return super().write_from(keys, buffers)
        return self.shared.write_from(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        return super().delete(keys) if self.is_closed else self.shared.delete(keys)

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        return super().quarantine(keys) if self.is_closed else self.shared.quarantine(keys)

    def stats(self) -> StorageStats:
        return self.shared.stats()

    def close(self) -> None:
        super().close()
        self.is_closed = True


class Undeleting(MemoryBackend):
    """Says that it deletes."""

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        return [ItemResult(ItemStatus.OK, 1) for _ in keys]


class Raising(MemoryBackend):
    """Raises where several keys are read at a time."""

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if len(keys) > 2:
            raise LookupError("as told")
        return super().read_into(keys, buffers)


class Refusing(MemoryBackend):
    """Has no room at all."""

    def write_from(self, keys: Sequence[bytes], _: Sequence[Buffers]) -> list[ItemResult]:
        return [ItemResult(ItemStatus.REFUSED, reason="it is full") for _ in keys]


class Hanging(MemoryBackend):
    """Does not come back from looking at several keys until the test is over."""

    may_return = threading.Event()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if len(keys) > 2:
            self.may_return.wait(60)
        return super().contains(keys)


@pytest.mark.parametrize("exists", [True, False])
def test_files(exists: bool, tmp_path: Path) -> None:
    """In a folder of its own beside or in the one that is named, and nothing is left there."""
    folder = tmp_path / "a b"
    if exists:
        FileBackend(folder).close()
    before = sorted(tmp_path.rglob("*"))
    assert not _failed(f"file://{tmp_path}/a%20b?num_threads=2&capacity_bytes=64MiB")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_can_be_checked_once_only_if_it_is_left_empty() -> None:
    """What a check wrote is gone before the next one begins, and at the end."""
    assert not _failed(f"{_HERE}:Kept")
    assert Kept.shared.stats().objects == 0


def test_memory_with_and_without_a_capacity() -> None:
    """The checks of capacities replace the one of the URL."""
    assert not _failed("memory://")
    assert not _failed("memory://?capacity_bytes=64MiB")


@pytest.mark.parametrize(
    ("cls", "check", "words"),
    [
        ("Undeleting", "removed", "should be absent"),
        ("Raising", "mixed_batch", "it raised LookupError: as told"),
        ("Refusing", "usable", "the write of a probe: refused it is full"),
    ],
)
def test_what_is_broken(cls: str, check: str, words: str) -> None:
    """A complaint says what is not as it should be; one that cannot be used ends the checks."""
    failed = _failed(f"{_HERE}:{cls}")
    assert words in failed[check]
    assert "empty" not in failed
    assert (len(failed) == 1) == (cls in ("Raising", "Refusing"))


def test_one_that_hangs() -> None:
    """The check has a deadline, and is the last."""
    Hanging.may_return.clear()
    told = list(check_storage_at(f"{_HERE}:Hanging", timeout=2.0))
    assert told[-1] == StorageChecked(
        "mixed_batch", "it did not return in 2 s; the checks after it were not run", told[-1].about
    )
    assert not any(one.complaint for one in told[:-1])
    (left,) = [one for one in threading.enumerate() if one.name == "kvferry-storage-check"]
    Hanging.may_return.set()
    left.join(60)
    assert not left.is_alive()


@pytest.mark.parametrize(
    ("url", "more", "error", "words"),
    [
        ("nowhere://x", {}, ConfigError, "no storage scheme"),
        ("file", {}, ConfigError, "give the folder as a URL"),
        ("file:///no/such/folder", {}, ConfigError, "no folder '/no/such'"),
        ("memory://?size=1", {}, ConfigError, "no option size"),
        ("no.such.module:Class", {}, StorageError, "cannot be imported"),
        ("memory://", {"timeout": 0}, ConfigError, "timeout=0"),
        ("memory://", {"timeout": float("nan")}, ConfigError, "timeout=nan"),
    ],
)
def test_what_cannot_be_checked(
    url: str, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    """There is an error before anything is written."""
    with pytest.raises(error, match=words):
        list(check_storage_at(url, **more))


def test_a_place_with_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's objects are neither checked nor touched."""
    full = MemoryBackend()
    block = memoryview(bytearray(b"mine"))
    address = int(np.frombuffer(block, dtype=np.uint8).ctypes.data)
    assert full.write_from([b"k"], [[(address, 4)]])[0].ok
    monkeypatch.setattr(Kept, "shared", full)
    with pytest.raises(ConfigError, match="there are 1 objects"):
        list(check_storage_at(f"{_HERE}:Kept"))
    assert full.contains([b"k"]) == [True]
