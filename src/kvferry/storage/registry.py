"""Backends by name: kvferry's own, and any class that can be imported."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from kvferry.errors import BackendInterfaceError, ConfigError, KVFerryError, StorageError
from kvferry.storage.base import INTERFACE_VERSION, Buffers, ItemResult, ItemStatus, StorageBackend
from kvferry.storage.raw_memory import AlignedBlock
from kvferry.storage.url import is_storage_url, parse_storage_url, typed_options

__all__ = ["BACKENDS", "backend_class", "check_backend", "open_backend", "try_backend"]

BACKENDS = {
    "file": "kvferry.storage.file:FileBackend",
    "memory": "kvferry.storage.memory:MemoryBackend",
    "mooncake": "kvferry.storage.mooncake:MooncakeBackend",
    "object_store": "kvferry.storage.object_store:ObjectStoreBackend",
}
"""kvferry's own backends and their classes."""

_METHODS = ("contains", "read_into", "write_from", "delete", "quarantine", "stats", "close")
_PROBE_BYTES = 2 * 4096


def open_backend(name: str, **options: Any) -> StorageBackend:
    """Open the backend called `name`, the class that ``package.module:Class`` names, or a URL.

    Args:
        name: A name of `BACKENDS`, where a class is to be imported from, or a URL of storage such
            as ``file:///folder?fsync=data``; see docs/storage.md.
        options: What the class takes; for kvferry's own see `MemoryBackend` and `FileBackend`.

    Raises:
        ConfigError: There is no such backend, it does not take these options, or the URL has one
            of them too.
        BackendInterfaceError: The class is no storage backend; the message says what is missing.
        StorageError: The backend cannot be opened.
    """
    if is_storage_url(name):
        name, options = _read_url(name, options)
    cls = backend_class(name)
    check_backend(cls, repr(name))
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as bad:
        raise ConfigError(
            f"{name!r} does not take these options ({bad}); it takes {inspect.signature(cls)}"
        ) from bad
    try:
        backend: StorageBackend = cls(**options)
    except KVFerryError:
        raise
    except Exception as bad:  # other people's code: whatever it raises, there is no backend
        raise StorageError(
            f"{name!r} cannot be opened: it raised {type(bad).__name__}: {bad}; look at its options"
        ) from bad
    return backend


def check_backend(backend: Any, name: str) -> None:
    """Raise BackendInterfaceError unless `backend`, a class or an object, is a storage backend."""
    missing = [method for method in _METHODS if not callable(getattr(backend, method, None))]
    missing += [method for method in sorted(getattr(backend, "__abstractmethods__", ()))
                if method not in missing]  # fmt: skip
    if missing:
        raise BackendInterfaceError(
            f"{name} lacks {', '.join(missing)}; a subclass of kvferry.storage.StorageBackend "
            f"needs all but quarantine, and another class that too"
        )
    version = getattr(backend, "interface_version", None)
    if version != INTERFACE_VERSION:
        raise BackendInterfaceError(
            f"{name} has interface_version {version!r}, and this kvferry {INTERFACE_VERSION}: "
            f"install versions of the two that go together"
        )


def try_backend(backend: StorageBackend) -> ItemResult:
    """Write, read back and remove one small object: does the backend do what it should here?

    Returns:
        The first result that is not as it should be, with the step in its reason, else OK.
    """
    key = b"kvferry probe " + os.urandom(16)
    wrote, read = AlignedBlock(_PROBE_BYTES), AlignedBlock(_PROBE_BYTES)
    wrote.view[:] = os.urandom(_PROBE_BYTES)
    written: Buffers = [(wrote.address, _PROBE_BYTES)]
    steps: dict[str, Callable[[], list[ItemResult]]] = {
        "write": lambda: backend.write_from([key], [written]),
        "read": lambda: backend.read_into([key], [[(read.address, _PROBE_BYTES)]]),
        "delete": lambda: backend.delete([key]),
    }
    for step, call in steps.items():
        result = _outcome(call)
        if not result.ok:
            reason = f"the {step} of a probe: {result.status.value} {result.reason}".rstrip()
            return result._replace(reason=reason)
        if step == "read" and read.view != wrote.view:
            _outcome(steps["delete"])
            return ItemResult(ItemStatus.CORRUPT, reason="a probe came back with other bytes")
    return ItemResult(ItemStatus.OK, _PROBE_BYTES)


def _outcome(call: Callable[[], list[ItemResult]]) -> ItemResult:
    """The one result of `call`, or why there is none."""
    try:
        found: Any = call()
    except Exception as bad:  # noqa: BLE001  other people's code: whatever it raises is a value
        return ItemResult(ItemStatus.FAILED, reason=f"it raised {type(bad).__name__}: {bad}")
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], ItemResult):
        return ItemResult(ItemStatus.FAILED, reason=f"it returned {str(found)[:80]} for one item")
    return found[0]


def _read_url(url: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name and the options that `url` stands for, with `options` added."""
    name, place, texts = parse_storage_url(url)
    what = repr(url.partition("?")[0][:80])
    if twice := sorted((place.keys() | texts.keys()) & options.keys()):
        raise ConfigError(f"storage {what}: {', '.join(twice)} is given twice; leave one out")
    return name, {**place, **typed_options(backend_class(name), texts, what), **options}


def backend_class(name: str) -> Any:
    """The class that `name`, of `BACKENDS` or ``package.module:Class``, stands for.

    Raises:
        ConfigError: It is neither.
        StorageError: It cannot be imported.
    """
    where = BACKENDS.get(name, name)
    module_name, colon, class_name = where.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(
            f"there is no storage backend {name!r}: give {', '.join(sorted(BACKENDS))}, or "
            f"package.module:Class"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as bad:
        raise StorageError(f"the storage backend {name!r} cannot be imported: {bad}") from bad
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise StorageError(f"{module_name} has no class {class_name}; look at its spelling")
    return found
