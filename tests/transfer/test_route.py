"""Routes: which mover carries a plan, in which steps, and why; and how many routes there are."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, LayerView, Plane, PoolView, host_pool_view
from kvferry.testing import place_host_layers
from kvferry.transfer import staging
from kvferry.transfer.profile import BUILT_IN
from kvferry.transfer.route import Route, plan_route
from kvferry.transfer.staging import Group, Place, place_of
from kvferry.types import Direction, Layout, Mover, SlotKind

_LAYERS = 61
_PAGE = 64
_GEOMETRY = Geometry(
    planes=(Plane(name="latent", num_layers=_LAYERS, element_size=576),), page_size=_PAGE
)
_PAGE_OF_A_LAYER = 576 * _PAGE
_CAPACITY = 32 << 20

EAGER = dataclasses.replace(BUILT_IN, launch_seconds=1e-12, copy_seconds=0.0, piece_seconds=0.0)
"""A device that starts kernels and copies in no time."""

each_direction = pytest.mark.parametrize("direction", list(Direction))


def _places(geometry: Geometry, views: PoolView | None = None) -> dict[int, Place]:
    """In kvferry's own pool, unless it is told otherwise; there is no memory."""
    views = views or host_pool_view(geometry, SlotKind.PAGE, base=1 << 40, num_slots=8)
    found = {}
    for span in geometry.spans():
        place = place_of(views.view(span.plane.name, span.layer), span.rows)
        assert place is not None
        found[span.index] = place
    return found


def _tensors(geometry: Geometry, layout: Layout, num_pages: int = 8, base: int = 1 << 40) -> Any:
    """The views of an engine's tensors, one a plane."""
    layers: dict[str, tuple[LayerView, ...]] = {}
    for plane in geometry.planes:
        rows = geometry.rows_per_page(plane)
        layers[plane.name] = place_host_layers(
            layout, plane, rows_per_page=rows, num_pages=num_pages, base=base
        )
        base += plane.num_layers * plane.element_size * rows * num_pages
    return PoolView(geometry, layers)


def _route(
    direction: Direction = Direction.LOAD, *, geometry: Geometry = _GEOMETRY, **changes: Any
) -> Route:
    """Of 256 pages in as many runs, unless it is changed."""
    given: dict[str, Any] = {
        "num_pages": 256,
        "num_runs": 256,
        "profile": BUILT_IN,
        "places": _places(geometry),
        "capacity": _CAPACITY,
        **changes,
    }
    return plan_route(geometry.spans_by_layer(), direction=direction, **given)


# ----------------------------------------------------------------------------------- plan_route


@each_direction
def test_the_same_numbers_get_the_same_route(direction: Direction) -> None:
    """It keeps nothing, changes nothing it is given, and looks at no memory: there is none."""
    places = _places(_GEOMETRY)
    given = copy.deepcopy(places)
    first = _route(direction, places=places)
    _route(direction, num_pages=1, num_runs=1, mover=Mover.STAGED)
    assert _route(direction, places=places) == first
    assert _route(direction, places=dict(reversed(places.items()))) == first
    assert places == given


@pytest.mark.parametrize(("num_runs", "most"), [(1, 1), (256, _LAYERS // 7)])
def test_a_load_goes_by_layers_and_few_of_them_first(num_runs: int, most: int) -> None:
    """So that the first are there early; steps grow, and never shrink but for the last."""
    route = _route(num_runs=num_runs)
    assert route.mover is Mover.STAGED
    assert route.reason == "staged by layers: the copy engine is faster than kernels here"
    assert 1 <= route.sizes[0] <= most
    assert list(route.sizes[:-1]) == sorted(route.sizes[:-1])
    assert [len(group.layers) for group in route.groups] == list(route.sizes)


def test_the_first_step_is_worth_a_launch() -> None:
    """The fewer bytes a layer has, the more layers are in the first step, up to all."""
    first = [_route(num_pages=pages, mover=Mover.DIRECT).sizes[0] for pages in (4096, 64, 8, 1)]
    assert first == sorted(first)
    assert first[0] == 1
    assert first[-1] == _LAYERS
    ramp = BUILT_IN.launch_seconds * BUILT_IN.link[Direction.LOAD] * 1e9
    assert ramp <= 8 * _PAGE_OF_A_LAYER * first[2]


def test_a_store_goes_by_pages_where_those_are_one_piece() -> None:
    """In kvferry's own pool and in page_major tensors: one step, and one band with all layers."""
    for places in (_places(_GEOMETRY), _places(_GEOMETRY, _tensors(_GEOMETRY, Layout.PAGE_MAJOR))):
        route = _route(Direction.STORE, places=places)
        assert route.mover is Mover.STAGED
        assert route.reason.startswith("staged by pages: ")
        assert route.sizes == (_LAYERS,)
        (group,) = route.groups
        assert [band.width for band in group.bands] == [_LAYERS * _PAGE_OF_A_LAYER]


def test_a_store_to_a_layer_first_pool_has_a_band_a_layer() -> None:
    """There is no whole page there; no layer is left out."""
    places = _places(_GEOMETRY, _tensors(_GEOMETRY, Layout.LAYER_FIRST))
    route = _route(Direction.STORE, places=places, mover=Mover.STAGED)
    widths = [band.width for group in route.groups for band in group.bands]
    assert widths == [_PAGE_OF_A_LAYER] * _LAYERS


@each_direction
def test_short_transfers_are_direct(direction: Direction) -> None:
    """One small page is over before staging is filled, and the reason says so."""
    small = Geometry(planes=(Plane(name="latent", num_layers=4, element_size=576),), page_size=1)
    route = _route(direction, geometry=small, num_pages=1, num_runs=1)
    assert route.mover is Mover.DIRECT
    assert route.groups == ()
    assert route.reason.startswith("faster than staged by ")
    assert route.reason.endswith(" here")
    named = route.reason.removeprefix("faster than ").removesuffix(" here")
    assert route.seconds["direct"] < route.seconds[named]


@each_direction
def test_the_faster_mover_is_taken(direction: Direction) -> None:
    """Kernels over a fast link are direct, over a slow one staged, for the same plan."""
    for rate, mover in ((500.0, Mover.DIRECT), (1.0, Mover.STAGED)):
        profile = dataclasses.replace(BUILT_IN, direct=dict.fromkeys(Direction, rate))
        assert _route(direction, profile=profile).mover is mover


@each_direction
def test_no_places_are_direct_with_the_reason(direction: Direction) -> None:
    """What cannot be staged says why, and a mover that was asked for is refused with it."""
    route = _route(direction, places=None, why_not_staged="the moon is full")
    assert (route.mover, route.groups) == (Mover.DIRECT, ())
    assert route.reason == "not staged: the moon is full"
    assert set(route.seconds) == {"direct"}
    with pytest.raises(PlanError, match="cannot be staged: the moon is full"):
        _route(direction, places=None, why_not_staged="the moon is full", mover=Mover.STAGED)


@each_direction
@pytest.mark.parametrize("num_pages", [1, 4096])
def test_a_mover_that_is_asked_for(direction: Direction, num_pages: int) -> None:
    """It is taken whatever the estimates are, and the reason says that."""
    for mover in Mover:
        route = _route(direction, num_pages=num_pages, num_runs=num_pages, mover=mover)
        assert route.mover is mover
        assert route.reason.endswith("asked for")
        assert bool(route.groups) is (mover is Mover.STAGED)


def test_calls_for_each_run_are_counted() -> None:
    """An old driver copies each run by itself: many runs cost much, one run costs no more."""

    def seconds(num_runs: int, batched: bool) -> float:
        return _route(
            num_runs=num_runs, batched=batched, num_pages=4096, mover=Mover.STAGED
        ).seconds["staged by layers"]

    assert seconds(1, batched=False) == pytest.approx(seconds(1, batched=True), rel=0.01)
    assert seconds(4096, batched=False) > seconds(4096, batched=True)
    assert seconds(4096, batched=False) - seconds(1, batched=False) >= 4095 * BUILT_IN.copy_seconds
    assert not math.isclose(seconds(4096, batched=False), seconds(64, batched=False))


@each_direction
@pytest.mark.parametrize("layout", [None, Layout.LAYER_FIRST])
def test_an_old_driver_with_short_runs_copies_less_often(
    direction: Direction, layout: Layout | None
) -> None:
    """In no more copies than with a call for all pages, and wider ones; or it is direct."""
    views = None if layout is None else _tensors(_GEOMETRY, layout)
    places, taken = _places(_GEOMETRY, views), []
    for num_runs in (1, 32, 256):
        new, old = (
            _route(direction, num_runs=num_runs, places=places, batched=batched)
            for batched in (True, False)
        )
        taken.append(old.mover)
        if old.mover is Mover.STAGED:
            assert new.mover is Mover.STAGED
            widths = [[b.width for g in one.groups for b in g.bands] for one in (new, old)]
            assert len(widths[1]) <= len(widths[0])
            assert max(widths[1]) >= max(widths[0])
    if layout is not None:
        assert taken == [Mover.STAGED, Mover.DIRECT, Mover.DIRECT]
    elif direction is Direction.LOAD:
        assert taken == [Mover.STAGED, Mover.STAGED, Mover.DIRECT]
        by_runs = [len(_route(num_runs=runs, batched=False).groups) for runs in (1, 32)]
        assert by_runs[1] < by_runs[0]


@each_direction
@pytest.mark.parametrize("seed", range(30))
def test_more_runs_are_never_estimated_faster(direction: Direction, seed: int) -> None:
    """Of one plan, by whichever way it is staged and with whatever driver; direct feels none."""
    rng = random.Random(seed)
    geometry = _random_geometry(rng)
    layout = rng.choice((None, Layout.LAYER_FIRST, Layout.PAGE_MAJOR))
    places = _places(geometry, None if layout is None else _tensors(geometry, layout))
    num_pages = rng.choice((2, 64, 1000))
    for batched in (True, False):
        before: dict[str, float] = {}
        first: dict[str, float] = {}
        for num_runs in sorted({1, 2, *rng.sample(range(1, num_pages + 1), 2), num_pages}):
            found = dict(
                _route(
                    direction, geometry=geometry, places=places, num_pages=num_pages,
                    num_runs=num_runs, batched=batched,
                ).seconds
            )  # fmt: skip
            first = first or found
            assert found.keys() == first.keys()
            for way, seconds in found.items():
                # Of steps that are as good as the best, the smallest are taken.
                slack = 1.01 if way == "staged by layers" else 1
                assert seconds * slack >= before.get(way, 0) * (1 - 1e-12)
            before = found
        assert before["direct"] == first["direct"]
        for way in first.keys() - {"direct"}:
            assert batched or before[way] > first[way]


@each_direction
@pytest.mark.parametrize("mover", [None, *Mover])
def test_no_pages_go_like_one(direction: Direction, mover: Mover | None) -> None:
    """All layers are in some step, for somebody may wait for each of them."""
    route = _route(direction, num_pages=0, num_runs=0, mover=mover)
    assert route == _route(direction, num_pages=1, num_runs=1, mover=mover)
    assert sum(route.sizes) == _LAYERS


def _random_geometry(rng: random.Random) -> Geometry:
    return Geometry(
        planes=tuple(
            Plane(
                name=f"plane_{number}",
                num_layers=rng.randint(1, 40),
                element_size=rng.choice((1, 16, 66, 131, 576, 656, 1024)),
            )
            for number in range(rng.randint(1, 3))
        ),
        page_size=rng.choice((1, 4, 64)),
    )


@each_direction
@pytest.mark.parametrize("seed", range(80))
def test_random_routes(direction: Direction, seed: int) -> None:
    """Steps are all layers in order, and no page of a step is larger than a piece may be."""
    rng = random.Random(seed)
    geometry = _random_geometry(rng)
    places = _places(geometry)
    if rng.random() < 0.5:
        layout = rng.choice((Layout.LAYER_FIRST, Layout.PAGE_MAJOR))
        places = _places(geometry, _tensors(geometry, layout))
    layers = sorted({span.model_layer for span in geometry.spans()})
    largest = max(
        sum(-(-s.num_bytes // 256) * 256 for s in geometry.spans() if s.model_layer == layer)
        for layer in layers
    )
    num_pages = rng.choice((0, 1, 2, 8, 512))
    capacity = int(largest * rng.choice((1, 1.5, 3, 7, 1000)))
    given = {
        "num_pages": num_pages,
        "num_runs": rng.randint(0, num_pages),
        "profile": rng.choice((BUILT_IN, EAGER)),
        "places": places,
        "capacity": capacity,
        "batched": rng.choice((True, False)),
    }
    for mover in (None, *Mover):
        route = _route(direction, geometry=geometry, mover=mover, **given)
        assert sum(route.sizes) == len(layers)
        assert min(route.sizes) >= 1
        assert all(seconds > 0 for seconds in route.seconds.values())
        if route.mover is Mover.DIRECT:
            assert route.groups == ()
            continue
        assert [len(group.layers) for group in route.groups] == list(route.sizes)
        assert [layer for group in route.groups for layer in group.layers] == layers
        assert max(group.pitch for group in route.groups) <= capacity


@each_direction
def test_a_page_larger_than_staging_goes_by_layers(direction: Direction) -> None:
    """In steps of as many layers as have room, one where there is no room for two."""
    for room, most in ((1, 1), (2.5, 2), (9, 8)):
        capacity = int(_PAGE_OF_A_LAYER * room)
        route = _route(direction, num_pages=1, capacity=capacity, mover=Mover.STAGED)
        assert route.reason.startswith("staged by layers: ")
        assert max(route.sizes) <= most
        assert set(route.seconds) == {"direct", "staged by layers"}


def test_a_store_of_many_bands_does_not_go_by_pages_that_do_not_fit() -> None:
    """Each band is aligned, so a page may take more of staging than it has bytes."""
    tiny = Geometry(planes=(Plane(name="latent", num_layers=64, element_size=16),), page_size=1)
    places = _places(tiny, _tensors(tiny, Layout.LAYER_FIRST))
    route = _route(
        Direction.STORE, geometry=tiny, places=places, capacity=64 * 16, mover=Mover.STAGED
    )
    assert max(group.pitch for group in route.groups) <= 64 * 16
    assert "staged by pages" not in route.seconds


@each_direction
@pytest.mark.parametrize("mover", list(Mover))
def test_a_route_is_json(direction: Direction, mover: Mover) -> None:
    """Written and read again it is the same, with every step and every band."""
    route = _route(direction, mover=mover)
    told = route.to_dict()
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["mover"] == mover.value
    assert told["layers_per_step"] == list(route.sizes)
    assert told["copy_widths"] == [[b.width for b in group.bands] for group in route.groups]
    assert told["reason"] == route.reason
    assert told["estimated_seconds"] == dict(route.seconds)


@each_direction
def test_a_group_is_made_once(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ways are compared: what a route of many layers takes grows as their number, and
    one doubling of the layers in a step."""
    num_layers = 1000
    plane = Plane(name="latent", num_layers=num_layers, element_size=64)
    geometry = Geometry(planes=(plane,), page_size=1)
    places = _places(geometry)
    made: list[tuple[int, ...]] = []
    group = staging._group

    def counted(layers: Sequence[int], *given: Any, **named: Any) -> Group:
        made.append(tuple(layers))
        return group(layers, *given, **named)

    monkeypatch.setattr(staging, "_group", counted)
    _route(direction, geometry=geometry, profile=EAGER, places=places, mover=Mover.STAGED)
    assert len(set(made)) == len(made)
    assert num_layers < sum(map(len, made)) <= 3 * num_layers * num_layers.bit_length()
