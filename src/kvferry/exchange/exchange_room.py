"""The memory that pages pass through while ranks exchange them, seen as a pool from both sides.

A room holds some layers of some pages at a time: a **step**. Loads from host memory take it for a
device pool, loads into the engine's pool take it for a host pool; so what moves bytes and compares
digests is what does so everywhere else.

    slot s of a step with layers a, b:   [ a's spans | b's spans ]   at   address + s·pitch
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import ConfigError
from kvferry.geometry import LayerView, PoolView
from kvferry.memory import ContextPinDriver, HostMapping, register
from kvferry.transfer import growing_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvferry.geometry import Geometry, Span
    from kvferry.kernels.jit import Context
    from kvferry.memory import PinnedChunk, Registration
    from kvferry.ranks import ExchangeBuffer
    from kvferry.types import SlotKind

__all__ = ["ExchangePages", "StepLayout", "exchange_view", "rows_of_slots", "step_layouts"]

_ALIGNMENT = 16
_MOST_LAYERS = 8


@dataclasses.dataclass(frozen=True)
class StepLayout:
    """How some layers of a page lie in a slot of a room."""

    layers: frozenset[int]
    """Model layers."""

    offsets: Mapping[int, int]
    """By span index: where in the slot."""

    pitch: int
    """Bytes from one slot to the next."""


def step_layouts(geometry: Geometry, kind: SlotKind, most_bytes: int) -> tuple[StepLayout, ...]:
    """All layers in steps that grow, each with a slot of at most `most_bytes`.

    Raises:
        ConfigError: One layer is larger than that.
    """
    by_layer: dict[int, list[Span]] = {}
    for span in geometry.spans_by_layer(kind):
        by_layer.setdefault(span.model_layer, []).append(span)
    layers = list(by_layer)
    most = _MOST_LAYERS
    while True:
        found, first = [], 0
        for size in growing_steps(len(layers), 1, most):
            taken = layers[first : first + size]
            found.append(_layout(taken, [span for layer in taken for span in by_layer[layer]]))
            first += size
        largest = max(layout.pitch for layout in found)
        if largest <= most_bytes:
            return tuple(found)
        if most == 1:
            raise ConfigError(
                f"a page of one layer takes {largest} bytes in an exchange, and there are "
                f"{most_bytes} for it: give more exchange_bytes"
            )
        most //= 2


def _layout(layers: Sequence[int], spans: Iterable[Span]) -> StepLayout:
    offsets, end = {}, 0
    for span in spans:
        offsets[span.index] = end
        end += -(-span.num_bytes // _ALIGNMENT) * _ALIGNMENT
    return StepLayout(frozenset(layers), offsets, end)


def exchange_view(
    geometry: Geometry,
    kind: SlotKind,
    layouts: Sequence[StepLayout],
    buffer: ExchangeBuffer,
    device: str,
    num_slots: int,
) -> PoolView:
    """`num_slots` slots of every step, all of them in the same bytes of `buffer`."""
    layers: dict[str, list[LayerView]] = {}
    for span in geometry.spans(kind):
        step = next(layout for layout in layouts if span.index in layout.offsets)
        layers.setdefault(span.plane.name, []).append(
            LayerView(
                address=buffer.address + step.offsets[span.index],
                num_rows=num_slots * span.rows,
                row_stride=span.plane.element_size,
                block_rows=span.rows,
                block_stride=step.pitch,
                num_pieces=1,
                piece_size=span.plane.element_size,
                piece_stride=span.plane.element_size,
                device=device,
                name=f"exchange of plane {span.plane.name!r}, layer {span.layer}",
            )
        )
    views = {name: tuple(found) for name, found in layers.items()}
    return PoolView(geometry, views, in_turn=True)


def rows_of_slots(spans: Iterable[Span], slots: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """The rows of `slots` in a room, by plane."""
    return {
        span.plane.name: slots[:, None] * span.rows + np.arange(span.rows, dtype=np.int64)
        for span in spans
    }


class ExchangePages:
    """A room as `HostPages`, with the digests that its pages must have.

    Args:
        view: From `exchange_view`.
        kind: Of its slots.
        num_slots: How many.
        buffer: Where it lies.
    """

    def __init__(
        self, view: PoolView, kind: SlotKind, num_slots: int, buffer: ExchangeBuffer
    ) -> None:
        self.geometry, self.view, self.kind = view.geometry, view, kind
        self.num_slots = num_slots
        self._buffer = buffer
        num_spans = len(view.geometry.spans(kind))
        self._mapping = HostMapping(num_slots * num_spans * 8)
        self.digests: NDArray[np.uint64] = np.frombuffer(
            self._mapping.view, dtype=np.uint64, count=num_slots * num_spans
        ).reshape(num_slots, num_spans)
        self._pinned: _OnDevice | None = None

    def pin_for(self, context: Context) -> _OnDevice:
        """Pin the digests; the room itself is on the device already."""
        if self._pinned is None:
            mapping = self._mapping
            self._pinned = _OnDevice(
                register(
                    mapping.address, mapping.num_bytes, ContextPinDriver(context), owner=mapping
                ),
                self._buffer,
            )
        return self._pinned

    def check_slots(self, slots: NDArray[np.int64]) -> None:
        """Nothing: all slots are the loader's."""

    def acquire(self, slots: NDArray[np.int64]) -> None:
        """Nothing: the loader closes a room when nothing is in flight."""

    def release(self, slots: NDArray[np.int64]) -> None:
        """Nothing; see `acquire`."""

    def close(self) -> None:
        """Unpin the digests."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.registration.close()


class _OnDevice:
    """`PinnedAddresses` of which the pages are the GPU's own memory."""

    def __init__(self, registration: Registration, buffer: ExchangeBuffer) -> None:
        self.registration = registration
        self._buffer = buffer

    @property
    def closed(self) -> bool:
        return self.registration.closed

    def device_address(self, host_address: int, num_bytes: int = 1) -> int:
        begin = self._buffer.address
        if begin <= host_address < begin + self._buffer.num_bytes:
            return host_address
        return self.registration.device_address(host_address, num_bytes)

    def chunk_of(self, host_address: int) -> PinnedChunk:
        return self.registration.chunk_of(host_address)

    @property
    def chunks(self) -> Sequence[PinnedChunk]:
        return self.registration.chunks
