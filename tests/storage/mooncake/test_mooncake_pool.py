"""What is particular to a pool that others use too: leases, stale objects, eviction, batches."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.storage.mooncake.pool_rig import Master, Member, opened
from tests.storage.server_rig import until
from tests.storage.storage_rig import SMALL, Pages, key_of, object_of, put

from kvferry.errors import ConfigError, StorageError
from kvferry.geometry import Geometry, Plane
from kvferry.storage import ItemStatus, PageStore, StorageBackend, open_backend, try_backend
from kvferry.storage.mooncake import MooncakeBackend

_NUMBERS = itertools.count()
LARGE = Geometry(planes=(Plane(name="k", num_layers=4, element_size=1024),), page_size=64)
"""A slot of 256 KiB."""


@pytest.fixture
def prefix() -> str:
    """Of keys that no other test has."""
    return f"pool {os.getpid()}/{next(_NUMBERS)}/"


@pytest.fixture
def make(master: Master, prefix: str) -> Iterator[Callable[[], MooncakeBackend]]:
    """Makes backends that see the same objects; all are closed in the end."""
    made: list[MooncakeBackend] = []

    def one() -> MooncakeBackend:
        made.append(opened(master, key_prefix=prefix))
        return made[-1]

    yield one
    for backend in made:
        backend.close()


def _get(backend: StorageBackend, number: int, num_bytes: int) -> tuple[ItemStatus, bool]:
    """The status of a read, and whether it brought the object's bytes."""
    into = np.full(num_bytes, 0xA5, dtype=np.uint8)
    (result,) = backend.read_into([key_of(number)], [[(int(into.ctypes.data), num_bytes)]])
    return result.status, bool((into == object_of(number, num_bytes)).all())


def test_registered_slots_are_used_in_place(make: Callable[[], MooncakeBackend]) -> None:
    """Pages go between host slots and the pool as they lie; their headers alone are staged."""
    writer, reader = make(), make()
    pages, back = Pages(LARGE, 40, seed=1), Pages(LARGE, 40)
    size = LARGE.slot_bytes()
    keys = [key_of(number) for number in range(40)]
    assert writer.register_memory(pages.addresses[0], 40 * size)
    assert reader.register_memory(back.addresses[0], 40 * size)
    assert all(one.ok for one in PageStore(writer, LARGE).write(
        keys, pages.addresses, pages.digests))  # fmt: skip
    found = PageStore(reader, LARGE).read(keys, back.addresses, back.digests)
    assert all(one.ok for one in found), found
    assert (back.bytes == pages.bytes).all()
    assert (back.digests == pages.digests).all()
    for backend in (writer, reader):
        counts = backend.stats().counts
        assert (counts["in_place_parts"], counts["staged_parts"]) == (40, 40)
    writer.unregister_memory(pages.addresses[0])
    assert (
        PageStore(writer, LARGE).write([key_of(99)], pages.addresses[:1], pages.digests[:1])[0].ok
    )
    assert writer.stats().counts["in_place_parts"] == 40


def test_memory_is_registered_once(make: Callable[[], MooncakeBackend]) -> None:
    """What the library refuses is staged as before, and counted."""
    backend = make()
    pages = Pages(SMALL, 4, seed=1)
    assert backend.register_memory(pages.addresses[0], 4 * SMALL.slot_bytes())
    assert not backend.register_memory(pages.addresses[1], SMALL.slot_bytes())
    assert backend.stats().errors["register_failed"] == 1
    backend.unregister_memory(pages.addresses[1])  # nothing was
    backend.unregister_memory(pages.addresses[0])
    assert "unregister_failed" not in backend.stats().errors


def test_batches_are_capped(make: Callable[[], MooncakeBackend]) -> None:
    """More keys than the cap are several calls, with one result each."""
    backend = make()
    numbers = list(range(300))
    assert all(one.ok for one in put(backend, numbers, 1000))
    assert backend.stats().counts["calls"] == 3
    assert (
        backend.contains([key_of(number) for number in range(310)]) == [True] * 300 + [False] * 10
    )
    assert all(
        _get(backend, number, 1000) == (ItemStatus.OK, True) for number in (0, 127, 128, 299)
    )
    assert all(one.ok for one in backend.delete([key_of(number) for number in numbers]))


def test_staging_is_bounded(make: Callable[[], MooncakeBackend]) -> None:
    """An object larger than a room is refused with the size to give; a batch larger is split."""
    backend = make()  # four rooms of 1 MiB
    assert all(one.ok for one in put(backend, range(5), 400 << 10))
    assert backend.stats().counts["calls"] == 3
    (large,) = put(backend, [9], (1 << 20) + 1)
    assert large.status is ItemStatus.REFUSED
    assert "buffer_bytes" in large.reason


def test_a_leased_object_is_hidden_and_removed_later(
    make: Callable[[], MooncakeBackend],
) -> None:
    """While another reads it, it is gone here at once, and in the pool when the lease is over."""
    ours, other = make(), make()
    assert put(ours, [1], 5000)[0].ok
    assert _get(other, 1, 5000) == (ItemStatus.OK, True)  # that is a lease
    assert ours.delete([key_of(1)])[0].ok
    assert ours.contains([key_of(1)]) == [False]
    assert _get(ours, 1, 5000)[0] is ItemStatus.MISS
    assert ours.delete([key_of(1)])[0].status is ItemStatus.MISS
    stats = ours.stats()
    assert stats.errors["leased"] == 1
    assert stats.counts["waiting_for_lease"] == 1

    def removed() -> bool:
        ours.delete([])  # whoever calls tries again what is due
        return ours.stats().counts["waiting_for_lease"] == 0

    until(removed, "it was never removed")
    assert ours.stats().counts["removed_later"] == 1
    assert other.contains([key_of(1)]) == [False]


def test_a_leased_object_can_be_replaced(make: Callable[[], MooncakeBackend]) -> None:
    """A write does not wait for the lease of the damaged object that it replaces."""
    ours, other = make(), make()
    torn = np.zeros(5000, dtype=np.uint8)
    buffers = [[(int(torn.ctypes.data), 2000), (int(torn.ctypes.data) + 2000, 3000)]]
    assert ours.write_from([key_of(1)], buffers)[0].ok
    assert _get(other, 1, 5000) == (ItemStatus.OK, False)
    assert ours.quarantine([key_of(1)])[0].ok
    assert put(ours, [1], 5000)[0].ok
    assert ours.stats().counts["replaced"] == 1
    assert ours.stats().quarantined == 1
    assert _get(ours, 1, 5000) == (ItemStatus.OK, True)
    assert _get(other, 1, 5000) == (ItemStatus.OK, True)


@pytest.mark.parametrize("damage", ["torn", "another length", "zeros"])
def test_a_stale_object_is_found_out_and_replaced(
    make: Callable[[], MooncakeBackend], damage: str
) -> None:
    """The pool keeps what was put first: what is not a page is a miss, and written anew."""
    ours, other = make(), make()
    pages, back = Pages(SMALL, 1, seed=3), Pages(SMALL, 1)
    store = PageStore(ours, SMALL)
    size = store.object_bytes(key_of(0))
    stale = np.zeros(size + (100 if damage == "another length" else 0), dtype=np.uint8)
    if damage == "torn":
        whole = Pages(SMALL, 1, seed=3)
        assert store.write([key_of(0)], whole.addresses, whole.digests)[0].ok
        assert ours.read_into([key_of(0)], [[(int(stale.ctypes.data), size)]])[0].ok
        assert ours.delete([key_of(0)])[0].ok
        stale[-100:] ^= 1
        assert ours.write_from([key_of(0)], [[(int(stale.ctypes.data), size)]])[0].ok
    else:
        at = int(stale.ctypes.data)
        assert other.write_from([key_of(0)], [[(at, stale.size)]])[0].ok
    assert store.write([key_of(0)], pages.addresses, pages.digests)[0].ok  # and kept the old one
    assert store.read([key_of(0)], back.addresses, back.digests)[0].status is ItemStatus.CORRUPT
    assert store.counts().corrupt == 1
    assert store.write([key_of(0)], pages.addresses, pages.digests)[0].ok
    found = PageStore(other, SMALL).read([key_of(0)], back.addresses, back.digests)
    assert found[0].ok, found
    assert (back.bytes == pages.bytes).all()


def test_eviction_is_a_miss() -> None:
    """A pool written to beyond its size drops objects; what is read is whole or not there."""
    with Master("--eviction_high_watermark_ratio=0.5", "--eviction_ratio=0.3") as master, Member(
        master.address, 32 << 20
    ):  # fmt: skip
        backend = opened(master)
        size, statuses = 512 << 10, []
        for number in range(150):
            statuses.append(put(backend, [number], size)[0].status)
        assert set(statuses) <= {ItemStatus.OK, ItemStatus.REFUSED}, statuses
        assert statuses.count(ItemStatus.OK) > 64, "nothing was evicted"
        found = [_get(backend, number, size) for number in range(150)]
        assert set(found) <= {(ItemStatus.OK, True), (ItemStatus.MISS, False)}
        kept = sum(status is ItemStatus.OK for status, _ in found)
        assert 0 < kept <= 64
        assert backend.stats().objects == kept, "misses correct the counts"
        backend.close()


def test_a_pool_without_memory(prefix: str) -> None:
    """Nobody gives any: a write is refused and says what to do; with ours it is taken."""
    with Master() as master:
        backend = opened(master, key_prefix=prefix)
        (result,) = put(backend, [1], 100)
        assert result.status is ItemStatus.REFUSED
        assert "segment_bytes" in result.reason
        assert not try_backend(backend).ok
        backend.close()
        ours = opened(master, key_prefix=prefix, segment_bytes=16 << 20)
        assert try_backend(ours).ok
        ours.close()


def test_two_writers_of_one_key(make: Callable[[], MooncakeBackend]) -> None:
    """The first stays, both are told that all is well, and every read is whole."""
    backends = [make(), make()]
    begin = threading.Barrier(2)
    results: list[bool] = []

    def work(backend: MooncakeBackend) -> None:
        begin.wait(60)
        for number in range(100):
            ok = put(backend, [number], 3000)[0].ok
            status, same = _get(backend, number, 3000)
            # One that is being put is not there yet.
            results.append(ok and (status is ItemStatus.MISS or (status is ItemStatus.OK and same)))

    threads = [threading.Thread(target=work, args=(one,), daemon=True) for one in backends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 200


def test_options() -> None:
    """Values that cannot be are refused before anything is opened."""
    for options in (
        {"address": "here"}, {"address": "h:0"}, {"address": ":5"}, {"segment_bytes": -1},
        {"buffer_bytes": 100}, {"replicas": 0}, {"batch_keys": 0}, {"deadline_secs": 0.0},
        {"setup_secs": -1.0}, {"deadline": 3},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            open_backend("mooncake", **options)


def test_no_master(master: Master) -> None:
    """An address where nobody listens is an error at once."""
    with pytest.raises(StorageError, match="cannot be reached"):
        open_backend("mooncake", address="127.0.0.1:1")
    assert master.process.poll() is None
