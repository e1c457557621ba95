"""The contract of backends against storage that a URL names, in a place of its own there.

    from kvferry.testing import check_storage_at

    for told in check_storage_at("file:///var/cache/kv"):
        print(told.check, told.complaint or "ok")

Every backend that a check opens is empty: it has a folder, prefix or key prefix of its own, and
what was written is deleted when it is closed. A backend of somebody else is opened as the URL says,
so what it names must be empty.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import pathlib
import queue
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvferry.errors import ConfigError, KVFerryError
from kvferry.storage import (
    Buffers,
    ItemResult,
    StorageBackend,
    StorageStats,
    backend_class,
    key_complaint,
    open_backend,
    parse_storage_url,
    try_backend,
)
from kvferry.testing.storage_contract import STORAGE_CHECKS, BackendFactory

__all__ = ["StorageChecked", "check_storage_at"]

_THREAD = "kvferry-storage-check"


class StorageChecked(NamedTuple):
    """How one check went."""

    check: str
    complaint: str
    """What is not as it should be; empty where the check passed."""

    about: str
    """What was checked, in words."""


def check_storage_at(url: str, *, timeout: float = 120.0) -> Iterator[StorageChecked]:
    """Run every check on what `url` names, one at each step.

    A check that does not return in `timeout` seconds ends them all: its thread is left behind.

    Raises:
        ConfigError: `url` names no storage, or it has objects of its own that would be in the way.
        StorageError: It cannot be opened.
    """
    if not 0 < timeout <= threading.TIMEOUT_MAX:
        raise ConfigError(f"timeout={timeout}: give seconds above 0")
    with _places(url) as make:
        for check in (_usable, *STORAGE_CHECKS):
            outcome: queue.SimpleQueue[str | KVFerryError] = queue.SimpleQueue()
            threading.Thread(
                target=_check, args=(check, make, outcome), name=_THREAD, daemon=True
            ).start()
            name = check.__name__.removeprefix("_")
            about = (check.__doc__ or "").partition("\n")[0]
            try:
                complaint = outcome.get(timeout=timeout)
            except queue.Empty:
                why = f"it did not return in {timeout:g} s; the checks after it were not run"
                yield StorageChecked(name, why, about)
                return
            if isinstance(complaint, KVFerryError):
                if check is _usable:
                    raise complaint
                complaint = f"it raised {type(complaint).__name__}: {complaint}"
            yield StorageChecked(name, complaint, about)
            if complaint and check is _usable:
                return


def _usable(make: BackendFactory) -> None:
    """It can be opened, is empty, and one object is written, read and deleted."""
    backend = make(None)
    try:
        if num_there := backend.stats().objects:
            raise ConfigError(f"there are {num_there} objects, and the checks need an empty place")
        result = try_backend(backend)
        assert result.ok, result.reason
    finally:
        backend.close()


def _check(
    check: Callable[[BackendFactory], None],
    make: BackendFactory,
    outcome: queue.SimpleQueue[str | KVFerryError],
) -> None:
    try:
        check(make)
    except AssertionError as failed:
        outcome.put(str(failed) or "it is not so")
    except KVFerryError as bad:
        outcome.put(bad)
    except Exception as bad:  # noqa: BLE001  other people's code: whatever it raises is a complaint
        outcome.put(f"it raised {type(bad).__name__}: {bad}")
    else:
        outcome.put("")


@contextlib.contextmanager
def _places(url: str) -> Iterator[BackendFactory]:
    """A factory of empty backends; what they need is removed at the end."""
    before, _, query = url.partition("?")
    name, place, _ = parse_storage_url(url)
    takes_capacity = "capacity_bytes" in inspect.signature(backend_class(name)).parameters
    own, number = f"kvferry-check-{uuid.uuid4().hex[:12]}", itertools.count()
    with contextlib.ExitStack() as at_end:
        folder = pathlib.Path()
        if name == "file":
            if not place:
                raise ConfigError("give the folder as a URL, as in file:///var/cache/kv")
            path = pathlib.Path(place["path"])
            inside = path if path.is_dir() else path.parent
            if not inside.is_dir():
                raise ConfigError(f"there is no folder {str(inside)!r}: make it, or name another")
            folder = pathlib.Path(tempfile.mkdtemp(prefix=".kvferry-check-", dir=inside))
            at_end.callback(shutil.rmtree, folder, ignore_errors=True)

        def make(capacity: int | None) -> StorageBackend:
            own_options: dict[str, Any] = {}
            at = before
            if name == "file":
                at = (folder / str(next(number))).as_uri()
            elif name == "object_store":
                at = f"{before.rstrip('/')}/{own}/{next(number)}"
            elif name == "mooncake":
                own_options["key_prefix"] = f"{own}/{next(number)}/"
            if capacity is not None and takes_capacity:
                own_options["capacity_bytes"] = capacity
            kept = [
                one for one in query.split("&") if one and one.partition("=")[0] not in own_options
            ]
            if kept:
                at += "?" + "&".join(kept)
            return _Tidy(open_backend(at, **own_options))

        yield make


class _Tidy(StorageBackend):
    """Deletes what was written through it when it is closed: the place is left as it was."""

    def __init__(self, inner: StorageBackend) -> None:
        self.interface_version = inner.interface_version
        self._inner = inner
        self._lock = threading.Lock()
        self._written: set[bytes] = set()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return self._inner.contains(keys)

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        return self._inner.read_into(keys, buffers)

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        with self._lock:
            self._written.update(key for key in keys if not key_complaint(key))
        return self._inner.write_from(keys, buffers)

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        return self._inner.delete(keys)

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        return self._inner.quarantine(keys)

    def stats(self) -> StorageStats:
        return self._inner.stats()

    def close(self) -> None:
        with self._lock:
            written, self._written = sorted(self._written), set()
        for key in written:
            self._inner.delete([key])
        self._inner.close()
