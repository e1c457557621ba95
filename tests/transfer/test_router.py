"""Routers: what a host pool allows, and few routes for many plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import ConfigError
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool
from kvferry.testing import place_host_layers
from kvferry.transfer import TransferPlan
from kvferry.transfer.host_pages import HostPages
from kvferry.transfer.profile import BUILT_IN
from kvferry.transfer.route import Route
from kvferry.transfer.router import Router, check_staging_bytes
from kvferry.types import Direction, Layout, Mover, SlotKind

_NUM_SLOTS = 300
_PAGE = 4
_GEOMETRY = Geometry(
    planes=(
        Plane(name="latent", num_layers=6, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(0, 3)),
        Plane(
            name="state", num_layers=1, element_size=64, rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
        ),
    ),
    page_size=_PAGE,
)  # fmt: skip
# Of model layer 0, which has both planes, each aligned in staging.
_LARGEST_LAYER = 2816 + 768


@pytest.fixture(scope="module")
def pool() -> Iterator[HostPool]:
    """Of kvferry's own."""
    made = HostPool(_GEOMETRY, num_slots=_NUM_SLOTS)
    yield made
    made.close()


def _registered(layout: Layout) -> RegisteredHostPool:
    """An engine's tensors, which nobody looks at."""
    layers, base = {}, 1 << 40
    for plane in _GEOMETRY.planes[:2]:
        layers[plane.name] = place_host_layers(
            layout, plane, rows_per_page=_PAGE, num_pages=8, base=base
        )
        base += 8 * _PAGE * plane.num_layers * plane.element_size
    return RegisteredHostPool(_GEOMETRY, PoolView(_GEOMETRY, layers))


def _router(
    host: HostPages, *, staging_bytes: int = 1 << 20, mover: Mover | None = None, why: str = ""
) -> Router:
    return Router(host, BUILT_IN, staging_bytes=staging_bytes, mover=mover, why_not_staged=why)


def _plan(
    num_pages: int,
    *,
    direction: Direction = Direction.LOAD,
    step: int = 1,
    layers: list[int] | None = None,
) -> TransferPlan:
    """Of every `step`-th slot."""
    rows = np.arange(num_pages * _PAGE)
    return TransferPlan.build(
        _GEOMETRY, direction, host_slots=np.arange(num_pages) * step, device_slots=rows,
        layers=layers,
    )  # fmt: skip


def test_many_plans_have_few_routes(pool: HostPool) -> None:
    """Page counts are routed like the power of two below them, and a route is planned once."""
    router = _router(pool)
    routes = {count: router.route(_plan(count)) for count in range(_NUM_SLOTS)}
    assert len({id(route) for route in routes.values()}) == 10
    for count, route in routes.items():
        assert route is routes[1 << (count.bit_length() - 1) if count else 0]
        assert router.route(_plan(count)) is route


def test_what_a_route_depends_on(pool: HostPool) -> None:
    """Direction, runs, and what moves of a page; not which slots they are."""
    router = _router(pool)
    plans = [
        _plan(100),
        _plan(100, direction=Direction.STORE),
        _plan(100, step=2),
        _plan(100, layers=[0, 1]),
        _plan(100, layers=[0, 2]),
    ]
    assert len({id(router.route(plan)) for plan in plans}) == len(plans)
    assert router.route(_plan(65, step=1)) is router.route(plans[0])
    assert router.route(_plan(99, step=2)) is router.route(plans[2])


def test_routes_do_not_pile_up(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many, all are forgotten, and planned again when they are asked for."""
    monkeypatch.setattr("kvferry.transfer.router._MAX_ROUTES", 4)
    router = _router(pool)
    found = [router.route(_plan(1 << power)) for power in range(6)]
    assert len({id(route) for route in found}) == 6
    assert len(router._routes) == 2
    again = router.route(_plan(1))
    assert again is not found[0]
    assert again == found[0]


def test_every_layer_is_in_a_step(pool: HostPool) -> None:
    """Also of a plan that moves some layers, or no pages."""
    router = _router(pool, mover=Mover.STAGED)
    for count in (0, 1, 100):
        for layers in (None, [5], [0, 3, 4]):
            route = router.route(_plan(count, layers=layers))
            assert sum(route.sizes) == len(layers or range(6))
            assert [one for group in route.groups for one in group.layers] == (
                layers or list(range(6))
            )


@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_MAJOR])
def test_pools_that_can_be_staged(layout: Layout) -> None:
    """Layers and pages of an engine's tensors, where each page is one piece."""
    with contextlib.closing(_registered(layout)) as host:
        router = _router(host, mover=Mover.STAGED)
        assert router.can_stage
        assert router.route(_plan(8)).mover is Mover.STAGED


def test_token_major_pools_are_direct_with_the_reason() -> None:
    """The plane and both layouts that would do are named; asking for staging is refused so."""
    with contextlib.closing(_registered(Layout.TOKEN_MAJOR)) as host:
        router = _router(host)
        assert not router.can_stage
        route = router.route(_plan(8))
        assert route.mover is Mover.DIRECT
        for said in ("not staged: ", "'latent', layer 0", "page_major", "layer_first"):
            assert said in route.reason
        with pytest.raises(ConfigError, match="nothing can be staged here: the pages of"):
            _router(host, mover=Mover.STAGED)


def test_another_reason_comes_first(pool: HostPool) -> None:
    """One that has nothing to do with the pool is told as it is."""
    router = _router(pool, why="an engine without staging")
    assert not router.can_stage
    assert router.route(_plan(8)).reason == "not staged: an engine without staging"
    with pytest.raises(ConfigError, match="here: an engine without staging"):
        _router(pool, why="an engine without staging", mover=Mover.STAGED)


def test_staging_that_holds_no_layer(pool: HostPool) -> None:
    """Everything is direct; the reason has the layer, its bytes, what there is and what to pass."""
    router = _router(pool, staging_bytes=2 * _LARGEST_LAYER - 2)
    route = router.route(_plan(8))
    assert (router.can_stage, route.mover) == (False, Mover.DIRECT)
    sizes = (_LARGEST_LAYER, _LARGEST_LAYER - 1, 2 * _LARGEST_LAYER)
    for said in ("model layer 0 ", *(f"{size:,}" for size in sizes), "staging_bytes"):
        assert said in route.reason
    with pytest.raises(ConfigError) as refused:
        _router(pool, staging_bytes=2 * _LARGEST_LAYER - 2, mover=Mover.STAGED)
    assert f"at least {2 * _LARGEST_LAYER:,}" in str(refused.value)


def test_the_staging_that_a_refusal_names_will_do(pool: HostPool) -> None:
    """One byte less a half is too little, and is refused with both sizes."""
    asked = 2 * _LARGEST_LAYER
    check_staging_bytes(pool, asked)
    with pytest.raises(ConfigError) as refused:
        check_staging_bytes(pool, asked - 2)
    assert f"staging_bytes={asked - 2:,} is too little" in str(refused.value)
    assert f"at least {asked:,}" in str(refused.value)
    router = _router(pool, staging_bytes=asked, mover=Mover.STAGED)
    for direction in Direction:
        route = router.route(_plan(100, direction=direction))
        assert max(group.pitch for group in route.groups) <= router.capacity


def test_staging_of_a_pool_that_cannot_be_staged_is_not_too_little() -> None:
    """No size would help there."""
    with contextlib.closing(_registered(Layout.TOKEN_MAJOR)) as host:
        check_staging_bytes(host, 1)


def test_an_old_driver_counts(pool: HostPool) -> None:
    """A mover that copies each run by itself is told so, and runs cost more then."""
    took = []
    for batched in (True, False):
        router = _router(pool, mover=Mover.STAGED)
        assert router.batched
        router.batched = batched
        took.append(router.route(_plan(100, step=2)).seconds["staged by layers"])
    assert took[0] < took[1]


def test_a_captured_transfer_is_direct(pool: HostPool) -> None:
    """A graph holds no ring, whatever mover the engine has; all layers are in its steps."""
    router = _router(pool, mover=Mover.STAGED)
    for count in (0, 1, 100):
        route: Route = router.direct(_plan(count))
        assert (route.mover, route.groups) == (Mover.DIRECT, ())
        assert "graph" in route.reason
        assert sum(route.sizes) == 6


def test_a_pool_of_states_is_routed_by_its_own_planes() -> None:
    """Checkpoints have spans of their own kind."""
    with HostPool(_GEOMETRY, num_slots=4, kind=SlotKind.STATE) as host:
        router = _router(host, mover=Mover.STAGED)
        plan = TransferPlan.load(
            _GEOMETRY, kind=SlotKind.STATE, host_slots=[2, 0], plane_slots={"state": [1, 2]}
        )
        assert router.route(plan).to_dict()["copy_widths"] == [[64]]
