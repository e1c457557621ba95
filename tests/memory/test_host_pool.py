"""The host pool: its size, its bytes, its digests, its leases and its end."""

from __future__ import annotations

import ctypes
import mmap
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.errors import (
    BudgetError,
    ConfigError,
    HostMemoryError,
    PoolClosedError,
    PoolInUseError,
    SlotOwnershipError,
)
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.memory import BudgetSource, HostPool, MemoryReading, SlotOwner, SlotRun
from kvferry.types import SlotKind

MIB = 1 << 20
GIB = 1 << 30


def _geometry(**kwargs: int) -> Geometry:
    return Geometry(
        planes=(
            Plane(name="latent", num_layers=5, element_size=576),
            Plane(name="index_key", num_layers=2, element_size=132),
            Plane(
                name="state",
                num_layers=3,
                element_size=1000,
                rows_per_page=1,
                hit_rule=HitRule.exact_boundary(),
            ),
        ),
        page_size=16,
        **kwargs,
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("kind", list(SlotKind))
@pytest.mark.parametrize("asked", [5 * MIB, 5 * MIB + 1, 16 * MIB - 1, 123_457])
@pytest.mark.parametrize("alignments", [{}, {"slot_alignment": 1, "span_alignment": 1}])
def test_size_is_never_above_and_one_slot_below_at_most(
    kind: SlotKind, asked: int, alignments: dict[str, int]
) -> None:
    """Slots and digests together stay within what was asked, less than two slots' bytes short."""
    geometry = _geometry(**alignments)
    with HostPool(geometry, num_bytes=asked, kind=kind) as pool:
        one = geometry.slot_bytes(kind) + 8 * len(geometry.spans(kind))
        assert pool.num_bytes <= asked
        assert pool.num_bytes >= asked - one - 8
        assert pool.num_bytes >= asked * 0.99 or asked < 100 * one
        assert pool.num_slots * one <= pool.num_bytes <= pool.num_slots * one + 8
        assert pool.num_free == pool.num_slots
        assert pool.slot_bytes == geometry.slot_bytes(kind)
        assert pool.kind is kind


def test_padding_before_the_digests_is_counted() -> None:
    """Slots of 3 bytes leave 0 to 7 bytes before the table; they too stay within what was asked."""
    plane = Plane(name="k", num_layers=1, element_size=3)
    geometry = Geometry(planes=(plane,), page_size=1, slot_alignment=1, span_alignment=1)
    for asked in range(16, 400):
        with HostPool(geometry, num_bytes=asked) as pool:
            assert asked - 18 <= pool.num_bytes <= asked
            pool.digests[:] = 1
            assert bytes(pool.slot_view(pool.num_slots - 1)) == bytes(3)


def test_exactly_one_slot_is_enough_and_a_byte_less_is_not() -> None:
    """The smallest pool has one slot; below it the message has both numbers."""
    geometry = _geometry()
    need = geometry.slot_bytes() + 8 * len(geometry.spans())
    with HostPool(geometry, num_bytes=need) as pool:
        assert (pool.num_slots, pool.num_bytes) == (1, need)
    with pytest.raises(ConfigError, match=rf"num_bytes={need - 1} holds no slot.*\({need} B\)"):
        HostPool(geometry, num_bytes=need - 1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "give one of the two"),
        ({"num_bytes": MIB, "num_slots": 1}, "give one of the two"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"num_slots": 2.5}, "num_slots=2.5"),
        ({"num_bytes": -1}, "num_bytes=-1"),
        ({"num_bytes": 1e9}, "num_bytes=1000000000.0"),
    ],
)
def test_senseless_sizes(arguments: dict[str, int], named: str) -> None:
    """Neither or both sizes, none, negative and broken ones are refused by name."""
    with pytest.raises(ConfigError, match=named):
        HostPool(_geometry(), **arguments)  # type: ignore[arg-type]


def test_kind_without_planes() -> None:
    """A geometry without state planes has no state pool."""
    geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=8),))
    with pytest.raises(ConfigError, match="no planes for state"):
        HostPool(geometry, num_slots=1, kind=SlotKind.STATE)


def test_memory_is_committed_when_the_pool_is_made() -> None:
    """Resident memory grows by the pool's whole size, digests included, before any use."""
    before = _resident_bytes()
    with HostPool(_geometry(), num_bytes=96 * MIB) as pool:
        assert _resident_bytes() - before >= pool.num_bytes * 0.99


_READINGS = {
    BudgetSource.MACHINE: MemoryReading(total_bytes=2 * GIB, available_bytes=80 * MIB),
    BudgetSource.CGROUP: MemoryReading(
        total_bytes=2 * GIB,
        available_bytes=GIB,
        cgroup_limit_bytes=100 * MIB,
        cgroup_used_bytes=20 * MIB,
    ),
    BudgetSource.MEMLOCK: MemoryReading(
        total_bytes=2 * GIB, available_bytes=GIB, memlock_limit_bytes=40 * MIB
    ),
}


@pytest.mark.parametrize("source", list(_READINGS))
def test_over_budget_is_refused_before_memory_is_taken(source: BudgetSource) -> None:
    """Machine, cgroup and lock limit each refuse, with all numbers and the override."""
    before = _resident_bytes()
    with pytest.raises(BudgetError) as refused:
        HostPool(
            _geometry(), num_slots=1000, reading=_READINGS[source], reserve_bytes=48 * MIB,
            locked=source is BudgetSource.MEMLOCK,
        )  # fmt: skip
    assert _resident_bytes() - before < 8 * MIB
    asked = 1000 * (_geometry().slot_bytes() + 7 * 8)
    locked = source is BudgetSource.MEMLOCK
    free, reserve = (40 * MIB, 0) if locked else (80 * MIB, 48 * MIB)
    message = str(refused.value)
    for number in (asked, free, free - reserve):
        assert f"({number} B)" in message
    assert locked or f"({reserve} B)" in message
    assert "1000 slots" in message
    assert "unchecked_budget=True" in message


def test_override_takes_what_the_budget_refuses() -> None:
    """unchecked_budget makes the pool, and the verdict stays readable."""
    reading = MemoryReading(total_bytes=GIB, available_bytes=0)
    with HostPool(_geometry(), num_slots=2, reading=reading, unchecked_budget=True) as pool:
        assert not pool.budget.allowed
        assert pool.num_slots == 2


def test_side_pools_stay_within_one_budget() -> None:
    """Pools of both kinds that split a size take no more than it between them."""
    total = 8 * MIB
    with (
        HostPool(_geometry(), num_bytes=total * 3 // 4) as pages,
        HostPool(_geometry(), num_bytes=total // 4, kind=SlotKind.STATE) as states,
    ):
        assert pages.num_bytes + states.num_bytes <= total


@pytest.mark.parametrize("alignment", [1, 64, 4096, 65536])
def test_slots_are_aligned_and_do_not_touch(alignment: int) -> None:
    """Each slot keeps its own random bytes, at its address, and digests lie beside them all."""
    geometry = _geometry(slot_alignment=alignment, span_alignment=min(alignment, 16))
    rng = random.Random(alignment)
    with HostPool(geometry, num_slots=9) as pool:
        written = {}
        for slot in rng.sample(range(9), 9):
            written[slot] = rng.randbytes(pool.slot_bytes)
            pool.slot_view(slot)[:] = written[slot]
        assert not pool.digests.any()
        pool.digests[:] = 0xA5A5A5A5A5A5A5A5
        for slot, expected in written.items():
            address = pool.slot_address(slot)
            assert address % alignment == 0
            assert address == pool.address + slot * geometry.slot_bytes()
            assert ctypes.string_at(address, pool.slot_bytes) == expected
            assert bytes(pool.slot_view(slot)) == expected


@pytest.mark.parametrize("slot", [-1, 4, 1 << 60, 1.5])
def test_unknown_slots_have_no_bytes(slot: int) -> None:
    """Address, view and owner of a slot that does not exist raise."""
    with HostPool(_geometry(), num_slots=4) as pool:
        for use in (pool.slot_address, pool.slot_view, pool.owner_of):
            with pytest.raises(SlotOwnershipError, match=str(slot)):
                use(slot)


def test_digests_of_allocated_slots_start_empty() -> None:
    """A slot handed out anew has no digest of its former life; other slots keep theirs."""
    with HostPool(_geometry(), num_slots=6) as pool:
        assert pool.digests.shape == (6, 7)
        assert pool.digests.dtype == np.uint64
        pool.allocate(6, SlotOwner.INDEX)
        pool.digests[:] = 7
        pool.free([SlotRun(2, 3)], SlotOwner.INDEX)
        assert pool.digests.all()
        assert pool.allocate(2, SlotOwner.INDEX) == (SlotRun(2, 2),)
        assert pool.digests.any(axis=1).tolist() == [True, True, False, False, True, True]


def test_owners_through_the_pool() -> None:
    """The pool allocates for transfers by default, hands over, frees, and proves itself."""
    with HostPool(_geometry(), num_slots=5) as pool:
        runs = pool.allocate(5)
        assert runs is not None
        assert pool.num_owned(SlotOwner.TRANSFER) == 5
        assert pool.allocate(1) is None
        pool.hand_over(runs, SlotOwner.TRANSFER, SlotOwner.INDEX)
        assert pool.owner_of(4) is SlotOwner.INDEX
        pool.free([3], SlotOwner.INDEX)
        with pytest.raises(SlotOwnershipError, match="slot 3 belongs to free"):
            pool.free([3], SlotOwner.INDEX)
        assert pool.num_free == 1
        pool.check_integrity()
        pool._owners._allocator.allocate(1)
        with pytest.raises(SlotOwnershipError, match="slot 3"):
            pool.check_integrity()


def test_close_waits_for_leases_and_transfers() -> None:
    """A lease or a slot in a transfer keeps the pool open; slots of the index do not."""
    pool = HostPool(_geometry(), num_slots=3)
    pool.allocate(1, SlotOwner.INDEX)
    pool.allocate(2)
    with pool.in_use() as leased:
        assert leased.num_leases == 1
        with pytest.raises(PoolInUseError, match=r"out: 1 .*TRANSFER: 2 "):
            pool.close()
    with pytest.raises(PoolInUseError, match=r"close\. slots still owned by TRANSFER: 2"):
        pool.close()
    pool.free([1, 2])  # what allocate() gives out by default is what free() takes back
    pool.slot_view(0)[0] = 1
    pool.check_integrity()
    pool.close()
    assert pool.closed


def test_free_slots_are_named() -> None:
    """`check_slots` passes slots that have an owner and names the first that has none."""
    with HostPool(_geometry(), num_slots=4) as pool:
        pool.allocate(2, SlotOwner.INDEX)
        pool.check_slots(np.array([1, 0]))
        pool.check_slots(np.array([], dtype=np.int64))
        with pytest.raises(SlotOwnershipError, match=r"slot 3 is free \(free: 2 of the 3 "):
            pool.check_slots(np.array([1, 3, 2]))
        pool.free([1], SlotOwner.INDEX)
        with pytest.raises(SlotOwnershipError, match="slot 1 is free"):
            pool.check_slots(np.array([0, 1]))
    with pytest.raises(PoolClosedError):
        pool.check_slots(np.array([0]))


def test_lease_alone_keeps_the_pool_open() -> None:
    """A lease held by another thread's transfer is enough, with no slot in a transfer."""
    with HostPool(_geometry(), num_slots=1) as pool, pool.in_use():
        with pytest.raises(PoolInUseError, match="leases out: 1 ") as refused:
            pool.close()
        assert "TRANSFER" not in str(refused.value)
        assert not pool.closed


def test_lease_is_given_back_when_its_block_fails() -> None:
    """in_use releases on the way out of an exception too."""
    with HostPool(_geometry(), num_slots=1) as pool:
        with pytest.raises(ZeroDivisionError), pool.in_use():
            1 // 0  # noqa: B018
        assert pool.num_leases == 0
        with pytest.raises(HostMemoryError, match="0 leases out"):
            pool.release()


def test_leases_from_many_threads_are_all_counted() -> None:
    """No lease is lost between threads."""
    with HostPool(_geometry(), num_slots=1) as pool:

        def lease_and_return() -> None:
            for _ in range(2000):
                pool.acquire()
                pool.acquire()
                pool.release()

        threads = [threading.Thread(target=lease_and_return) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert pool.num_leases == 8000
        for _ in range(8000):
            pool.release()


def test_close_under_views_leaves_the_pool_whole() -> None:
    """With a slot view or the digests still held, close raises and the pool goes on working."""
    pool = HostPool(_geometry(), num_slots=2)
    pool.digests[1, 1] = 9
    held: list[object] = [pool.slot_view(0), pool.digests]
    while held:
        with pytest.raises(PoolInUseError, match="drop those first"):
            pool.close()
        assert not pool.closed
        assert pool.digests[1, 1] == 9
        held.pop()
    pool.close()


def test_everything_after_close_raises() -> None:
    """close may be repeated; every use after it raises PoolClosedError, its sizes stay known."""
    pool = HostPool(_geometry(), num_slots=2)
    pool.close()
    pool.close()
    uses: list[Callable[[], object]] = [
        lambda: pool.address,
        lambda: pool.digests,
        lambda: pool.num_free,
        lambda: pool.num_leases,
        lambda: pool.num_owned(SlotOwner.INDEX),
        lambda: pool.owner_of(0),
        lambda: pool.slot_address(0),
        lambda: pool.slot_view(0),
        lambda: pool.allocate(1),
        lambda: pool.free([], SlotOwner.INDEX),
        lambda: pool.hand_over([], SlotOwner.INDEX, SlotOwner.TRANSFER),
        pool.check_integrity,
        pool.acquire,
        lambda: pool.in_use().__enter__(),
        pool.__enter__,
    ]
    for use in uses:
        with pytest.raises(PoolClosedError, match="after close"):
            use()
    assert (pool.num_slots, pool.slot_bytes) == (2, _geometry().slot_bytes())
    assert "closed" in repr(pool)


def test_locked_pool() -> None:
    """A small pool can be kept out of swap."""
    with HostPool(_geometry(), num_slots=2, locked=True) as pool:
        lines = Path("/proc/self/status").read_text().splitlines()
        locked = next(int(line.split()[1]) for line in lines if line.startswith("VmLck:"))
        assert locked * 1024 >= pool.num_bytes


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_not_there_is_not_leased(slot: int) -> None:
    """Refused by name, and the pool can still be closed."""
    with HostPool(_geometry(), num_slots=4) as pool:
        with pytest.raises(SlotOwnershipError, match=f"slot {slot} is none of the pool's 4 slots"):
            pool.acquire(np.array([0, slot]))
        assert pool.num_leases == 0
