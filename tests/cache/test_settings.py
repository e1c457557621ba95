"""What a cache is made with: sections that have the names of arguments, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cache import KVFerry
from kvferry.errors import ConfigError, PlanError, StorageError
from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.index import Namespace
from kvferry.memory import HostPool
from kvferry.metrics import Metrics

PAGE = 4
TOKENS = list(range(16))
GEOMETRY = Geometry(planes=(Plane(name="k", num_layers=2, element_size=24),), page_size=PAGE)


def make(**given: Any) -> KVFerry:
    """A cache over a pool of 40 rows."""
    pool = {"k": [np.zeros((40, 24), dtype=np.uint8) for _ in range(2)]}
    return KVFerry(
        GEOMETRY,
        PoolView.from_tensors(GEOMETRY, pool),
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint),
        host={"num_bytes": "64KiB"},
        load={"threshold_tokens": 1},
        **given,
    )


def test_sections_with_the_names_of_arguments(tmp_path: Path) -> None:
    """`storage` and `metrics` may be settings as well, and are checked as such."""
    section = {"enabled": True, "path": str(tmp_path)}
    with make(storage=section, metrics={"enabled": True, "max_events": 3}) as cache:
        assert cache.config.storage.path == tmp_path
        assert cache.config.metrics.max_events == 3
        assert isinstance(cache.metrics, Metrics)
        cache.store(TOKENS, device_slots=np.arange(16)).wait()
        assert cache.flush(20).complete
    assert len(list(tmp_path.glob("??/*.kvo"))) == 4
    with pytest.raises(ConfigError, match=r"storage\.pat"):
        make(storage={"pat": str(tmp_path)})


def test_a_cache_that_is_not_made_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that cannot be opened is an error of the constructor, after all pools were made."""
    closed: list[HostPool] = []
    close = HostPool.close

    def noted(pool: HostPool) -> None:
        closed.append(pool)
        close(pool)

    monkeypatch.setattr(HostPool, "close", noted)
    with pytest.raises(StorageError):
        make(storage={"enabled": True, "path": str(tmp_path / "no" / "such")})
    assert len(closed) == 1


def test_slots_of_a_plane_that_is_not_there_are_refused() -> None:
    """A plane's name with a slip would otherwise be rows that nobody moves."""
    with make() as cache, pytest.raises(PlanError, match=r"'kk'.*has: k"):
        cache.store(TOKENS, device_slots=np.arange(16), plane_slots={"kk": [1]})
