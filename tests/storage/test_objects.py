"""Pages in a backend: exact or nothing, whatever the backend does."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.storage.storage_rig import KEYS, SMALL, Pages, statuses, stored_pages

from kvferry.errors import StorageError
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.storage import (
    FileBackend,
    ItemResult,
    ItemStatus,
    MemoryBackend,
    PageStore,
    PageStoreCounts,
    checksum,
)
from kvferry.testing import Fault, FaultKind, FaultyBackend, memory_at
from kvferry.types import SlotKind


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("offset", [0, 64, 512])
def test_pages_and_digests_come_back(tmp_path: Path, kind: str, offset: int) -> None:
    """Bytes and digests of every page are those that were stored, wherever slots lie."""
    backend = MemoryBackend() if kind == "memory" else FileBackend(tmp_path / "store")
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 8, seed=1, offset=offset), Pages(SMALL, 8, offset=offset)
    before = pages.bytes.copy()
    assert store.contains(KEYS) == [False] * 8
    wrote = store.write(KEYS, pages.addresses, pages.digests)
    assert wrote == [ItemResult(ItemStatus.OK, 8192)] * 8
    assert np.array_equal(pages.bytes, before)
    assert store.contains([*KEYS, b"none"]) == [True] * 8 + [False]
    order = [5, 2, 7, 0]
    read = store.read([KEYS[n] for n in order], into.addresses[:4], into.digests[:4])
    assert all(one.ok for one in read)
    assert np.array_equal(into.bytes[:4], pages.bytes[order])
    assert np.array_equal(into.digests[:4], pages.digests[order])
    assert (into.bytes[4:] == 0xA5).all()
    assert (into.digests[4:] == 0).all()
    backend.close()


@pytest.mark.parametrize("bytes_of_a_slot", [4096, 3098112, 37376, 576])
@pytest.mark.parametrize("direct_io", [True, False])
def test_slots_of_any_size(tmp_path: Path, bytes_of_a_slot: int, direct_io: bool) -> None:
    """Slots that are no whole blocks go out and come back, with nothing behind them touched."""
    plane = Plane(name="k", num_layers=1, element_size=bytes_of_a_slot // 64)
    geometry = Geometry(planes=(plane,), slot_alignment=64, span_alignment=16)
    assert geometry.slot_bytes() == bytes_of_a_slot
    backend = FileBackend(tmp_path / "store", direct_io=direct_io)
    store = PageStore(backend, geometry)
    for offset in (0, 64, 512):
        pages, into = Pages(geometry, 3, seed=offset, offset=offset), Pages(geometry, 3)
        keys = [b"%d %d" % (offset, number) for number in range(3)]
        assert all(one.ok for one in store.write(keys, pages.addresses, pages.digests))
        assert all(one.ok for one in store.read(keys, into.addresses, into.digests))
        assert np.array_equal(into.bytes, pages.bytes)
        for key in keys:
            file = Path(tmp_path, "store").rglob(f"{key.hex()}.kvo")
            assert next(file).stat().st_size == store.object_bytes(key)
    counts = backend.stats().counts
    assert counts.get("direct", 0) + counts.get("buffered", 0) == 18
    if not direct_io:
        assert "direct" not in counts
    else:
        assert counts["buffered"] >= 6, "slots off the blocks are counted"
    backend.close()


def test_swapped_objects_are_not_served() -> None:
    """An object that lies under another's key is known by the key in its header."""
    backend, store, _ = stored_pages(2)
    held = np.zeros(8192, dtype=np.uint8)
    whole = [[(int(held.ctypes.data), held.size)]]
    backend.inner.read_into([KEYS[0]], whole)
    backend.inner.delete([KEYS[1]])
    backend.inner.write_from([KEYS[1]], whole)
    into = Pages(SMALL, 2)
    results = store.read(KEYS[:2], into.addresses, into.digests)
    assert statuses(results) == ["ok", "corrupt"]
    assert "another key" in results[1].reason


def test_another_geometry_is_a_miss() -> None:
    """Objects of the same key and size but another dtype's geometry are left alone, not served."""
    backend, store, _ = stored_pages(1)
    planes = tuple(dataclasses.replace(plane, name=plane.name + "2") for plane in SMALL.planes)
    other = PageStore(backend, Geometry(planes=planes, page_size=16))
    into = Pages(SMALL, 1)
    (result,) = other.read(KEYS[:1], into.addresses, into.digests)
    assert (result.status, SMALL.fingerprint in result.reason) == (ItemStatus.MISS, True)
    assert other.counts().foreign == 1
    assert backend.stats().quarantined == 0
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["ok"]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("version", [0, 2, 1 << 31])
def test_another_version_of_the_same_size_is_a_miss(
    tmp_path: Path, version: int, kind: str
) -> None:
    """Whole, and not ours to read or to put away: counted, left alone, and written over later."""
    backend = MemoryBackend() if kind == "memory" else FileBackend(tmp_path)
    store, pages, into = PageStore(backend, SMALL), Pages(SMALL, 2, seed=1), Pages(SMALL, 2)
    assert all(one.ok for one in store.write(KEYS[:2], pages.addresses, pages.digests))
    size = store.object_bytes(KEYS[0])
    stored = np.zeros(size, dtype=np.uint8)
    place = [[(stored.ctypes.data, size)]]
    assert backend.read_into(KEYS[:1], place)[0].ok
    length = size - store.slot_bytes
    header = bytearray(stored[:length].tobytes())
    header[8:12] = version.to_bytes(4, "little")
    header[48:64] = bytes(16)
    header[48:64] = checksum(header)
    stored[:length] = np.frombuffer(header, dtype=np.uint8)
    assert backend.delete(KEYS[:1])[0].ok
    assert backend.write_from(KEYS[:1], place)[0].ok

    later = PageStore(backend, SMALL)
    assert later.contains(KEYS[:2]) == [True, True]
    results = later.read(KEYS[:2], into.addresses, into.digests)
    assert statuses(results) == ["miss", "ok"]
    assert f"format version {version}, and this is 1" in results[0].reason
    assert later.counts() == PageStoreCounts(foreign=1, missing=1)
    assert backend.stats().quarantined == 0
    assert backend.contains(KEYS[:1]) == [True]
    assert later.contains(KEYS[:1]) == [False]
    assert later.write(KEYS[:1], pages.addresses[:1], pages.digests[:1])[0].ok
    assert statuses(later.read(KEYS[:2], into.addresses, into.digests)) == ["ok", "ok"]
    backend.close()


def test_yes_and_then_nothing_is_asked_once() -> None:
    """A key that a backend says it has and has not is taken for absent a while, until written."""
    clock = _Clock()
    backend = FaultyBackend()
    store = PageStore(backend, SMALL, missing_secs=30, clock=clock)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    backend.script("contains", KEYS[0], FaultKind.SAYS_YES, always=True)
    assert store.contains(KEYS[:1]) == [True]
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["miss"]
    for _ in range(3):
        assert store.contains(KEYS[:2]) == [False, False]
    assert backend.count("contains", KEYS[0]) == 1
    clock.now = 31
    assert store.contains(KEYS[:1]) == [True]
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["miss"]
    assert store.contains(KEYS[:1]) == [False]
    assert store.write(KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert store.contains(KEYS[:1]) == [True]
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["ok"]


def test_evicted_between_the_two_questions() -> None:
    """What goes between `contains` and the read is a miss of that page alone."""
    backend, store, pages = stored_pages()
    backend.script("contains", KEYS[4], FaultKind.EVICT_AFTER)
    into = Pages(SMALL, 8)
    assert store.contains(KEYS) == [True] * 8
    results = store.read(KEYS, into.addresses, into.digests)
    assert statuses(results) == ["ok"] * 4 + ["miss"] + ["ok"] * 3
    assert np.array_equal(np.delete(into.bytes, 4, 0), np.delete(pages.bytes, 4, 0))
    assert (into.bytes[4] == 0xA5).all()


def test_overwritten_while_it_is_read() -> None:
    """Bytes that change under a read are found when it ends, and read once more."""
    backend, store, pages = stored_pages(1)
    release = threading.Event()
    backend.script("read_into", KEYS[0], Fault(FaultKind.BLOCK, release=release))
    into = Pages(SMALL, 1)
    results: list[ItemResult] = []
    reader = threading.Thread(
        target=lambda: results.extend(store.read(KEYS[:1], into.addresses, into.digests))
    )
    kept = backend.inner._objects[KEYS[0]]  # type: ignore[attr-defined]
    kept[6000] ^= 1  # what a store without leases would do
    reader.start()
    assert backend.blocked.wait(30)
    release.set()
    reader.join(30)
    assert statuses(results) == ["corrupt"]
    assert (into.digests == 0).all()
    assert store.write(KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["ok"]


def test_other_slots_are_never_written() -> None:
    """A batch of hits, misses and damage writes to its own slots alone."""
    backend, store, pages = stored_pages(3)
    backend.script("read_into", KEYS[1], Fault(FaultKind.WRONG_BYTES, bit=99999 % 65536))
    into = Pages(SMALL, 9)
    slots = [1, 4, 7]
    keys = [KEYS[0], KEYS[1], b"absent"]
    digests = np.zeros((3, len(SMALL.spans())), dtype=np.uint64)
    results = store.read(keys, [into.addresses[slot] for slot in slots], digests)
    assert statuses(results) == ["ok", "ok", "miss"]
    untouched = [slot for slot in range(9) if slot not in (1, 4)]
    assert (into.bytes[untouched] == 0xA5).all()
    assert np.array_equal(into.bytes[[1, 4]], pages.bytes[:2])


def test_checks_can_be_switched_off() -> None:
    """Without `verify` the page's checksum is not compared; its header still is."""
    backend, _, _ = stored_pages(1)
    store = PageStore(backend, SMALL, verify=False)
    into = Pages(SMALL, 1)
    backend.script("read_into", KEYS[0], Fault(FaultKind.WRONG_BYTES, bit=8 * 5000))
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["ok"]
    wrong = Fault(FaultKind.WRONG_BYTES, bit=8 * 100)
    backend.script("read_into", KEYS[0], wrong, wrong)
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["corrupt"]


def test_states_and_pages_are_told_apart() -> None:
    """A checkpoint is stored like a page, and is not read as one."""
    plane = Plane(
        name="state",
        num_layers=2,
        element_size=96,
        rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )
    page = Plane(name="k", num_layers=2, element_size=6, rows_per_page=16)
    geometry = Geometry(planes=(plane, page), page_size=16)
    assert geometry.slot_bytes(SlotKind.STATE) == geometry.slot_bytes(SlotKind.PAGE)
    backend = MemoryBackend()
    states = PageStore(backend, geometry, kind=SlotKind.STATE)
    memory = np.arange(states.slot_bytes, dtype=np.uint8)
    digests = np.ones((1, 2), dtype=np.uint64)
    assert states.write([b"k"], [int(memory.ctypes.data)], digests)[0].ok
    pages = PageStore(backend, geometry)
    (result,) = pages.read([b"k"], [int(memory.ctypes.data)], digests)
    assert result.status is ItemStatus.MISS


def test_bad_calls_raise_before_anything_is_touched() -> None:
    """Digests of another shape or type, or a list too short, are errors of the caller."""
    backend, store, pages = stored_pages(2)
    calls = len(backend.calls)
    for keys, addresses, digests in (
        (KEYS[:2], pages.addresses[:1], pages.digests),
        (KEYS[:2], pages.addresses, pages.digests[:1]),
        (KEYS[:2], pages.addresses, pages.digests[:, :-1]),
        (KEYS[:2], pages.addresses, pages.digests.astype(np.int64)),
    ):
        for call in (store.write, store.read):
            with pytest.raises(StorageError):
                call(keys, addresses, digests)  # type: ignore[arg-type]
    assert len(backend.calls) == calls
    assert memory_at(pages.addresses[0], 4096).size == 4096
    with pytest.raises(StorageError, match="state"):
        PageStore(backend, SMALL, kind=SlotKind.STATE)


def test_a_key_that_cannot_be_is_refused_alone() -> None:
    """A key too long is refused, and the rest of its batch is kept."""
    store = PageStore(MemoryBackend(), SMALL)
    pages = Pages(SMALL, 3, seed=1)
    wrote = store.write([b"a", bytes(97), b"c"], pages.addresses, pages.digests)
    assert statuses(wrote) == ["ok", "refused", "ok"]
    read = store.read([b"a", bytes(97), b"c"], pages.addresses, pages.digests)
    assert statuses(read) == ["ok", "miss", "ok"]
