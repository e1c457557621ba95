"""A cache above the pool: pages travel between two of them, in place, and come back exactly."""

from __future__ import annotations

import numpy as np
from tests.cache.ferry_rig import TOKENS, Engine
from tests.storage.mooncake.pool_rig import Master, opened
from tests.storage.server_rig import until


def test_two_caches_over_one_pool(master: Master) -> None:
    """What one has stored the other loads, without storing; both give the memory back."""
    first, second = Engine(seed=1), Engine(seed=2)
    backends = [opened(master, key_prefix="two caches/") for _ in range(2)]
    expected = first.rows(0, 16)
    with first.cache() as cache:
        cache.attach_storage(backends[0])
        until(lambda: len(backends[0]._lent.all()) == 1, "the host pool was not registered")
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        assert cache.flush(20).complete
        assert cache.detach_storage(20)
    assert backends[0]._lent.all() == []
    with second.cache() as cache:
        cache.attach_storage(backends[1])
        until(lambda: len(backends[1]._lent.all()) == 1, "the host pool was not registered")
        cache.prefetch(TOKENS).wait()
        found = cache.match(TOKENS)
        assert found.num_tokens == 16
        loaded = cache.load(found, device_slots=np.arange(100, 116))
        loaded.wait()
        assert loaded.verified_pages == 4
        assert cache.detach_storage(20)
    for backend in backends:
        counts = backend.stats().counts
        # Each page in place, behind a header that is not; and a probe, written and read.
        assert counts["in_place_parts"] >= 4
        assert counts["staged_parts"] == counts["in_place_parts"] + 2
    for name, rows in second.rows(100, 16).items():
        assert (rows == expected[name]).all(), name
