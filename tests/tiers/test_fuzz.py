"""Random operations on index, pools, tiers and storage together, against an oracle after each."""

from __future__ import annotations

import collections
import random
from typing import Any

import numpy as np
import pytest
from tests.tiers.fake_data import FakeData

from kvferry.events import EventLog, PagesEvicted, PagesQuarantined, PagesStored
from kvferry.geometry import Geometry, HitRule, Plane
from kvferry.index import Namespace, PrefixIndex, page_keys
from kvferry.memory import SlotOwners
from kvferry.tiers import (
    DeviceSlots,
    FetchHandle,
    LinkState,
    LoadHandle,
    Match,
    PageState,
    PrefetchPolicy,
    RestoreRule,
    StorePolicy,
    TierManager,
    TierOptions,
)
from kvferry.types import SlotKind, Tier

PAGE = 2
FULL = Plane(name="k", num_layers=2, element_size=8)
DRAFT = Plane(name="draft", num_layers=1, element_size=6)
WINDOW = Plane(name="w", num_layers=1, element_size=8, hit_rule=HitRule.last(3))
STATE = Plane(
    name="s", num_layers=1, element_size=8, rows_per_page=1, hit_rule=HitRule.exact_boundary()
)
GEOMETRIES = {
    "full": (FULL, DRAFT),
    "window": (WINDOW,),
    "full_and_window": (FULL, WINDOW),
    "full_and_state": (FULL, STATE),
}


class World:
    """A control plane over a fake data plane, and what should be true of them."""

    def __init__(
        self, seed: int, planes: tuple[Plane, ...], policy: StorePolicy, fetch: PrefetchPolicy
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.geometry = Geometry(planes=planes, page_size=PAGE)
        self.rule = RestoreRule(self.geometry)
        self.data = FakeData(self.rng, failing=self.rng.choice([0.0, 0.05, 0.3]))
        self.events = EventLog(1 << 16)
        kinds = [kind for kind in SlotKind if self.geometry.spans(kind)]
        self.pools = {kind: SlotOwners(self.rng.randint(4, 12)) for kind in kinds}
        self.index = PrefixIndex(
            policy=self.rng.choice(["lru", "lfu", "slru", "fifo"]), clock=self.clock
        )
        self.manager = TierManager(
            self.geometry,
            self.index,
            self.pools,
            self.data,
            options=TierOptions(
                store_policy=policy,
                prefetch_policy=fetch,
                load_threshold_tokens=1,
                prefetch_threshold_tokens=1,
                prefetch_max_secs=20,
                write_max_secs=20,
                prefetch_budget_pages=self.rng.randint(1, 6),
                max_queue_pages=self.rng.randint(1, 8),
                batch_pages=self.rng.randint(1, 4),
                max_batches=2,
                lease_secs=10,
                miss_memory_secs=5,
                breaker_secs=5,
            ),
            events=self.events,
            clock=self.clock,
        )
        namespace = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )
        self.prompts = []
        for _ in range(8):
            tokens = [self.rng.randint(0, 1) for _ in range(PAGE * self.rng.randint(1, 7))]
            self.prompts.append(page_keys(namespace, tokens, PAGE))
        self.on_host: set[bytes] = set()
        self.matches: list[Match] = []
        self.loads: list[tuple[LoadHandle, list[bytes], int]] = []
        self.fetches: list[FetchHandle] = []
        self.next_device_page = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.data.attach()

    def clock(self) -> float:
        """Seconds, as the test says."""
        return self.now

    # ------------------------------------------------------------------------ operations

    def rows(self, num_pages: int, first_page: int = 0) -> tuple[DeviceSlots, int]:
        """Device pages that nobody had before, and the first of them."""
        first = self.next_device_page
        self.next_device_page += num_pages + 1
        pages = np.arange(first, first + num_pages)
        planes: dict[str, Any] = {}
        if SlotKind.STATE in self.pools:
            planes = {"s": [first + num_pages]}
        slots = DeviceSlots(
            self.geometry,
            (pages[:, None] * PAGE + np.arange(PAGE)).ravel(),
            planes or None,
            first_page=first_page,
        )
        return slots, first

    def store(self) -> None:
        """Offer the beginning of a prompt, or say that it is to be evicted."""
        keys = self.rng.choice(self.prompts)
        keys = keys[: self.rng.randint(0, len(keys))]
        rows, _ = self.rows(max(1, len(keys)))
        state = len(keys) - 1 if keys and self.rng.random() < 0.7 else None
        self.manager.store(keys, rows, evicting=self.rng.random() < 0.3, state_page=state)

    def match(self) -> None:
        """Look a prompt up; forget to release it now and then."""
        keys = self.rng.choice(self.prompts)
        found = self.manager.match(keys)
        expected = self.expected_prefix(keys)
        if expected is not None:
            assert found.num_tokens == expected * PAGE
        if found.num_tokens:
            self.counts["hit"] += 1
        if self.rng.random() < 0.8:
            self.matches.append(found)

    def expected_prefix(self, keys: list[bytes]) -> int | None:
        """What events say that the host has; None where checkpoints or doubts come in."""
        if SlotKind.STATE in self.pools or self.manager._control.tiers[SlotKind.PAGE].suspects:
            return None
        return self.rule.usable_pages([key in self.on_host for key in keys])

    def release(self) -> None:
        """Give a match back, once or twice."""
        if self.matches:
            found = self.matches.pop(self.rng.randrange(len(self.matches)))
            found.release()
            assert not found.release()

    def load(self) -> None:
        """Load a match, from some page on."""
        if not self.matches:
            return
        found = self.rng.choice(self.matches)
        count = found.num_tokens // PAGE
        skip = self.rng.randint(0, count)
        rows, first = self.rows(max(1, count - skip), skip)
        handle = self.manager.load(
            found, rows, skip_tokens=skip * PAGE, has_state_slots=SlotKind.STATE in self.pools
        )
        self.loads.append((handle, list(found.keys), first))

    def prefetch(self) -> None:
        """Begin a prefetch."""
        if len(self.fetches) < 6:
            self.fetches.append(self.manager.prefetch(self.rng.choice(self.prompts)))

    def look(self) -> None:
        """Look at a prefetch, cancel it, or forget that it is there."""
        if not self.fetches:
            return
        fetch = self.rng.choice(self.fetches)
        what = self.rng.random()
        if what < 0.5:
            fetch.look()
        elif what < 0.7:
            fetch.cancel()
            fetch.cancel()
        if what > 0.9 or fetch.done:
            self.fetches.remove(fetch)
            self.counts["fetched"] += fetch.num_pages

    def flip(self) -> None:
        """Flip a bit, in a whole page of the host or in storage."""
        places = [
            place
            for place, content in self.data.host.items()
            if content[1] and place not in self.data.writers
        ]
        if places and self.rng.random() < 0.5:
            place = self.rng.choice(places)
            self.data.host[place] = (self.data.host[place][0], False)
        elif self.data.storage:
            name = self.rng.choice(list(self.data.storage))
            self.data.storage[name] = (name[1], False)

    def vanish(self) -> None:
        """Storage drops something by itself."""
        if self.data.storage:
            del self.data.storage[self.rng.choice(list(self.data.storage))]

    def pass_time(self) -> None:
        """Seconds go by."""
        self.now += self.rng.choice([0.1, 1, 3, 12])

    def reset(self) -> None:
        """Forget everything, whatever is in flight."""
        self.manager.reset()
        self.counts["reset"] += 1

    def storage(self) -> None:
        """Detach, by force or not; or attach again."""
        if (
            self.manager.storage_state is LinkState.ATTACHED
            or self.manager.storage_state is LinkState.DETACHING
        ):
            self.manager.detach_storage(force=self.rng.random() < 0.5)
        else:
            self.data.attach()

    def hang(self) -> None:
        """A storage command does not come back, or all that did not do."""
        if self.rng.random() < 0.6:
            self.data.hang()
        else:
            self.data.unhang()

    def carry_out(self) -> None:
        """The data plane does some of what it was told."""
        for _ in range(self.rng.randint(1, 4)):
            self.data.step()

    # ------------------------------------------------------------------------ what is true

    OPERATIONS = (
        ("store", 14), ("match", 10), ("release", 6), ("load", 10), ("prefetch", 8), ("look", 6),
        ("carry_out", 36), ("flip", 2), ("vanish", 1), ("pass_time", 3), ("reset", 0.3),
        ("storage", 0.8), ("hang", 1),
    )  # fmt: skip

    def step(self) -> None:
        """One operation, a poll now and then, and all that must hold."""
        names, weights = zip(*self.OPERATIONS, strict=True)
        getattr(self, self.rng.choices(names, weights)[0])()
        if self.rng.random() < 0.7:
            self.manager.poll()
        self.check()

    def check(self) -> None:
        """I1 to I5, the events, and what loads brought."""
        self.manager.check_integrity()
        for event in self.events.drain():
            if event.tier is not Tier.HOST:
                continue
            if isinstance(event, PagesStored):
                self.on_host.update(event.keys)
            elif isinstance(event, PagesEvicted | PagesQuarantined):
                self.on_host.difference_update(event.keys)
        tier = self.manager._control.tiers[SlotKind.PAGE]
        resident = {self.index.key_of(node) for node in tier.resident_nodes()}
        assert resident == self.on_host
        for handle, keys, first in [one for one in self.loads if one[0].done]:
            self.check_load(handle, keys, first)
        self.loads = [one for one in self.loads if not one[0].done]

    def check_load(self, handle: LoadHandle, keys: list[bytes], first: int) -> None:
        """What a load vouches for is what was stored, and nothing else was written."""
        skip = handle.skip_tokens // PAGE
        usable = handle.usable_tokens // PAGE
        assert skip <= usable <= max(skip, handle.num_tokens // PAGE)
        needed = usable - self.rule.pages_needed(usable)
        for page in range(max(skip, needed), usable):
            content = self.data.device[SlotKind.PAGE, first + page - skip]
            assert content == (keys[page], True), f"page {page}: a wrong page was vouched for"
        if usable > skip:
            self.counts["loaded"] += 1
            if SlotKind.STATE in self.pools:
                states = [at for at in self.data.device if at[0] is SlotKind.STATE]
                assert any(self.data.device[at] == (keys[usable - 1], True) for at in states)

    def settle(self) -> None:
        """Let everything end; then nothing is held any more (I3, I6)."""
        self.data.unhang()
        for fetch in self.fetches:
            fetch.cancel()
        self.fetches.clear()
        for _ in range(1000):
            if not self.data.step() and not self.manager.poll() and not self.data.pending:
                break
        else:
            pytest.fail("it never settles")
        self.manager.poll()
        self.check()
        for found in self.matches:
            found.release()
        self.matches.clear()
        self.now += 1000
        self.manager.poll()
        while self.data.step() or self.manager.poll():
            pass
        self.check()
        stats = self.manager.stats()
        assert (stats.jobs, stats.readers, stats.prefetches, stats.num_parked) == (0, 0, 0, 0)
        assert not any(self.data.readers.values())
        assert not self.data.writers
        for states in stats.slots.values():
            busy = {state for state, count in states.items() if count}
            assert busy <= {PageState.ABSENT, PageState.RESIDENT}
        assert self.index.num_leases == 0
        assert all(self.index.num_pinned(node) == 0 for node in self.index._nodes.node_of.values())
        self.data.device.clear()


@pytest.mark.soak
@pytest.mark.parametrize("fetch", list(PrefetchPolicy))
@pytest.mark.parametrize("policy", list(StorePolicy))
@pytest.mark.parametrize("planes", list(GEOMETRIES.values()), ids=list(GEOMETRIES))
def test_random_operations(
    planes: tuple[Plane, ...], policy: StorePolicy, fetch: PrefetchPolicy, soak_factor: int
) -> None:
    """No slot has two owners, nothing leaks, no wrong page is vouched for, in 10^5 steps in all."""
    counts: collections.Counter[str] = collections.Counter()
    worlds = 10
    for seed in range(worlds * soak_factor):
        world = World(seed, planes, policy, fetch)
        for step in range(300):
            try:
                world.step()
                if step % 60 == 59:
                    world.settle()
            except BaseException as failed:
                failed.add_note(f"seed {seed}, step {step}")
                raise
        counts += world.counts
    assert counts["hit"] > 20
    assert counts["loaded"] > 5
    assert counts["reset"] > 0
