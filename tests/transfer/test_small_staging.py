"""Staging memory that holds a page of a layer and no whole page: every byte, and none beyond it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import DeviceRig, latent, same
from tests.transfer.fake_gpu import FakeGpu

from kvferry.errors import ConfigError
from kvferry.geometry import Geometry, Plane
from kvferry.kernels.jit import Stream
from kvferry.transfer.staging_ring import StagingRing, StagingRoom
from kvferry.types import Mover

_TWO_PLANES = Geometry(
    planes=(
        Plane(name="latent", num_layers=9, element_size=576),
        Plane(name="index_key", num_layers=3, element_size=131, layer_ids=(0, 3, 8)),
    ),
    page_size=16,
)


@pytest.fixture(autouse=True)
def _no_room_beyond_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A room that is larger than the ring would be memory of somebody else's."""
    take = StagingRing.take

    def checked(self: StagingRing, num_bytes: int, streams: Sequence[Stream]) -> StagingRoom:
        assert num_bytes <= self.num_bytes
        return take(self, num_bytes, streams)

    monkeypatch.setattr(StagingRing, "take", checked)


@pytest.mark.parametrize(
    "given",
    [
        {"staging_bytes": 1.5e6},
        {"staging_bytes": "64M"},
        {"staging_bytes": True},
        {"staging_bytes": -1},
        {"num_blocks": True},
        {"num_blocks": 2.0},
        {"num_blocks": 0},
    ],
    ids=str,
)
def test_what_is_no_whole_number_is_refused(gpu: FakeGpu, given: dict[str, Any]) -> None:
    """With its name and value, before anything is allocated."""
    rig = DeviceRig(gpu)
    ((name, value),) = given.items()
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: give a whole number")):
        rig.engine(**given)
    assert set(gpu.holdings.values()) == {0}


def test_staging_is_all_there_from_the_start(gpu: FakeGpu) -> None:
    """Of either direction as much as was asked for, and no more of it however much moves."""
    rig = DeviceRig(gpu)
    asked = 3 * rig.geometry.slot_bytes()
    engine = rig.engine(staging_bytes=asked)
    rings = 2 if gpu.mover == "staged" else 0
    assert list(gpu.device_memory.values()).count(asked) == rings
    first = gpu.holdings["device bytes"]
    for count in (1, 12, 3):
        rows = rig.rows(count)
        rig.store(engine, range(count), rows).wait()
        rig.load(engine, range(count), rows).wait()
    assert list(gpu.device_memory.values()).count(asked) == rings
    assert gpu.holdings["device bytes"] - first < asked  # for tables and indices
    engine.close()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("layers_of_room", [1, 2.5])
@pytest.mark.parametrize("geometry", [latent(576, 9), latent(17, 12), _TWO_PLANES], ids=str)
def test_what_is_stored_is_loaded(
    gpu: FakeGpu, geometry: Geometry, layers_of_room: float, registered: bool
) -> None:
    """With one layer a piece, or two: a page and many, in kvferry's own pool and in tensors."""
    rig = DeviceRig(gpu, geometry, registered=registered)
    layer = max(
        sum(-(-s.num_bytes // 256) * 256 for s in geometry.spans() if s.model_layer == one)
        for one in range(geometry.planes[0].num_layers)
    )
    engine = rig.engine(staging_bytes=int(2 * layers_of_room * layer))
    for count in (1, 11):
        slots, rows = np.arange(12)[::-1][:count], rig.rows(count)
        expected = rig.on_device(rows)
        stored = rig.store(engine, slots, rows)
        stored.wait()
        same(rig.on_host(slots), expected, f"{count} pages on the host")
        rig.poison()
        loaded = rig.load(engine, slots, rows)
        loaded.wait()
        same(rig.on_device(rows), expected, f"{count} pages loaded")
        assert loaded.verified_pages == stored.verified_pages == count
        for handle in (stored, loaded):
            route = engine.route(handle.plan)
            assert route is not None
            assert route.mover is Mover(gpu.mover or Mover.DIRECT)
    engine.close()
    rig.host.close()
