"""One backend for all ranks: the objects of a rank that has bytes of its own bear its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.storage import ItemResult, StorageBackend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.storage import Buffers, StorageStats

__all__ = ["RankBackend"]


class RankBackend(StorageBackend):
    """Gives every key a suffix.

    Args:
        inner: Keeps the objects; closed with this one.
        suffix: At most 32 bytes, so that keys stay within what backends take.
    """

    def __init__(self, inner: StorageBackend, suffix: bytes) -> None:
        self._inner = inner
        self._suffix = suffix

    def _names(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key + self._suffix for key in keys]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `StorageBackend.contains`."""
        return self._inner.contains(self._names(keys))

    def read_into(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """See `StorageBackend.read_into`."""
        return self._inner.read_into(self._names(keys), buffers)

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        """See `StorageBackend.write_from`."""
        return self._inner.write_from(self._names(keys), buffers)

    def delete(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """See `StorageBackend.delete`."""
        return self._inner.delete(self._names(keys))

    def quarantine(self, keys: Sequence[bytes]) -> list[ItemResult]:
        """See `StorageBackend.quarantine`."""
        return self._inner.quarantine(self._names(keys))

    def register_memory(self, address: int, num_bytes: int) -> bool:
        """See `StorageBackend.register_memory`."""
        return self._inner.register_memory(address, num_bytes)

    def unregister_memory(self, address: int) -> None:
        """See `StorageBackend.unregister_memory`."""
        self._inner.unregister_memory(address)

    def stats(self) -> StorageStats:
        """Of all ranks that use the backend."""
        return self._inner.stats()

    def close(self) -> None:
        """See `StorageBackend.close`."""
        self._inner.close()
