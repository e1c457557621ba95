"""What Prometheus is told, what off costs, and what becomes of labels."""

from __future__ import annotations

import builtins
import inspect
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

import kvferry
from kvferry.errors import MetricsError, MissingDependencyError
from kvferry.metrics import QUANTITIES, Metrics, MetricsSink, NullMetrics, QuantityKind
from kvferry.metrics.prometheus import MAX_WORDS, OTHER
from kvferry.types import Direction, Tier

_PACKAGE = Path(kvferry.__file__).parent
_ROOT = Path(__file__).parents[2]
_METHODS = [
    name for name, _ in inspect.getmembers(MetricsSink, inspect.isfunction) if name[0] != "_"
]


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def _say_everything(sink: MetricsSink) -> None:
    """Call each method once, with figures that tell them apart."""
    for direction, scale in ((Direction.LOAD, 1), (Direction.STORE, 10)):
        sink.transferred(
            direction, "staged flat", pages=2 * scale, num_bytes=300 * scale, tokens=128 * scale,
            seconds=0.02 * scale, ok=True,
        )  # fmt: skip
        sink.transferred(
            direction, "flat", pages=1, num_bytes=1, tokens=1, seconds=1.0, ok=False
        )  # fmt: skip
        sink.routed(direction, "staged", "flat: the copy engine is faster here")
        sink.link(direction, 50.5 * scale, 0.05 * scale)
    sink.matched({Tier.DEVICE: 64, Tier.HOST: 128, Tier.STORAGE: 256}, 32)
    sink.stored(Tier.HOST, 3, 3000)
    sink.dropped("queue_full", 4)
    sink.evicted(Tier.HOST, 5)
    sink.prefetched("complete", 6, 6000, 0.5)
    sink.digest_failed(Tier.HOST, 7)
    sink.quarantined(Tier.STORAGE, 8)
    sink.worker_fault("storage")
    sink.storage_changed("back", usable=True)
    sink.occupancy(Tier.HOST, 9, 10)
    sink.queue("store", 11)


_EXPECTED: dict[str, list[tuple[dict[str, str], float]]] = {
    "kvferry_load_back_bytes_total": [({"path": "staged flat"}, 300)],
    "kvferry_load_back_tokens_total": [({"path": "staged flat"}, 128)],
    "kvferry_load_back_pages_total": [({"path": "staged flat"}, 2)],
    "kvferry_load_back_duration_seconds_sum": [({"path": "staged flat"}, 0.02)],
    "kvferry_load_back_failed_transfers_total": [({"path": "flat"}, 1)],
    "kvferry_backup_bytes_total": [({"path": "staged flat"}, 3000)],
    "kvferry_backup_tokens_total": [({"path": "staged flat"}, 1280)],
    "kvferry_backup_pages_total": [({"path": "staged flat"}, 20)],
    "kvferry_backup_duration_seconds_sum": [({"path": "staged flat"}, 0.2)],
    "kvferry_backup_failed_transfers_total": [({"path": "flat"}, 1)],
    "kvferry_routed_transfers_total": [
        (
            {
                "direction": direction,
                "mover": "staged",
                "reason": "flat: the copy engine is faster here",
            },
            1,
        )
        for direction in ("load", "store")
    ],
    "kvferry_matched_tokens_total": [
        ({"tier": "device"}, 64),
        ({"tier": "host"}, 128),
        ({"tier": "storage"}, 256),
    ],
    "kvferry_missed_tokens_total": [({}, 32)],
    "kvferry_stored_pages_total": [({"tier": "host"}, 3)],
    "kvferry_stored_bytes_total": [({"tier": "host"}, 3000)],
    "kvferry_dropped_pages_total": [({"reason": "queue_full"}, 4)],
    "kvferry_evicted_pages_total": [({"tier": "host"}, 5)],
    "kvferry_prefetched_pages_total": [({"outcome": "complete"}, 6)],
    "kvferry_prefetched_bytes_total": [({"outcome": "complete"}, 6000)],
    "kvferry_prefetch_duration_seconds_sum": [({"outcome": "complete"}, 0.5)],
    "kvferry_digest_failed_pages_total": [({"tier": "host"}, 7)],
    "kvferry_quarantined_pages_total": [({"tier": "storage"}, 8)],
    "kvferry_worker_faults_total": [({"kind": "storage"}, 1)],
    "kvferry_storage_changes_total": [({"state": "back"}, 1)],
    "kvferry_storage_usable": [({}, 1)],
    "kvferry_used_pages": [({"tier": "host"}, 9)],
    "kvferry_capacity_pages": [({"tier": "host"}, 10)],
    "kvferry_queued_jobs": [({"queue": "store"}, 11)],
    "kvferry_link_gigabytes_per_second": [
        ({"direction": "load"}, 50.5),
        ({"direction": "store"}, 505.0),
    ],
    "kvferry_link_busy_fraction": [({"direction": "load"}, 0.05), ({"direction": "store"}, 0.5)],
}


def test_each_figure_goes_where_it_belongs() -> None:
    """Everything that is said is found under its name and labels, and nothing else is."""
    metrics = Metrics()
    _say_everything(metrics)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket", "_count"))
    }
    expected = {
        (name, tuple(sorted(labels.items()))): pytest.approx(value)
        for name, samples in _EXPECTED.items()
        for labels, value in samples
    }
    assert found == expected


def test_every_quantity_is_said_by_some_method() -> None:
    """No metric of the table is one that nothing counts."""
    names = {name.removesuffix("_sum") for name in _EXPECTED}
    assert names == {one.name for one in QUANTITIES}


def test_counters_add_up_and_gauges_are_as_told_last() -> None:
    """A second call adds to a counter, and replaces what a gauge shows."""
    metrics = Metrics()
    for _ in range(2):
        _say_everything(metrics)
    metrics.occupancy(Tier.HOST, 0, 10)
    assert _value(metrics, "kvferry_load_back_bytes_total", path="staged flat") == 600
    assert _value(metrics, "kvferry_load_back_duration_seconds_count", path="staged flat") == 2
    assert _value(metrics, "kvferry_used_pages", tier="host") == 0
    assert _value(metrics, "kvferry_queued_jobs", queue="store") == 11


def test_a_failed_transfer_moves_nothing() -> None:
    """Its bytes and seconds are in no figure: they would flatter the speed."""
    metrics = Metrics()
    metrics.transferred(
        Direction.LOAD, "flat", pages=9, num_bytes=9, tokens=9, seconds=9.0, ok=False
    )
    assert _value(metrics, "kvferry_load_back_failed_transfers_total", path="flat") == 1
    for name in ("bytes_total", "pages_total", "tokens_total", "duration_seconds_count"):
        assert _value(metrics, f"kvferry_load_back_{name}", path="flat") is None


@pytest.mark.parametrize("one", QUANTITIES, ids=lambda one: one.name)
def test_names_have_prefix_and_unit(one: Any) -> None:
    """Names begin with kvferry_, counters end with _total, durations in seconds."""
    assert re.fullmatch(r"kvferry_[a-z_]+", one.name)
    assert one.name.endswith("_total") is (one.kind is QuantityKind.COUNTER)
    assert one.name.endswith("_seconds") or one.kind is not QuantityKind.HISTOGRAM
    units = "bytes|tokens|pages|seconds|transfers|faults|jobs|gigabytes_per_second|fraction"
    units += "|changes|usable"
    assert re.search(rf"_({units})(_total)?$", one.name)
    assert set(one.labels) <= {
        *("direction", "kind", "mover", "outcome", "path", "queue", "reason", "state", "tier"),
    }


def test_the_document_has_every_metric() -> None:
    """The table of docs/metrics.md is that of the code: names, kinds, labels and meanings."""
    text = (_ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `kvferry_.*$", text, re.MULTILINE)
    labels = [", ".join(f"`{label}`" for label in one.labels) or "none" for one in QUANTITIES]
    assert rows == [
        f"| `{one.name}` | {one.kind} | {label} | {one.meaning} |"
        for one, label in zip(QUANTITIES, labels, strict=True)
    ]


def test_the_text_is_what_prometheus_reads() -> None:
    """`text` parses back into the same figures."""
    from prometheus_client.parser import text_string_to_metric_families

    metrics = Metrics()
    _say_everything(metrics)
    parsed = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.text())
        for sample in family.samples
    }
    assert parsed[("kvferry_missed_tokens_total", ())] == 32
    assert parsed[("kvferry_load_back_bytes_total", (("path", "staged flat"),))] == 300
    assert parsed[("kvferry_load_back_duration_seconds_bucket",
                   (("le", "0.03"), ("path", "staged flat")))] == 1  # fmt: skip


def test_two_caches_have_a_registry_each() -> None:
    """Metrics are in no global registry, and two of them do not add up."""
    one, other = Metrics(), Metrics()
    one.queue("store", 5)
    assert _value(other, "kvferry_queued_jobs", queue="store") is None
    assert "kvferry" not in prometheus_client.generate_latest().decode()


def test_a_registry_of_somebody_else() -> None:
    """An engine's registry may hold them; names that it has already leave it as it was."""
    registry = prometheus_client.CollectorRegistry()
    Metrics(registry).queue("store", 5)
    assert registry.get_sample_value("kvferry_queued_jobs", {"queue": "store"}) == 5
    with pytest.raises(MetricsError, match="registry of its own"):
        Metrics(registry)
    assert registry.get_sample_value("kvferry_queued_jobs", {"queue": "store"}) == 5
    other = prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("kvferry_used_pages", "Of another program.", registry=other)
    with pytest.raises(MetricsError, match="has a metric of that name"):
        Metrics(other)
    assert [family.name for family in other.collect()] == ["kvferry_used_pages"]


def test_free_words_fill_no_server() -> None:
    """A label with ever new values has a limit, and all beyond it are counted as one."""
    metrics = Metrics()
    for number in range(MAX_WORDS + 50):
        metrics.dropped(f"reason {number}", 1)
    assert _value(metrics, "kvferry_dropped_pages_total", reason=f"reason {MAX_WORDS - 1}") == 1
    assert _value(metrics, "kvferry_dropped_pages_total", reason=f"reason {MAX_WORDS}") is None
    assert _value(metrics, "kvferry_dropped_pages_total", reason=OTHER) == 50
    metrics.dropped("reason 0", 1)
    assert _value(metrics, "kvferry_dropped_pages_total", reason="reason 0") == 2
    # Other labels have room of their own.
    metrics.worker_fault("new")
    assert _value(metrics, "kvferry_worker_faults_total", kind="new") == 1


def test_threads_lose_no_count() -> None:
    """Counts of several threads add up, also while labels are new."""
    metrics, begin = Metrics(), threading.Barrier(4)

    def count() -> None:
        begin.wait(60)
        for number in range(500):
            metrics.dropped(f"reason {number % 150}", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (family,) = (one for one in metrics.registry.collect() if one.name == "kvferry_dropped_pages")
    counts = {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert sum(counts.values()) == 2000
    assert len(counts) == MAX_WORDS + 1


@pytest.mark.parametrize("name", _METHODS)
def test_both_sinks_have_every_method(name: str) -> None:
    """Metrics and NullMetrics take what the protocol says, by the same names and defaults."""
    said = inspect.signature(getattr(MetricsSink, name))
    assert inspect.signature(getattr(Metrics, name)) == said
    assert inspect.signature(getattr(NullMetrics, name)) == said


def test_off_does_nothing() -> None:
    """Each method of NullMetrics has an empty body: no attribute, call or name is looked up."""
    sink: MetricsSink = NullMetrics()
    assert not sink.enabled
    assert Metrics().enabled
    _say_everything(sink)
    assert vars(sink) == {}
    for name in _METHODS:
        code = getattr(NullMetrics, name).__code__
        assert code.co_names == (), name
        assert set(code.co_consts) <= {None}, name


def test_off_imports_nothing() -> None:
    """A process with metrics off never loads prometheus-client; making Metrics does."""
    child = (
        f"import sys; sys.path.insert(0, {str(_PACKAGE.parent)!r})\n"
        "from kvferry.metrics import LinkMeter, Metrics, NullMetrics\n"
        "NullMetrics().queue('store', 1)\n"
        "assert not {'prometheus_client', 'numpy', 'torch'} & set(sys.modules)\n"
        "Metrics()\n"
        "assert 'prometheus_client' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)


def test_without_the_package_the_line_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Metrics that are on and cannot be is an error, not metrics that are off."""
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "prometheus_client":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingDependencyError, match="pip install 'prometheus-client>="):
        Metrics()
