"""Which kernel carries a transfer: by itself, on request, and with some of them switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gpu_rig import GpuRig, Rows, kernel, latent, scattered

from kvferry import TransferHandle, TransferPlan
from kvferry.errors import ConfigError, PlanError
from kvferry.types import Direction

pytestmark = pytest.mark.gpu

_PAGES = 5
_NUM_ROWS = 640
_SLOTS = [6, 0, 3, 5, 1]

_Make = Callable[..., GpuRig]


def _round_trip(rig: GpuRig, run: int = 1, **options: Any) -> tuple[TransferHandle, TransferHandle]:
    """Store and load, each compared with every byte of both pools."""
    engine = rig.engine(**options)
    rig.fill(1)
    sources: Rows = scattered(1, _PAGES, 64, _NUM_ROWS, run)
    targets: Rows = scattered(2, _PAGES, 64, _NUM_ROWS, run)
    plan = TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=sources)
    stored = engine.store(plan)
    stored.wait()
    rig.check_stored(_SLOTS, {"latent": sources})
    rig.poison()
    images = rig.after_load(_SLOTS, {"latent": targets})
    plan = TransferPlan.load(rig.geometry, host_slots=_SLOTS, device_slots=targets)
    loaded = engine.load(plan)
    loaded.wait()
    assert loaded.verified_pages == _PAGES
    rig.check_device(images)
    told = {decision.chosen for decision in engine.explain(plan).values()}
    assert told == {kernel(loaded)}
    return stored, loaded


@pytest.mark.parametrize(
    ("element_size", "run", "path"),
    [
        (576, 1, "flat"),
        (656, 1, "flat"),
        (584, 1, "flat"),
        (66, 1, "realign"),
        (66, 64, "flat"),
        (132, 1, "realign"),
        (132, 16, "flat"),
        (131, 1, "realign"),
        (131, 64, "flat"),
        (1, 1, "realign"),
        (37440, 1, "flat"),
    ],
)
def test_the_best_path(make_rig: _Make, element_size: int, run: int, path: str) -> None:
    """Whole 8-byte packages over what lies side by side go flat, all else goes through realign."""
    rig = make_rig(latent(element_size, num_layers=2), num_rows=_NUM_ROWS, num_slots=8)
    stored, loaded = _round_trip(rig, run)
    assert (kernel(stored), kernel(loaded)) == (path, path)


@pytest.mark.parametrize("num_blocks", [1, 3, 200])
@pytest.mark.parametrize(
    ("element_size", "options"),
    [
        (576, {"path": "flat"}),
        (576, {"path": "realign"}),
        (576, {"path": "grouped"}),
        (128, {"path": "grouped"}),
        (132, {"path": "grouped"}),
        (4096, {"path": "grouped", "unroll": 1}),
        (512, {"unroll": 2}),
        (37440, {"path": "grouped"}),
        (131, {"path": "realign"}),
    ],
)
def test_a_path_on_request(
    make_rig: _Make, element_size: int, options: dict[str, Any], num_blocks: int
) -> None:
    """The path that is asked for is taken, with as many blocks as it may have."""
    rig = make_rig(latent(element_size, num_layers=3), num_rows=_NUM_ROWS, num_slots=8)
    stored, loaded = _round_trip(rig, num_blocks=num_blocks, **options)
    wanted = options.get("path", "grouped")
    assert (kernel(stored), kernel(loaded)) == (wanted, wanted)


def test_an_unroll_that_does_not_fit(make_rig: _Make) -> None:
    """An unroll alone asks for grouped; where that cannot be, the others stand in and say so."""
    rig = make_rig(latent(512), num_rows=_NUM_ROWS, num_slots=8)
    stored, loaded = _round_trip(rig, unroll=32)
    assert (kernel(stored), kernel(loaded)) == ("flat", "flat")


@pytest.mark.parametrize(
    ("element_size", "options", "said"),
    [
        (131, {"path": "flat"}, "flat: "),
        (66, {"path": "flat"}, "flat: "),
        (66, {"path": "grouped"}, "no multiple of 4"),
        (2048, {"path": "grouped", "unroll": 32}, "grouped: "),
        (132, {"path": "grouped", "unroll": 4}, "take unroll 32"),
    ],
)
def test_a_path_that_cannot(
    make_rig: _Make, element_size: int, options: dict[str, Any], said: str
) -> None:
    """What was asked for and cannot be is refused with the reason, both ways, and whole."""
    rig = make_rig(latent(element_size), num_rows=_NUM_ROWS, num_slots=8)
    rig.fill(1)
    engine, images = rig.engine(**options), rig.images()
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    for direction in Direction:
        plan = TransferPlan.build(rig.geometry, direction, host_slots=_SLOTS, device_slots=rows)
        submit = engine.load if direction is Direction.LOAD else engine.store
        with pytest.raises(PlanError, match=f"layer 0 cannot move as asked: .*{said}"):
            submit(plan)
    rig.check_device(images)
    assert bool((rig.slot_memory() == 0xA5).all())


def test_a_path_that_is_switched_off(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flat, realign carries all and the handle says so; flat cannot be asked for then."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat")
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    stored, loaded = _round_trip(rig)
    assert (kernel(stored), kernel(loaded)) == ("realign", "realign")
    with pytest.raises(ConfigError, match=r"'flat' is not to be had .* realign, grouped"):
        rig.engine(path="flat")


def test_grouped_is_never_a_way_out(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With flat and realign switched off nothing moves, and the refusal names the switch."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat,realign")
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    plan = TransferPlan.load(
        rig.geometry, host_slots=_SLOTS, device_slots=scattered(1, _PAGES, 64, _NUM_ROWS)
    )
    with pytest.raises(PlanError, match="switched off by KVFERRY_DISABLE_PATHS"):
        rig.engine().load(plan)


def test_all_paths_are_switched_off(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then there is no engine, and the error says what to change."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat,realign,grouped")
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    with pytest.raises(ConfigError, match="every path for GPU pools is switched off"):
        rig.engine()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "cpu"}, "'cpu' is not to be had for GPU pools"),
        ({"num_threads": 2}, "num_threads=2 is for pools in host memory"),
        ({"num_blocks": 0}, "num_blocks=0"),
    ],
)
def test_options_that_cannot_be(make_rig: _Make, options: dict[str, Any], said: str) -> None:
    """Options of the CPU paths and numbers below 1 are refused when the engine is made."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    with pytest.raises(ConfigError, match=said):
        rig.engine(**options)
