"""Objects that come back wrong, or not at all: each is a miss of its own page."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from tests.storage.storage_rig import KEYS, SMALL, Pages, flip, statuses, stored_pages

from kvferry.errors import StorageError
from kvferry.storage import (
    FileBackend,
    ItemResult,
    ItemStatus,
    PageStore,
)
from kvferry.testing import Fault, FaultKind, FaultyBackend


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
        backend.script("write_from", KEYS[1], wrong)
    store.write(KEYS[:3], pages.addresses, pages.digests)
    if where == "on the way out, twice":
        backend.script("read_into", KEYS[1], wrong, wrong)
    if where == "at rest":
        held = np.zeros(8192, dtype=np.uint8)
        whole = [[(int(held.ctypes.data), held.size)]]
        backend.inner.read_into([KEYS[1]], whole)
        backend.inner.delete([KEYS[1]])
        flip(int(held.ctypes.data), bit)
        backend.inner.write_from([KEYS[1]], whole)
    results = store.read(KEYS[:3], into.addresses, into.digests)
    assert statuses(results) == ["ok", "corrupt", "ok"]
    assert np.array_equal(into.bytes[[0, 2]], pages.bytes[[0, 2]])
    assert (into.digests[1] == 0).all()
    assert backend.count("read_into", KEYS[1]) == 2
    assert backend.count("read_into", KEYS[0]) == 1
    assert backend.stats().quarantined == 1
    assert store.contains(KEYS[:3]) == [True, False, True]
    counts = store.counts()
    assert (counts.reread, counts.healed, counts.corrupt) == (1, 0, 1)


def test_every_bit_of_a_file_is_seen(tmp_path: Path) -> None:
    """Each byte of an object's file with a bit turned, and each length, is never served."""
    store = PageStore(FileBackend(tmp_path / "store", direct_io=False), SMALL)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    store.write(KEYS[:1], pages.addresses, pages.digests)
    (path,) = Path(tmp_path, "store").rglob("*.kvo")
    right = path.read_bytes()
    for at in range(0, len(right), 61):
        wrong = bytearray(right)
        wrong[at] ^= 1 << at % 8
        path.write_bytes(wrong)
        assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["corrupt"], at
        path.write_bytes(right)
        assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["ok"]
    for length in (0, 1, 4095, 4096, 8191, 8193, 16384):
        path.write_bytes((right * 2)[:length])
        assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["corrupt"]
    assert not (into.digests == 0).any()


def test_a_wrong_read_that_heals() -> None:
    """A page that is right at the second look is served, and the first look is counted."""
    backend, store, pages = stored_pages()
    backend.script("read_into", KEYS[2], Fault(FaultKind.WRONG_BYTES, bit=40000))
    into = Pages(SMALL, 8)
    assert statuses(store.read(KEYS, into.addresses, into.digests)) == ["ok"] * 8
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
    backend, store, pages = stored_pages()
    what, status = _READ_FAULTS[fault]
    backend.script("read_into", KEYS[page], what, always=True)
    into = Pages(SMALL, 8)
    if fault == "ok, and nothing read":
        # What an earlier read of the same page left in header memory must not be believed.
        assert all(one.ok for one in store.read(KEYS[:0], [], into.digests[:0]))
    results = store.read(KEYS, into.addresses, into.digests)
    assert statuses(results) == ["ok"] * page + [status] + ["ok"] * (7 - page)
    others = [number for number in range(8) if number != page]
    assert np.array_equal(into.bytes[others], pages.bytes[others])
    assert np.array_equal(into.digests[others], pages.digests[others])
    assert (into.digests[page] == 0).all()


def test_headers_of_an_earlier_read_are_not_believed() -> None:
    """OK without a byte read is not taken for a page because its header was here before."""
    backend, store, _ = stored_pages(2)
    into = Pages(SMALL, 2)
    assert statuses(store.read(KEYS[:2], into.addresses, into.digests)) == ["ok", "ok"]
    into.digests[:] = 0
    backend.script("read_into", None, FaultKind.SILENT, always=True)
    assert statuses(store.read(KEYS[:2], into.addresses, into.digests)) == ["corrupt"] * 2
    assert (into.digests == 0).all()


@pytest.mark.parametrize(
    "error",
    [OSError(5, "gone"), MemoryError(), RuntimeError("no"), KeyError("k"), StorageError("s")],
)
def test_a_backend_that_raises_is_a_failed_batch(error: Exception) -> None:
    """No exception of a backend comes through; the batch has failed, and the next one works."""
    backend, store, pages = stored_pages()
    into = Pages(SMALL, 8)
    for method in ("contains", "read_into", "write_from"):
        backend.script(method, KEYS[3], Fault(FaultKind.RAISE, error=error))
    assert store.contains(KEYS) == [False] * 8
    results = store.read(KEYS, into.addresses, into.digests)
    assert statuses(results) == ["failed"] * 8
    assert type(error).__name__ in results[0].reason
    wrote = store.write(KEYS, pages.addresses, pages.digests)
    assert statuses(wrote) == ["failed"] * 8
    assert store.counts().backend_faults == 3
    assert store.contains(KEYS) == [True] * 8
    assert statuses(store.read(KEYS, into.addresses, into.digests)) == ["ok"] * 8


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
    backend.script("write_from", KEYS[2], fault)
    wrote = store.write(KEYS[:4], pages.addresses, pages.digests)
    assert statuses(wrote) == ["ok", "ok", status, "ok"]
    read = store.read(KEYS[:4], into.addresses, into.digests)
    assert statuses(read) == ["ok", "ok", "miss", "ok"]
    assert np.array_equal(into.bytes[[0, 1, 3]], pages.bytes[[0, 1, 3]])


def test_a_write_that_keeps_too_little_is_found_when_read() -> None:
    """An object that was cut while the backend said OK is damage, not a page."""
    backend = FaultyBackend()
    store = PageStore(backend, SMALL)
    pages, into = Pages(SMALL, 1, seed=1), Pages(SMALL, 1)
    backend.script("write_from", KEYS[0], Fault(FaultKind.SHORT, num_bytes=4))
    assert store.write(KEYS[:1], pages.addresses, pages.digests)[0].ok
    assert statuses(store.read(KEYS[:1], into.addresses, into.digests)) == ["corrupt"]
