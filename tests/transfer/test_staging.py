"""How a plan lies in staging: where pages are on the host, and what bands layers make."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvferry.geometry import Geometry, LayerView, Plane, PoolView, Span, host_pool_view
from kvferry.memory import HostPool
from kvferry.testing import place_host_layers
from kvferry.transfer.staging import Group, LayerGroups, Place, place_of
from kvferry.types import Layout, SlotKind

_BASE = 1 << 40
_ALIGNMENT = 256
_TWO_PLANES = Geometry(
    planes=(
        Plane(name="latent", num_layers=3, element_size=24),
        Plane(name="index_key", num_layers=2, element_size=5, rows_per_page=1, layer_ids=(0, 2)),
    ),
    page_size=3,
)


def _places(geometry: Geometry, view: PoolView) -> dict[int, Place]:
    found = {}
    for span in geometry.spans():
        place = place_of(view.view(span.plane.name, span.layer), span.rows)
        assert place is not None
        found[span.index] = place
    return found


def _pool_places(geometry: Geometry, num_slots: int = 4) -> dict[int, Place]:
    """In a host pool of kvferry's own, of which there is no memory."""
    view = host_pool_view(geometry, SlotKind.PAGE, base=_BASE, num_slots=num_slots)
    return _places(geometry, view)


def _registered(geometry: Geometry, layout: Layout, num_slots: int) -> PoolView:
    """In an engine's tensors, one a plane, with nothing between them."""
    layers, base = {}, _BASE
    for plane in geometry.planes:
        rows = geometry.rows_per_page(plane)
        layers[plane.name] = place_host_layers(
            layout, plane, rows_per_page=rows, num_pages=num_slots, base=base
        )
        base += plane.num_layers * rows * num_slots * plane.element_size
    return PoolView(geometry, layers)


def _assert_places(geometry: Geometry, view: PoolView) -> None:
    """Row r of slot s of every span is where its place says, in one piece."""
    for span in geometry.spans():
        one = view.view(span.plane.name, span.layer)
        place = place_of(one, span.rows)
        assert place is not None
        size = span.plane.element_size
        for row in range(one.num_rows):
            slot, within = divmod(row, span.rows)
            address = place.address + slot * place.pitch + within * size
            assert address == one.row_address(row)


# ------------------------------------------------------------------------------------- place_of


@pytest.mark.parametrize("num_slots", [1, 2, 7])
def test_places_in_a_host_pool(num_slots: int) -> None:
    """In kvferry's own pool, also of one slot, pages are a slot apart."""
    pool = HostPool(_TWO_PLANES, num_slots=num_slots)
    _assert_places(_TWO_PLANES, pool.view)
    places = _places(_TWO_PLANES, pool.view)
    assert {place.pitch for place in places.values()} == {_TWO_PLANES.slot_bytes()}
    pool.close()


@pytest.mark.parametrize("num_slots", [1, 2, 7])
@pytest.mark.parametrize("layout", [Layout.LAYER_FIRST, Layout.PAGE_MAJOR])
def test_places_in_an_engine_s_pool(layout: Layout, num_slots: int) -> None:
    """Pages of layer_first and page_major tensors are one piece each, at even distances."""
    view = _registered(_TWO_PLANES, layout, num_slots)
    _assert_places(_TWO_PLANES, view)
    pitches = {place.pitch for place in _places(_TWO_PLANES, view).values()}
    assert pitches == ({72, 5} if layout is Layout.LAYER_FIRST else {3 * 72, 2 * 5})


def _view(**changes: int) -> LayerView:
    """Eight rows of ten bytes, two a page, side by side unless it is changed."""
    given: dict[str, Any] = {
        "address": _BASE, "num_rows": 8, "row_stride": 10, "block_rows": 8, "block_stride": 80,
        "num_pieces": 1, "piece_size": 10, "piece_stride": 10,
    }  # fmt: skip
    return LayerView(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"row_stride": 11, "block_stride": 88},
        {"num_pieces": 2, "piece_size": 5, "piece_stride": 80},
        {"num_pieces": 2, "piece_size": 5, "piece_stride": 5},
        {"block_rows": 4, "block_stride": 41},
        {"block_rows": 1, "block_stride": 11},
        {"block_rows": 2, "block_stride": 1 << 31},
    ],
    ids=["padded rows", "pieces", "pieces side by side", "two pages a block", "rows", "pitch"],
)
def test_pages_that_have_no_place(changes: dict[str, int]) -> None:
    """Rows with gaps, elements in pieces, uneven pages, and pitches that no copy takes."""
    assert place_of(_view(**changes), 2) is None


@pytest.mark.parametrize(
    ("changes", "pitch"),
    [
        ({}, 10),
        ({"row_stride": 17}, 17),
        ({"row_stride": 17, "block_rows": 4, "block_stride": 68}, 17),
        ({"row_stride": 17, "block_rows": 4, "block_stride": 69}, None),
        ({"row_stride": 99, "block_rows": 1, "block_stride": 23}, 23),
        ({"row_stride": 17, "num_pieces": 2, "piece_size": 5, "piece_stride": 6}, None),
        ({"row_stride": 1 << 31}, None),
    ],
)
def test_pages_of_one_row(changes: dict[str, int], pitch: int | None) -> None:
    """Each is one piece wherever the next one is, as in a page_major tensor of scales."""
    view = _view(**changes)
    assert place_of(view, 1) == (None if pitch is None else Place(_BASE, pitch))
    if pitch is not None:
        found = [view.row_address(slot) for slot in range(view.num_rows)]
        assert found == [_BASE + slot * pitch for slot in range(view.num_rows)]


def test_token_major_pages_have_no_place() -> None:
    """Layers lie between the rows of a page."""
    view = _registered(_TWO_PLANES, Layout.TOKEN_MAJOR, 4)
    assert place_of(view.view("latent", 0), 3) is None


def test_pages_that_have_a_place() -> None:
    """One block, blocks without gaps of any size, blocks of a page, and the largest pitch."""
    pitch = (1 << 31) - 1
    assert place_of(_view(), 2) == Place(_BASE, 20)
    assert place_of(_view(block_rows=4, block_stride=40), 2) == Place(_BASE, 20)
    assert place_of(_view(block_rows=1, block_stride=10), 2) == Place(_BASE, 20)
    assert place_of(_view(block_rows=2, block_stride=23), 2) == Place(_BASE, 23)
    assert place_of(_view(block_rows=2, block_stride=pitch), 2) == Place(_BASE, pitch)
    assert place_of(_view(block_stride=0), 2) == Place(_BASE, 20)
    assert place_of(_view(block_stride=0), 8) == Place(_BASE, 80)


# ---------------------------------------------------------------------------------- LayerGroups


def _random_geometry(rng: random.Random) -> Geometry:
    num_layers = rng.randint(1, 9)
    planes = []
    for number in range(rng.randint(1, 3)):
        ids = sorted(rng.sample(range(num_layers), rng.randint(1, num_layers)))
        planes.append(
            Plane(
                name=f"plane_{number}",
                num_layers=len(ids),
                element_size=rng.choice((1, 16, 66, 131, 256, 576)),
                layer_ids=tuple(ids),
                rows_per_page=rng.choice((None, 1)),
            )
        )
    return Geometry(
        planes=tuple(planes),
        page_size=rng.choice((1, 4, 16)),
        span_alignment=rng.choice((1, 16, 256, 512)),
    )


def _random_sizes(rng: random.Random, total: int) -> tuple[int, ...]:
    sizes = []
    while total:
        sizes.append(rng.randint(1, total))
        total -= sizes[-1]
    return tuple(sizes)


def _check_group(group: Group, places: dict[int, Place], *, with_gaps: bool) -> None:
    """Each byte of each span is in one band, where its offset says, and nothing overlaps."""
    assert group.pitch % _ALIGNMENT == 0
    assert group.width == sum(band.width for band in group.bands)
    end = 0
    for band in group.bands:
        assert band.in_staging % _ALIGNMENT == 0
        assert end <= band.in_staging < end + _ALIGNMENT
        assert band.width <= band.place.pitch
        end = band.in_staging + band.width
    assert end <= group.pitch < end + _ALIGNMENT
    taken = np.zeros(group.pitch, np.int8)
    for span, offset in zip(group.spans, group.offsets, strict=True):
        place = places[span.index]
        holding = [
            band
            for band in group.bands
            if band.place.pitch == place.pitch
            and band.place.address <= place.address
            and place.address + span.num_bytes <= band.place.address + band.width
        ]
        assert len(holding) == 1
        assert offset - holding[0].in_staging == place.address - holding[0].place.address
        taken[offset : offset + span.num_bytes] += 1
    assert taken.max() == 1
    if not with_gaps:
        assert group.width == sum(span.num_bytes for span in group.spans)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_random_groups(seed: int, with_gaps: bool) -> None:
    """Of any geometry, layout and subset, in any sizes: all layers in order, and sound bands."""
    rng = random.Random(seed)
    geometry = _random_geometry(rng)
    num_slots = rng.randint(1, 4)
    places = _pool_places(geometry, num_slots)
    if rng.random() < 0.4:
        layout = rng.choice((Layout.LAYER_FIRST, Layout.PAGE_MAJOR))
        places = _places(geometry, _registered(geometry, layout, num_slots))
    every = geometry.spans_by_layer()
    layers = sorted({span.model_layer for span in every})
    chosen = sorted(rng.sample(layers, rng.randint(1, len(layers))))
    spans = [span for span in every if span.model_layer in chosen]
    sizes = _random_sizes(rng, len(chosen))
    groups = LayerGroups(spans, places, with_gaps=with_gaps).of(sizes)
    assert [len(group.layers) for group in groups] == list(sizes)
    assert [layer for group in groups for layer in group.layers] == chosen
    for group in groups:
        assert {span.index for span in group.spans} == {
            span.index for span in spans if span.model_layer in group.layers
        }
        _check_group(group, places, with_gaps=with_gaps)


def _bands(
    geometry: Geometry,
    *,
    with_gaps: bool,
    spans: Sequence[Span] | None = None,
    places: dict[int, Place] | None = None,
) -> list[tuple[int, int]]:
    """Offset in a slot and width of each band of all layers in one group."""
    spans = geometry.spans_by_layer() if spans is None else spans
    places = _pool_places(geometry) if places is None else places
    num_layers = len({span.model_layer for span in spans})
    (group,) = LayerGroups(spans, places, with_gaps=with_gaps).of([num_layers])
    _check_group(group, places, with_gaps=with_gaps)
    return [(band.place.address - _BASE, band.width) for band in group.bands]


def _planes(sizes: Sequence[int], *, alignment: int = 1, num_layers: int = 3) -> Geometry:
    """One plane for each size, with pages of one row."""
    return Geometry(
        planes=tuple(
            Plane(name=f"plane_{number}", num_layers=num_layers, element_size=size)
            for number, size in enumerate(sizes)
        ),
        page_size=1,
        span_alignment=alignment,
    )


@pytest.mark.parametrize("with_gaps", [False, True])
def test_neighbours_are_one_band(with_gaps: bool) -> None:
    """Layers of a plane, and planes side by side."""
    assert _bands(_planes([100]), with_gaps=with_gaps) == [(0, 300)]
    assert _bands(_planes([100, 7]), with_gaps=with_gaps) == [(0, 321)]


def test_padding_is_crossed_only_where_the_host_is_read() -> None:
    """Between layers of a plane; never between planes."""
    padded = _planes([100, 50], alignment=128)
    assert _bands(padded, with_gaps=True) == [(0, 356), (384, 306)]
    assert _bands(padded, with_gaps=False) == [
        *((at, 100) for at in (0, 128, 256)),
        *((at, 50) for at in (384, 512, 640)),
    ]


def test_wide_padding_is_not_crossed() -> None:
    """A gap is worth no more than where the next band would begin."""
    assert _bands(_planes([257], alignment=512), with_gaps=True) == [(0, 512 + 512 + 257)]
    assert _bands(_planes([256], alignment=512), with_gaps=True) == [
        (0, 256),
        (512, 256),
        (1024, 256),
    ]


@pytest.mark.parametrize("with_gaps", [False, True])
def test_layers_that_do_not_move_are_not_crossed(with_gaps: bool) -> None:
    """What lies between is a layer that was left out, however small."""
    geometry = _planes([100])
    spans = [span for span in geometry.spans_by_layer() if span.model_layer != 1]
    assert _bands(geometry, with_gaps=with_gaps, spans=spans) == [(0, 100), (200, 100)]


def test_a_layer_of_another_plane_is_no_neighbour() -> None:
    """Also where it would be the next by its number, and what lies between is small."""
    geometry = Geometry(
        planes=(
            Plane(name="one", num_layers=1, element_size=100, layer_ids=(1,)),
            Plane(name="two", num_layers=2, element_size=50, layer_ids=(0, 1)),
        ),
        page_size=1,
        span_alignment=1,
    )
    spans = [span for span in geometry.spans_by_layer() if span.model_layer == 1]
    assert _bands(geometry, with_gaps=True, spans=spans) == [(0, 100), (150, 50)]


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("num_slots", [1, 4])
def test_layers_of_a_layer_first_pool_are_apart(num_slots: int, with_gaps: bool) -> None:
    """Also where there is one slot, so that they are neighbours: a band is of one page slot."""
    geometry = _planes([100])
    places = _places(geometry, _registered(geometry, Layout.LAYER_FIRST, num_slots))
    assert _bands(geometry, with_gaps=with_gaps, places=places) == [
        (layer * num_slots * 100, 100) for layer in range(3)
    ]


@pytest.mark.parametrize("with_gaps", [False, True])
def test_a_band_has_one_pitch(with_gaps: bool) -> None:
    """Neighbours in one slot are none in the next where their slots are not as far apart."""
    geometry = _planes([100], num_layers=2)
    places = {0: Place(_BASE, 300), 1: Place(_BASE + 100, 400)}
    assert _bands(geometry, with_gaps=with_gaps, places=places) == [(0, 100), (100, 100)]


def test_views_of_a_group_are_its_rows_in_staging() -> None:
    """Rows of a page lie side by side, pages a pitch apart, at the offset of their span."""
    sizes = [len({span.model_layer for span in _TWO_PLANES.spans()})]
    (group,) = LayerGroups(
        _TWO_PLANES.spans_by_layer(), _pool_places(_TWO_PLANES), with_gaps=True
    ).of(sizes)
    views = list(group.views())
    assert len(views) == len(group.spans) == 5
    for view, span, offset in zip(views, group.spans, group.offsets, strict=True):
        assert view.element_size == span.plane.element_size
        for row in range(view.num_rows):
            page, within = divmod(row, span.rows)
            expected = offset + page * group.pitch + within * view.element_size
            assert view.row_address(row) == expected
