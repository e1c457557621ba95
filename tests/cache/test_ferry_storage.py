"""The cache over a backend: what is found again, explained, flushed, attached and detached."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cache.ferry_rig import PAGE, QUICK, TOKENS, Engine, equal

from kvferry.cache import KVFerry
from kvferry.config import Config
from kvferry.errors import CacheError, MissingDependencyError, StorageError
from kvferry.storage import MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.types import Tier


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
