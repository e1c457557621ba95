"""Which path carries a span of two real views, and what is refused whatever their alignment."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.geometry import Geometry, LayerView, Plane
from kvferry.kernels import CopyDecision, CopyPath, decide_span, refused_paths

_LIMIT = (1 << 31) - 1


def _decided(element_size: int, page_size: int = 16, pieces: int = 1, **options: Any) -> Any:
    """The decision for one layer whose elements lie in `pieces` on the device."""
    plane = Plane(name="kv", num_layers=1, element_size=element_size)
    (span,) = Geometry(planes=(plane,), page_size=page_size).spans()
    rows = 4 * page_size

    def view(num_pieces: int) -> LayerView:
        piece = element_size // num_pieces
        stride = element_size if num_pieces == 1 else piece
        return LayerView(
            address=1 << 40,
            num_rows=rows,
            row_stride=stride,
            block_rows=rows,
            block_stride=rows * element_size,
            num_pieces=num_pieces,
            piece_size=piece,
            piece_stride=rows * piece if num_pieces > 1 else element_size,
            device="cuda:0",
        )

    return decide_span(span, view(pieces), view(1), run_rows=1, **options)


def test_grouped_needs_realign_for_its_digests() -> None:
    """Where realign is switched off it is refused, unless digests are off."""
    asked: dict[str, Any] = {"path": CopyPath.GROUPED, "disabled": {CopyPath.REALIGN}}
    refused = _decided(656, **asked)
    assert refused.chosen is None
    assert refused.reason == ("grouped: its digests are made by realign, which is switched off")
    assert _decided(656, **asked, verify=False).chosen is CopyPath.GROUPED
    assert _decided(656, path=CopyPath.GROUPED).chosen is CopyPath.GROUPED
    assert _decided(656, disabled={CopyPath.REALIGN}).chosen is CopyPath.FLAT


@pytest.mark.parametrize("path", [None, *CopyPath])
def test_a_span_that_kernels_cannot_count_has_no_path(path: CopyPath | None) -> None:
    """2^31 bytes in a page of one layer are too many for each, and the reason has the numbers."""
    decision = _decided(1 << 21, page_size=1 << 10, path=path)
    assert decision.chosen is None
    assert "spans of 2,147,483,648 bytes are longer than the 2,147,483,647" in decision.reason
    assert _decided(1 << 20, page_size=1 << 10, path=path).chosen is (path or CopyPath.FLAT)


def test_grouped_takes_no_pieces() -> None:
    """An element that is scattered on one side is left to the others."""
    decision: CopyDecision = _decided(512, pieces=2)
    assert decision.grouped.eligible is False
    assert "in one piece, and here it lies in 2" in decision.grouped.reason
    assert decision.chosen is CopyPath.FLAT


def test_the_wish_of_the_user_is_the_first_reason() -> None:
    """A path that is switched off says so, also where it could not be taken anyway."""
    off = "switched off by KVFERRY_DISABLE_PATHS"
    assert refused_paths(_LIMIT) == {}
    assert refused_paths(_LIMIT, disabled={CopyPath.FLAT}) == {CopyPath.FLAT: off}
    too_long = refused_paths(_LIMIT + 1, disabled={CopyPath.FLAT})
    assert set(too_long) == set(CopyPath)
    assert too_long[CopyPath.FLAT] == off
    assert "longer than" in too_long[CopyPath.REALIGN]
    both = refused_paths(8, disabled={CopyPath.GROUPED, CopyPath.REALIGN}, num_pieces=3)
    assert both == {CopyPath.GROUPED: off, CopyPath.REALIGN: off}
