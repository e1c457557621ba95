"""obstore: loaded, opened for a URL, and what its errors mean."""

from __future__ import annotations

import datetime
import importlib
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvferry.errors import ConfigError, MissingDependencyError, StorageError
from kvferry.storage.base import ItemResult, ItemStatus

__all__ = ["Client", "open_client"]

_CLOUDS = ("s3", "s3a", "gs", "az", "adl", "azure", "abfs", "abfss", "http", "https")
_SCHEMES = (*_CLOUDS, "file", "memory")


class Client(NamedTuple):
    """A store, and the library that it is of."""

    library: Any
    store: Any

    def put(self, name: str, content: memoryview, chunk_bytes: int, num_parts: int) -> None:
        """Write one object, whole or not at all; in parts where it is longer than `chunk_bytes`."""
        self.library.put(
            self.store,
            name,
            content,
            use_multipart=len(content) > chunk_bytes,
            chunk_size=chunk_bytes,
            max_concurrency=num_parts,
        )

    def get(self, name: str, num_bytes: int) -> Any:
        """The bytes of an object, or how many it has where it is not `num_bytes`."""
        found = self.library.get(self.store, name)
        size = int(found.meta["size"])
        return found.bytes() if size == num_bytes else size

    def has(self, name: str) -> bool:
        """Whether there is such an object."""
        try:
            self.library.head(self.store, name)
        except self._absent:
            return False
        return True

    def delete(self, name: str) -> None:
        """Remove an object; for many stores one that is not there is removed as well."""
        self.library.delete(self.store, name)

    def result_of(self, error: Exception, *, reads: bool) -> ItemResult:
        """What became of an item whose call raised `error`."""
        if reads and isinstance(error, self._absent):
            return ItemResult(ItemStatus.MISS)
        return ItemResult(ItemStatus.FAILED, reason=f"{type(error).__name__}: {_short(error)}")

    @property
    def _absent(self) -> tuple[type[Exception], ...]:
        return (self.library.exceptions.NotFoundError, FileNotFoundError)


def open_client(
    url: str, settings: Mapping[str, Any], *, request_secs: float, retry_secs: float
) -> Client:
    """A store at `url`, which nobody is asked for yet.

    Args:
        url: ``s3://bucket/prefix`` and the like.
        settings: The library's own, such as ``endpoint`` and ``region``.
        request_secs: The longest that one request may take.
        retry_secs: How long requests that failed are tried again.

    Raises:
        ConfigError: The URL, or a setting.
        MissingDependencyError: obstore is not installed.
        StorageError: A folder that cannot be made.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"url={url!r} is of no object store: give s3://bucket/prefix, gs://bucket/prefix, "
            f"az://container/prefix, file:///folder or memory:///"
        )
    try:
        library = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError as absent:
        raise MissingDependencyError(
            "the object-store backend needs obstore: pip install 'kvferry[object-store]'"
        ) from absent
    if scheme not in _CLOUDS and settings:
        raise ConfigError(f"{url!r} takes no settings, and has {', '.join(sorted(settings))}")
    try:
        if scheme == "memory":
            return Client(library, stores.MemoryStore())
        if scheme == "file":
            folder = urllib.parse.unquote(urllib.parse.urlsplit(url).path)
            return Client(library, stores.LocalStore(folder, mkdir=True))
        endpoint = str(settings.get("endpoint", ""))
        store = stores.from_url(
            url,
            config=dict(settings) or None,
            client_options={
                "timeout": datetime.timedelta(seconds=request_secs),
                "connect_timeout": datetime.timedelta(seconds=min(request_secs, 5.0)),
                # Who names an endpoint without TLS wants it.
                "allow_http": endpoint.startswith("http://") or scheme == "http",
            },
            retry_config={
                "retry_timeout": datetime.timedelta(seconds=retry_secs),
                "max_retries": 10,
            },
        )
    except library.exceptions.UnknownConfigurationKeyError as bad:
        raise ConfigError(f"{url!r} does not take that setting: {_short(bad)}") from bad
    except OSError as bad:
        raise StorageError(f"{url!r} cannot be opened: {bad}") from bad
    except (library.exceptions.BaseError, ValueError, TypeError) as bad:
        raise ConfigError(f"{url!r} cannot be opened with these settings: {_short(bad)}") from bad
    return Client(library, store)


def _short(error: Exception) -> str:
    """The first line of what the library says; behind it come its own structures."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
