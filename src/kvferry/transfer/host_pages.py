"""What a transfer needs of a host pool, whoever owns its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import Geometry, PoolView
    from kvferry.kernels.jit import Context
    from kvferry.types import SlotKind

__all__ = ["HostPages", "PinnedAddresses"]


class PinnedAddresses(Protocol):
    """Pinned host memory as a GPU sees it."""

    @property
    def closed(self) -> bool:
        """Whether it is pinned no more."""

    def device_address(self, host_address: int, num_bytes: int = 1) -> int:
        """What the GPU calls `host_address`, good for `num_bytes` from there on."""

    def chunk_of(self, host_address: int) -> PinnedChunk:
        """The registration that `host_address` lies in: no copy may cross its ``end``."""

    @property
    def chunks(self) -> Sequence[PinnedChunk]:
        """All registrations, by host address."""


class PinnedChunk(Protocol):
    """One registration of pinned memory."""

    @property
    def address(self) -> int:
        """The host address of its first byte."""

    @property
    def end(self) -> int:
        """The host address after its last byte."""


class HostPages(Protocol):
    """Page slots with a digest table: kvferry's own pool, or an engine's tensors as they are."""

    @property
    def geometry(self) -> Geometry:
        """The planes."""

    @property
    def kind(self) -> SlotKind:
        """What a slot holds."""

    @property
    def num_slots(self) -> int:
        """How many page slots there are."""

    @property
    def view(self) -> PoolView:
        """Where the bytes lie; row ``s·R + i`` of a plane is row i of slot s."""

    @property
    def digests(self) -> NDArray[np.uint64]:
        """Shape: ``[num_slots, spans]``. Written by stores, read by loads, 0 where none."""

    def pin_for(self, context: Context) -> PinnedAddresses:
        """Pin slots and digests for the GPU of `context`, once; see `HostPool.pin`."""

    def check_slots(self, slots: NDArray[np.int64]) -> None:
        """Raise SlotOwnershipError if a pool that knows owners has none for one of `slots`.

        Shape: ``[N]``, every one below `num_slots`.
        """

    def acquire(self, slots: NDArray[np.int64]) -> None:
        """Keep the pool from being closed and `slots` from being freed, until `release`.

        Raises PoolClosedError if it is closed.
        """

    def release(self, slots: NDArray[np.int64]) -> None:
        """Give back one `acquire` of the same slots. On any thread."""
