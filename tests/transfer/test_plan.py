"""Plans: what is checked before a byte moves, and in which order things move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.kernels import page_seed
from kvferry.transfer import TransferPlan, blocks_to_rows
from kvferry.types import Direction, SlotKind

_GEOMETRY = Geometry(
    planes=(
        Plane(name="k", num_layers=3, element_size=16),
        Plane(name="index_key", num_layers=2, element_size=64, rows_per_page=1, layer_ids=(0, 2)),
        Plane(
            name="state",
            num_layers=1,
            element_size=128,
            rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
        ),
    ),
    page_size=4,
)


def _plan(**changes: object) -> TransferPlan:
    given = {
        "host_slots": [5, 2],
        "device_slots": np.arange(8).reshape(2, 4),
        "plane_slots": {"index_key": [1, 0]},
        **changes,
    }
    return TransferPlan.load(_GEOMETRY, **given)


def test_layers_move_in_model_order() -> None:
    """All planes of model layer 0 come before any of layer 1, so that layer 0 is ready first."""
    plan = _plan()
    moved = [(span.model_layer, span.plane.name) for span in plan.spans]
    assert moved == [(0, "k"), (0, "index_key"), (1, "k"), (2, "k"), (2, "index_key")]
    assert plan.model_layers == (0, 1, 2)
    assert plan.num_bytes == 2 * (3 * 4 * 16 + 2 * 64)


def test_a_plan_may_move_some_planes_and_layers() -> None:
    """Planes and model layers can be chosen; those left out need no slots."""
    plan = _plan(planes=["k"], layers=[1, 2], plane_slots=None)
    assert [(span.model_layer, span.plane.name) for span in plan.spans] == [(1, "k"), (2, "k")]
    plan = _plan(planes=["index_key"], layers=[2], device_slots=None)
    assert [(span.layer, span.model_layer) for span in plan.spans] == [(1, 2)]


def test_state_slots_are_moved_by_their_own_plans() -> None:
    """Planes kept at exact boundaries are not part of pages."""
    plan = TransferPlan.store(
        _GEOMETRY, kind=SlotKind.STATE, host_slots=[3], plane_slots={"state": [9]}
    )
    assert [span.plane.name for span in plan.spans] == ["state"]
    with pytest.raises(PlanError, match="state"):
        _plan(planes=["state"])


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda given: np.array(given, dtype=np.int32),
        lambda given: np.array(given, dtype=np.uint64),
        lambda given: torch.tensor(given, dtype=torch.int32),
        lambda given: torch.tensor(given, dtype=torch.int64),
        lambda given: np.array(given, dtype=np.int64)[::-1][::-1],
    ],
)
def test_indices_come_in_any_integer_container(make: Callable[[list[int]], Any]) -> None:
    """Lists, arrays and tensors of any integer type mean the same plan."""
    plan = TransferPlan.load(
        _GEOMETRY, host_slots=make([5, 2]), device_slots=make(list(range(8))), planes=["k"]
    )
    assert plan.host_slots.tolist() == [5, 2]
    assert plan.rows_on_host("k").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_slots": [5, -2]}, "host_slots holds -2"),
        ({"host_slots": np.array([5, 1 << 63], np.uint64)}, "host_slots holds 9223372036854775808"),
        ({"host_slots": [5.0, 2.0]}, "float64"),
        ({"host_slots": [True, False]}, "bool"),
        ({"host_slots": [[5, 2]]}, r"shape \(1, 2\)"),
        ({"host_slots": ["a", "b"]}, "whole numbers"),
        ({"host_slots": [5]}, r"shape \(2, 4\), but 1 host slots with 4 rows"),
        ({"device_slots": [0, 1, 2]}, r"shape \(3,\), but 2 host slots"),
        ({"device_slots": np.arange(8).reshape(4, 2)}, r"shape \(4, 2\)"),
        ({"device_slots": [0, 1, 2, 3, 4, 5, 6, 0]}, "names 0 twice"),
        ({"device_slots": None}, "plane 'k' keeps 4 rows a page"),
        ({"plane_slots": None}, r"plane_slots\['index_key'\], shape \[2, 1\]"),
        ({"plane_slots": {"index_key": [7, 7]}}, "names 7 twice"),
        ({"plane_slots": {"index_key": [1, 0], "v": [0]}}, "names \\['v'\\]"),
        ({"planes": ["v"]}, r"\['v'\].*there are: index_key, k"),
        ({"kind": "slot"}, "kind must be one of page, state, not 'slot'"),
        ({"planes": []}, r"planes \[\]"),
        ({"layers": [3]}, r"layers \[3\]"),
        ({"layers": []}, r"layers \[\]"),
        ({"page_keys": [b"a"]}, "1 page keys for 2 host slots"),
        ({"page_keys": ["a", "b"]}, "must be bytes, not str"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, object], message: str) -> None:
    """What is wrong is named with its value before anything moves."""
    with pytest.raises(PlanError, match=message):
        _plan(**changes)


def test_only_destinations_must_be_unique() -> None:
    """One slot may be read twice, and never be written twice."""
    rows = {"device_slots": np.arange(8), "planes": ["k"]}
    TransferPlan.load(_GEOMETRY, host_slots=[5, 5], **rows)
    with pytest.raises(PlanError, match="host_slots names 5 twice"):
        TransferPlan.store(_GEOMETRY, host_slots=[5, 5], **rows)
    TransferPlan.store(_GEOMETRY, host_slots=[5, 6], device_slots=[0] * 8, planes=["k"])


def test_no_pages_is_a_plan() -> None:
    """A plan of nothing is valid and moves nothing."""
    plan = TransferPlan.store(_GEOMETRY, host_slots=[], device_slots=[], planes=["k"])
    assert (plan.num_pages, plan.num_bytes) == (0, 0)


def test_page_keys_become_seeds() -> None:
    """Each page's digests are seeded by its key; without keys the seed is 0."""
    plan = _plan(page_keys=[b"one", b"two"])
    assert plan.page_seeds.tolist() == [page_seed(b"one"), page_seed(b"two")]
    assert _plan().page_seeds.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("block_ids", "block_size", "page_size", "expected"),
    [
        ([7], 4, 4, [[28, 29, 30, 31]]),
        ([7, 1], 2, 4, [[14, 15, 2, 3]]),
        ([3], 4, 2, [[12, 13], [14, 15]]),
        ([9, 4], 1, 2, [[9, 4]]),
        ([], 16, 64, []),
    ],
)
def test_blocks_become_token_slots(
    block_ids: list[int], block_size: int, page_size: int, expected: list[list[int]]
) -> None:
    """An engine's blocks may be smaller than, equal to or larger than a page."""
    found = blocks_to_rows(block_ids, block_size=block_size, page_size=page_size)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("block_ids", "block_size", "page_size", "message"),
    [
        ([1, 2], 48, 528 // 5, "one must divide the other"),
        ([1], 528, 48 * 7, "one must divide the other"),
        ([1, 2, 3], 16, 64, "no whole number of pages"),
        ([1], 0, 64, "block_size must be a positive"),
        ([1], 16, True, "page_size must be a positive"),
        ([-1], 64, 64, "holds -1"),
    ],
)
def test_bad_block_tables_are_refused(
    block_ids: list[int], block_size: int, page_size: int, message: str
) -> None:
    """A ratio that does not divide, or a partial page, is refused with both numbers."""
    with pytest.raises(PlanError, match=message):
        blocks_to_rows(block_ids, block_size=block_size, page_size=page_size)


def test_direction_is_told() -> None:
    """`load`, `store` and a direction's plain value say which way a plan goes."""
    given: dict[str, Any] = {"device_slots": range(4), "planes": ["k"]}
    plain = TransferPlan.build(_GEOMETRY, "store", host_slots=[0], **given)  # type: ignore[arg-type]
    assert plain.direction is Direction.STORE
    with pytest.raises(PlanError, match="host_slots names 5 twice"):
        TransferPlan.build(_GEOMETRY, "store", host_slots=[5, 5], device_slots=range(8))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="direction must be one of load, store, not 'up'"):
        TransferPlan.build(_GEOMETRY, "up", host_slots=[0], **given)  # type: ignore[arg-type]
    plan = TransferPlan.store(_GEOMETRY, host_slots=[0], device_slots=range(4), planes=["k"])
    assert plan.direction is Direction.STORE
