"""Pages of an engine's host pools as objects: exact, apart from each other, or a miss."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tests.adapters.sglang.host_pools import (
    NUM_PAGES,
    PAGE,
    CopiedPool,
    LatentPool,
    PairPool,
    hashes,
    indices_of,
    tensors_of,
)

from kvferry.adapters.sglang.stored_pools import StoredPool, StoredPools, object_key
from kvferry.errors import StorageError
from kvferry.storage import MAX_KEY_BYTES, MemoryBackend, StorageBackend
from kvferry.testing import POISON, Fault, FaultKind, FaultyBackend

_POOLS = {"one piece": LatentPool, "a piece a layer": PairPool, "copied": CopiedPool}
_IDENTITY = {"model_name": "m", "pp": [0, 1]}


def _pools(backend: StorageBackend, **changed: Any) -> StoredPools:
    given = {"shard": (0, 1), "replicates": True, "in_place": True, "verify": True, **changed}
    identity = given.pop("identity", _IDENTITY)
    return StoredPools(backend, identity, **given)


def _stored(backend: StorageBackend, pool: Any, name: str = "kv", **changed: Any) -> StoredPool:
    pools = _pools(backend, **changed)
    pools.register(name, pool)
    found = pools.pool(name)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [*((kind, True) for kind in _POOLS), ("one piece", False), ("copied", False)],
)
def test_pages_come_back_in_other_places(kind: str, in_place: bool) -> None:
    """Each byte of each page, and no byte of another page is touched."""
    source, target = _POOLS[kind](1), _POOLS[kind](2)
    backend = MemoryBackend(capacity_bytes=1 << 24)
    keys = hashes(3)
    wrote = _stored(backend, source, in_place=in_place).write(keys, indices_of(5, 0, 2))
    before = [tensor.clone() for tensor in tensors_of(target)]
    read = _stored(backend, target, in_place=in_place).read(keys, indices_of(1, 7, 3))
    assert (wrote, read) == ([True] * 3, [True] * 3)
    axis = 1 if kind == "a piece a layer" else 0
    for tensor, old, origin in zip(tensors_of(target), before, tensors_of(source), strict=True):
        expected = old.transpose(0, axis).clone()
        for at, there in ((1, 5), (7, 0), (3, 2)):
            rows = origin.transpose(0, axis)[there * PAGE : (there + 1) * PAGE]
            expected[at * PAGE : (at + 1) * PAGE] = rows
        assert torch.equal(tensor.transpose(0, axis), expected)


@pytest.mark.parametrize("kind", _POOLS)
@pytest.mark.parametrize("position", [0, 1, 3])
@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.STATUS),
        Fault(FaultKind.SHORT),
        Fault(FaultKind.ZERO),
        Fault(FaultKind.WRONG_BYTES, bit=8 * 4096 + 5),
        Fault(FaultKind.SILENT),
        Fault(FaultKind.NOT_A_RESULT),
    ],
    ids=lambda fault: fault.kind.value,
)
def test_a_fault_costs_its_page_alone(kind: str, position: int, fault: Fault) -> None:
    """A page that was not read whole is told; its neighbours are there."""
    pool, keys = _POOLS[kind](3), hashes(4)
    backend = FaultyBackend()
    stored = _stored(backend, pool)
    stored.write(keys, indices_of(0, 1, 2, 3))
    (key,) = stored.keys([keys[position]])
    backend.script("read_into", key, fault, fault)
    read = stored.read(keys, indices_of(4, 5, 6, 7))
    assert read == [number != position for number in range(4)]


def test_a_backend_that_raises_is_a_miss() -> None:
    """No page counts, and the next call goes on."""
    pool, keys = LatentPool(), hashes(2)
    backend = FaultyBackend()
    stored = _stored(backend, pool)
    stored.write(keys, indices_of(0, 1))
    (key, _) = stored.keys(keys)
    backend.script("read_into", key, Fault(FaultKind.RAISE))
    assert stored.read(keys, indices_of(2, 3)) == [False, False]
    assert stored.objects.counts().backend_faults == 1


def test_a_page_of_another_length_is_refused() -> None:
    """One byte more or less is no page, read or written."""
    pool = LatentPool()
    stored = _stored(MemoryBackend(capacity_bytes=1 << 20), pool, in_place=False)
    page = pool.get_data_page(0)
    key = hashes(1)
    for wrong in (page[:-1], torch.cat([page, page[:1]])):
        assert stored.write_copies(key, [wrong]) == [False]
    assert stored.write_copies(key, [page]) == [True]
    for wrong in (torch.empty(len(page) - 1, dtype=torch.uint8), torch.empty(0)):
        assert stored.read_copies(key, [wrong]) == [False]
    right = torch.full_like(page, POISON)
    assert stored.read_copies(key, [right]) == [True]
    assert torch.equal(right, page)


def test_only_whole_pages_in_order_move() -> None:
    """Indices that the pool's allocator does not give are refused before a byte moves."""
    pool = LatentPool()
    stored = _stored(MemoryBackend(capacity_bytes=1 << 20), pool)
    whole = indices_of(1, 2)
    for wrong in (whole[:-1], whole.flip(0), whole + 1, torch.zeros(2 * PAGE, dtype=torch.int64)):
        with pytest.raises(StorageError, match="indices"):
            stored.write(hashes(2), wrong)
        with pytest.raises(StorageError, match="indices"):
            stored.read(hashes(2), wrong)


def test_what_is_there_is_not_written_again() -> None:
    """A second write of a page calls the backend for the others alone."""
    backend = FaultyBackend()
    pool = LatentPool()
    stored = _stored(backend, pool)
    assert stored.write(hashes(2), indices_of(0, 1)) == [True, True]
    (first, _) = stored.keys(hashes(2))
    backend.script("write_from", first, Fault(FaultKind.RAISE))
    assert stored.write(hashes(3), indices_of(0, 1, 2)) == [True] * 3


def _variants() -> dict[str, StoredPool]:
    backend = MemoryBackend(capacity_bytes=1 << 20)
    wide = LatentPool(width=8, dtype=torch.float16)
    direct = LatentPool()
    direct.layout = "page_first_direct"
    short = LatentPool()
    short.page_size = PAGE
    named = LatentPool()
    named.storage_format_tag = "other"  # type: ignore[attr-defined]
    heads = LatentPool()
    heads.head_num = 2  # type: ignore[attr-defined]
    return {
        "plain": _stored(backend, LatentPool()),
        "another pool": _stored(backend, LatentPool(), "draft"),
        "another model": _stored(backend, LatentPool(), identity={**_IDENTITY, "model_name": "n"}),
        "another stage": _stored(backend, LatentPool(), identity={**_IDENTITY, "pp": [1, 2]}),
        "of float16": _stored(backend, wide),
        "of bfloat16": _stored(backend, LatentPool(width=8, dtype=torch.bfloat16)),
        "another layout": _stored(backend, direct),
        "by copies": _stored(backend, LatentPool(), in_place=False),
        "another format": _stored(backend, named),
        "split over ranks, first": _stored(backend, LatentPool(), replicates=False, shard=(0, 2)),
        "split over ranks, second": _stored(backend, LatentPool(), replicates=False, shard=(1, 2)),
        "split over more ranks": _stored(backend, LatentPool(), replicates=False, shard=(0, 4)),
        "with heads, first rank": _stored(backend, heads, shard=(0, 2)),
        "with heads, second rank": _stored(backend, heads, shard=(1, 2)),
        "a state, first rank": _stored(backend, LatentPool(), "mamba", shard=(0, 2)),
        "a state, second rank": _stored(backend, LatentPool(), "mamba", shard=(1, 2)),
    }


def test_whatever_makes_bytes_mean_something_else_is_in_the_key() -> None:
    """Models, types, layouts, shards and pools never share an object, of equal size or not."""
    found = _variants()
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        assert first.fingerprint != second.fingerprint, (one, other)
        assert first.keys(hashes(1)) != second.keys(hashes(1)), (one, other)
    assert found["of float16"].objects.payload_bytes == found["of bfloat16"].objects.payload_bytes


def test_ranks_with_the_same_bytes_share_them() -> None:
    """A latent is the same on every rank: one object serves all."""
    backend = MemoryBackend(capacity_bytes=1 << 20)
    first, second = (_stored(backend, LatentPool(), shard=(rank, 2)) for rank in (0, 1))
    assert first.fingerprint == second.fingerprint


def test_fingerprints_stay_what_they_are() -> None:
    """The next version must find a stored page: this value changes with the format alone."""
    stored = _stored(MemoryBackend(capacity_bytes=1 << 20), LatentPool())
    assert stored.fingerprint == "d1658c2e88a6b5a652cd6e1721bf9d32"


def test_keys_are_told_apart() -> None:
    """Hashes as they are, other texts hashed, none too long, none equal to another."""
    fingerprint = "0123456789abcdef" * 2
    given = [*hashes(2), "A" * 64, "a" * 64, "a" * 63, "", "x" * 500, "a" * 64 + ".mamba"]
    made = [object_key(fingerprint, key) for key in given]
    assert len(set(made)) == len(given)
    assert all(key.startswith(bytes.fromhex(fingerprint)) for key in made)
    assert max(map(len, made)) <= MAX_KEY_BYTES


def test_a_pool_without_bytes_has_all_pages() -> None:
    """The engine's anchor of compressed pools holds nothing: the pools beside it decide."""
    pools = _pools(MemoryBackend(capacity_bytes=1 << 20))
    anchor = LatentPool()
    anchor.kv_buffer = None  # type: ignore[assignment]
    pools.register("kv", anchor)
    assert pools.contains("kv", hashes(3)) == [True] * 3
    with pytest.raises(StorageError, match="not registered"):
        pools.contains("indexer", hashes(1))


def test_every_page_of_a_pool_may_go() -> None:
    """The last page too, and all at once."""
    pool, keys = PairPool(5), hashes(NUM_PAGES)
    stored = _stored(MemoryBackend(capacity_bytes=1 << 24), pool)
    before = [tensor.clone() for tensor in pool.planes]
    assert all(stored.write(keys, indices_of(*range(NUM_PAGES))))
    for tensor in pool.planes:
        tensor.fill_(POISON)
    assert all(stored.read(keys, indices_of(*range(NUM_PAGES))))
    assert all(torch.equal(one, other) for one, other in zip(pool.planes, before, strict=True))
