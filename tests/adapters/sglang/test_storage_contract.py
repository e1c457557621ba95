"""kvferry's storage behind the installed engine: its base classes, its factory, its host pools."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.sglang.host_pools import (
    LAYERS,
    NUM_PAGES,
    PAGE,
    CopiedPool,
    LatentPool,
    PairPool,
    hashes,
    indices_of,
)

pytest.importorskip("sglang", reason="SGLang is not installed; see make test-sglang")

# The engine's imports warn of what is none of ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.device_pool_info import (
        KVBufferLayout,
        KVBuffers,
        MHABufferInfo,
        MLABufferInfo,
    )
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    from kvferry.adapters.sglang.storage import KVFerryStorage

from kvferry.errors import ConfigError
from kvferry.testing import POISON, Fault, FaultKind, FaultyBackend

pytestmark = pytest.mark.filterwarnings("ignore")


def _config(ours: dict[str, object] | None = None, **changed: Any) -> HiCacheStorageConfig:
    given = {
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0),
        **dict.fromkeys(("tp_size", "pp_size", "attn_cp_size"), 1),
        "is_mla_model": True,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "m",
        **changed,
    }
    extra = {
        "backend_name": "kvferry",
        "module_path": "kvferry.adapters.sglang",
        "class_name": "KVFerryStorage",
        "interface_v1": given.pop("interface_v1", 1),
        "kvferry": ours or {"backend": "memory"},
    }
    return HiCacheStorageConfig(**given, extra_config=extra)


def _in_folder(folder: Path, **more: object) -> dict[str, object]:
    return {"backend": "file", "path": str(folder), "capacity_bytes": 1 << 26, **more}


def _storage(pool: Any, config: HiCacheStorageConfig | None = None) -> Any:
    made = StorageBackendFactory.create_backend("dynamic", config or _config(), pool)
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def _faulty(pool: Any) -> tuple[KVFerryStorage, FaultyBackend]:
    storage = _storage(pool, _config({"backend": "kvferry.testing:FaultyBackend"}))
    assert isinstance(storage._backend, FaultyBackend)
    return storage, storage._backend


def test_the_factory_makes_it_by_name() -> None:
    """As `--hicache-storage-backend dynamic` does, with nothing abstract left."""
    storage = _storage(LatentPool())
    assert isinstance(storage, KVFerryStorage)
    assert isinstance(storage, HiCacheStorage)
    assert not inspect.isabstract(KVFerryStorage)
    storage.close()


def test_every_method_of_the_base_class_is_there_with_its_parameters() -> None:
    """Keywords that the engine may use are taken; a method of a newer engine shows here."""
    methods = [name for name, _ in inspect.getmembers(HiCacheStorage, inspect.isfunction)]
    assert {"batch_get_v1", "batch_set_v2", "batch_exists_v2", "clear", "get_stats"} < set(methods)
    for name in methods:
        theirs = inspect.signature(getattr(HiCacheStorage, name)).parameters
        ours = inspect.signature(getattr(KVFerryStorage, name)).parameters
        assert list(ours) == list(theirs), name
        assert [one.kind for one in ours.values()] == [one.kind for one in theirs.values()], name
        # Nothing is left to a base class that returns None where a list is due.
        if name not in ("on_host_pools_registered",):
            assert getattr(KVFerryStorage, name) is not getattr(HiCacheStorage, name), name


def test_v1_moves_pages_where_they_lie(tmp_path: Path) -> None:
    """Stored by one process, found by another, with a result a key."""
    source, target = LatentPool(1), LatentPool(2)
    config = _config(_in_folder(tmp_path))
    writer = _storage(source, config)
    keys = hashes(3)
    assert writer.batch_exists(keys) == 0
    assert writer.batch_set_v1(keys, indices_of(4, 1, 6)) == [True] * 3
    writer.close()
    reader = _storage(target, config)
    assert reader.batch_exists([*keys, *hashes(1, seed=9)]) == 3
    asked = [keys[0], *hashes(1, seed=9), keys[2]]
    assert reader.batch_get_v1(asked, indices_of(0, 1, 2)) == [True, False, True]
    assert torch.equal(target.get_data_page(0), source.get_data_page(4 * PAGE))
    assert torch.equal(target.get_data_page(2 * PAGE), source.get_data_page(6 * PAGE))
    reader.close()


def test_pages_as_copies() -> None:
    """Without `interface_v1` the engine hands over tensors, and gets them back whole or None."""
    pool = LatentPool()
    storage = _storage(pool, _config(interface_v1=0))
    keys = hashes(2)
    pages = [pool.get_data_page(page * PAGE) for page in (3, 5)]
    assert storage.batch_set(keys, pages) is True
    room = [torch.full_like(page, POISON) for page in pages]
    assert storage.batch_exists(keys) == 2
    found = storage.batch_get([*keys, "another"], [*room, pool.get_dummy_flat_data_page()])
    assert found[2] is None
    assert all(torch.equal(one, other) for one, other in zip(found[:2], pages, strict=True))
    assert storage.exists(keys[0])
    assert not storage.exists("another")
    assert storage.set("one", pages[0]) is True
    assert torch.equal(storage.get("one"), pages[0])
    assert storage.get("one", torch.empty(len(pages[0]) + 1, dtype=torch.uint8)) is None
    assert storage.set("short", pages[0][:-1]) is False
    assert storage.set("nothing") is False


def _hybrid(**changed: Any) -> tuple[Any, dict[str, LatentPool]]:
    pools: dict[str, LatentPool] = {
        "kv": LatentPool(1),
        "indexer": LatentPool(2, width=3),
        "mamba": CopiedPool(3, width=11),
        "draft": PairPool(4),
    }
    storage = _storage(pools["kv"], _config(**changed))
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, PoolName(name))
    return storage, pools


def _transfers(keys: list[str], indices: torch.Tensor, *names: PoolName) -> list[PoolTransfer]:
    return [PoolTransfer(name=name, keys=keys, host_indices=indices) for name in names]


_BESIDE = (PoolName.INDEXER, PoolName.MAMBA, PoolName.DRAFT)


def test_v2_moves_every_pool() -> None:
    """KV, indexer, state and draft, each in its own objects and with results of its own."""
    storage, pools = _hybrid()
    keys = hashes(2)
    assert storage.batch_set_v1(keys, indices_of(0, 1)) == [True, True]
    wrote = storage.batch_set_v2(_transfers(keys, indices_of(0, 1), *_BESIDE))
    assert wrote == {name: [True, True] for name in _BESIDE}
    before = {name: pool.get_page_buffer_meta for name, pool in pools.items()}
    assert before
    read = storage.batch_get_v2(_transfers(keys, indices_of(6, 7), *_BESIDE))
    assert read == wrote
    for name in ("indexer", "mamba"):
        for to, at in ((6, 0), (7, 1)):
            one, other = (pools[name].get_data_page(page * PAGE) for page in (to, at))
            assert torch.equal(one, other), name
    draft = pools["draft"]
    assert isinstance(draft, PairPool)
    assert all(torch.equal(plane[:, 6 * PAGE :], plane[:, : 2 * PAGE]) for plane in draft.planes)


def test_v2_finds_what_every_pool_can_serve() -> None:
    """An indexer page that is missing ends the prefix, a state is wanted at its end alone."""
    storage, _ = _hybrid()
    keys = hashes(6)
    storage.batch_set_v1(keys, indices_of(*range(6)))
    storage.batch_set_v2(_transfers(keys[:3] + keys[4:], indices_of(0, 1, 2, 4, 5), _BESIDE[0]))
    storage.batch_set_v2(_transfers([keys[1]], indices_of(1), _BESIDE[1]))
    asked = [
        PoolTransfer(name=PoolName.INDEXER, hit_policy=PoolHitPolicy.ALL_PAGES),
        PoolTransfer(name=PoolName.MAMBA, hit_policy=PoolHitPolicy.TRAILING_PAGES, keys=["x"]),
    ]
    found = storage.batch_exists_v2(keys, asked)
    assert isinstance(found, PoolTransferResult)
    assert found.kv_hit_pages == 2
    assert found.extra_pool_hit_pages == {"kv": 6, "indexer": 3, "mamba": 2}
    assert found.restorable_prefix_pages == [2]


def test_a_failed_page_of_one_pool_is_told_for_that_pool() -> None:
    """Other pages and other pools count."""
    pool = LatentPool()
    storage, backend = _faulty(pool)
    storage.register_mem_host_pool_v2(LatentPool(5), PoolName.INDEXER)
    keys = hashes(3)
    transfers = _transfers(keys, indices_of(0, 1, 2), PoolName.KV, PoolName.INDEXER)
    storage.batch_set_v2(transfers)
    (bad,) = storage.pools.all["indexer"].keys([keys[1]])
    backend.script("read_into", bad, FaultKind.STATUS)
    read = storage.batch_get_v2(transfers)
    assert read == {PoolName.KV: [True] * 3, PoolName.INDEXER: [True, False, True]}


@pytest.mark.parametrize("error", [OSError("disk"), MemoryError(), KeyError("x"), RuntimeError()])
def test_nothing_is_raised_across_the_border(error: Exception) -> None:
    """Whatever fails is a miss, and the next call works."""
    pool = LatentPool()
    storage, backend = _faulty(pool)
    keys = hashes(1)
    for method in ("contains", "read_into", "write_from"):
        backend.script(method, None, Fault(FaultKind.RAISE, error=error), always=True)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_exists_v2(keys).kv_hit_pages == 0
    assert storage.batch_set_v1(keys, indices_of(0)) == [False]
    assert storage.batch_get_v1(keys, indices_of(0)) == [False]
    unknown = PoolTransfer(name=PoolName.SWA, keys=keys, host_indices=indices_of(0))
    assert storage.batch_get_v2([unknown]) == {PoolName.SWA: [False]}
    assert storage.batch_set_v1(keys, indices_of(0)[:-1]) == [False]
    without = PoolTransfer(name=PoolName.KV, keys=keys)
    assert storage.batch_set_v2([without]) == {PoolName.KV: [False]}
    assert storage.failures["batch_get_v2"] == 1
    healthy = _storage(pool)
    assert healthy.batch_set_v1(keys, indices_of(0)) == [True]


def test_models_and_ranks_keep_apart(tmp_path: Path) -> None:
    """Another model, revision, layout, stage or shard finds nothing in the same folder."""
    ours = _in_folder(tmp_path)
    pool, keys = LatentPool(), hashes(1)
    base = _storage(pool, _config(ours))
    assert base.batch_set_v1(keys, indices_of(0)) == [True]
    others = [
        _config(ours, model_name="n"),
        _config({**ours, "revision": "2"}),
        _config(ours, pp_rank=1, pp_size=2),
        _config(ours, attn_cp_rank=1, attn_cp_size=2),
        _config(ours, is_mla_model=False, tp_rank=1, tp_size=2),
        _config(ours, interface_v1=0),
    ]
    for config in others:
        assert _storage(pool, config).batch_exists(keys) == 0
    # A latent is the same on every rank of a model.
    assert _storage(pool, _config(ours, tp_rank=1, tp_size=2)).batch_exists(keys) == 1


def test_settings_are_checked_at_the_start(tmp_path: Path) -> None:
    """A name or value that is none ends the attach with an error that says so."""
    wrong: list[dict[str, object]] = [
        {"backned": "memory"},
        {"backend": "file"},
        {"backend": "memory", "path": 3},
    ]
    for ours in wrong:
        with pytest.raises(ConfigError):
            KVFerryStorage(_config(ours))


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_clear_removes_everything(kind: str, tmp_path: Path) -> None:
    """Nothing is found afterwards, and pages are stored anew."""
    pool, keys = LatentPool(), hashes(2)
    ours: dict[str, object] = _in_folder(tmp_path) if kind == "file" else {"backend": "memory"}
    storage = _storage(pool, _config(ours))
    storage.batch_set_v1(keys, indices_of(0, 1))
    assert storage.batch_exists(keys) == 2
    assert storage.clear() is True
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, indices_of(0, 1)) == [True, True]
    assert storage.batch_exists(keys) == 2


def test_statistics_are_the_engines(tmp_path: Path) -> None:
    """One sample a batch, taken out when they are read."""
    pool, keys = LatentPool(), hashes(2)
    storage = _storage(pool)
    storage.batch_set_v1(keys, indices_of(0, 1))
    storage.batch_get_v1([*keys, "none"], indices_of(0, 1, 2))
    stats = storage.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([2], [2])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    assert storage.get_stats().backup_pgs == []


def test_a_closed_backend_misses() -> None:
    """The engine may still have a call under way."""
    storage = _storage(LatentPool())
    storage.close()
    storage.close()
    assert storage.batch_exists(hashes(1)) == 0
    assert storage.batch_set_v1(hashes(1), indices_of(0)) == [False]


_WIDTH = 96


def _latent_host(layout: str) -> Any:
    layers = tuple(
        torch.zeros(NUM_PAGES * PAGE, 1, _WIDTH, dtype=torch.uint8) for _ in range(LAYERS)
    )
    info = MLABufferInfo(
        buffers=layers,
        data_ptrs=torch.tensor([one.data_ptr() for one in layers], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=64,
        qk_rope_head_dim=32,
        kv_cache_dim=_WIDTH,
        dtype=torch.uint8,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False,
        device_capacity_tokens=NUM_PAGES * PAGE, start_layer=0, end_layer=LAYERS,
        target_layer_num=LAYERS,
    )  # fmt: skip


def _heads_host(layout: str) -> Any:
    k, v = (
        tuple(torch.zeros(NUM_PAGES * PAGE, 2, 16, dtype=torch.bfloat16) for _ in range(LAYERS))
        for _ in "kv"
    )
    tables = [torch.tensor([one.data_ptr() for one in some], dtype=torch.uint64) for some in (k, v)]
    info = MHABufferInfo(
        buffers=KVBuffers(
            k=k, v=v, k_data_ptrs=tables[0], v_data_ptrs=tables[1], layout=KVBufferLayout.NHD
        ),
        page_size=PAGE,
        head_num=2,
        head_dim=16,
        v_head_dim=16,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info, 2.0, 0, PAGE, layout, pin_memory=False,
        device_capacity_tokens=NUM_PAGES * PAGE, start_layer=0, end_layer=LAYERS,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("make", [_latent_host, _heads_host], ids=["latent", "heads"])
@pytest.mark.parametrize("interface_v1", [1, 0], ids=["in place", "by copies"])
def test_the_engines_own_host_pools(make: Any, layout: str, interface_v1: int) -> None:
    """Their pages come back exact in other slots, and no other slot changes."""
    source, target = make(layout), make(layout)
    for pool, seed in ((source, 1), (target, 2)):
        raw = pool.kv_buffer.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8,
                                generator=torch.Generator().manual_seed(seed)))  # fmt: skip
    keys = hashes(3)
    storage = _storage(source, _config(interface_v1=interface_v1))
    before = target.kv_buffer.clone()

    def page_of(pool: Any, page: int) -> torch.Tensor:
        found: torch.Tensor = pool.get_data_page(page * PAGE, flat=True).contiguous()
        return found.view(torch.uint8)

    if interface_v1:
        assert storage.batch_set_v1(keys, indices_of(3, 0, 7)) == [True] * 3
        storage.register_mem_pool_host(target)
        assert storage.pools.all["kv"].why_copied == ""
        assert storage.batch_get_v1(keys, indices_of(1, 5, 2)) == [True] * 3
    else:
        pages = [source.get_data_page(page * PAGE) for page in (3, 0, 7)]
        assert storage.batch_set(keys, pages) is True
        storage.register_mem_pool_host(target)
        rooms = [target.get_dummy_flat_data_page() for _ in keys]
        for page, found in zip((1, 5, 2), storage.batch_get(keys, rooms), strict=True):
            target.set_from_flat_data_page(page * PAGE, found)
    for to, at in ((1, 3), (5, 0), (2, 7)):
        assert torch.equal(page_of(target, to), page_of(source, at))
    after, target.kv_buffer = target.kv_buffer, before
    untouched = [page_of(target, page).clone() for page in (0, 3, 4, 6, 7)]
    target.kv_buffer = after
    assert all(
        torch.equal(page_of(target, page), old)
        for page, old in zip((0, 3, 4, 6, 7), untouched, strict=True)
    )
