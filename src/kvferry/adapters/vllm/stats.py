"""The counts of a step in vLLM's own shapes: for its log, and for its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvferry.adapters.vllm.counts import COUNTS

__all__ = ["FerryPromMetrics", "FerryStats"]


class FerryStats(KVConnectorStats):  # type: ignore[misc]
    """Counts by name, as `StepCounts.take` gives them."""

    def reset(self) -> None:
        """Start anew."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add the counts of another one."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class FerryPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """One counter for each count, by engine: ``kvferry_vllm_loaded_bytes_total`` and so on."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[Counter]
        self._counters = {}
        for name, meaning in COUNTS.items():
            made = counter(
                name=f"kvferry_vllm_{name}", documentation=meaning, labelnames=labelnames
            )
            self._counters[name] = {
                engine: made.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of one step."""
        for name, amount in transfer_stats_data.items():
            self._counters[name][engine_idx].inc(amount)
