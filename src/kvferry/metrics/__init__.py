"""What a cache counts and measures, for Prometheus. `NullMetrics` stands in where that is off.

Importing this does not load prometheus-client; making a `Metrics` does.
"""

from kvferry.metrics.guard import Listeners
from kvferry.metrics.link_meter import LinkMeter, LinkReading
from kvferry.metrics.prometheus import Metrics
from kvferry.metrics.quantities import QUANTITIES, Quantity, QuantityKind
from kvferry.metrics.sink import MetricsSink, NullMetrics

__all__ = [
    "QUANTITIES",
    "LinkMeter",
    "LinkReading",
    "Listeners",
    "Metrics",
    "MetricsSink",
    "NullMetrics",
    "Quantity",
    "QuantityKind",
]
