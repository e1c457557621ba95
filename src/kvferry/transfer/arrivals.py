"""Where the streams of a transfer have come to the end of model layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvferry.kernels.jit import Event, Stream
    from kvferry.transfer.in_flight import InFlight

__all__ = ["Arrivals"]


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
        self.note((layers,), (self.recorded(stream),))

    def recorded(self, stream: Stream) -> Event:
        """An event where `stream` is now. Raises DriverError."""
        (event,) = self.events(1)
        try:
            event.record(stream.handle)
        except BaseException:
            self.put_back((event,))
            raise
        return event

    def events(self, count: int) -> list[Event]:
        """Some that are recorded by others, then noted or put back. Raises DriverError."""
        return self._in_flight.events(count)

    def note(self, steps: Iterable[Sequence[int]], events: Iterable[Event]) -> None:
        """The layers of each step are there where its event was recorded."""
        noted = self._layers
        for layers, event in zip(steps, events, strict=True):
            for layer in layers:
                noted[layer] = event

    def put_back(self, events: Iterable[Event]) -> None:
        """They were not recorded."""
        self._in_flight.put_back(events)
