"""Pages that turn bad, or are wanted by others, while a load of them is in flight."""

from __future__ import annotations

from typing import Any

import pytest
from tests.tiers.rig import PAGE, K, Rig, V, quarantined

from kvferry.tiers import Reason
from kvferry.transfer import TransferEngine, TransferHandle, TransferPlan
from kvferry.types import SlotKind, Tier

TOKENS = list(range(5 * PAGE))


class SteppedHandle(TransferHandle):
    """A load that carries out one layer at a time, when it is told to."""

    def __init__(self, engine: TransferEngine, plan: TransferPlan) -> None:
        self.plan = plan
        self._engine = engine
        self._left = list(plan.model_layers)
        self._bad: set[int] = set()

    def step(self) -> int:
        """The next layer travels; which it was."""
        layer = self._left.pop(0)
        spans = tuple(span for span in self.plan.spans if span.model_layer == layer)
        part = TransferPlan(
            direction=self.plan.direction,
            geometry=self.plan.geometry,
            kind=self.plan.kind,
            host_slots=self.plan.host_slots,
            device_rows={span.plane.name: self.plan.device_rows[span.plane.name] for span in spans},
            spans=spans,
            page_seeds=self.plan.page_seeds,
        )
        self._bad.update(self._engine.load(part).bad_pages)
        return layer

    path = "stepped"
    verified = True
    error = None

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def bad_pages(self) -> tuple[int, ...]:
        return tuple(sorted(self._bad)) if self.done else ()

    def wait_layer(self, layer: int, stream: int | None = None) -> None:  # noqa: ARG002
        while layer in self._left:
            self.step()

    def wait_all(self, stream: int | None = None) -> None:  # noqa: ARG002
        while self._left:
            self.step()

    def wait(self, timeout: float = 60.0) -> None:  # noqa: ARG002
        self.wait_all()


class SteppedEngine:
    """An engine whose loads are `SteppedHandle`s."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self.handles: list[SteppedHandle] = []

    def load(self, plan: TransferPlan, stream: int | None = None) -> SteppedHandle:  # noqa: ARG002
        """Nothing moves yet."""
        self.handles.append(SteppedHandle(self._engine, plan))
        return self.handles[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize("layer", range(3))
def test_in_a_layer_while_others_are_in_flight(layer: int) -> None:
    """A caller that computes as layers come may compute from a wrong one; it learns in time."""
    rig = Rig((K, V), wrap_engine=SteppedEngine)
    engine: Any = rig.engines[SlotKind.PAGE]
    rig.store(TOKENS).wait(20)
    loaded = rig.load(rig.match(TOKENS), 20)
    handle = engine.handles[0]
    span = next(s for s in rig.geometry.spans() if s.layer == layer and s.plane.name == "v")
    for _ in range(layer):
        handle.step()
    rig.flip_host(TOKENS, 1, span.offset)
    loaded.wait_layer(layer)  # says nothing about bytes
    assert not loaded.done
    assert loaded.verified_pages == 0
    assert loaded.usable_tokens == 0
    loaded.wait_all()
    rig.until(lambda: loaded.done)
    assert loaded.usable_tokens == PAGE
    rig.settle()
    assert rig.match(TOKENS).num_tokens == PAGE
    rig.close()


def test_pages_that_are_loaded_are_not_evicted() -> None:
    """While a load is in flight its pages stay, however full the host is."""
    rig = Rig((K, V), num_slots=8, wrap_engine=SteppedEngine)
    was = rig.pages(0, 5)
    rig.store(TOKENS).wait(20)
    with rig.match(TOKENS) as found:
        loaded = rig.load(found, 20)
    other = rig.store([1] * (8 * PAGE), 10)
    assert (other.reason, other.num_submitted) == (Reason.HOST_FULL, 3)
    loaded.wait_all()
    rig.until(lambda: loaded.done)
    assert loaded.verified_pages == 5
    assert all(rig.same(20 + page, was[page]) for page in range(5))
    rig.close()


def test_a_fault_of_the_link_alone_does_not_cost_the_page() -> None:
    """A page that fails on the device and is right on the host stays; the load does not use it."""
    rig = Rig((K, V), wrap_engine=SteppedEngine)
    engine: Any = rig.engines[SlotKind.PAGE]
    rig.store(TOKENS).wait(20)
    loaded = rig.load(rig.match(TOKENS), 20)
    rig.flip_host(TOKENS, 1, 0)
    engine.handles[0].wait_all()
    rig.flip_host(TOKENS, 1, 0)  # as if it had only ever been wrong on the way
    rig.until(lambda: loaded.done)
    assert loaded.usable_tokens == PAGE
    rig.settle()
    assert rig.manager.stats().transient_pages == 1
    assert rig.match(TOKENS).num_tokens == 5 * PAGE
    rig.close()


def test_others_learn_of_a_bad_page() -> None:
    """Two loads share a bad page: neither uses it, and it is put away once."""
    rig = Rig((K, V), wrap_engine=SteppedEngine)
    rig.store(TOKENS).wait(20)
    first, second = rig.load(rig.match(TOKENS), 20), rig.load(rig.match(TOKENS), 30)
    rig.flip_host(TOKENS, 3, 0)
    first.wait_all()
    rig.until(lambda: first.done)
    # Before the second look is over the page is in doubt, and served to nobody.
    assert rig.manager.num_jobs == 2
    assert rig.manager.match(rig.keys(TOKENS)).num_tokens == 3 * PAGE
    rig.manager.poll()
    assert rig.match(TOKENS).num_tokens == 3 * PAGE
    second.wait_all()
    rig.until(lambda: second.done)
    assert first.usable_tokens == second.usable_tokens == 3 * PAGE
    rig.settle()
    assert quarantined(rig, Tier.HOST) == [rig.keys(TOKENS)[3]]
    rig.close()
