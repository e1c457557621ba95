"""The host pool: page slots in committed memory, each with exactly one owner.

The memory is one mapping: the slots, then a digest table of one uint64 a (slot, span).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from kvferry.errors import PoolInUseError
from kvferry.geometry import Geometry, PoolView, host_pool_view
from kvferry.memory.backing import Backing, HugePages
from kvferry.memory.budget import BudgetVerdict
from kvferry.memory.busy_slots import BusySlots
from kvferry.memory.mapping import close_on_exit
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.memory.pool_layout import PoolLayout
from kvferry.memory.pool_mapping import PoolMapping, PoolPages
from kvferry.memory.pool_memory import PoolMemory
from kvferry.memory.reading import MemoryReading
from kvferry.memory.registration import PinDriver, Registration
from kvferry.memory.slot_owners import SlotOwner, SlotOwners, free_slots_named, why_in_use
from kvferry.memory.slot_runs import SlotRun, Slots, merge_slots
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = ["HostPool"]


class HostPool(PoolMemory):
    """Page slots of one kind in host memory, page_major, as `geometry` lays them out.

    All memory is committed when the pool is made, and never more than was asked for. Slot
    bookkeeping (allocate, free, hand_over, digests) belongs to one thread; leases may be taken and
    given back on any.

    Args:
        geometry: The planes.
        num_bytes: The most the pool may take, slots and digest table together. It takes at most
            one slot and its digests less than that.
        num_slots: The number of slots, instead of `num_bytes`.
        kind: What a slot holds.
        locked: Keep the memory out of swap.
        huge_pages: Which pages to ask for, see `HugePages`; `backing` says which ones came. A pool
            in reserved huge pages is judged by those that are free, not by ordinary memory.
        numa_node: The node to take memory from as long as it has some: its number, ``auto`` for
            that of the device at `device_bus_id`, None as the system chooses.
        device_bus_id: The PCI address of the device that the pool is for, as its driver has it.
        shared: Let other processes map the memory by `fd`; see `HostMapping.attach`.
        threads: How many threads commit the memory; None: one a processor, 16 at most.
        reserve_bytes: What stays free for others; see `check_budget`.
        reading: The memory there is; by default it is read now. Processes that share a host agree
            on whether they fit only when they judge by one reading.
        processes: How many processes make such a pool from the same reading.
        unchecked_budget: Take the memory whatever the verdict.

    Raises:
        ConfigError: The size holds no slot, or the geometry has no planes for such slots.
        BudgetError: There is not that much memory.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_bytes: int | None = None,
        num_slots: int | None = None,
        kind: SlotKind = SlotKind.PAGE,
        locked: bool = False,
        huge_pages: HugePages = "auto",
        numa_node: int | Literal["auto"] | None = None,
        device_bus_id: str | None = None,
        shared: bool = False,
        threads: int | None = None,
        reserve_bytes: int | None = None,
        reading: MemoryReading | None = None,
        processes: int = 1,
        unchecked_budget: bool = False,
    ) -> None:
        self._geometry = geometry
        self._kind = SlotKind(kind)
        self._layout = PoolLayout(geometry, self._kind)
        self._slot_bytes = self._layout.slot_bytes
        self._num_slots = self._layout.count_slots(num_bytes, num_slots)
        self._num_bytes = self._layout.total_bytes(self._num_slots)
        made = PoolMapping(
            f"a host pool of {self._num_slots} slots",
            self._num_bytes,
            PoolPages(
                huge_pages=huge_pages,
                numa_node=numa_node,
                device_bus_id=device_bus_id,
                shared=shared,
                locked=locked,
                threads=threads,
            ),
            alignment=geometry.slot_alignment,
            reserve_bytes=reserve_bytes,
            reading=reading,
            processes=processes,
            unchecked_budget=unchecked_budget,
        )
        mapping = made.mapping
        self._budget, self._backing = made.verdict, made.backing
        super().__init__(
            mapping,
            num_slots=self._num_slots,
            digest_offset=self._layout.digest_offset(self._num_slots),
            when_closed=f"a host pool of {self._num_slots} slots was used after close(): make a "
            f"new one",
        )
        self._view = host_pool_view(geometry, kind, base=mapping.address, num_slots=self._num_slots)
        self._owners = SlotOwners(self._num_slots)
        self._owner_codes = np.frombuffer(self._owners.codes, dtype=np.uint8)
        self._busy = BusySlots(self._num_slots)

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
        """How many slots there are, free or not."""
        return self._num_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next."""
        return self._slot_bytes

    @property
    def num_bytes(self) -> int:
        """Slots and digest table; `backing` has what whole pages for them take."""
        return self._num_bytes

    @property
    def budget(self) -> BudgetVerdict:
        """The verdict on the pool's size, from when it was made."""
        return self._budget

    @property
    def backing(self) -> Backing:
        """What its memory is, from when it was made: which pages, where, and why not others."""
        return self._backing

    @property
    def fd(self) -> int:
        """The descriptor of a shared pool's memory: slots, then digests. The pool closes it.

        Raises ConfigError where the pool is not shared.
        """
        self._check_open()
        return self._mapping.fd

    @property
    def closed(self) -> bool:
        """Whether the pool was closed. From then on everything else but its sizes raises."""
        return super().closed

    @property
    def address(self) -> int:
        """Where slot 0 starts; aligned to the geometry's `slot_alignment` and the system's page."""
        self._check_open()
        return self._mapping.address

    @property
    def view(self) -> PoolView:
        """Where the rows of every plane lie; valid while a lease is held."""
        self._check_open()
        return self._view

    @property
    def num_free(self) -> int:
        """How many slots are free."""
        return self.num_owned(SlotOwner.FREE)

    @property
    def num_leases(self) -> int:
        """How many leases are out."""
        self._check_open()
        return self._leases

    def num_owned(self, owner: SlotOwner) -> int:
        """How many slots `owner` has."""
        self._check_open()
        return self._owners.num_owned(owner)

    def owner_of(self, slot: SupportsIndex) -> SlotOwner:
        """Who owns `slot`. Raises SlotOwnershipError for a slot out of range."""
        self._check_open()
        return self._owners.owner_of(slot)

    def slot_address(self, slot: SupportsIndex) -> int:
        """Where `slot` starts. Raises SlotOwnershipError for a slot out of range."""
        self._check_open()
        return self._mapping.address + self._owners.checked(slot) * self._slot_bytes

    def slot_view(self, slot: SupportsIndex) -> memoryview:
        """The bytes of `slot`, writable, padding included. Keeps the pool from closing.

        Raises SlotOwnershipError for a slot out of range.
        """
        self._check_open()
        start = self._owners.checked(slot) * self._slot_bytes
        return self._mapping.view[start : start + self._slot_bytes]

    def allocate(
        self, num_slots: int, owner: SlotOwner = SlotOwner.TRANSFER
    ) -> tuple[SlotRun, ...] | None:
        """`num_slots` free slots for `owner`, in few runs, without digests; None: too few are free.

        All or nothing. None also comes for more slots than the pool will ever have. Raises
        ConfigError for a negative number and SlotOwnershipError for the free list as owner.
        """
        self._check_open()
        runs = self._owners.allocate(num_slots, owner)
        for run in runs or ():
            self._digests[run.start : run.stop] = 0
        return runs

    def free(self, slots: Slots, owner: SlotOwner = SlotOwner.TRANSFER) -> None:
        """Give `slots` (runs, single slots or both), which `owner` has, back to the free list.

        Raises SlotOwnershipError, and changes nothing, when a slot is out of range, named twice,
        free already, somebody else's, or still read or written by a transfer.
        """
        self._check_open()
        runs = merge_slots(slots, self._num_slots)
        with self._lock:
            self._busy.check_idle(runs)
            self._owners.free(runs, owner)

    def hand_over(self, slots: Slots, owner: SlotOwner, new_owner: SlotOwner) -> None:
        """Make `slots` (runs, single slots or both), which `owner` has, those of `new_owner`.

        Raises SlotOwnershipError, and changes nothing, when a slot is out of range, named twice,
        or not `owner`'s, or when either owner is the free list.
        """
        self._check_open()
        self._owners.hand_over(slots, owner, new_owner)

    def check_slots(self, slots: npt.NDArray[np.int64]) -> None:
        """Raise SlotOwnershipError, before a transfer moves a byte, if one of `slots` is free."""
        self._check_open()
        free = slots[self._owner_codes[slots] == 0]
        if free.size:
            raise free_slots_named(int(free[0]), free.size, slots.size)

    def check_integrity(self) -> None:
        """Prove that each slot has one owner; SlotOwnershipError tells the first that has not.

        Costs O(num_slots).
        """
        self._check_open()
        self._owners.check_integrity()

    def pin(
        self, driver: PinDriver, *, chunk_bytes: int | None = None, allow_gaps: bool = False
    ) -> Registration:
        """Register slots and digest table with `driver`, until the pool is closed.

        Where the driver does not take them at once, no slot is split; see `register`. A pool that
        is pinned already stays as it is, for all of its users.

        Raises:
            PinError: The driver refused, and nothing is pinned; or the pool was pinned with gaps,
                and here they are not allowed.
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

    def acquire(self, slots: npt.NDArray[np.int64] | None = None) -> None:
        """Take a lease: until `release` the pool cannot be closed, nor `slots` be freed.

        Any thread may call it. Raises PoolClosedError, or SlotOwnershipError for a slot that the
        pool does not have; then no lease is taken.
        """
        with self._lock:
            self._check_open()
            self._busy.add(slots)
            self._take_lease()

    def release(self, slots: npt.NDArray[np.int64] | None = None) -> None:
        """Give back a lease of the same slots. Raises HostMemoryError when none is out."""
        with self._lock:
            self._return_lease()
            self._busy.remove(slots)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Self]:
        """Hold a lease for the length of a ``with`` block."""
        self.acquire()
        try:
            yield self
        finally:
            self.release()

    def close(self) -> None:
        """Give the memory back, with whatever the index still has in it; once closed, a no-op.

        Raises PoolInUseError, and leaves the pool open, while a lease is out, a transfer owns
        slots, or views of the memory live. Raises PinError, and keeps the memory, where the driver
        does not let go of it: the pool is no longer pinned, and `close` may be called again.
        """
        with self._lock:
            if self.closed:
                return
            in_flight = self._owners.num_owned(SlotOwner.TRANSFER)
            if self._leases or in_flight:
                raise PoolInUseError(why_in_use(self._leases, in_flight))
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
        state = "closed" if self.closed else f"{self.num_free} of {self._num_slots} free"
        notes = len(self._backing.notes)
        more = f", {notes} note{'s' * (notes > 1)} in backing" if notes else ""
        return (
            f"HostPool({self._kind.value} slots of {self._slot_bytes} B, {state}; "
            f"{self._backing.summary}{more})"
        )
