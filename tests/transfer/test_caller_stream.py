"""Pieces of indices on a device: in the stream where they are ready, without an index of their own.

torch here has no GPU, so a double stands for it; tests/gpu/test_cache.py has the bytes.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import IndexTensor

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, Plane
from kvferry.tiers import DeviceSlots
from kvferry.transfer.caller_stream import current_stream


class Slots(IndexTensor):
    """A tensor on the device that may be cut and reshaped, but not indexed."""

    def __getitem__(self, piece: slice) -> Slots:
        assert isinstance(piece, slice), "an index would be brought to the device"
        return Slots(self.indices[piece])

    def __len__(self) -> int:
        return len(self.indices)

    def reshape(self, *shape: int) -> Slots:
        """As torch has it."""
        return Slots(self.indices.reshape(*shape))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams in which something was joined; "current" where none was chosen."""
    joined_in: list[Any] = []
    chosen: list[Any] = ["current"]

    @contextlib.contextmanager
    def stream(one: Any) -> Iterator[None]:
        chosen.append(one)
        yield
        chosen.pop()

    def cat(pieces: list[Slots]) -> Slots:
        joined_in.append(chosen[-1])
        return Slots(np.concatenate([piece.indices for piece in pieces]))

    cuda = SimpleNamespace(
        stream=stream,
        ExternalStream=lambda handle, device: (handle, device),
        default_stream=lambda device: ("default", device),
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, cat=cat))
    return joined_in


_GEOMETRY = Geometry(planes=(Plane(name="k", num_layers=1, element_size=8),), page_size=4)


@pytest.mark.parametrize(
    ("stream", "wanted"), [(None, "current"), (7, (7, "cuda:0")), (0, ("default", "cuda:0"))]
)
def test_pages_with_others_between_them(
    streams: list[Any], stream: int | None, wanted: Any
) -> None:
    """They are put together in the caller's stream, and those in a row are one piece."""
    rows = DeviceSlots(_GEOMETRY, Slots(np.arange(100, 140)), first_page=2, stream=stream)
    found = rows.tokens([3, 4, 7, 9])
    assert found.indices.tolist() == [
        list(range(first, first + 4)) for first in (104, 108, 120, 128)
    ]
    assert streams == [wanted]


def test_pages_in_a_row_are_a_slice(streams: list[Any]) -> None:
    """Nothing is copied, and no stream is asked for."""
    rows = DeviceSlots(_GEOMETRY, Slots(np.arange(40)), stream=7)
    assert rows.tokens([2, 3]).indices.tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert streams == []


def test_a_tensor_in_pieces_is_refused() -> None:
    """To put it in a row would be work in a stream that nobody named."""
    given = Slots(np.arange(8))
    given.is_contiguous = lambda: False  # type: ignore[method-assign]
    with pytest.raises(PlanError, match="contiguous"):
        DeviceSlots(_GEOMETRY, given)


def test_the_current_stream_is_torch_s_where_torch_uses_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before torch has used a GPU, and without torch, it is the legacy default stream."""
    current = SimpleNamespace(cuda_stream=9)
    cuda = SimpleNamespace(is_initialized=lambda: False, current_stream=lambda _: current)
    torch = SimpleNamespace(cuda=cuda, _C=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert current_stream(1) == 0
    cuda.is_initialized = lambda: True
    assert current_stream(1) == 9
    torch._C = SimpleNamespace(_cuda_getCurrentRawStream=lambda gpu: 70 + gpu)
    assert current_stream(1) == 71
    monkeypatch.delitem(sys.modules, "torch")
    assert current_stream(1) == 0
