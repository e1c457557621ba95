"""What a loader refuses before it asks anybody, and its end; with this process alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import CacheError, ConfigError, ViewError
from kvferry.exchange import ShardedLoader
from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.memory import HostPool, SlotOwner
from kvferry.ranks import GlooExchange, SingleRank, ThreadRanks
from kvferry.transfer import TransferEngine, TransferPlan

_GEOMETRY = Geometry(planes=(Plane(name="latent", num_layers=2, element_size=656),), page_size=4)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What a loader of one rank is made of."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    host = HostPool(_GEOMETRY, num_slots=2)
    host.allocate(2, SlotOwner.INDEX)
    view = PoolView.from_tensors(_GEOMETRY, {"latent": np.zeros((2, 16, 656), np.uint8)})
    engine = TransferEngine(view, host)
    engine.store(TransferPlan.store(_GEOMETRY, host_slots=[0], device_slots=np.arange(4))).wait()
    group = dist.new_group(backend="gloo")
    assert group is not None
    yield {
        "engine": engine,
        "device": view,
        "host": host,
        "ranks": SingleRank(),
        "exchange": GlooExchange(group),
    }
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"ranks": ThreadRanks.make(2)[1]}, ConfigError, "rank 1 of 2 .* rank 0 of 1"),
        ({"way": "both"}, ConfigError, "way='both' is none of sharded and whole"),
        ({"exchange_bytes": 1}, ConfigError, "exchange_bytes=1 for 1 ranks: give some MiB"),
        ({"exchange_bytes": 5000}, ConfigError, "2624 bytes .* 2500 .* more exchange_bytes"),
    ],
)
def test_arguments_that_cannot_be(
    parts: dict[str, Any], given: dict[str, Any], error: type[Exception], match: str
) -> None:
    """Each with its value, and what to give."""
    with pytest.raises(error, match=match):
        ShardedLoader(**{**parts, **given})


def test_an_exchange_of_another_device(parts: dict[str, Any]) -> None:
    """It says which exchange is for which."""
    parts["exchange"].device = "cuda:0"
    with pytest.raises(ViewError, match="between cuda:0 memories, and the pool is on cpu"):
        ShardedLoader(**parts)


def test_a_loader_that_is_closed_loads_nothing(parts: dict[str, Any]) -> None:
    """Nor one with a time that is none; a second close does nothing."""
    plan = TransferPlan.load(_GEOMETRY, host_slots=[0], device_slots=np.arange(8, 12))
    with ShardedLoader(**parts) as loader:
        for timeout in (0.0, float("nan"), 1e9):
            with pytest.raises(ConfigError, match="timeout="):
                loader.load(plan, timeout=timeout)
        handle = loader.load(plan)
        handle.wait_layer(0)
        handle.wait_all()
        handle.wait()
        assert (handle.path.split()[0], handle.way.reason) == ("whole", "there is one rank")
        assert (handle.verified, handle.bad_pages, handle.error) == (True, (), None)
        assert handle.link_seconds is None
    with pytest.raises(CacheError, match="closed"):
        loader.load(plan)
    loader.close()
