"""A sink between the cache and somebody's metrics: what those raise ends here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from kvferry.metrics.sink import NullMetrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.metrics.sink import MetricsSink

__all__ = ["Listeners"]

_logger = logging.getLogger(__name__)


class Listeners:
    """Calls those who are told of what the cache does, and counts what they raise.

    They are told amid bookkeeping, and at its end. What one of them raises must not reach a caller
    that would then have no handle, nor leave a job half done. It is counted, its first error is
    logged as a warning, and the listener is told of later things as before: one label that a sink
    cannot take is no reason to lose all others.
    """

    def __init__(self) -> None:
        self.num_failures = 0
        """How often one raised."""

        self._told: set[str] = set()

    def call(self, who: str, method: Callable[..., object], *args: Any, **given: Any) -> None:
        """Call `method` of the listener `who`."""
        try:
            method(*args, **given)
        except Exception as bad:  # noqa: BLE001  other people's code: whatever it raises is counted
            self.num_failures += 1
            if who not in self._told:
                self._told.add(who)
                _logger.warning(
                    "%s raised %s: %s; the cache goes on, and counts what more it raises as "
                    "listener_failures of stats()", who, type(bad).__name__, bad,
                )  # fmt: skip

    def guard(self, metrics: MetricsSink) -> MetricsSink:
        """`metrics`, of which no method raises. One that is off stays, and costs nothing."""
        if type(metrics) is NullMetrics:  # and no class made from it
            return metrics
        return cast("MetricsSink", _Guarded(metrics, self))


class _Guarded:
    """Has the methods of a sink."""

    def __init__(self, sink: MetricsSink, listeners: Listeners) -> None:
        self._sink = sink
        self._listeners = listeners
        self.enabled = sink.enabled

    def __getattr__(self, name: str) -> Callable[..., None]:
        def told(*args: Any, **given: Any) -> None:
            # Looked up with each call, so that what a sink lacks is its failure, too.
            call = self._listeners.call
            call(f"{type(self._sink).__name__}.{name}", _named, self._sink, name, args, given)

        setattr(self, name, told)
        return told


def _named(sink: MetricsSink, name: str, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    getattr(sink, name)(*args, **given)
