"""What every host pool has of its own: a mapping with the digests, leases, and a registration."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import HostMemoryError, PinError, PoolClosedError
from kvferry.memory.pinned import register

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.memory.mapping import HostMapping
    from kvferry.memory.registration import PinDriver, Registration

__all__ = ["PoolMemory"]


class PoolMemory:
    """The digest table, from byte `digest_offset` of `mapping` to its end, and who keeps it open.

    `when_closed` is what PoolClosedError says of a use after `close`.
    """

    def __init__(
        self, mapping: HostMapping, *, num_slots: int, digest_offset: int, when_closed: str
    ) -> None:
        self._mapping = mapping
        self._table_rows, self._digest_offset = num_slots, digest_offset
        self._when_closed = when_closed
        self._digests = self._digest_table()
        self._registration: Registration | None = None
        # Reentrant, as the garbage collector may give a lease back in the middle of anything.
        self._lock = threading.RLock()
        self._leases = 0

    @property
    def digests(self) -> NDArray[np.uint64]:
        """The digest table, uint64 [num_slots, spans a slot], in place; 0 says "no digest".

        Keeps the pool from closing while it is held.
        """
        self._check_open()
        return self._digests

    @property
    def closed(self) -> bool:
        """Whether the pool was closed."""
        return self._mapping.closed

    @property
    def registration(self) -> Registration | None:
        """Where a GPU finds the pool; None: it is not pinned, and no GPU may be sent there."""
        pinned = self._registration
        return None if pinned is None or pinned.closed else pinned

    def _check_open(self) -> None:
        if self._mapping.closed:
            raise PoolClosedError(self._when_closed)

    def _take_lease(self) -> None:
        with self._lock:
            self._check_open()
            self._leases += 1

    def _return_lease(self) -> None:
        with self._lock:
            if self._leases == 0:
                raise HostMemoryError(
                    "release() was called with 0 leases out: call it once for each acquire()"
                )
            self._leases -= 1

    def _pinned_before(self, *, allow_gaps: bool) -> Registration | None:
        """What an earlier `pin` registered; None: register now, still under `_lock`."""
        self._check_open()
        pinned = self._registration
        if pinned is not None and pinned.closed:
            raise PinError(
                "the pool could not be closed, and the driver keeps some of it: call its close() "
                "again"
            )
        if pinned is not None and not pinned.contiguous and not allow_gaps:
            raise PinError(
                f"the pool is pinned in {len(pinned.chunks)} chunks that the GPU has apart: pass "
                f"allow_gaps=True and ask for the address of each piece"
            )
        return pinned

    def _pin_mapping(
        self, driver: PinDriver, *, granule_bytes: int, chunk_bytes: int | None, allow_gaps: bool
    ) -> Registration:
        """Register all of the mapping, once, without splitting a granule; see `register`."""
        with self._lock:
            self._registration = self._pinned_before(allow_gaps=allow_gaps) or register(
                self._mapping.address,
                self._mapping.num_bytes,
                driver,
                chunk_bytes=chunk_bytes,
                granule_bytes=granule_bytes,
                allow_gaps=allow_gaps,
                owner=self._mapping,
            )
            return self._registration

    def _close_memory(self) -> None:
        """The end of `close`, still under the `_lock` that the pool found itself unused under."""
        if self.closed:
            return
        del self._digests  # a view of ours would keep the mapping open
        try:
            # A pool that stays open must stay pinned: no view first, then the driver.
            self._mapping.check_no_view()
            if self._registration is not None:
                self._registration.close()
                self._registration = None
            self._mapping.close()
        finally:
            if not self._mapping.closed:
                self._digests = self._digest_table()

    def _digest_table(self) -> NDArray[np.uint64]:
        table: NDArray[np.uint64] = np.frombuffer(
            self._mapping.view, dtype=np.uint64, offset=self._digest_offset
        )
        return table.reshape(self._table_rows, -1)
