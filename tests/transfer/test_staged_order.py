"""Two transfers with bytes in common, each by either mover, while any one stream stands still."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.device_rig import PAGE
from tests.transfer.fake_gpu import FakeGpu
from tests.transfer.scene import Scene, staged_bytes

from kvferry.geometry import Geometry, Plane
from kvferry.transfer import movers
from kvferry.transfer.route import Route
from kvferry.transfer.router import Router
from kvferry.types import Direction, Mover

_LOAD, _STORE = Direction.LOAD, Direction.STORE
_GEOMETRY = Geometry(
    planes=(
        Plane(name="latent", num_layers=3, element_size=656),
        Plane(name="index_key", num_layers=1, element_size=131, layer_ids=(1,)),
    ),
    page_size=PAGE,
)
_COUNT = 8
# Loads of the same slots, and stores of the same rows, take nothing from each other.
_IN_COMMON = [
    (_STORE, _STORE, "slots"),
    (_LOAD, _LOAD, "rows"),
    (_STORE, _LOAD, "slots"),
    (_STORE, _LOAD, "rows"),
    (_LOAD, _STORE, "slots"),
    (_LOAD, _STORE, "rows"),
]
_MOVERS = [
    (Mover.STAGED, Mover.STAGED),
    (Mover.STAGED, Mover.DIRECT),
    (Mover.DIRECT, Mover.STAGED),
]


pytestmark = only_staged


@pytest.fixture(autouse=True)
def turns(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[Mover]:
    """Movers that the next transfers are carried by; all others are staged."""
    monkeypatch.setattr(movers, "SHORT_PIECE_BYTES", 1)
    named: list[Mover] = []
    planned = Router.route

    def route(self: Router, plan: object) -> Route:
        direct = named and named.pop(0) is Mover.DIRECT
        chosen = self.direct if direct else functools.partial(planned, self)
        return chosen(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "route", route)
    return named


def _each_stream(scene: Scene) -> Iterator[tuple[str, int]]:
    for direction in Direction:
        for name, stream in scene.streams(direction)._asdict().items():
            yield f"{direction.value} {name}", stream.handle


def _num_in_order(
    gpu: FakeGpu, scene: Scene, turns: list[Mover], taken: tuple[Mover, Mover], *, shared: str,
    ways: tuple[Direction, Direction],
) -> int:  # fmt: skip
    """Both transfers with each stream held in turn; how often something was held, of 8."""
    held = 0
    for name, stream in _each_stream(scene):
        slots = scene.rng.permutation(scene.num_slots)[: 2 * _COUNT].reshape(2, _COUNT)
        rows = scene.rig.rows(2 * _COUNT).reshape(2, _COUNT, PAGE)
        # In another order, so that pieces of the two do not match.
        if shared == "slots":
            slots[1] = np.roll(slots[0], 3)
        else:
            rows[1] = np.roll(rows[0], 3, axis=0)
        scene.rig.fill()
        scene.device = scene.rig.images()
        with gpu.held(stream):
            turns[:] = taken
            handles = [
                scene.move(way is _LOAD, slots[number], rows[number])
                for number, way in enumerate(ways)
            ]
            held += bool(gpu.num_pending(stream))
        assert [one.route.mover for one in handles if one.route] == list(taken), name
        for one in handles:
            one.wait()
            assert one.verified_pages == _COUNT, name
        scene.check()
    return held


@pytest.mark.parametrize("taken", _MOVERS, ids=lambda pair: f"{pair[0].value}, {pair[1].value}")
@pytest.mark.parametrize(
    ("first", "second", "shared"), _IN_COMMON, ids=lambda one: getattr(one, "value", one)
)
def test_the_second_comes_after_the_first(
    gpu: FakeGpu,
    turns: list[Mover],
    first: Direction,
    second: Direction,
    shared: str,
    taken: tuple[Mover, Mover],
) -> None:
    """Slots or rows that both use end as if the second began when the first was over."""
    # With room for both whole: else kernels wait for copies to empty it, and are in order by that.
    scene = Scene(gpu, _GEOMETRY, 11, staging_bytes=5 * _COUNT * staged_bytes(_GEOMETRY))
    held = _num_in_order(gpu, scene, turns, taken, shared=shared, ways=(first, second))
    # Kernels and reports of every direction that moves, at the least.
    assert held >= 2 * len({first, second})
    scene.close()
