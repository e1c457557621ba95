"""Metrics and subscribers that raise: the cache goes on, and every handle ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.tiers.rig import PAGE, K, Rig, V

from kvferry.metrics import Listeners, MetricsSink, NullMetrics
from kvferry.storage import MemoryBackend
from kvferry.types import Tier

PROMPT = list(range(5 * PAGE))
OTHER = list(range(1000, 1000 + 6 * PAGE))

_METHODS = [
    name for name in vars(MetricsSink) if not name.startswith("_") and name not in ("enabled",)
]


class Sink(NullMetrics):
    """Notes what it is told, and raises from what is in `broken`."""

    enabled = True

    def __init__(self, broken: set[str]) -> None:
        self.broken = broken
        self.told: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in _METHODS:
            return super().__getattribute__(name)

        def note(*_: object, **__: object) -> None:
            self.told.append(name)
            if name in self.broken:
                raise ZeroDivisionError(f"in {name}")

        return note


@pytest.fixture(autouse=True)
def _no_output(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING):
        yield


def _life(rig: Rig) -> None:
    """What sinks are told of: stores, evictions, loads, bad pages, prefetches."""
    for prompt in (PROMPT, OTHER, PROMPT):
        stored = rig.store(prompt)
        stored.wait(20)
        assert stored.done
        rig.until(lambda: not rig.manager.offer_all())
    rig.wipe(20, 5)
    was = rig.pages(0, 5)
    found = rig.match(PROMPT)
    loaded = rig.load(found, 20)
    loaded.wait(20)
    assert loaded.usable_tokens == 5 * PAGE
    assert all(rig.same(20 + page, was[page]) for page in range(5))
    rig.flip_host(PROMPT, 2, 0)
    bad = rig.load(found, 20)
    bad.wait(20)
    assert bad.usable_tokens == 2 * PAGE
    found.release()
    rig.settle()
    rig.manager.reset()
    fetch = rig.manager.prefetch(rig.keys(OTHER), forced=True)
    fetch.wait(20)
    assert fetch.result().num_tokens == 6 * PAGE
    rig.close()


def _rig(broken: set[str]) -> tuple[Rig, Sink]:
    sink = Sink(broken)
    return Rig((K, V), num_slots=8, backend=MemoryBackend(), metrics=sink), sink


@pytest.mark.parametrize("broken", [*_METHODS, "all"])
def test_a_sink_that_raises(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told of everything else, its errors are counted, and each method's first is logged."""
    names = set(_METHODS) if broken == "all" else {broken}
    rig, sink = _rig(names)
    _life(rig)
    failures = sum(sink.told.count(name) for name in names)
    assert rig.manager.stats().listener_failures == failures
    logged = [one.getMessage() for one in caplog.records if "listener_failures" in one.getMessage()]
    assert len(logged) == len(names & set(sink.told))
    assert {"matched", "stored", "evicted", "prefetched", "digest_failed"} < set(sink.told)


def test_a_life_tells_nearly_everything() -> None:
    """What the test above breaks is really called, but for what needs a GPU or a fault."""
    rig, sink = _rig(set())
    _life(rig)
    assert set(_METHODS) - set(sink.told) <= {"routed", "dropped", "worker_fault", "link"}
    assert rig.manager.stats().listener_failures == 0


def test_a_sink_that_lacks_a_method() -> None:
    """One of an earlier version is as one that raises."""
    listeners = Listeners()

    class Early:
        enabled = True

    guarded = listeners.guard(Early())  # type: ignore[arg-type]
    guarded.evicted(Tier.HOST, 3)
    assert listeners.num_failures == 1


def test_metrics_that_are_off_are_not_wrapped() -> None:
    """They cost no call more than before."""
    off = NullMetrics()
    assert Listeners().guard(off) is off


def test_interrupts_are_not_swallowed() -> None:
    """Only errors are a listener's own business."""

    class Impatient(NullMetrics):
        enabled = True

        def evicted(self, *_: object) -> None:
            raise KeyboardInterrupt

    listeners = Listeners()
    with pytest.raises(KeyboardInterrupt):
        listeners.guard(Impatient()).evicted(Tier.HOST, 1)
    assert listeners.num_failures == 0


@pytest.mark.parametrize("call", ["store", "match", "load", "prefetch"])
def test_a_subscriber_that_raises(call: str, caplog: pytest.LogCaptureFixture) -> None:
    """Callers get their handles, and others that subscribed their events."""
    rig = Rig((K, V), num_slots=8, backend=MemoryBackend())
    told: list[Any] = []

    def bad(_: object) -> None:
        raise ZeroDivisionError("of the subscriber")

    rig.events.subscribe(bad)
    rig.events.subscribe(told.extend)
    rig.store(PROMPT).wait(20)
    calls: dict[str, Callable[[], Any]] = {
        "store": lambda: rig.store(OTHER),
        "match": lambda: rig.match(PROMPT).release(),
        "load": lambda: rig.load(rig.match(PROMPT), 20),
        "prefetch": lambda: rig.manager.prefetch(rig.keys(OTHER), forced=True),
    }
    calls[call]()
    rig.settle()
    assert told
    assert rig.manager.stats().listener_failures > 0
    assert sum("of the subscriber" in one.getMessage() for one in caplog.records) == 1
    rig.manager.reset()
    rig.clock.now += 1000
    rig.close()
