"""Planes, spans, hit rules and fingerprints: what a geometry accepts and how it lays out bytes."""

from __future__ import annotations

import dataclasses
import fractions
import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import GeometryError
from kvferry.geometry import Geometry, HitKind, HitRule, Plane
from kvferry.types import SlotKind

K = Plane(name="k", num_layers=2, element_size=2048)
SMALL = Geometry(
    planes=(
        Plane(name="latent", num_layers=3, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=132, layer_ids=(0, 2)),
        Plane(name="packed", num_layers=1, element_size=7, rows_per_page=1),
        Plane(
            name="state",
            num_layers=2,
            element_size=100,
            rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
            layer_ids=(1, 4),
        ),
    ),
    page_size=4,
)
# The fingerprint of stored pages: these may change only together with the format version.
GOLDEN = {
    Geometry(planes=(K,)): "42252e9c4ea74a7361f7803916b369be",
    SMALL: "87231195d26cbc799d3ae8ed4d7058c6",
}


def test_spans_lie_in_order_each_on_its_alignment() -> None:
    """Planes in order, layers in order, every span rounded up to 16 bytes."""
    spans = SMALL.spans()
    assert [(s.plane.name, s.layer, s.offset, s.num_bytes, s.rows) for s in spans] == [
        ("latent", 0, 0, 2624, 4),
        ("latent", 1, 2624, 2624, 4),
        ("latent", 2, 5248, 2624, 4),
        ("index_key", 0, 7872, 528, 4),
        ("index_key", 1, 8400, 528, 4),
        ("packed", 0, 8928, 7, 1),
    ]
    assert [s.index for s in spans] == list(range(6))
    assert [s.plane_index for s in spans] == [0, 0, 0, 1, 1, 2]
    assert [s.model_layer for s in spans] == [0, 1, 2, 0, 2, 0]


def test_state_planes_have_slots_of_their_own() -> None:
    """Planes of exact boundaries fill state slots, from offset 0 and with their own index."""
    spans = SMALL.spans(SlotKind.STATE)
    assert [(s.index, s.plane_index, s.model_layer, s.offset, s.num_bytes) for s in spans] == [
        (0, 3, 1, 0, 100),
        (1, 3, 4, 112, 100),
    ]
    assert SMALL.state_bytes == 200
    assert SMALL.slot_bytes(SlotKind.STATE) == 4096


def test_bytes_of_pages_slots_and_tokens() -> None:
    """page_bytes counts payload, slot_bytes padding too, and a token's share need not be whole."""
    assert SMALL.page_bytes == 3 * 4 * 656 + 2 * 4 * 132 + 7 == 8935
    assert SMALL.slot_bytes() == 12288
    assert SMALL.bytes_per_token == 8935 / 4
    whole = Geometry(planes=(K,)).bytes_per_token
    assert (whole, type(whole)) == (4096, int)


def test_bytes_per_token_are_exact_beyond_what_a_float_holds() -> None:
    """A whole number is an int however large, and a part of one is rounded once."""
    large = Plane(name="k", num_layers=(1 << 14) + 1, element_size=(1 << 40) - 1)
    whole = large.num_layers * large.element_size
    told = Geometry(planes=(large,)).bytes_per_token
    assert (told, type(told)) == (whole, int)
    assert int(float(whole)) != whole
    packed = Plane(name="packed", num_layers=1, element_size=1, rows_per_page=1)
    part = Geometry(planes=(large, packed), page_size=3).bytes_per_token
    assert part == float(fractions.Fraction(3 * whole + 1, 3))


def test_a_geometry_of_pages_alone_has_no_state_slots() -> None:
    """Without a plane of a kind, its slots take nothing."""
    geometry = Geometry(planes=(K,))
    assert geometry.spans(SlotKind.STATE) == ()
    assert geometry.slot_bytes(SlotKind.STATE) == geometry.state_bytes == 0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5000)), min_size=1, max_size=4),
    page_size=st.integers(1, 200),
    span_power=st.integers(0, 8),
    slot_power=st.integers(0, 13),
)
def test_spans_never_overlap_or_leave_the_slot(
    sizes: list[tuple[int, int]], page_size: int, span_power: int, slot_power: int
) -> None:
    """For any sizes and alignments: aligned, in order, apart, inside, with all of the payload."""
    geometry = Geometry(
        planes=tuple(
            Plane(name=f"p{i}", num_layers=layers, element_size=size)
            for i, (layers, size) in enumerate(sizes)
        ),
        page_size=page_size,
        span_alignment=1 << min(span_power, slot_power),
        slot_alignment=1 << slot_power,
    )
    end = payload = 0
    for span in geometry.spans():
        assert span.offset % geometry.span_alignment == 0
        assert end <= span.offset < end + geometry.span_alignment
        end = span.offset + span.num_bytes
        payload += span.num_bytes
    assert payload == geometry.page_bytes == page_size * sum(n * size for n, size in sizes)
    assert end <= geometry.slot_bytes() < end + geometry.slot_alignment
    assert geometry.slot_bytes() % geometry.slot_alignment == 0


def test_fingerprints_are_golden() -> None:
    """Fingerprints of stored pages are the same in every version of kvferry."""
    assert {geometry: geometry.fingerprint for geometry in GOLDEN} == GOLDEN


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_fingerprints_are_the_same_in_every_process(seed: str) -> None:
    """A fresh interpreter with any hash seed finds the golden fingerprint."""
    script = (
        "import json, sys\n"
        "from kvferry.geometry import Geometry\n"
        "print(Geometry.from_dict(json.loads(sys.argv[1])).fingerprint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(SMALL.to_dict())],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
    )
    assert done.stdout.strip() == GOLDEN[SMALL]


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 8},
        {"span_alignment": 32},
        {"slot_alignment": 8192},
        {"planes": SMALL.planes[::-1]},
        {"planes": SMALL.planes[:-1]},
        {"planes": (dataclasses.replace(SMALL.planes[0], name="other"), *SMALL.planes[1:])},
        {"planes": (dataclasses.replace(SMALL.planes[0], num_layers=4), *SMALL.planes[1:])},
        {"planes": (dataclasses.replace(SMALL.planes[0], element_size=657), *SMALL.planes[1:])},
        {"planes": (dataclasses.replace(SMALL.planes[0], rows_per_page=2), *SMALL.planes[1:])},
        {"planes": (dataclasses.replace(SMALL.planes[0], layer_ids=(0, 1, 3)), *SMALL.planes[1:])},
        {
            "planes": (
                dataclasses.replace(SMALL.planes[0], hit_rule=HitRule.last(8)),
                *SMALL.planes[1:],
            )
        },
    ],
)
def test_every_part_of_a_geometry_is_in_its_fingerprint(change: dict[str, Any]) -> None:
    """Changing any field changes the fingerprint."""
    assert dataclasses.replace(SMALL, **change).fingerprint != SMALL.fingerprint


def test_one_spelling_of_all_layers() -> None:
    """Layer ids that count from 0 are the same as none at all."""
    spelt = dataclasses.replace(K, layer_ids=(0, 1))
    assert spelt == K
    assert Geometry(planes=(spelt,)).fingerprint == Geometry(planes=(K,)).fingerprint
    assert tuple(K.model_layers) == (0, 1)


def test_to_dict_and_back() -> None:
    """A geometry survives JSON, and planes by hand need three fields only."""
    assert Geometry.from_dict(json.loads(json.dumps(SMALL.to_dict()))) == SMALL
    by_hand = {"planes": [{"name": "k", "num_layers": 2, "element_size": 2048}]}
    assert Geometry.from_dict(by_hand) == Geometry(planes=(K,))


def test_planes_by_name() -> None:
    """A plane is found by its name, and an unknown name is answered with the known ones."""
    assert SMALL.plane("packed").element_size == 7
    with pytest.raises(GeometryError, match="latent, index_key, packed, state"):
        SMALL.plane("v")


def test_rows_of_a_page() -> None:
    """One row a token unless the plane says otherwise."""
    assert [SMALL.rows_per_page(plane) for plane in SMALL.planes] == [4, 4, 1, 1]


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (HitRule(), [0, 1, 5]),
        (HitRule.exact_boundary(), [0, 1, 1]),
        (HitRule.last(1), [0, 1, 1]),
        (HitRule.last(64), [0, 1, 1]),
        (HitRule.last(65), [0, 1, 2]),
        (HitRule.last(10_000), [0, 1, 5]),
    ],
)
def test_pages_that_a_hit_needs(rule: HitRule, needed: list[int]) -> None:
    """Of prefixes of 0, 1 and 5 pages of 64 tokens."""
    assert [rule.pages_needed(pages, 64) for pages in (0, 1, 5)] == needed


@pytest.mark.parametrize("kind", HitKind)
def test_a_kind_by_its_value_is_the_kind(kind: HitKind) -> None:
    """A plain string means the same as the enum, in every place that asks."""
    tokens = 100 if kind is HitKind.LAST_TOKENS else 0
    plain, rule = HitRule(kind.value, tokens), HitRule(kind, tokens)  # type: ignore[arg-type]
    assert plain == rule
    assert plain.kind is kind
    assert plain.pages_needed(10, 64) == rule.pages_needed(10, 64)
    plane = Plane(name="k", num_layers=1, element_size=8, rows_per_page=1, hit_rule=plain)
    assert plane.slot_kind is dataclasses.replace(plane, hit_rule=rule).slot_kind
    assert plane.to_dict()["hit_rule"] == kind.value


@pytest.mark.parametrize("kind", ["some", "ALL_PAGES", "", None, 3, [], HitRule])
def test_unknown_hit_kinds_are_refused(kind: Any) -> None:
    """A kind that is none is refused where the rule is made, with the known ones."""
    with pytest.raises(GeometryError, match="all_pages, last_tokens, exact_boundary"):
        HitRule(kind)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        (HitKind.LAST_TOKENS, 0),
        (HitKind.LAST_TOKENS, -1),
        (HitKind.LAST_TOKENS, "8"),
        (HitKind.LAST_TOKENS, True),
        (HitKind.LAST_TOKENS, 1.5),
        (HitKind.ALL_PAGES, None),
        (HitKind.ALL_PAGES, False),
        (HitKind.ALL_PAGES, 8),
        (HitKind.EXACT_BOUNDARY, 8),
    ],
)
def test_bad_hit_rules_are_refused(kind: HitKind, tokens: Any) -> None:
    """A window has a positive number of tokens, the other kinds have none."""
    with pytest.raises(GeometryError, match="last_tokens"):
        HitRule(kind, tokens)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": ""}, "plane name"),
        ({"name": "two words"}, "plane name"),
        ({"name": 3}, "plane name"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_layers": -1}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": "2"}, "num_layers"),
        ({"element_size": 0}, "element_size"),
        ({"element_size": 2.0}, "element_size"),
        ({"element_size": 1 << 41}, "element_size"),
        ({"rows_per_page": 0}, "rows_per_page"),
        ({"layer_ids": (0,)}, "names 1"),
        ({"layer_ids": (1, 0)}, "ascending"),
        ({"layer_ids": (1, 1)}, "ascending"),
        ({"layer_ids": (-1, 1)}, "layer id"),
        ({"layer_ids": ("0", "1")}, "layer id"),
        ({"layer_ids": 5}, "layer_ids must be a list"),
        ({"layer_ids": "01"}, "layer_ids must be a list"),
        ({"layer_ids": {0: 1}}, "layer_ids must be a list"),
        ({"hit_rule": HitRule.exact_boundary()}, "rows_per_page=1"),
        ({"hit_rule": "all_pages"}, "hit_rule must be a HitRule"),
        ({"hit_rule": HitKind.ALL_PAGES}, "hit_rule must be a HitRule"),
        ({"hit_rule": None}, "hit_rule must be a HitRule"),
    ],
)
def test_bad_planes_are_refused(change: dict[str, Any], named: str) -> None:
    """A plane that cannot be is refused with the field at fault."""
    with pytest.raises(GeometryError, match=named):
        dataclasses.replace(K, **change)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"planes": ()}, "at least one plane"),
        ({"planes": (K, K)}, "k is used twice"),
        ({"planes": 5}, "planes must be a list"),
        ({"planes": None}, "planes must be a list"),
        ({"planes": "k"}, "a plane must be a Plane"),
        ({"planes": ({"name": "k"},)}, "from_dict"),
        ({"page_size": "64"}, "page_size"),
        ({"span_alignment": None}, "span_alignment"),
        ({"page_size": 0}, "page_size"),
        ({"page_size": True}, "page_size"),
        ({"span_alignment": 0}, "span_alignment"),
        ({"span_alignment": 24}, "power of two"),
        ({"slot_alignment": 100}, "power of two"),
        ({"span_alignment": 64, "slot_alignment": 32}, "multiple of span_alignment"),
    ],
)
def test_bad_geometries_are_refused(change: dict[str, Any], named: str) -> None:
    """A geometry that cannot be is refused with the field at fault."""
    with pytest.raises(GeometryError, match=named):
        dataclasses.replace(SMALL, **change)


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ([], "mapping of fields, not list"),
        ({}, r"missing fields \['planes'\]"),
        ({"planes": [], "model": 1}, r"unknown fields \['model'\]"),
        ({"planes": "k"}, "list of planes, not str"),
        ({"planes": [3]}, "not int"),
        ({"planes": [], 1: 2, "b": 3}, r"unknown fields \['b', 1\]"),
        ({"planes": [{1: 2, (): 3}]}, r"unknown fields \[\(\), 1\]"),
        ({"planes": [{**K.to_dict(), "last_tokens": None}]}, "last_tokens"),
        ({"planes": [{**K.to_dict(), "hit_rule": None}]}, "hit_rule None"),
        ({"planes": [{"name": "k"}]}, "'element_size', 'num_layers'"),
        ({"planes": [{**K.to_dict(), "size": 1}]}, r"unknown fields \['size'\]"),
        ({"planes": [{**K.to_dict(), "hit_rule": "some"}]}, "hit_rule 'some' is none of"),
        ({"planes": [{**K.to_dict(), "hit_rule": []}]}, "is none of"),
        ({"planes": [{**K.to_dict(), "last_tokens": "4"}]}, "last_tokens"),
        ({"planes": [{**K.to_dict(), "layer_ids": 4}]}, "layer_ids must be a list"),
        ({"planes": [{**K.to_dict(), "layer_ids": "01"}]}, "layer_ids must be a list"),
    ],
)
def test_bad_planes_by_hand_are_refused(told: Any, named: str) -> None:
    """from_dict names what is unknown, missing or of the wrong kind."""
    with pytest.raises(GeometryError, match=named):
        Geometry.from_dict(told)
