"""One budget over all planes: its parts, its limits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.errors import BudgetError, ConfigError
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.memory import BudgetSource, HostPool, MemoryReading, PoolSizes, split_budget
from kvferry.types import SlotKind

MIB = 1 << 20
GIB = 1 << 30

_PLANES = {
    SlotKind.PAGE: (
        Plane(name="latent", num_layers=5, element_size=576),
        Plane(name="index_key", num_layers=2, element_size=132),
    ),
    SlotKind.STATE: (
        Plane(
            name="state",
            num_layers=3,
            element_size=100_000,
            rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
        ),
    ),
}
READING = MemoryReading(total_bytes=64 * GIB, available_bytes=32 * GIB)


def _geometry(*kinds: SlotKind) -> Geometry:
    planes = tuple(plane for kind in kinds or SlotKind for plane in _PLANES[kind])
    return Geometry(planes=planes, page_size=16)


def _split(geometry: Geometry, **arguments: Any) -> PoolSizes:
    return split_budget(geometry, **{"reading": READING, "reserve_bytes": 0, **arguments})


@pytest.mark.parametrize("budget", [4 * MIB, 5 * MIB + 1, 16 * MIB - 1, 123_456_789])
@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.7])
def test_all_pools_stay_within_the_budget(budget: int, fraction: float) -> None:
    """Pools of these sizes take what is told; less than one slot of a page is left over."""
    geometry = _geometry()
    sizes = _split(geometry, num_bytes=budget, state_fraction=fraction)
    one_page = geometry.slot_bytes() + 8 * len(geometry.spans())
    assert budget - one_page - 16 <= sizes.num_bytes <= budget
    assert sizes.budget_bytes == sizes.verdict.asked_bytes == budget
    one_state = geometry.slot_bytes(SlotKind.STATE) + 8 * 3
    for_states = fraction * budget
    assert for_states - one_state - 16 <= sizes.state_bytes <= for_states
    if budget < 20 * MIB:
        taken = 0
        for kind in SlotKind:
            with HostPool(geometry, num_slots=sizes.slots(kind), kind=kind) as pool:
                taken += pool.num_bytes
        assert taken == sizes.num_bytes


@pytest.mark.parametrize("kind", list(SlotKind))
def test_a_geometry_of_one_kind_gives_it_everything(kind: SlotKind) -> None:
    """No share is set aside for what the model has not, whatever it was to be."""
    geometry = _geometry(kind)
    sizes = _split(geometry, num_bytes=64 * MIB)
    other = SlotKind.STATE if kind is SlotKind.PAGE else SlotKind.PAGE
    assert sizes.slots(other) == 0
    assert sizes.num_bytes == (sizes.page_bytes if kind is SlotKind.PAGE else sizes.state_bytes)
    assert sizes.num_bytes > 64 * MIB - geometry.slot_bytes(kind) - 100
    assert _split(geometry, num_bytes=64 * MIB, state_fraction=0.7) == sizes
    with pytest.raises(ConfigError, match=r"state_fraction=0: give a share above 0"):
        _split(geometry, num_bytes=64 * MIB, state_fraction=0)


def test_a_ratio_to_the_device_pool() -> None:
    """2.5 times by default; other ratios, below one too, are taken as they are."""
    geometry = _geometry(SlotKind.PAGE)
    assert _split(geometry, device_bytes=100 * MIB).budget_bytes == 250 * MIB
    assert _split(geometry, device_bytes=100 * MIB, ratio=3).budget_bytes == 300 * MIB
    small = _split(geometry, device_bytes=100 * MIB, ratio=0.25)
    assert small.budget_bytes == 25 * MIB
    assert small.page_slots == _split(geometry, num_bytes=25 * MIB).page_slots > 0


@pytest.mark.parametrize(
    ("arguments", "source", "numbers"),
    [
        (
            {"device_bytes": 16 * GIB, "reserve_bytes": GIB},
            BudgetSource.MACHINE,
            (40 * GIB, 32 * GIB, GIB, 31 * GIB),
        ),
        (
            {"num_bytes": 9 * GIB, "processes": 4},
            BudgetSource.MACHINE,
            (9 * GIB, 32 * GIB, 8 * GIB),
        ),
        ({"num_bytes": 9 * GIB, "huge_pages": "always"}, BudgetSource.HUGE_PAGES, (9 * GIB,)),
    ],
)
def test_more_than_the_host_has(
    arguments: dict[str, Any], source: BudgetSource, numbers: tuple[int, ...]
) -> None:
    """Refused with asked, free, reserve and limit, and with what the budget came from."""
    with pytest.raises(BudgetError) as refused:
        _split(_geometry(), **arguments)
    text = str(refused.value)
    for number in numbers:
        assert f"({number} B)" in text
    assert "after a reserve of" in text
    assert "page slots" in text
    assert "device pool" in text or "num_bytes=" in text
    sizes = _split(_geometry(), **arguments, unchecked_budget=True)
    assert not sizes.verdict.allowed
    assert sizes.verdict.limited_by is source


def test_huge_pages_that_suffice_are_the_budget() -> None:
    """Memory set aside for them counts as used, and is what the pools are going to take."""
    reading = MemoryReading(total_bytes=64 * GIB, available_bytes=GIB, huge_free_bytes=40 * GIB)
    sizes = _split(_geometry(), num_bytes=30 * GIB, reading=reading)
    assert sizes.verdict.limited_by is BudgetSource.HUGE_PAGES
    with pytest.raises(BudgetError, match="the machine"):
        _split(_geometry(), num_bytes=30 * GIB, reading=reading, huge_pages="never")
    with pytest.raises(BudgetError, match="the machine"):
        _split(_geometry(), num_bytes=30 * GIB, reading=reading, processes=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "give one of the two"),
        ({"num_bytes": MIB, "device_bytes": MIB}, "give one of the two"),
        ({"num_bytes": 0}, "num_bytes=0"),
        ({"num_bytes": 1e9}, "num_bytes=1000000000.0"),
        ({"device_bytes": -5}, "device_bytes=-5"),
        ({"device_bytes": MIB, "ratio": 0}, "ratio=0"),
        ({"device_bytes": MIB, "ratio": float("nan")}, "ratio=nan"),
        ({"device_bytes": MIB, "ratio": "2"}, "ratio='2'"),
        ({"num_bytes": MIB, "state_fraction": 1.5}, "state_fraction=1.5"),
        ({"num_bytes": MIB, "state_fraction": float("nan")}, "state_fraction=nan"),
        ({"num_bytes": MIB, "state_fraction": 0}, "state_fraction=0: give a share above 0"),
        (
            {"num_bytes": MIB, "state_fraction": 1},
            "state_fraction=1: give a share above 0 and below 1",
        ),
        ({"num_bytes": MIB, "state_fraction": "0.5"}, "state_fraction='0.5'"),
        ({"num_bytes": MIB, "state_fraction": 0.1}, r"for state slots, and one .*state_fraction"),
        ({"num_bytes": 310_000, "state_fraction": 0.999}, r"for page slots, and one"),
        ({"device_bytes": 1000}, r"2.5 times a device pool of 1000 B leaves 250 B"),
        ({"num_bytes": MIB, "huge_pages": "yes"}, "huge_pages='yes'"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(arguments: dict[str, Any], told: str) -> None:
    """Numbers that make no sense, and shares that hold no slot, by name."""
    with pytest.raises(ConfigError, match=told):
        _split(_geometry(), **arguments)
