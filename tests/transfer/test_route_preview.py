"""Previews of routes: what they tell is what an engine over such pools does."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from tests.transfer.device_rig import PAGE, DeviceRig, latent, same
from tests.transfer.fake_gpu import FakeGpu

from kvferry.errors import ConfigError, PlanError
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.transfer import (
    BUILT_IN,
    TransferPlan,
    compiled_staging,
    host_copies,
    preview_route,
    route_preview,
    staging,
)
from kvferry.types import Direction, Layout, Mover

_TWO_PLANES = Geometry(
    planes=(
        Plane(name="latent", num_layers=4, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=132, layer_ids=(0, 2)),
    ),
    page_size=PAGE,
)
_COPIES = ("cuMemcpy2DAsync", "cuMemcpyBatchAsync")


def _slots(num_pages: int, run: int) -> list[int]:
    """Host slots in runs of `run`, with a free one after each."""
    return [page + page // run for page in range(num_pages)]


@pytest.mark.parametrize(
    ("geometry", "registered"), [(latent(), False), (_TWO_PLANES, False), (_TWO_PLANES, True)]
)
@pytest.mark.parametrize("run", [1, 3, 12])
@pytest.mark.parametrize("worth", [1, 60])
@pytest.mark.parametrize("most_parts", [2, staging.MAX_PARTS])
def test_an_engine_does_what_its_preview_says(
    gpu: FakeGpu,
    monkeypatch: pytest.MonkeyPatch,
    geometry: Geometry,
    *,
    registered: bool,
    run: int,
    worth: int,
    most_parts: int,
) -> None:
    """Mover, steps, widths, kernels, copy calls and pieces are those of a transfer."""
    for module in (staging, compiled_staging):
        monkeypatch.setattr(module, "PARTS_WORTH_A_CALL", worth)
    for module in (route_preview, compiled_staging, host_copies):
        monkeypatch.setattr(module, "MAX_PARTS", most_parts)
    gpu.batches = True  # previews count copies of many pages as there
    rig = DeviceRig(gpu, geometry, num_slots=24, registered=registered)
    staging_bytes = 3 * geometry.slot_bytes()
    profile = dataclasses.replace(BUILT_IN, launch_seconds=1e-9)
    engine = rig.engine(staging_bytes=staging_bytes, profile=profile)
    slots, rows = _slots(12, run), rig.rows(12)
    for direction in (Direction.STORE, Direction.LOAD):
        told = preview_route(
            geometry,
            direction,
            num_pages=12,
            profile=profile,
            host_run=run,
            host_layout=Layout.LAYER_FIRST if registered else Layout.PAGE_MAJOR,
            staging_bytes=staging_bytes,
            mover=Mover(gpu.mover or ""),
        )
        plan = TransferPlan.build(geometry, direction, host_slots=slots, device_slots=rows)
        route = engine.route(plan)
        assert route is not None
        assert told.num_runs == len(plan.host_runs)
        assert told.route.mover is route.mover is Mover(gpu.mover or "")
        assert told.route.sizes == route.sizes
        # Planes that are tensors of their own come in the order of their addresses.
        widths, expected = (
            [sorted(of) for of in one.to_dict()["copy_widths"]] for one in (told, route)
        )
        assert widths == expected
        decisions = engine.explain(plan)
        kernels = {(one.plane, layer): one.kernel for one in told.kernels for layer in one.layers}
        planes = {plane.name: plane for plane in geometry.planes}
        assert kernels == {
            (name, planes[name].model_layers[layer]): decision.chosen
            for (name, layer), decision in decisions.items()
        }
        begin = len(gpu.calls)
        move = engine.load if direction is Direction.LOAD else engine.store
        move(plan).wait()
        calls = [name.removesuffix("_v2") for name in gpu.calls[begin:]]
        found = [sum(name == one for name in calls) for one in _COPIES]
        assert [told.num_copy_calls - told.num_batches, told.num_batches] == found
    engine.close()


@pytest.mark.parametrize("ask", ["route", "explain"])
def test_a_plan_of_others_is_not_told_of(gpu: FakeGpu, ask: str) -> None:
    """It is refused, and nothing of it is kept for transfers that look alike: all layers move."""
    rig = DeviceRig(gpu, latent(48, num_layers=2))
    engine, rows = rig.engine(), rig.rows(4)
    theirs = latent(48, num_layers=1)
    for direction in Direction:
        plan = TransferPlan.build(theirs, direction, host_slots=[0, 1, 2, 3], device_slots=rows)
        with pytest.raises(PlanError, match="another geometry"):
            getattr(engine, ask)(plan)
    rig.store(engine, [0, 1, 2, 3], rows).wait()
    wanted = rig.on_device(rows)
    same(rig.on_host([0, 1, 2, 3]), wanted, "stored")
    rig.poison()
    rig.load(engine, [0, 1, 2, 3], rows).wait()
    same(rig.on_device(rows), wanted, "loaded")
    engine.close()


@pytest.mark.parametrize("layout", list(Layout))
def test_where_pages_lie_decides_what_can_be_staged(layout: Layout) -> None:
    """page_major and layer_first pools can be staged; token_major ones cannot, and why."""
    geometry = latent(num_layers=61)
    told = preview_route(
        geometry,
        Direction.LOAD,
        num_pages=512,
        profile=BUILT_IN,
        host_layout=layout,
        mover=None if layout is Layout.TOKEN_MAJOR else Mover.STAGED,
    )
    if layout is Layout.TOKEN_MAJOR:
        assert told.route.mover is Mover.DIRECT
        assert "are not one piece each at even distances" in told.route.reason
        assert list(told.seconds) == ["direct"]
        return
    bands = [group.bands for group in told.route.groups]
    assert {band.place.pitch for band in itertools.chain(*bands)} == {
        geometry.slot_bytes() if layout is Layout.PAGE_MAJOR else PAGE * 576
    }
    # A page's layers are one band, or a layer each.
    expected = [1 if layout is Layout.PAGE_MAJOR else size for size in told.route.sizes]
    assert [len(of) for of in bands] == expected


def test_counts_are_those_of_a_plan() -> None:
    """Routes are planned for powers of two; times are those of all pages."""
    told = preview_route(
        latent(), Direction.LOAD, num_pages=100, profile=BUILT_IN, host_run=9, device_run=4
    )
    assert (told.num_runs, told.planned_pages, told.planned_runs) == (12, 64, 8)
    assert told.seconds["direct"] > told.route.seconds["direct"]
    assert told.num_bytes == 100 * PAGE * 576 * 4


def test_staging_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment or no staging memory: direct, with the reason. Too little: refused."""

    def reason(staging_bytes: int = 64 << 20) -> str:
        told = preview_route(
            latent(), Direction.STORE, num_pages=64, profile=BUILT_IN, staging_bytes=staging_bytes
        )
        assert told.route.mover is Mover.DIRECT
        return told.route.reason

    assert reason(0) == "not staged: staging_bytes is 0"
    with pytest.raises(ConfigError, match=r"pass staging_bytes of at least 18,432"):
        reason(4096)
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "staged")
    assert reason() == "not staged: switched off by KVFERRY_DISABLE_PATHS"
    with pytest.raises(PlanError, match="cannot be staged: switched off"):
        preview_route(latent(), Direction.LOAD, num_pages=1, profile=BUILT_IN, mover=Mover.STAGED)


def test_what_no_engine_takes_is_refused() -> None:
    """Counts below 1, geometries of states alone, and more pages than kernels take at once."""
    wrong: list[dict[str, Any]] = [{"num_pages": 0}, {"host_run": 0}, {"device_run": -1}]
    for given in wrong:
        with pytest.raises(PlanError, match="must be 1 or more"):
            preview_route(latent(), Direction.LOAD, profile=BUILT_IN, **{"num_pages": 1, **given})
    with pytest.raises(PlanError, match="must be 0 or more"):
        preview_route(latent(), Direction.LOAD, num_pages=1, profile=BUILT_IN, staging_bytes=-1)
    state = Plane(
        name="state",
        num_layers=1,
        element_size=8,
        rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )
    with pytest.raises(PlanError, match="no plane follows the tokens"):
        preview_route(Geometry(planes=(state,)), Direction.LOAD, num_pages=1, profile=BUILT_IN)
    with pytest.raises(PlanError, match="split the transfer"):
        preview_route(latent(), Direction.LOAD, num_pages=1 << 31, profile=BUILT_IN)
