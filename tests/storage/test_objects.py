"""Pages in a backend: exact or nothing, whatever the backend does."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.storage.storage_rig import SMALL, Pages, flip, key_of

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

_KEYS = [key_of(number) for number in range(8)]


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _stored(count: int = 8) -> tuple[FaultyBackend, PageStore, Pages]:
    """A store of `count` pages over a backend that can be made to fail."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages = Pages(SMALL, count, seed=1)
    assert all(one.ok for one in store.write(_KEYS[:count], pages.addresses, pages.digests))
    return backend, store, pages


def _statuses(results: list[ItemResult]) -> list[str]:
    return [result.status.value for result in results]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("offset", [0, 64, 512])
def test_pages_and_digests_come_back(tmp_path: Path, kind: str, offset: int) -> None:
    """Bytes and digests of every page are those that were stored, wherever slots lie."""
    backend = MemoryBackend() if kind == "memory" else FileBackend(tmp_path / "store")
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 8, seed=1, offset=offset), Pages(SMALL, 8, offset=offset)
    before = pages.bytes.copy()
    assert store.contains(_KEYS) == [False] * 8
    wrote = store.write(_KEYS, pages.addresses, pages.digests)
    assert wrote == [ItemResult(ItemStatus.OK, 8192)] * 8
    assert np.array_equal(pages.bytes, before)
    assert store.contains([*_KEYS, b"none"]) == [True] * 8 + [False]
    order = [5, 2, 7, 0]
    read = store.read([_KEYS[n] for n in order], into.addresses[:4], into.digests[:4])
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


@pytest.mark.parametrize("where", ["at rest", "on the way in", "on the way out, twice"])
@pytest.mark.parametrize("bit", [0, 70, 8 * 48, 8 * 100 + 3, 8 * 160, 8 * 4095, 8 * 4096,
                                 8 * 4096 + 12345, 8 * 8191 + 7])  # fmt: skip
def test_one_bit_is_seen(where: str, bit: int) -> None:
    """One bit turned in the header or the page, on the way or at rest, is never served."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 3, seed=1), Pages(SMALL, 3)
    wrong = Fault(FaultKind.WRONG_BYTES, bit=bit)
    if where == "on the way in":
        backend.script("write_from", _KEYS[1], wrong)
    store.write(_KEYS[:3], pages.addresses, pages.digests)
    if where == "on the way out, twice":
        backend.script("read_into", _KEYS[1], wrong, wrong)
    if where == "at rest":
        held = np.zeros(8192, dtype=np.uint8)
        whole = [[(int(held.ctypes.data), held.size)]]
        backend.inner.read_into([_KEYS[1]], whole)
        backend.inner.delete([_KEYS[1]])
        flip(int(held.ctypes.data), bit)
        backend.inner.write_from([_KEYS[1]], whole)
    results = store.read(_KEYS[:3], into.addresses, into.digests)
    assert _statuses(results) == ["ok", "corrupt", "ok"]
    assert np.array_equal(into.bytes[[0, 2]], pages.bytes[[0, 2]])
    assert (into.digests[1] == 0).all()
    assert backend.count("read_into", _KEYS[1]) == 2
    assert backend.count("read_into", _KEYS[0]) == 1
    assert backend.stats().quarantined == 1
    assert store.contains(_KEYS[:3]) == [True, False, True]
    counts = store.counts()
    assert (counts.reread, counts.healed, counts.corrupt) == (1, 0, 1)


def test_every_bit_of_a_file_is_seen(tmp_path: Path) -> None:
    """Each byte of an object's file with a bit turned, and each length, is never served."""
    store = PageStore(FileBackend(tmp_path / "store", direct_io=False), SMALL)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    store.write(_KEYS[:1], pages.addresses, pages.digests)
    (path,) = Path(tmp_path, "store").rglob("*.kvo")
    right = path.read_bytes()
    for at in range(0, len(right), 61):
        wrong = bytearray(right)
        wrong[at] ^= 1 << at % 8
        path.write_bytes(wrong)
        assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["corrupt"], at
        path.write_bytes(right)
        assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["ok"]
    for length in (0, 1, 4095, 4096, 8191, 8193, 16384):
        path.write_bytes((right * 2)[:length])
        assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["corrupt"]
    assert not (into.digests == 0).any()


def test_a_wrong_read_that_heals() -> None:
    """A page that is right at the second look is served, and the first look is counted."""
    backend, store, pages = _stored()
    backend.script("read_into", _KEYS[2], Fault(FaultKind.WRONG_BYTES, bit=40000))
    into = Pages(SMALL, 8)
    assert _statuses(store.read(_KEYS, into.addresses, into.digests)) == ["ok"] * 8
    assert np.array_equal(into.bytes, pages.bytes)
    assert np.array_equal(into.digests, pages.digests)
    assert (
        dataclasses.replace(store.counts(), reread=0, healed=0)
        == PageStore(backend, SMALL).counts()
    )
    assert (store.counts().reread, store.counts().healed) == (1, 1)
    assert backend.stats().quarantined == 0


_FAILED = Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.FAILED, reason="it broke"))
_READ_FAULTS = {
    "failed": (_FAILED, "failed"),
    "refused": (Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED)), "refused"),
    "miss": (Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.MISS)), "miss"),
    "None": (Fault(FaultKind.NOT_A_RESULT), "failed"),
    "False": (Fault(FaultKind.NOT_A_RESULT, value=False), "failed"),
    "True": (Fault(FaultKind.NOT_A_RESULT, value=True), "failed"),
    "status alone": (Fault(FaultKind.NOT_A_RESULT, value=ItemStatus.OK), "failed"),
    "one byte short": (Fault(FaultKind.SHORT), "corrupt"),
    "half": (Fault(FaultKind.SHORT, num_bytes=4096), "corrupt"),
    "zero bytes": (Fault(FaultKind.ZERO), "corrupt"),
    "ok, and nothing read": (Fault(FaultKind.SILENT), "corrupt"),
    "wrong bytes": (Fault(FaultKind.WRONG_BYTES, bit=8 * 5000), "corrupt"),
}


@pytest.mark.parametrize("fault", _READ_FAULTS)
@pytest.mark.parametrize("page", [0, 3, 7])
def test_a_failing_read_fails_its_page_alone(fault: str, page: int) -> None:
    """Whatever a backend does to one page of a batch, the others are whole and it is not served."""
    backend, store, pages = _stored()
    what, status = _READ_FAULTS[fault]
    backend.script("read_into", _KEYS[page], what, always=True)
    into = Pages(SMALL, 8)
    if fault == "ok, and nothing read":
        # What an earlier read of the same page left in header memory must not be believed.
        assert all(one.ok for one in store.read(_KEYS[:0], [], into.digests[:0]))
    results = store.read(_KEYS, into.addresses, into.digests)
    assert _statuses(results) == ["ok"] * page + [status] + ["ok"] * (7 - page)
    others = [number for number in range(8) if number != page]
    assert np.array_equal(into.bytes[others], pages.bytes[others])
    assert np.array_equal(into.digests[others], pages.digests[others])
    assert (into.digests[page] == 0).all()


def test_headers_of_an_earlier_read_are_not_believed() -> None:
    """OK without a byte read is not taken for a page because its header was here before."""
    backend, store, _ = _stored(2)
    into = Pages(SMALL, 2)
    assert _statuses(store.read(_KEYS[:2], into.addresses, into.digests)) == ["ok", "ok"]
    into.digests[:] = 0
    backend.script("read_into", None, FaultKind.SILENT, always=True)
    assert _statuses(store.read(_KEYS[:2], into.addresses, into.digests)) == ["corrupt"] * 2
    assert (into.digests == 0).all()


@pytest.mark.parametrize(
    "error",
    [OSError(5, "gone"), MemoryError(), RuntimeError("no"), KeyError("k"), StorageError("s")],
)
def test_a_backend_that_raises_is_a_failed_batch(error: Exception) -> None:
    """No exception of a backend comes through; the batch has failed, and the next one works."""
    backend, store, pages = _stored()
    into = Pages(SMALL, 8)
    for method in ("contains", "read_into", "write_from"):
        backend.script(method, _KEYS[3], Fault(FaultKind.RAISE, error=error))
    assert store.contains(_KEYS) == [False] * 8
    results = store.read(_KEYS, into.addresses, into.digests)
    assert _statuses(results) == ["failed"] * 8
    assert type(error).__name__ in results[0].reason
    wrote = store.write(_KEYS, pages.addresses, pages.digests)
    assert _statuses(wrote) == ["failed"] * 8
    assert store.counts().backend_faults == 3
    assert store.contains(_KEYS) == [True] * 8
    assert _statuses(store.read(_KEYS, into.addresses, into.digests)) == ["ok"] * 8


@pytest.mark.parametrize(
    ("fault", "status"),
    [(_FAILED, "failed"), (Fault(FaultKind.NOT_A_RESULT), "failed"),
     (Fault(FaultKind.ZERO), "failed"),
     (Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED, reason="full")), "refused")],
)  # fmt: skip
def test_a_failing_write_is_a_future_miss(fault: Fault, status: str) -> None:
    """A page that was not kept is told, and is absent later; the others are there."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 4, seed=1), Pages(SMALL, 4)
    backend.script("write_from", _KEYS[2], fault)
    wrote = store.write(_KEYS[:4], pages.addresses, pages.digests)
    assert _statuses(wrote) == ["ok", "ok", status, "ok"]
    read = store.read(_KEYS[:4], into.addresses, into.digests)
    assert _statuses(read) == ["ok", "ok", "miss", "ok"]
    assert np.array_equal(into.bytes[[0, 1, 3]], pages.bytes[[0, 1, 3]])


def test_a_write_that_keeps_too_little_is_found_when_read() -> None:
    """An object that was cut while the backend said OK is damage, not a page."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    backend.script("write_from", _KEYS[0], Fault(FaultKind.SHORT, num_bytes=4))
    assert store.write(_KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["corrupt"]


def test_swapped_objects_are_not_served() -> None:
    """An object that lies under another's key is known by the key in its header."""
    backend, store, _ = _stored(2)
    held = np.zeros(8192, dtype=np.uint8)
    whole = [[(int(held.ctypes.data), held.size)]]
    backend.inner.read_into([_KEYS[0]], whole)
    backend.inner.delete([_KEYS[1]])
    backend.inner.write_from([_KEYS[1]], whole)
    into = Pages(SMALL, 2)
    results = store.read(_KEYS[:2], into.addresses, into.digests)
    assert _statuses(results) == ["ok", "corrupt"]
    assert "another key" in results[1].reason


def test_another_geometry_is_a_miss() -> None:
    """Objects of the same key and size but another dtype's geometry are left alone, not served."""
    backend, store, _ = _stored(1)
    planes = tuple(dataclasses.replace(plane, name=plane.name + "2") for plane in SMALL.planes)
    other = PageStore(backend, Geometry(planes=planes, page_size=16))
    into = Pages(SMALL, 1)
    (result,) = other.read(_KEYS[:1], into.addresses, into.digests)
    assert (result.status, SMALL.fingerprint in result.reason) == (ItemStatus.MISS, True)
    assert other.counts().foreign == 1
    assert backend.stats().quarantined == 0
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["ok"]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("version", [0, 2, 1 << 31])
def test_another_version_of_the_same_size_is_a_miss(
    tmp_path: Path, version: int, kind: str
) -> None:
    """Whole, and not ours to read or to put away: counted, left alone, and written over later."""
    backend = MemoryBackend() if kind == "memory" else FileBackend(tmp_path)
    store, pages, into = PageStore(backend, SMALL), Pages(SMALL, 2, seed=1), Pages(SMALL, 2)
    assert all(one.ok for one in store.write(_KEYS[:2], pages.addresses, pages.digests))
    size = store.object_bytes(_KEYS[0])
    stored = np.zeros(size, dtype=np.uint8)
    place = [[(stored.ctypes.data, size)]]
    assert backend.read_into(_KEYS[:1], place)[0].ok
    length = size - store.slot_bytes
    header = bytearray(stored[:length].tobytes())
    header[8:12] = version.to_bytes(4, "little")
    header[48:64] = bytes(16)
    header[48:64] = checksum(header)
    stored[:length] = np.frombuffer(header, dtype=np.uint8)
    assert backend.delete(_KEYS[:1])[0].ok
    assert backend.write_from(_KEYS[:1], place)[0].ok

    later = PageStore(backend, SMALL)
    assert later.contains(_KEYS[:2]) == [True, True]
    results = later.read(_KEYS[:2], into.addresses, into.digests)
    assert _statuses(results) == ["miss", "ok"]
    assert f"format version {version}, and this is 1" in results[0].reason
    assert later.counts() == PageStoreCounts(foreign=1, missing=1)
    assert backend.stats().quarantined == 0
    assert backend.contains(_KEYS[:1]) == [True]
    assert later.contains(_KEYS[:1]) == [False]
    assert later.write(_KEYS[:1], pages.addresses[:1], pages.digests[:1])[0].ok
    assert _statuses(later.read(_KEYS[:2], into.addresses, into.digests)) == ["ok", "ok"]
    backend.close()


def test_yes_and_then_nothing_is_asked_once() -> None:
    """A key that a backend says it has and has not is taken for absent a while, until written."""
    clock = _Clock()
    backend = FaultyBackend()
    store = PageStore(backend, SMALL, missing_secs=30, clock=clock)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    backend.script("contains", _KEYS[0], FaultKind.SAYS_YES, always=True)
    assert store.contains(_KEYS[:1]) == [True]
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["miss"]
    for _ in range(3):
        assert store.contains(_KEYS[:2]) == [False, False]
    assert backend.count("contains", _KEYS[0]) == 1
    clock.now = 31
    assert store.contains(_KEYS[:1]) == [True]
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["miss"]
    assert store.contains(_KEYS[:1]) == [False]
    assert store.write(_KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert store.contains(_KEYS[:1]) == [True]
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["ok"]


def test_evicted_between_the_two_questions() -> None:
    """What goes between `contains` and the read is a miss of that page alone."""
    backend, store, pages = _stored()
    backend.script("contains", _KEYS[4], FaultKind.EVICT_AFTER)
    into = Pages(SMALL, 8)
    assert store.contains(_KEYS) == [True] * 8
    results = store.read(_KEYS, into.addresses, into.digests)
    assert _statuses(results) == ["ok"] * 4 + ["miss"] + ["ok"] * 3
    assert np.array_equal(np.delete(into.bytes, 4, 0), np.delete(pages.bytes, 4, 0))
    assert (into.bytes[4] == 0xA5).all()


def test_overwritten_while_it_is_read() -> None:
    """Bytes that change under a read are found when it ends, and read once more."""
    backend, store, pages = _stored(1)
    release = threading.Event()
    backend.script("read_into", _KEYS[0], Fault(FaultKind.BLOCK, release=release))
    into = Pages(SMALL, 1)
    results: list[ItemResult] = []
    reader = threading.Thread(
        target=lambda: results.extend(store.read(_KEYS[:1], into.addresses, into.digests))
    )
    kept = backend.inner._objects[_KEYS[0]]  # type: ignore[attr-defined]
    kept[6000] ^= 1  # what a store without leases would do
    reader.start()
    assert backend.blocked.wait(30)
    release.set()
    reader.join(30)
    assert _statuses(results) == ["corrupt"]
    assert (into.digests == 0).all()
    assert store.write(_KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["ok"]


def test_other_slots_are_never_written() -> None:
    """A batch of hits, misses and damage writes to its own slots alone."""
    backend, store, pages = _stored(3)
    backend.script("read_into", _KEYS[1], Fault(FaultKind.WRONG_BYTES, bit=99999 % 65536))
    into = Pages(SMALL, 9)
    slots = [1, 4, 7]
    keys = [_KEYS[0], _KEYS[1], b"absent"]
    digests = np.zeros((3, len(SMALL.spans())), dtype=np.uint64)
    results = store.read(keys, [into.addresses[slot] for slot in slots], digests)
    assert _statuses(results) == ["ok", "ok", "miss"]
    untouched = [slot for slot in range(9) if slot not in (1, 4)]
    assert (into.bytes[untouched] == 0xA5).all()
    assert np.array_equal(into.bytes[[1, 4]], pages.bytes[:2])


def test_checks_can_be_switched_off() -> None:
    """Without `verify` the page's checksum is not compared; its header still is."""
    backend, _, _ = _stored(1)
    store = PageStore(backend, SMALL, verify=False)
    into = Pages(SMALL, 1)
    backend.script("read_into", _KEYS[0], Fault(FaultKind.WRONG_BYTES, bit=8 * 5000))
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["ok"]
    wrong = Fault(FaultKind.WRONG_BYTES, bit=8 * 100)
    backend.script("read_into", _KEYS[0], wrong, wrong)
    assert _statuses(store.read(_KEYS[:1], into.addresses, into.digests)) == ["corrupt"]


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
    backend, store, pages = _stored(2)
    calls = len(backend.calls)
    for keys, addresses, digests in (
        (_KEYS[:2], pages.addresses[:1], pages.digests),
        (_KEYS[:2], pages.addresses, pages.digests[:1]),
        (_KEYS[:2], pages.addresses, pages.digests[:, :-1]),
        (_KEYS[:2], pages.addresses, pages.digests.astype(np.int64)),
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
    assert _statuses(wrote) == ["ok", "refused", "ok"]
    read = store.read([b"a", bytes(97), b"c"], pages.addresses, pages.digests)
    assert _statuses(read) == ["ok", "miss", "ok"]
