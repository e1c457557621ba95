"""A page that was damaged on purpose is damaged, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.cache import KVFerry
from kvferry.config import Config
from kvferry.errors import CacheError
from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.index import Namespace
from kvferry.testing import flip_host_bit
from kvferry.types import SlotKind

PAGE = 4
TOKENS = list(range(3 * PAGE))
GEOMETRY = Geometry(planes=(Plane(name="k", num_layers=2, element_size=24),), page_size=PAGE)


def test_a_flipped_bit_makes_one_page_bad() -> None:
    """A load says which page, and what is before it can be used; other damage is refused."""
    pool = {"k": [np.arange(24 * 24, dtype=np.uint8).reshape(24, 24) for _ in range(2)]}
    config = Config.resolve(None, {}, host={"num_bytes": "64KiB"}, load={"threshold_tokens": 1})
    with KVFerry(
        GEOMETRY,
        PoolView.from_tensors(GEOMETRY, pool),
        config.config,
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint),
    ) as cache:
        keys = cache.keys(TOKENS)
        with pytest.raises(CacheError, match="store it"):
            flip_host_bit(cache, keys[1])
        cache.store(TOKENS, device_slots=np.arange(12)).wait()
        with pytest.raises(CacheError, match="host has no state"):
            flip_host_bit(cache, keys[1], kind=SlotKind.STATE)
        with pytest.raises(CacheError, match="not in a slot"):
            flip_host_bit(cache, keys[1], byte=GEOMETRY.slot_bytes())
        flip_host_bit(cache, keys[1], byte=GEOMETRY.page_bytes - 1)
        with cache.match(TOKENS) as found:
            loaded = cache.load(found, device_slots=np.arange(12, 24))
            loaded.wait()
        assert loaded.bad_pages == (1,)
        assert loaded.usable_tokens == PAGE
