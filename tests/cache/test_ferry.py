"""`KVFerry` as an engine uses it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.cache.ferry_rig import STATE, TOKENS, Engine, K, equal

from kvferry.cache import KVFerry
from kvferry.config import Config
from kvferry.errors import ConfigError
from kvferry.events import PagesEvicted, PagesStored
from kvferry.index import ContentSpan
from kvferry.ranks import ThreadRanks
from kvferry.storage import MemoryBackend
from kvferry.tiers import Reason
from kvferry.types import SlotKind, Tier


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
