"""A host pool of another process, whose memory is mapped and pinned here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import PoolInUseError
from kvferry.geometry import host_pool_view
from kvferry.memory.mapping import HostMapping, close_on_exit
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.memory.pool_layout import PoolLayout
from kvferry.memory.pool_memory import PoolMemory
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import Geometry, PoolView
    from kvferry.kernels.jit import Context
    from kvferry.memory.backing import Backing
    from kvferry.memory.registration import PinDriver, Registration

__all__ = ["AttachedHostPool"]


class AttachedHostPool(PoolMemory):
    """The slots and digests of a shared `HostPool` of another process, at the same places.

    Nothing is written by attaching, and no memory is taken. Which slots hold what is known where
    the pool was made, so a transfer may name any of them here. The memory lives as long as anybody
    maps it, however the process that made it ends.

    Args:
        geometry: The planes, as there.
        fd: The descriptor of the memory, from `HostPool.fd`; stays the caller's to close.
        num_slots: How many slots the pool has.
        kind: What a slot holds.

    Raises:
        ConfigError: The memory has not the size of such a pool.
    """

    def __init__(
        self, geometry: Geometry, fd: int, *, num_slots: int, kind: SlotKind = SlotKind.PAGE
    ) -> None:
        self._geometry = geometry
        self._kind = SlotKind(kind)
        layout = PoolLayout(geometry, self._kind)
        self._num_slots = layout.count_slots(None, num_slots)
        self._slot_bytes = layout.slot_bytes
        self._num_bytes = layout.total_bytes(self._num_slots)
        mapping = HostMapping.attach(fd, self._num_bytes, alignment=geometry.slot_alignment)
        super().__init__(
            mapping,
            num_slots=self._num_slots,
            digest_offset=layout.digest_offset(self._num_slots),
            when_closed=f"an attached pool of {self._num_slots} slots was used after close(): "
            f"attach again",
        )
        self._view = host_pool_view(
            geometry, self._kind, base=mapping.address, num_slots=self._num_slots
        )

    @property
    def geometry(self) -> Geometry:
        """What the slots hold."""
        return self._geometry

    @property
    def kind(self) -> SlotKind:
        """Which of the geometry's two kinds of slots these are."""
        return self._kind

    @property
    def num_slots(self) -> int:
        """How many slots there are."""
        return self._num_slots

    @property
    def num_bytes(self) -> int:
        """Slots and digest table: mapped here, taken where the pool was made."""
        return self._num_bytes

    @property
    def backing(self) -> Backing:
        """What the memory is."""
        return self._mapping.backing

    @property
    def view(self) -> PoolView:
        """Where the rows of every plane lie in this process; valid while a lease is held."""
        self._check_open()
        return self._view

    def pin(
        self, driver: PinDriver, *, chunk_bytes: int | None = None, allow_gaps: bool = False
    ) -> Registration:
        """Register slots and digests with the driver of this process; as `HostPool.pin`.

        Raises:
            PinError: The driver refused, and nothing is pinned.
            ConfigError: `chunk_bytes` holds no slot.
        """
        return self._pin_mapping(
            driver,
            granule_bytes=self._slot_bytes,
            chunk_bytes=chunk_bytes,
            allow_gaps=allow_gaps,
        )

    def pin_for(self, context: Context) -> Registration:
        """`pin` for the GPU of `context`."""
        return self.pin(ContextPinDriver(context))

    def check_slots(self, slots: NDArray[np.int64]) -> None:
        """Nothing: the owners of slots are known where the pool was made."""

    def acquire(self, slots: NDArray[np.int64] | None = None) -> None:  # noqa: ARG002
        """Keep the pool open; raises PoolClosedError if it is closed."""
        self._take_lease()

    def release(self, slots: NDArray[np.int64] | None = None) -> None:  # noqa: ARG002
        """Give back one `acquire`. Raises HostMemoryError when none is out."""
        self._return_lease()

    def close(self) -> None:
        """Unpin and unmap the memory here; once closed, a no-op.

        Raises PoolInUseError, and leaves the pool open, while a transfer uses it; PinError where
        the driver keeps the memory, and `close` may be called again.
        """
        with self._lock:
            if self.closed:
                return
            if self._leases:
                raise PoolInUseError(
                    f"{self._leases} transfers still use this pool; wait for them, then close"
                )
            self._close_memory()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        close_on_exit(self, exc)

    def __repr__(self) -> str:
        state = "closed" if self.closed else "another process's"
        return f"AttachedHostPool({self._num_slots} {self._kind.value} slots, {state})"
