"""`KVFerry` as an engine uses it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cache import KVFerry
from kvferry.config import Config
from kvferry.errors import CacheError, ConfigError, MissingDependencyError, StorageError
from kvferry.events import PagesEvicted, PagesStored
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.index import ContentSpan, Namespace
from kvferry.ranks import ThreadRanks
from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason
from kvferry.types import SlotKind, Tier

PAGE = 4
K = Plane(name="k", num_layers=3, element_size=40)
V = Plane(name="v", num_layers=3, element_size=24)
STATE = Plane(
    name="state", num_layers=2, element_size=72, rows_per_page=1, hit_rule=HitRule.exact_boundary()
)
TOKENS = list(range(18))
QUICK: dict[str, Any] = {
    "host": {"num_bytes": "128KiB"},
    "load": {"threshold_tokens": 1},
    "prefetch": {"threshold_tokens": 1},
}


class Engine:
    """Device tensors of an engine."""

    def __init__(self, planes: tuple[Plane, ...] = (K, V), rows: int = 160, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geometry = Geometry(planes=planes, page_size=PAGE)
        self.tensors = {
            plane.name: [
                rng.integers(0, 256, (rows, plane.element_size), dtype=np.uint8)
                for _ in range(plane.num_layers)
            ]
            for plane in planes
        }
        self.pool = PoolView.from_tensors(self.geometry, self.tensors)
        self.namespace = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )

    def cache(self, **given: Any) -> KVFerry:
        """A cache of it; sections of the config win over `QUICK`."""
        for name in (*QUICK, "store", "integrity"):
            given[name] = {**QUICK.get(name, {}), **given.get(name, {})}
        given.setdefault("namespace", self.namespace)
        return KVFerry(self.geometry, self.pool, **given)

    def rows(self, first: int, count: int) -> dict[str, Any]:
        """A copy of some rows."""
        return {
            name: np.stack([layer[first : first + count] for layer in layers])
            for name, layers in self.tensors.items()
        }


@pytest.fixture
def engine() -> Engine:
    """An engine with K and V."""
    return Engine()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether all rows are the same."""
    return all((one[name] == other[name]).all() for name in one)


def test_match_load_compute_store(engine: Engine) -> None:
    """The README's loop: what is cached is loaded, the rest is computed and stored."""
    was = engine.rows(0, 16)
    with engine.cache(storage=MemoryBackend()) as cache:
        stored = cache.store(TOKENS, device_slots=np.arange(18))
        stored.wait()
        assert (stored.num_pages, stored.num_stored) == (4, 4)
        with cache.match(TOKENS) as found:
            assert found.num_tokens == 16
            loaded = cache.load(found, device_slots=list(range(100, 116)))
            for layer in range(3):
                loaded.wait_layer(layer)
            loaded.wait()
        assert loaded.usable_tokens == loaded.agreed_tokens() == 16
        assert loaded.verified_pages == 4
        assert equal(engine.rows(100, 16), was)
        report = cache.flush(20)
        assert report.complete
        cache.reset()
        assert cache.match(TOKENS).num_tokens == 0
        fetch = cache.prefetch(TOKENS)
        fetch.wait()
        assert fetch.look() == fetch.result()
        assert fetch.result().num_tokens == 16
        told = [type(event) for event in cache.events.drain() if event.tier is Tier.HOST]
        assert PagesStored in told
        assert PagesEvicted in told
        cache.check_integrity()
    assert cache.close().clean


def test_valid_tokens_bound_what_is_stored(engine: Engine) -> None:
    """What is not filled is never read: pages end where the engine says."""
    with engine.cache() as cache:
        cache.store(TOKENS, device_slots=np.arange(18), valid_tokens=11).wait()
        assert cache.match(TOKENS).num_tokens == 8


@pytest.mark.parametrize(
    "other",
    [{"lora": "x"}, {"salt": "x"}, {"content": (ContentSpan(2, 3, b"an image" * 2),)}],
    ids=str,
)
def test_other_namespaces_miss(engine: Engine, other: dict[str, Any]) -> None:
    """What was computed with another adapter, salt or image is not found."""
    with engine.cache() as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        assert cache.match(TOKENS, **other).num_tokens == 0
        cache.store(TOKENS, device_slots=np.arange(18), **other).wait()
        assert cache.match(TOKENS, **other).num_tokens == 16


def test_write_back_and_evicting(engine: Engine) -> None:
    """Under write_back nothing moves until the engine evicts."""
    with engine.cache(store={"policy": "write_back"}) as cache:
        assert cache.store(TOKENS, device_slots=np.arange(18)).reason is Reason.NOT_WRITTEN_BACK
        handle = cache.evicting(TOKENS, device_slots=np.arange(18))
        handle.wait()
        assert cache.match(TOKENS).num_tokens == 16


def test_states(release: threading.Event) -> None:
    """A recurrent state is kept where the engine stopped at a whole page."""
    engine = Engine((K, STATE))
    was = engine.tensors["state"][1][7].copy()
    with engine.cache(storage=MemoryBackend()) as cache:
        cache.store(
            TOKENS, device_slots=np.arange(18), plane_slots={"state": [7]}, has_state=True
        ).wait()
        assert cache.match(TOKENS).num_tokens == 0  # 18 tokens end inside of a page
        cache.store(
            TOKENS,
            valid_tokens=16,
            device_slots=np.arange(18),
            plane_slots={"state": [7]},
            has_state=True,
        ).wait()
        cache.flush(20)
        cache.reset()
        cache.prefetch(TOKENS).wait()
        found = cache.match(TOKENS)
        assert found.num_tokens == 16
        slots = np.arange(100, 116)
        assert cache.load(found, device_slots=slots).reason is Reason.NO_STATE_SLOTS
        loaded = cache.load(found, device_slots=slots, plane_slots={"state": [90]})
        loaded.wait()
        assert loaded.usable_tokens == 16
        assert (engine.tensors["state"][1][90] == was).all()


def test_all_pools_fit_the_size_that_was_given() -> None:
    """Pages and checkpoints share what was configured."""
    cache = Engine((K, STATE)).cache(host={"num_bytes": "256KiB", "state_fraction": 0.3})
    pools = list(cache._pools.values())
    assert len(pools) == 2
    assert sum(pool.num_bytes for pool in pools) <= 256 << 10
    cache.close()


def test_a_ratio_sizes_the_host(engine: Engine) -> None:
    """Without a size, the host is a multiple of the device pool."""
    cache = engine.cache(host={"num_bytes": None, "device_ratio": 40.0})
    bytes_on_device = sum(layer.nbytes for layers in engine.tensors.values() for layer in layers)
    taken = cache._pools[SlotKind.PAGE].num_bytes
    assert bytes_on_device * 40 * 0.95 <= taken <= bytes_on_device * 40
    cache.close()


def test_config_and_overrides(engine: Engine) -> None:
    """A config is taken as it is, and keyword settings win over it."""
    config = Config.resolve(host={"num_bytes": "64KiB"}, load={"threshold_tokens": 8}).config
    cache = KVFerry(
        engine.geometry, engine.pool, config, namespace=engine.namespace,
        load={"threshold_tokens": 5},
    )  # fmt: skip
    assert cache.config.load.threshold_tokens == 5
    assert cache.config.host.num_bytes == 64 << 10
    cache.close()
    with pytest.raises(ConfigError, match="threshold"):
        engine.cache(load={"threshold": 5})


def test_a_namespace_of_another_geometry_is_refused(engine: Engine) -> None:
    """Keys must say how bytes are laid out."""
    other = Engine((K,)).namespace
    with pytest.raises(ConfigError, match=engine.geometry.fingerprint):
        engine.cache(namespace=other)


def test_the_file_backend_serves_the_next_cache(engine: Engine, tmp_path: Path) -> None:
    """By config: what one cache stored, the next finds."""
    storage = {"enabled": True, "backend": "file", "path": str(tmp_path)}
    was = engine.rows(0, 16)
    with _with_storage(engine, storage) as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        assert cache.flush(20).complete
    with _with_storage(engine, storage) as cache:
        fetch = cache.prefetch(TOKENS)
        fetch.wait()
        loaded = cache.load(cache.match(TOKENS), device_slots=np.arange(100, 116))
        loaded.wait()
        assert loaded.verified_pages == 4
        assert equal(engine.rows(100, 16), was)


def _with_storage(engine: Engine, storage: dict[str, Any]) -> KVFerry:
    config = Config.resolve(**QUICK, storage=storage).config
    return KVFerry(engine.geometry, engine.pool, config, namespace=engine.namespace)


def test_explain_says_where_and_why(engine: Engine) -> None:
    """Each tier has its first reason for stopping."""
    with engine.cache() as cache:
        nothing = cache.explain(TOKENS)
        assert nothing.tokens_by_tier == {Tier.HOST: 0, Tier.STORAGE: 0}
        assert "never stored, evicted since, or in another namespace" in nothing.stops[Tier.HOST]
        assert "no_storage" in nothing.stops[Tier.STORAGE]
        assert nothing.first_missing_key == cache.keys(TOKENS)[0].hex()
        assert "less than a page" in cache.explain([1, 2]).stops[Tier.HOST]
        cache.attach_storage(MemoryBackend())
        cache.store(TOKENS, device_slots=np.arange(18), valid_tokens=8).wait()
        cache.flush(20)
        some = cache.explain(TOKENS, storage_timeout=10)
        assert some.tokens_by_tier == {Tier.HOST: 8, Tier.STORAGE: 8}
        assert "does not have page 2" in some.stops[Tier.STORAGE]
        assert "page 2 is not known" in some.stops[Tier.HOST]
        cache.reset()
        assert cache.explain(TOKENS, storage_timeout=10).tokens_by_tier[Tier.STORAGE] == 8
        cache.switches.flip(load=False, storage=False)
        assert "switched_off" in cache.explain(TOKENS).stops[Tier.STORAGE]
        assert "host: 0 tokens" in str(cache.explain(TOKENS))


def test_flush_tells_of_what_is_missing(engine: Engine) -> None:
    """Where storage refuses a page, the chain has a hole, and flush says so."""
    backend = FaultyBackend()
    cache = engine.cache()
    cache.attach_storage(backend, probe=False)
    refused = Fault(FaultKind.STATUS)
    backend.script("write_from", cache.keys(TOKENS)[1], refused, always=True)
    cache.store(TOKENS, device_slots=np.arange(18)).wait()
    report = cache.flush(1)
    assert not report.complete
    assert (report.num_unstored, report.num_holes) == (1, 2)
    cache.close()


def test_storage_that_does_not_work_is_not_attached(engine: Engine) -> None:
    """A probe finds out before anybody relies on it."""
    backend = FaultyBackend()
    backend.script("read_into", None, Fault(FaultKind.WRONG_BYTES))
    with engine.cache() as cache:
        with pytest.raises(StorageError, match="other bytes"):
            cache.attach_storage(backend)
        cache.attach_storage("memory")
        with pytest.raises(CacheError, match="already"):
            cache.attach_storage("memory")
        assert cache.detach_storage()
        assert cache.detach_storage()


def test_without_xxhash_there_is_a_cache_and_no_storage(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs it is refused when it is attached; host memory needs none."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with engine.cache() as cache:
        with pytest.raises(MissingDependencyError, match="xxhash"):
            cache.attach_storage(MemoryBackend())
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        cache.load(cache.match(TOKENS), device_slots=np.arange(100, 116)).wait()
        assert equal(engine.rows(100, 16), engine.rows(0, 16))
        monkeypatch.undo()
        cache.attach_storage(MemoryBackend())
        assert cache.flush(20).complete


def test_detach_is_bounded_and_may_be_forced(engine: Engine, release: threading.Event) -> None:
    """A blocked backend cannot keep the tier; close tells what it still writes to."""
    backend = FaultyBackend()
    cache = engine.cache()
    cache.attach_storage(backend, probe=False)
    cache.store(TOKENS, device_slots=np.arange(18)).wait()
    cache.flush(20)
    cache.reset()
    block = Fault(FaultKind.BLOCK, release=release, deadline_secs=60)
    backend.script("read_into", None, block, always=True)
    cache.prefetch(TOKENS)
    while not backend.blocked.is_set():
        cache.wait(0.01)
    assert not cache.detach_storage(timeout=0.01)
    assert cache.detach_storage(timeout=0.01, force=True)
    cache.attach_storage("memory")
    first = cache.close(timeout=0.05)
    assert not first.clean
    assert first.parked_slots == 4
    release.set()
    assert cache.close(timeout=20).clean
    assert cache.close().clean


def test_ranks_use_what_all_of_them_have() -> None:
    """Two ranks with different pages agree on the shorter prefix, and on what was verified."""
    ranks = ThreadRanks.make(2)
    told: dict[int, Any] = {}

    def run(number: int) -> None:
        engine = Engine(seed=number)
        with engine.cache(ranks=ranks[number]) as cache:
            cache.store(TOKENS, device_slots=np.arange(18), valid_tokens=(16, 12)[number]).wait()
            found = cache.match(TOKENS)
            if number == 0:
                slot = cache._manager._control.tiers[SlotKind.PAGE].slot_of(
                    cache._manager._control.chain_nodes(cache.keys(TOKENS))[1]
                )
                with cache._pools[SlotKind.PAGE].slot_view(slot) as view:
                    view[0] ^= 1
            loaded = cache.load(found, device_slots=np.arange(100, 116))
            loaded.wait()
            told[number] = (found.num_tokens, loaded.usable_tokens, loaded.agreed_tokens())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == {0: (12, 4, 4), 1: (12, 12, 4)}


def test_ranks_with_states_agree_on_a_common_checkpoint() -> None:
    """The smaller of two prefixes is no use where one rank has no checkpoint."""
    ranks = ThreadRanks.make(2)
    told: dict[int, Any] = {}

    def run(number: int) -> None:
        engine = Engine((K, STATE))
        with engine.cache(ranks=ranks[number]) as cache:
            for valid in ((8, 16), (8, 12))[number]:
                cache.store(
                    TOKENS,
                    valid_tokens=valid,
                    device_slots=np.arange(18),
                    plane_slots={"state": [valid]},
                    has_state=True,
                ).wait()
            told[number] = cache.match(TOKENS).num_tokens

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert told == {0: 8, 1: 8}


def test_a_polling_loop_does_not_starve_storage(engine: Engine) -> None:
    """A caller that polls without end still gets its pages written."""
    backend = MemoryBackend()
    with engine.cache(storage=backend) as cache:
        for number in range(200):
            cache.store([number] * PAGE, device_slots=np.arange(PAGE))
        for _ in range(2_000_000):
            cache.poll()
            if not cache.stats().jobs:
                break
        assert cache.stats().jobs == 0


def test_loads_are_counted(engine: Engine) -> None:
    """Metrics are told of transfers, matches and occupancy."""
    from kvferry.metrics import Metrics

    metrics = Metrics()
    with engine.cache(metrics=metrics) as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        cache.load(cache.match(TOKENS), device_slots=np.arange(100, 116)).wait()
        cache.poll()
    from prometheus_client import generate_latest

    text = generate_latest(metrics.registry).decode()
    assert "kvferry_load_back_bytes_total" in text


def test_replicas_write_once_and_read_alike(engine: Engine) -> None:
    """Of ranks with the same bytes one writes; the others have nothing to do, which is success."""
    backend = MemoryBackend()
    follower = engine.cache(storage=backend, writes_storage=False)
    follower.store(TOKENS, device_slots=np.arange(18)).wait()
    assert follower.flush(20).complete
    assert backend.stats().objects == 0
    writer = engine.cache(storage=backend)
    writer.store(TOKENS, device_slots=np.arange(18)).wait()
    assert writer.flush(20).complete
    assert backend.stats().objects == 4
    follower.reset()
    fetch = follower.prefetch(TOKENS)
    fetch.wait()
    assert fetch.result().num_tokens == 16
    follower.close()
    writer.close()
