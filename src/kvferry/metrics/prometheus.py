"""Metrics that a Prometheus server reads, by prometheus-client."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvferry.errors import MetricsError, MissingDependencyError
from kvferry.metrics.quantities import DURATION_BUCKETS, QUANTITIES, Quantity, QuantityKind
from kvferry.types import Direction, Tier

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = ["MAX_WORDS", "OTHER", "Metrics"]

MAX_WORDS = 100
"""How many values a label takes that callers word freely: reason, outcome, kind, queue, path."""

OTHER = "other"
"""What stands for all values of such a label beyond the first `MAX_WORDS`."""

_PREFIX_OF = {Direction.LOAD: "kvferry_load_back", Direction.STORE: "kvferry_backup"}


class Metrics:
    """Counts and measures in a registry of prometheus-client. docs/metrics.md lists all.

    Args:
        registry: Where the metrics are to be found; None: in one of their own, `registry`.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
        MetricsError: The registry has a metric of one of these names.
    """

    enabled = True

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            import prometheus_client as client
        except ImportError as absent:
            raise MissingDependencyError(
                "metrics are on, and prometheus-client is not installed: "
                "pip install 'prometheus-client>=0.22', or switch them off with metrics.enabled = "
                "false"
            ) from absent
        self.registry = client.CollectorRegistry() if registry is None else registry
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._words_lock = threading.Lock()
        self._words: dict[str, set[str]] = {}
        made: list[Counter | Gauge | Histogram] = []
        try:
            for one in QUANTITIES:
                made.append(self._make(one))
        except ValueError as taken:
            for metric in made:
                self.registry.unregister(metric)
            raise MetricsError(
                f"the registry has a metric of that name already ({taken}): give each Metrics a "
                f"registry of its own, or share one Metrics"
            ) from taken

    def _make(self, one: Quantity) -> Counter | Gauge | Histogram:
        import prometheus_client as client

        about = (one.name, f"{one.meaning[0].upper()}{one.meaning[1:]}.", one.labels)
        if one.kind is QuantityKind.COUNTER:
            return self._counters.setdefault(
                one.name, client.Counter(*about, registry=self.registry)
            )
        if one.kind is QuantityKind.GAUGE:
            return self._gauges.setdefault(one.name, client.Gauge(*about, registry=self.registry))
        return self._histograms.setdefault(
            one.name,
            client.Histogram(*about, registry=self.registry, buckets=DURATION_BUCKETS),
        )

    def text(self) -> str:
        """All metrics in the text form that Prometheus reads, for an engine's own ``/metrics``."""
        import prometheus_client as client

        return client.generate_latest(self.registry).decode()

    def _word(self, label: str, word: str) -> str:
        """`word`, or `OTHER` where the label has its fill: a server keeps a series for each."""
        words = self._words.get(label)
        if words is not None and word in words:
            return word
        with self._words_lock:
            words = self._words.setdefault(label, set())
            if word not in words and len(words) >= MAX_WORDS:
                return OTHER
            words.add(word)
        return word

    def transferred(
        self,
        direction: Direction,
        path: str,
        *,
        pages: int,
        num_bytes: int,
        tokens: int,
        seconds: float,
        ok: bool,
    ) -> None:
        """See `MetricsSink.transferred`."""
        prefix, path = _PREFIX_OF[direction], self._word("path", path)
        if not ok:
            self._counters[f"{prefix}_failed_transfers_total"].labels(path).inc()
            return
        self._counters[f"{prefix}_bytes_total"].labels(path).inc(num_bytes)
        self._counters[f"{prefix}_tokens_total"].labels(path).inc(tokens)
        self._counters[f"{prefix}_pages_total"].labels(path).inc(pages)
        self._histograms[f"{prefix}_duration_seconds"].labels(path).observe(seconds)

    def routed(self, direction: Direction, mover: str, reason: str) -> None:
        """See `MetricsSink.routed`."""
        self._counters["kvferry_routed_transfers_total"].labels(
            direction, self._word("mover", mover), self._word("reason of a route", reason)
        ).inc()

    def matched(self, tokens_by_tier: Mapping[Tier, int], missed_tokens: int) -> None:
        """See `MetricsSink.matched`."""
        for tier, tokens in tokens_by_tier.items():
            self._counters["kvferry_matched_tokens_total"].labels(tier).inc(tokens)
        self._counters["kvferry_missed_tokens_total"].inc(missed_tokens)

    def stored(self, tier: Tier, pages: int, num_bytes: int) -> None:
        """See `MetricsSink.stored`."""
        self._counters["kvferry_stored_pages_total"].labels(tier).inc(pages)
        self._counters["kvferry_stored_bytes_total"].labels(tier).inc(num_bytes)

    def dropped(self, reason: str, pages: int) -> None:
        """See `MetricsSink.dropped`."""
        word = self._word("reason of a drop", reason)
        self._counters["kvferry_dropped_pages_total"].labels(word).inc(pages)

    def evicted(self, tier: Tier, pages: int) -> None:
        """See `MetricsSink.evicted`."""
        self._counters["kvferry_evicted_pages_total"].labels(tier).inc(pages)

    def prefetched(self, outcome: str, pages: int, num_bytes: int, seconds: float) -> None:
        """See `MetricsSink.prefetched`."""
        word = self._word("outcome", outcome)
        self._counters["kvferry_prefetched_pages_total"].labels(word).inc(pages)
        self._counters["kvferry_prefetched_bytes_total"].labels(word).inc(num_bytes)
        self._histograms["kvferry_prefetch_duration_seconds"].labels(word).observe(seconds)

    def digest_failed(self, tier: Tier, pages: int) -> None:
        """See `MetricsSink.digest_failed`."""
        self._counters["kvferry_digest_failed_pages_total"].labels(tier).inc(pages)

    def quarantined(self, tier: Tier, pages: int) -> None:
        """See `MetricsSink.quarantined`."""
        self._counters["kvferry_quarantined_pages_total"].labels(tier).inc(pages)

    def worker_fault(self, kind: str) -> None:
        """See `MetricsSink.worker_fault`."""
        self._counters["kvferry_worker_faults_total"].labels(self._word("kind", kind)).inc()

    def storage_changed(self, state: str, *, usable: bool) -> None:
        """See `MetricsSink.storage_changed`."""
        self._counters["kvferry_storage_changes_total"].labels(self._word("state", state)).inc()
        self._gauges["kvferry_storage_usable"].set(int(usable))

    def occupancy(self, tier: Tier, used_pages: int, capacity_pages: int) -> None:
        """See `MetricsSink.occupancy`."""
        self._gauges["kvferry_used_pages"].labels(tier).set(used_pages)
        self._gauges["kvferry_capacity_pages"].labels(tier).set(capacity_pages)

    def queue(self, name: str, depth: int) -> None:
        """See `MetricsSink.queue`."""
        self._gauges["kvferry_queued_jobs"].labels(self._word("queue", name)).set(depth)

    def link(self, direction: Direction, gigabytes_per_second: float, busy_fraction: float) -> None:
        """See `MetricsSink.link`."""
        self._gauges["kvferry_link_gigabytes_per_second"].labels(direction).set(
            gigabytes_per_second
        )
        self._gauges["kvferry_link_busy_fraction"].labels(direction).set(busy_fraction)
