"""The figures of a device: interpolation, and profiles that are refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest

from kvferry.errors import ConfigError
from kvferry.transfer import BUILT_IN, DeviceProfile
from kvferry.types import Direction

LOAD, STORE = Direction.LOAD, Direction.STORE


def test_a_measured_width_has_its_rate() -> None:
    """At every point of either curve the rate is the one that was measured."""
    for direction in Direction:
        for width, rate in BUILT_IN.widths[direction]:
            assert BUILT_IN.copy_rate(direction, width) == rate


def test_between_two_widths_the_logarithm_counts() -> None:
    """Half way between 1,024 and 4,096 is 2,048; at the cliff of stores both ends bound it."""
    curve = ((1024, 10.0), (4096, 30.0))
    profile = dataclasses.replace(BUILT_IN, widths={LOAD: curve, STORE: curve})
    assert profile.copy_rate(LOAD, 2048) == pytest.approx(20.0)
    assert profile.copy_rate(LOAD, 3000) == pytest.approx(10 + 10 * math.log2(3000 / 1024))
    assert 28.0 < BUILT_IN.copy_rate(STORE, 9000) < 47.5
    assert BUILT_IN.copy_rate(LOAD, 9000) > BUILT_IN.copy_rate(STORE, 9000)


@pytest.mark.parametrize("direction", Direction)
def test_outside_the_curve_its_ends_hold(direction: Direction) -> None:
    """Rows narrower or wider than any that was measured."""
    curve = BUILT_IN.widths[direction]
    assert BUILT_IN.copy_rate(direction, 1) == curve[0][1]
    assert BUILT_IN.copy_rate(direction, 1 << 40) == curve[-1][1]


def test_a_row_of_nothing_has_no_rate() -> None:
    """A width of 0 is refused, with what to do."""
    with pytest.raises(ConfigError, match="width=0: a row has 1 byte or more"):
        BUILT_IN.copy_rate(LOAD, 0)


def test_a_profile_survives_json() -> None:
    """All figures come back, and equal."""
    profile = dataclasses.replace(
        BUILT_IN, source="calibrated", copy_seconds=0.0, unmeasured=("direct.load",)
    )
    assert DeviceProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert profile != BUILT_IN


def test_a_profile_cannot_be_changed() -> None:
    """Nor can the mappings in it: a planner may keep one."""
    with pytest.raises(TypeError):
        BUILT_IN.link[LOAD] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], 2, "format 2; this kvferry reads 1"),
        (["source"], "guessed", "source='guessed'"),
        (["link", "load"], 0, "link.load=0.0, but it is GB/s, from 1e-06"),
        (["link", "load"], "55", "link.load='55', but it is a finite number"),
        (["link", "store"], math.nan, "link.store=nan"),
        pytest.param(["link", "store"], 10**400, "link.store=1000", id="huge"),
        (["link", "store"], 1e308, "to 1,000,000"),
        (["link", "store"], 5e-324, "from 1e-06"),
        (["direct_blocks", "load"], 10**30, "from 1 to 2,147,483,647"),
        pytest.param(["copy_seconds"], -(10**400), "copy_seconds=-1000", id="low"),
        (["widths", "load"], [[1, 1.0], [10**400, 2.0]], "from 1 to 1,099,511,627,776"),
        (["link", "store"], True, "link.store=True"),
        (["link"], {"load": 1.0}, "one figure each for load and store"),
        (["link"], 55.0, "link=55.0"),
        (["widths", "load"], [], "one width or more"),
        (["widths", "load"], [[656, 1.0], [656, 2.0]], "each above the one before"),
        (["widths", "load"], [[656.5, 1.0]], "656.5, but a width is a whole number"),
        (["widths", "load"], [[656]], "a width and a rate"),
        (["widths", "store"], [[656, -1.0]], "widths.store=-1.0"),
        (["widths", "store"], "fast", "it is a list"),
        (["copy_seconds"], -1e-6, "copy_seconds=-1e-06"),
        (["launch_seconds"], 10, "from 0 to below 1"),
        (["direct", "store"], None, "direct.store=None"),
        (["direct_blocks", "load"], 0, "direct_blocks.load=0, but it is a number of blocks"),
        (["direct_blocks", "load"], 24.0, "direct_blocks.load=24.0"),
        (["unmeasured"], [1], "it lists names"),
        (["unmeasured"], "link", "it is a list"),
        (["extra"], 1, "'extra'"),
    ],
)
def test_a_figure_that_cannot_be_is_refused(path: list[str], value: Any, said: str) -> None:
    """The message names the figure and its value."""
    told = copy.deepcopy(BUILT_IN.to_dict())
    at = told
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    with pytest.raises(ConfigError) as refused:
        DeviceProfile.from_dict(told)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", list(BUILT_IN.to_dict()))
def test_a_profile_without_a_field_is_refused(name: str) -> None:
    """Each of them."""
    told = BUILT_IN.to_dict()
    del told[name]
    with pytest.raises(ConfigError, match=name):
        DeviceProfile.from_dict(told)


@pytest.mark.parametrize("told", [None, [], "profile", 1])
def test_what_is_no_profile_is_refused(told: Any) -> None:
    """Whatever JSON a file may hold."""
    with pytest.raises(ConfigError, match="a device profile is a mapping"):
        DeviceProfile.from_dict(told)
