"""Every metric: its name, its labels and what it says. docs/metrics.md has this as a table."""

from __future__ import annotations

import enum
from typing import NamedTuple

__all__ = ["DURATION_BUCKETS", "QUANTITIES", "Quantity", "QuantityKind"]

DURATION_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper ends of the buckets of a duration, in seconds."""


class QuantityKind(enum.StrEnum):
    """What Prometheus calls the kinds of metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Quantity(NamedTuple):
    """One metric."""

    name: str
    """As Prometheus shows it, with its unit."""

    kind: QuantityKind
    labels: tuple[str, ...]
    meaning: str


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Quantity:
    return Quantity(name, QuantityKind.COUNTER, labels, meaning)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Quantity:
    return Quantity(name, QuantityKind.GAUGE, labels, meaning)


def _histogram(name: str, labels: tuple[str, ...], meaning: str) -> Quantity:
    return Quantity(name, QuantityKind.HISTOGRAM, labels, meaning)


def _of_transfers(prefix: str, way: str) -> tuple[Quantity, ...]:
    return (
        _counter(f"{prefix}_bytes_total", ("path",), f"bytes of all planes {way}"),
        _counter(f"{prefix}_tokens_total", ("path",), f"tokens {way}"),
        _counter(f"{prefix}_pages_total", ("path",), f"pages {way}"),
        _histogram(
            f"{prefix}_duration_seconds",
            ("path",),
            f"how long a transfer of pages {way} took, first to last byte, by the GPU's clock",
        ),
        _counter(
            f"{prefix}_failed_transfers_total",
            ("path",),
            f"transfers of pages {way} that failed; nothing else counts them",
        ),
    )


QUANTITIES = (
    *_of_transfers("kvferry_load_back", "loaded from the host to the device"),
    *_of_transfers("kvferry_backup", "stored from the device to the host"),
    _counter(
        "kvferry_routed_transfers_total",
        ("direction", "mover", "reason"),
        "transfers that a mover was chosen for, and why it was",
    ),
    _counter(
        "kvferry_matched_tokens_total",
        ("tier",),
        "tokens of prompts that were found, by the tier that has them",
    ),
    _counter("kvferry_missed_tokens_total", (), "tokens of prompts that no tier has"),
    _counter("kvferry_stored_pages_total", ("tier",), "pages that came to be in a tier"),
    _counter("kvferry_stored_bytes_total", ("tier",), "bytes of the pages that came to be there"),
    _counter(
        "kvferry_dropped_pages_total",
        ("reason",),
        "pages that were to be stored and were not, which later is a miss",
    ),
    _counter("kvferry_evicted_pages_total", ("tier",), "pages given up to make room"),
    _counter(
        "kvferry_prefetched_pages_total",
        ("outcome",),
        "pages that prefetches brought from storage to the host",
    ),
    _counter("kvferry_prefetched_bytes_total", ("outcome",), "bytes of those pages"),
    _histogram(
        "kvferry_prefetch_duration_seconds",
        ("outcome",),
        "how long a prefetch took, from its submission",
    ),
    _counter(
        "kvferry_digest_failed_pages_total",
        ("tier",),
        "pages that were not what was stored in that tier; none of them was served",
    ),
    _counter("kvferry_quarantined_pages_total", ("tier",), "pages put where nobody reads them"),
    _counter("kvferry_worker_faults_total", ("kind",), "errors that a worker is not made for"),
    _counter(
        "kvferry_storage_changes_total",
        ("state",),
        "how often storage came to be attached, down, back or detached",
    ),
    _gauge(
        "kvferry_storage_usable",
        (),
        "1 while storage is attached and answers, else 0",
    ),
    _gauge("kvferry_used_pages", ("tier",), "pages in a tier now"),
    _gauge("kvferry_capacity_pages", ("tier",), "pages that a tier has room for"),
    _gauge("kvferry_queued_jobs", ("queue",), "jobs that wait in a queue now"),
    _gauge(
        "kvferry_link_gigabytes_per_second",
        ("direction",),
        "speed of the link while it was busy lately, in 10⁹ bytes per second, by the GPU's clock",
    ),
    _gauge(
        "kvferry_link_busy_fraction",
        ("direction",),
        "share of the time lately in which the link was busy, 0 to 1, by the GPU's clock",
    ),
)
