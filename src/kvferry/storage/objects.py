"""Pages of a geometry in a backend, read and written in host slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import StorageError
from kvferry.storage.base import Buffers, ItemResult, StorageBackend
from kvferry.storage.checked_objects import CheckedObjects
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import Geometry

__all__ = ["PageStore"]


class PageStore(CheckedObjects):
    """Pages of `geometry` in `backend`. Thread-safe; calls block until the batch is done.

    A page is read and written in a host slot of ``geometry.slot_bytes(kind)`` bytes, in place. A
    slot belongs to a read until it returns, and what it holds after a result that is not OK is
    undefined. Nothing that a backend does is raised: a call that raises, or that returns what no
    backend may, is a FAILED batch.

    Args:
        backend: Stays the caller's; it is not closed.
        geometry: Its fingerprint is part of every object, and a read of another one is a MISS.
        kind: Which slots these are.
        verify: Compare the checksum of what was read. The header is checked in any case.
        missing_secs: How long a key that was not there when it was read is taken for absent,
            whatever the backend says. Writing it ends that.

    Raises StorageError for a geometry without planes for such slots, and MissingDependencyError
    where xxhash is not installed.
    """

    def __init__(
        self,
        backend: StorageBackend,
        geometry: Geometry,
        *,
        kind: SlotKind = SlotKind.PAGE,
        verify: bool = True,
        missing_secs: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        num_spans = len(geometry.spans(kind))
        if not num_spans:
            raise StorageError(f"this geometry has no planes for {kind.value} slots to store")
        super().__init__(
            backend,
            fingerprint=geometry.fingerprint,
            payload_bytes=geometry.slot_bytes(kind),
            num_digests=num_spans,
            kind=kind,
            verify=verify,
            missing_secs=missing_secs,
            clock=clock,
        )

    @property
    def slot_bytes(self) -> int:
        """Bytes of a page."""
        return self._payload_bytes

    @property
    def num_spans(self) -> int:
        """Digests of a page."""
        return self._num_digests

    def write(
        self, keys: Sequence[bytes], addresses: Sequence[int], digests: NDArray[np.uint64]
    ) -> list[ItemResult]:
        """Store the pages in the slots at `addresses`.

        Args:
            keys: One a page.
            addresses: Of the slots; nothing may write to them until this returns.
            digests: Shape ``[pages, spans]``, uint64, as made on the device.

        Returns:
            One result a page; `ItemResult.num_bytes` is that of the object.
        """
        return self.write_objects(keys, self._slots(addresses), digests)

    def read(
        self, keys: Sequence[bytes], addresses: Sequence[int], digests_out: NDArray[np.uint64]
    ) -> list[ItemResult]:
        """Read pages into the slots at `addresses`.

        Args:
            keys: One a page.
            addresses: Of the slots, which belong to this call until it returns.
            digests_out: Shape ``[pages, spans]``, uint64; rows of pages that are OK are set.

        Returns:
            One result a page. CORRUPT pages were read twice, and are quarantined.
        """
        return self.read_objects(keys, self._slots(addresses), digests_out)

    def _slots(self, addresses: Sequence[int]) -> list[Buffers]:
        return [[(address, self._payload_bytes)] for address in addresses]
