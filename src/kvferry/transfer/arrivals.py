"""Where the streams of a transfer have come to the end of model layers."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.kernels.jit import Event, Stream
    from kvferry.transfer.in_flight import InFlight

__all__ = ["Arrivals", "StepMarks"]


class Arrivals:
    """The events of one transfer's layers. The context must be current for every call.

    Args:
        in_flight: Where events come from.
        layers: By model layer: where its bytes are there. Filled here.
    """

    def __init__(self, in_flight: InFlight, layers: dict[int, Event]) -> None:
        self._in_flight = in_flight
        self._layers = layers

    def mark(self, layers: Sequence[int], stream: Stream) -> None:
        """`layers` are there where `stream` is now. Raises DriverError."""
        event = self.recorded(stream)
        for layer in layers:
            self._layers[layer] = event

    def recorded(self, stream: Stream) -> Event:
        """An event where `stream` is now. Raises DriverError."""
        event = self._in_flight.event()
        try:
            event.record(stream.handle)
        except BaseException:
            self._in_flight.put_back((event,))
            raise
        return event

    def marks(self, steps: Sequence[Sequence[int]]) -> StepMarks:
        """Marks for the layers of each step, for compiled code to record. Raises DriverError."""
        return StepMarks(self._in_flight, self._layers, steps)


class StepMarks:
    """An event for each step of a transfer, which compiled code records in their order."""

    def __init__(
        self, in_flight: InFlight, layers: dict[int, Event], steps: Sequence[Sequence[int]]
    ) -> None:
        self._in_flight = in_flight
        self._layers = layers
        self._steps = steps
        self.events = in_flight.events(len(steps))
        self._handles = (ctypes.c_void_p * len(steps))(*[one.address for one in self.events])
        self.address = ctypes.addressof(self._handles)
        """Where their handles lie, side by side."""

    def settle(self, num_recorded: int) -> None:
        """Take note of the layers of so many steps; other events go back."""
        noted, recorded = self._layers, self.events[:num_recorded]
        for step, event in zip(self._steps, recorded, strict=False):
            for layer in step:
                noted[layer] = event
        self._in_flight.put_back(self.events[num_recorded:])
