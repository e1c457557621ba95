"""What waits for what: transfers of the same bytes one after another, others side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.transfer.device_rig import PAGE, DeviceRig, IndexTensor, same
from tests.transfer.fake_gpu import CALLER, FakeGpu

from kvferry.errors import SlotOwnershipError
from kvferry.memory import SlotOwner
from kvferry.transfer import TransferEngine
from kvferry.types import Direction


@pytest.fixture
def rig(gpu: FakeGpu) -> DeviceRig:
    """Pools of random bytes."""
    return DeviceRig(gpu)


@pytest.fixture
def engine(rig: DeviceRig) -> Iterator[TransferEngine]:
    """An engine whose streams the GPU knows."""
    with rig.warm_engine() as made:
        yield made
        rig.gpu.release()


@pytest.mark.parametrize("on_device", [False, True], ids=["host indices", "device indices"])
def test_a_load_sees_the_store_before_it(
    rig: DeviceRig, engine: TransferEngine, on_device: bool
) -> None:
    """A load of slots that a store is still to fill brings what the store puts there."""
    gpu = rig.gpu
    rows, target = rig.rows(3), rig.rows(3)
    rig.store(engine, [0, 1, 2], rows).wait()
    rig.fill()
    new = rig.on_device(rows)
    gpu.hold(gpu.stream_of[Direction.STORE])
    stored = rig.store(engine, [0, 1, 2], IndexTensor(rows) if on_device else rows)
    loaded = rig.load(engine, [2, 0, 1], IndexTensor(target) if on_device else target)
    assert not loaded.done
    gpu.release()
    stored.wait()
    loaded.wait()
    assert (stored.verified_pages, loaded.verified_pages) == (3, 3)
    same(rig.on_device(target[[1, 2, 0]]), new, "what was loaded")


def test_a_store_sees_the_load_before_it(rig: DeviceRig, engine: TransferEngine) -> None:
    """A store of rows that a load is still to fill takes what the load brings."""
    gpu = rig.gpu
    rows = rig.rows(3)
    rig.store(engine, [0, 1, 2], rows).wait()
    kept = rig.on_device(rows)
    rig.poison()
    gpu.hold(gpu.stream_of[Direction.LOAD])
    loaded = rig.load(engine, [0, 1, 2], rows)
    stored = rig.store(engine, [5, 6, 7], rows[[2, 1, 0]])
    assert not stored.done
    gpu.release()
    loaded.wait()
    stored.wait()
    same(rig.on_host([7, 6, 5]), kept, "what was stored")
    assert stored.verified_pages == 3


def test_a_store_does_not_overwrite_what_a_load_still_reads(
    rig: DeviceRig, engine: TransferEngine
) -> None:
    """A load gets the slot as it was when it was submitted, whatever is stored there next."""
    gpu = rig.gpu
    rows = rig.rows(2)
    target = rig.rows(2, besides=rows)
    rig.store(engine, [3, 4], rows).wait()
    old = rig.on_device(rows)
    rig.fill()
    gpu.hold(gpu.stream_of[Direction.LOAD])
    loaded = rig.load(engine, [3, 4], target)
    stored = rig.store(engine, [4], rows[:1])
    assert not stored.done
    gpu.release()
    loaded.wait()
    assert loaded.verified_pages == 2
    same(rig.on_device(target), old, "what was loaded")
    stored.wait()


def test_a_load_does_not_overwrite_what_a_store_still_reads(
    rig: DeviceRig, engine: TransferEngine
) -> None:
    """A store gets the rows as they were when it was submitted, whatever is loaded there next."""
    gpu = rig.gpu
    rows = rig.rows(2)
    rig.store(engine, [0, 1], rows).wait()
    rig.fill()
    new = rig.on_device(rows)
    gpu.hold(gpu.stream_of[Direction.STORE])
    stored = rig.store(engine, [5, 6], rows)
    loaded = rig.load(engine, [0], rows[1:])
    assert not loaded.done
    gpu.release()
    stored.wait()
    loaded.wait()
    same(rig.on_host([5, 6]), new, "what was stored")


@pytest.mark.parametrize("held", list(Direction))
def test_transfers_with_nothing_in_common_go_side_by_side(
    rig: DeviceRig, engine: TransferEngine, held: Direction
) -> None:
    """Either way may be stuck, and a transfer the other way of other rows and slots ends."""
    gpu = rig.gpu
    rows = rig.rows(3)
    others = rig.rows(3, besides=rows)
    rig.store(engine, [0, 1, 2], rows).wait()
    transfers = {
        Direction.LOAD: lambda: rig.load(engine, [0, 1, 2], rows),
        Direction.STORE: lambda: rig.store(engine, [7, 4, 9], others),
    }
    other = Direction.STORE if held is Direction.LOAD else Direction.LOAD
    with gpu.held(gpu.stream_of[held]):
        stuck = transfers[held]()
        free = transfers[other]()
        assert free.done
        assert not stuck.done
    stuck.wait()
    assert (free.verified_pages, stuck.verified_pages) == (3, 3)


def test_slots_of_a_pending_transfer_are_not_freed(rig: DeviceRig, engine: TransferEngine) -> None:
    """Nor given out; whoever frees one is told which. When the transfer is over they may go."""
    gpu, pool = rig.gpu, rig.pool
    free = [8, 9, 10, 11]
    pool.free(free, SlotOwner.INDEX)
    rows = rig.rows(3)
    with gpu.held():
        stored = rig.store(engine, [2, 5, 6], rows)
        loaded = rig.load(engine, [6, 7], rig.rows(2, besides=rows))
        for slots, named in (([5], 5), ([0, 1, 6], 6), ([7], 7)):
            with pytest.raises(SlotOwnershipError, match=rf"slot {named} .*transfer"):
                pool.free(slots, SlotOwner.INDEX)
        assert pool.num_free == 4
        runs = pool.allocate(4, SlotOwner.TRANSFER)
        assert runs is not None
        assert sorted(slot for run in runs for slot in run.slots) == free
        assert pool.allocate(1, SlotOwner.TRANSFER) is None
        pool.free([0, 1], SlotOwner.INDEX)
        pool.check_integrity()
    stored.wait()
    loaded.wait()
    pool.free([2, 5, 6, 7], SlotOwner.INDEX)
    assert pool.num_free == 6
    pool.check_integrity()


def test_a_freed_slot_stays_busy_until_each_transfer_of_it_is_over(
    rig: DeviceRig, engine: TransferEngine
) -> None:
    """Two transfers of one slot: the end of the first does not set it free."""
    gpu, pool = rig.gpu, rig.pool
    rows = rig.rows(1)
    rig.store(engine, [3], rows).wait()
    with gpu.held(gpu.stream_of[Direction.LOAD]):
        done = rig.load(engine, [3], rows)
        gpu.release(gpu.stream_of[Direction.LOAD])
        done.wait()
        gpu.hold(gpu.stream_of[Direction.LOAD])
        pending = rig.load(engine, [3], rows)
        with pytest.raises(SlotOwnershipError, match="slot 3 "):
            pool.free([3], SlotOwner.INDEX)
    pending.wait()
    pool.free([3], SlotOwner.INDEX)
    assert np.array_equal(pool.digests[3] != 0, [True] * 4)


def test_the_caller_goes_on_while_digests_are_compared(
    rig: DeviceRig, engine: TransferEngine
) -> None:
    """`wait_all` is over when the bytes are there; the verdict on them comes to the handle."""
    gpu = rig.gpu
    rows = rig.rows(2)
    rig.store(engine, [0, 1], rows).wait()
    kept = rig.on_device(rows)
    rig.pool.slot_view(1)[7] ^= 1
    rig.poison()
    seen: list[bool] = []
    gpu.hold(gpu.report_stream_of[Direction.LOAD])
    loaded = rig.load(engine, [0, 1], rows)
    loaded.wait_all(stream=CALLER)
    gpu.enqueue(
        CALLER,
        lambda: seen.append(
            np.array_equal(rig.on_device(rows[:1])["latent"], kept["latent"][:, :PAGE])
        ),
    )
    assert seen == [True]
    assert not loaded.done
    assert loaded.verified_pages == 0
    gpu.release()
    loaded.wait()
    assert loaded.bad_pages == (1,)


@pytest.mark.parametrize("direction", list(Direction))
def test_digests_wait_for_the_bytes(
    rig: DeviceRig, engine: TransferEngine, direction: Direction
) -> None:
    """Those of a transfer whose kernels come late are finished after them, though the stream is
    another and idle."""
    gpu = rig.gpu
    rows = rig.rows(3)
    rig.store(engine, [0, 1, 2], rows).wait()
    gpu.hold(gpu.stream_of[direction])
    move = rig.load if direction is Direction.LOAD else rig.store
    moved = move(engine, [0, 1, 2], rows)
    assert gpu.num_pending(gpu.report_stream_of[direction])
    assert not moved.done
    gpu.release()
    moved.wait()
    assert moved.verified_pages == 3


def test_the_next_transfer_goes_on_beside_the_report(
    rig: DeviceRig, engine: TransferEngine
) -> None:
    """Its bytes move while digests of the one before are still to be finished."""
    gpu = rig.gpu
    rows = rig.rows(2)
    kept = rig.on_device(rows)
    gpu.hold(gpu.report_stream_of[Direction.STORE])
    first = rig.store(engine, [0], rows[:1])
    second = rig.store(engine, [1], rows[1:])
    same(rig.on_host([0, 1]), kept, "what was stored")
    assert not first.done
    assert not second.done
    gpu.release()
    second.wait()
    assert first.verified_pages == second.verified_pages == 1
