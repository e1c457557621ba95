"""Streams go on in any order that their waits allow, and the bytes are those of one after another.

The fake GPU carries out one entry at a time, from a random stream each time. What no wait orders
happens in every order that way, as on a GPU that is busy with other things.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.device_rig import PAGE, Bytes, latent
from tests.transfer.fake_gpu import CALLER, FakeGpu
from tests.transfer.scene import Scene

from kvferry.geometry import Geometry, Plane
from kvferry.transfer import movers
from kvferry.transfer.route import Route
from kvferry.transfer.router import Router
from kvferry.types import Mover

_SEEDS = range(12)
_NUM_SLOTS = 24
_TWO_PLANES = Geometry(
    planes=(
        Plane(name="latent", num_layers=5, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(1, 4)),
    ),
    page_size=PAGE,
)
_GEOMETRIES = {"one plane": latent(576, 7), "two planes": _TWO_PLANES, "small": latent(66, 3)}


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a store and the last of a load are of one page."""
    monkeypatch.setattr(movers, "SHORT_PIECE_BYTES", 1)


each_geometry = pytest.mark.parametrize("geometry", _GEOMETRIES.values(), ids=_GEOMETRIES)


@each_geometry
@pytest.mark.parametrize("seed", _SEEDS)
def test_transfers_of_the_same_bytes(gpu: FakeGpu, geometry: Geometry, seed: int) -> None:
    """Loads and stores of overlapping slots and rows, submitted at once, end as if in turn."""
    scene = Scene(gpu, geometry, seed)
    gpu.hold_all()
    handles = [
        scene.submit(bool(scene.rng.integers(2)), int(scene.rng.integers(1, 24)))[0]
        for _ in range(5)
    ]
    gpu.interleave(seed)
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == handle.plan.num_pages
    scene.check()
    scene.close()


@only_staged
@each_geometry
@pytest.mark.parametrize("seed", _SEEDS)
def test_both_movers_at_once(
    gpu: FakeGpu, geometry: Geometry, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one transfer is staged and the next is direct they are still in order."""
    scene = Scene(gpu, geometry, seed)
    turns = itertools.cycle((True, False))
    planned = Router.route

    def route(self: Router, plan: object) -> Route:
        if next(turns):
            return self.direct(plan)  # type: ignore[arg-type]
        return planned(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "route", route)
    gpu.hold_all()
    handles = [
        scene.submit(bool(scene.rng.integers(2)), int(scene.rng.integers(1, 20)))[0]
        for _ in range(6)
    ]
    gpu.interleave(seed)
    taken = {handle.route.mover for handle in handles if handle.route is not None}
    assert taken == {Mover.DIRECT, Mover.STAGED}
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == handle.plan.num_pages
    scene.check()
    scene.close()


@each_geometry
@pytest.mark.parametrize("seed", _SEEDS)
def test_bytes_are_there_when_a_wait_is_over(gpu: FakeGpu, geometry: Geometry, seed: int) -> None:
    """Those of a layer of a load after `wait_layer`, on both sides after `wait_all`; and rows of a
    store may be written anew."""
    scene = Scene(gpu, geometry, seed)
    rig, seen = scene.rig, []
    gpu.hold_all()

    def expect(found: Bytes, wanted: Bytes) -> None:
        seen.append(np.array_equal(found, wanted))

    loaded, rows = scene.submit(True, 19)
    for layer in loaded.plan.model_layers:
        loaded.wait_layer(layer, stream=CALLER)
        for plane in geometry.planes:
            of_plane = [s.layer for s in loaded.plan.spans
                        if s.plane.name == plane.name and s.model_layer == layer]  # fmt: skip
            for number in of_plane:
                tensor, wanted = rig.tensors[plane.name], scene.device[plane.name]
                at = rows.ravel()
                gpu.enqueue(
                    CALLER,
                    functools.partial(
                        lambda t, w, n, i: expect(t[n][i], w[n][i]),
                        tensor, wanted.copy(), number, at,
                    ),
                )  # fmt: skip
    stored, source = scene.submit(False, 18)
    stored.wait_all(stream=CALLER)
    kept = {name: image.copy() for name, image in scene.host.items()}

    def overwrite() -> None:
        found = rig.on_host(np.arange(_NUM_SLOTS))
        for name, wanted in kept.items():
            expect(found[name], wanted)
        for name in rig.tensors:
            rig.tensors[name][:, source.ravel()] = 0x5A
            scene.device[name][:, source.ravel()] = 0x5A

    gpu.enqueue(CALLER, overwrite)
    gpu.interleave(seed)
    assert seen
    assert all(seen), f"{seen.count(False)} of {len(seen)} looks came too early"
    stored.wait()
    assert stored.verified_pages == 18
    scene.check()
    scene.close()
