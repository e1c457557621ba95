"""Which rank loads which pages, and which way a load goes."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ConfigError
from kvferry.exchange import Way, choose_way, cut_shares, rounds_of
from kvferry.exchange.exchange_room import step_layouts
from kvferry.geometry import Geometry, Plane
from kvferry.ranks import ExchangeRates
from kvferry.types import SlotKind

_FAST = ExchangeRates(link=50.0, gather=300.0, gather_seconds=20e-6)


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_are_every_page_once(num_pages: int, size: int) -> None:
    """In the order of the plan, and as long as each other but for one page."""
    shares = cut_shares(num_pages, size)
    assert [page for share in shares for page in share] == list(range(num_pages))
    assert len(shares) == size
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 7))
def test_rounds_are_every_page_once_in_slots_of_its_own(
    num_pages: int, size: int, most_slots: int
) -> None:
    """No chunk is longer than it may, none is empty, and each rank's pages are in its own."""
    seen = []
    for one in rounds_of(cut_shares(num_pages, size), most_slots):
        assert 1 <= one.chunk_slots <= most_slots
        slots = one.all_slots
        assert len(set(slots.tolist())) == len(slots) == len(one.all_pages)
        for rank in range(size):
            own = one.slots_of(rank)
            assert len(own) == len(one.pages[rank])
            assert ((own >= rank * one.chunk_slots) & (own < (rank + 1) * one.chunk_slots)).all()
        seen += one.all_pages.tolist()
    assert sorted(seen) == list(range(num_pages))


def test_steps_hold_every_layer_once_and_grow() -> None:
    """Spans of a step do not overlap, and lie within its pitch."""
    geometry = Geometry(
        planes=(
            Plane(name="latent", num_layers=21, element_size=656),
            Plane(name="index", num_layers=2, element_size=3, layer_ids=(0, 20)),
        ),
        page_size=4,
    )
    layouts = step_layouts(geometry, SlotKind.PAGE, 1 << 20)
    assert [len(layout.layers) for layout in layouts] == [1, 1, 2, 4, 8, 5]
    spans = {span.index: span for span in geometry.spans()}
    placed = [index for layout in layouts for index in layout.offsets]
    assert sorted(placed) == sorted(spans)
    for layout in layouts:
        taken = np.zeros(layout.pitch, dtype=np.int64)
        for index, offset in layout.offsets.items():
            assert spans[index].model_layer in layout.layers
            taken[offset : offset + spans[index].num_bytes] += 1
        assert taken.max() == 1


def test_steps_shrink_to_the_room_there_is() -> None:
    """Fewer layers a step where eight do not fit; a room for less than one is refused."""
    geometry = Geometry(planes=(Plane(name="k", num_layers=9, element_size=16),), page_size=4)
    layouts = step_layouts(geometry, SlotKind.PAGE, 3 * 64)
    assert max(len(layout.layers) for layout in layouts) == 2
    with pytest.raises(ConfigError, match=r"64 bytes.*63.*exchange_bytes"):
        step_layouts(geometry, SlotKind.PAGE, 63)


def _way(wanted: str | None = None, **other: int) -> Way:
    numbers = {"num_bytes": 500_000_000, "num_pages": 190, "size": 8, "num_steps": 11}
    return choose_way(
        **{**numbers, **other},
        rates=_FAST,
        agree_seconds=200e-6,
        wanted=wanted,
    )


def test_shares_pay_where_links_are_slower_than_the_exchange() -> None:
    """Eight links carry a long load; the estimate is the slower part, and a step of the other."""
    way = _way()
    assert way.sharded
    assert way.seconds["whole"] == pytest.approx(0.010)
    loading, exchanging = 0.010 / 8, 0.5 * 7 / 8 / 300
    assert way.seconds["sharded"] == pytest.approx(
        max(loading, exchanging) + min(loading, exchanging) / 11 + 11 * 20e-6 + 2 * 200e-6
    )
    assert "8 links and an exchange are faster" in way.reason


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"size": 1}, "there is one rank"),
        ({"num_pages": 0, "num_bytes": 0}, "there are no pages"),
        ({"num_bytes": 30_000}, "an exchange does not pay: .* ms in shares, .* ms whole"),
        ({"num_steps": 1000}, "does not pay"),
    ],
)
def test_what_does_not_pay_is_whole(other: dict[str, int], reason: str) -> None:
    """One rank, nothing to load, less than agreeing takes, or too many steps."""
    way = _way(None, **other)
    assert not way.sharded
    assert re.search(reason, way.reason)


def test_a_way_that_is_asked_for_is_taken() -> None:
    """Either, with both estimates; but nothing is shared with nobody."""
    assert _way("sharded", num_bytes=1) == Way(True, "asked for", _way(num_bytes=1).seconds)
    assert not _way("whole").sharded
    assert not _way("sharded", size=1).sharded
