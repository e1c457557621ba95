"""The data plane by itself: commands in, answers out."""

from __future__ import annotations

import numpy as np
import pytest
from tests.tiers.rig import PAGE, Rig

from kvferry.errors import KVFerryError, PlanError
from kvferry.memory import SlotOwner
from kvferry.storage import ItemStatus, MemoryBackend
from kvferry.testing.faulty_backend import FaultyBackend
from kvferry.tiers import (
    DetachStorage,
    Found,
    Moved,
    MovePages,
    ProbeStorage,
    ReadPages,
    StorageAttached,
    StorageDetached,
    StorageDone,
    Verify,
    WritePages,
)
from kvferry.types import Direction, SlotKind

KEY = bytes(range(32))


def rig_with_slots(**given: object) -> Rig:
    """All host slots are somebody else's to give, as in a process without a control plane."""
    rig = Rig(**given)  # type: ignore[arg-type]
    rig.pools[SlotKind.PAGE].allocate(12, SlotOwner.INDEX)
    return rig


def move(direction: Direction, slot: int = 0, at: int = 0) -> MovePages:
    """One page."""
    rows = np.arange(at * PAGE, (at + 1) * PAGE).reshape(1, PAGE)
    return MovePages(1, direction, SlotKind.PAGE, (KEY,), (slot,), device_slots=rows)


def close(rig: Rig) -> None:
    """Give all back."""
    assert rig.data.close(20)
    rig.pools[SlotKind.PAGE].free(range(12), SlotOwner.INDEX)
    rig.pools[SlotKind.PAGE].close()


@pytest.mark.parametrize("verify", [Verify.STORAGE, Verify.OFF])
def test_no_digest_of_an_earlier_page_stays(verify: Verify) -> None:
    """Where no digests are made, a slot keeps none of whoever had it before."""
    rig = rig_with_slots(verify=verify)
    rig.pools[SlotKind.PAGE].digests[:] = 77
    rig.data.submit(move(Direction.STORE))
    digests = rig.pools[SlotKind.PAGE].digests
    assert (digests[0] == 0).all()
    assert (digests[1:] == 77).all()
    del digests
    close(rig)


def test_a_refused_transfer_is_raised_or_answered() -> None:
    """In one process it raises; for commands of another process it is an answer."""
    rig = rig_with_slots()
    with pytest.raises(PlanError):
        rig.data.submit(move(Direction.STORE, at=1000))
    assert rig.data.execute(move(Direction.STORE, at=1000)) is None
    (answer,) = rig.data.poll()
    assert isinstance(answer, Moved)
    assert "PlanError" in answer.error
    close(rig)


def test_storage_that_is_not_there_is_refused() -> None:
    """Commands of no attachment, or of one that is gone, are answered all the same."""
    rig = rig_with_slots()
    kind = SlotKind.PAGE
    rig.data.submit(ProbeStorage(1, 9, kind, (KEY, KEY)))
    rig.data.submit(ReadPages(2, 9, kind, (KEY,), (0,)))
    rig.data.submit(DetachStorage(3, 9))
    probe, read, detached = rig.data.poll()
    assert isinstance(probe, Found)
    assert (probe.found, bool(probe.error)) == ((False, False), True)
    assert isinstance(read, StorageDone)
    assert read.statuses == (ItemStatus.REFUSED,)
    assert detached == StorageDetached(9, 3)
    close(rig)


def test_a_queue_that_is_full_refuses_and_gives_back() -> None:
    """More commands than may wait are answered at once, and their slots are let go."""
    import threading

    from kvferry.testing.faulty_backend import Fault, FaultKind

    release = threading.Event()
    backend = FaultyBackend()
    backend.script("write_from", None, Fault(FaultKind.BLOCK, release=release), always=True)
    rig = rig_with_slots()
    rig.data.attach_storage(1, backend, num_threads=1)
    for job in range(1100):
        rig.data.submit(WritePages(job, 1, SlotKind.PAGE, (KEY,), (job % 12,)))
    early = rig.data.poll()
    refused = [one for one in early if isinstance(one, StorageDone)]
    assert early[0] == StorageAttached(1)
    assert 1100 - 1024 - 1 <= len(refused) <= 1100 - 1024
    assert all(one.statuses == (ItemStatus.REFUSED,) for one in refused)
    release.set()
    rig.data.submit(DetachStorage(5000, 1))
    answered = len(refused)
    for _ in range(3000):
        answered += sum(isinstance(one, StorageDone) for one in rig.data.poll())
        if not rig.data.num_threads:
            break
        rig.data.wait(0.02)
    answered += sum(isinstance(one, StorageDone) for one in rig.data.poll())
    assert answered == 1100
    assert rig.pools[SlotKind.PAGE].num_leases == 0
    close(rig)


def test_a_backend_whose_close_raises_is_gone_all_the_same() -> None:
    """What closing it raised is told."""

    class Stuck(MemoryBackend):
        def close(self) -> None:
            raise KVFerryError("it does not close")

    rig = rig_with_slots()
    rig.data.attach_storage(4, Stuck())
    rig.data.submit(DetachStorage(7, 4))
    rig.data.poll()
    assert rig.data.wait(20)
    (gone,) = rig.data.poll()
    assert gone == StorageDetached(4, 7, "KVFerryError: it does not close")
    assert rig.data.num_threads == 0
    close(rig)
