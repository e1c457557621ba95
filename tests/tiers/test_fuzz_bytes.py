"""Random operations with real bytes, real threads and a backend that fails: never a wrong byte."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.tiers.rig import PAGE, PLANE_SETS, Rig

from kvferry.geometry import Plane
from kvferry.storage import ItemResult, ItemStatus
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import FetchHandle, LoadHandle

FAULTS = [
    Fault(FaultKind.RAISE),
    Fault(FaultKind.STATUS),
    Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.MISS)),
    Fault(FaultKind.SHORT),
    Fault(FaultKind.WRONG_BYTES, bit=8 * 4100),
    Fault(FaultKind.SILENT),
    Fault(FaultKind.NOT_A_RESULT),
]
SCRATCH = 40


@pytest.mark.soak
@pytest.mark.parametrize("planes", list(PLANE_SETS.values()), ids=list(PLANE_SETS))
def test_random_operations(planes: tuple[Plane, ...], soak_factor: int) -> None:
    """Whatever a load vouches for is what was stored, in every plane that the prefix needs."""
    for seed in range(soak_factor):
        rng = random.Random(seed)
        backend = FaultyBackend()
        rig = Rig(planes, num_slots=10, backend=backend, batch_pages=2, breaker_failures=1000,
                  prefetch_budget_pages=5, max_queue_pages=6, device_pages=64)  # fmt: skip
        prompts = [
            [number // 2] * PAGE + [number] * (rng.randint(1, 5) * PAGE) for number in range(5)
        ]
        # The first page of two prompts is the same one, so it must hold the same bytes.
        contents = {number: rig.pages(8 * number, 6) for number in range(5)}
        vouched = 0
        fetches: list[FetchHandle] = []
        for _ in range(800):
            number = rng.randrange(5)
            prompt = prompts[number]
            what = rng.random()
            if what < 0.3:
                rig.store(prompt, 8 * number)
            elif what < 0.6:
                with rig.match(prompt) as found:
                    rig.wipe(SCRATCH, 8)
                    loaded = rig.load(found, SCRATCH)
                rig.until(lambda loaded=loaded: loaded.done)  # type: ignore[misc]
                vouched += _check(rig, loaded, number, contents)
            elif what < 0.75:
                fetches.append(rig.manager.prefetch(rig.keys(prompt)))
            elif what < 0.85:
                if fetches:
                    fetches.pop(rng.randrange(len(fetches))).cancel()
            elif what < 0.9:
                method = rng.choice(["read_into", "write_from", "contains"])
                fault = FaultKind.EVICT_AFTER if method == "contains" else rng.choice(FAULTS)
                backend.script(method, None, fault)
            elif what < 0.93:
                pages = [
                    page for page in range(len(prompt) // PAGE) if rig.slot_of(prompt, page) >= 0
                ]
                if pages and not rig.manager.num_jobs:
                    span = rng.choice(rig.geometry.spans())
                    rig.flip_host(prompt, rng.choice(pages), span.offset)
            elif what < 0.94:
                rig.manager.reset()
            else:
                rig.pump(0.002)
            rig.manager.check_integrity()
        for fetch in fetches:
            fetch.cancel()
        rig.settle()
        rig.check_idle()
        assert vouched > 20
        rig.close()


def _check(
    rig: Rig, loaded: LoadHandle, number: int, contents: dict[int, list[dict[str, Any]]]
) -> int:
    """How many pages were vouched for; each is one that was stored for these tokens."""
    count = loaded.usable_tokens // PAGE
    rule = rig.manager._control.rule
    for page in range(count):
        names = list(rule.whole_planes)
        for name, hit_rule in rule.windows.items():
            if page >= count - hit_rule.pages_needed(count, PAGE):
                names.append(name)
        sources = [number] if page else [other for other in range(5) if other // 2 == number // 2]
        assert not names or any(
            rig.same(SCRATCH + page, contents[source][page], names) for source in sources
        ), f"page {page} of prompt {number} is not what was stored"
    return count
