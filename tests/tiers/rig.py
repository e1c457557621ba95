"""A whole cache over pools in host memory, and what its bytes should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.events import EventLog, PagesQuarantined
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.index import Namespace, PrefixIndex, page_keys
from kvferry.memory import HostPool
from kvferry.metrics import MetricsSink
from kvferry.storage import StorageBackend
from kvferry.tiers import (
    DataPlane,
    DeviceSlots,
    LinkState,
    LoadHandle,
    Match,
    StoreHandle,
    TierManager,
    TierOptions,
    Verify,
)
from kvferry.transfer import TransferEngine
from kvferry.types import SlotKind, Tier

PAGE = 4
K = Plane(name="k", num_layers=3, element_size=40)
V = Plane(name="v", num_layers=3, element_size=24)
INDEX_KEY = Plane(name="index_key", num_layers=2, element_size=132, rows_per_page=1)
DRAFT = Plane(name="draft", num_layers=1, element_size=56, layer_ids=(3,))
WINDOW = Plane(name="window", num_layers=2, element_size=16, hit_rule=HitRule.last(6))
STATE = Plane(
    name="state", num_layers=2, element_size=72, rows_per_page=1, hit_rule=HitRule.exact_boundary()
)
PLANE_SETS = {
    "kv": (K, V),
    "side_and_draft": (K, INDEX_KEY, DRAFT),
    "full_and_window": (K, WINDOW),
    "window": (WINDOW,),
    "full_and_state": (K, STATE),
}

FAST = {
    "load_threshold_tokens": 1,
    "prefetch_threshold_tokens": 1,
    "prefetch_budget_pages": 64,
}


class Clock:
    """Seconds as the test says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Rig:
    """Device tensors with random rows, a host pool, and both planes in this process.

    Prompt tokens of page p lie in device page p when they are stored; loads go elsewhere.
    """

    def __init__(
        self,
        planes: Sequence[Plane] = (K, V),
        *,
        num_slots: int = 12,
        num_states: int = 4,
        device_pages: int = 64,
        backend: StorageBackend | None = None,
        verify: Verify = Verify.ALWAYS,
        num_threads: int = 2,
        wrap_engine: Callable[[TransferEngine], Any] = lambda engine: engine,
        metrics: MetricsSink | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.geometry = Geometry(planes=tuple(planes), page_size=PAGE)
        self.rng = np.random.default_rng(seed)
        self.device_pages = device_pages
        self.tensors = {
            plane.name: [
                self.rng.integers(
                    0,
                    256,
                    (device_pages * self.geometry.rows_per_page(plane), plane.element_size),
                    dtype=np.uint8,
                )
                for _ in range(plane.num_layers)
            ]
            for plane in planes
        }
        self.view = PoolView.from_tensors(self.geometry, self.tensors)
        kinds = [kind for kind in SlotKind if self.geometry.spans(kind)]
        sizes = {SlotKind.PAGE: num_slots, SlotKind.STATE: num_states}
        self.pools = {
            kind: HostPool(self.geometry, num_slots=sizes[kind], kind=kind) for kind in kinds
        }
        self.engines = {
            kind: wrap_engine(TransferEngine(self.view, pool, verify=verify is Verify.ALWAYS))
            for kind, pool in self.pools.items()
        }
        self.data = DataPlane(self.geometry, self.engines, self.pools, verify=verify)
        self.clock = Clock()
        self.index = PrefixIndex(clock=self.clock)
        self.events = EventLog(1000)
        self.manager = TierManager(
            self.geometry,
            self.index,
            self.pools,
            self.data,
            options=TierOptions(**{**FAST, "verify": verify, **options}),
            metrics=metrics,
            events=self.events,
            clock=self.clock,
            pump=self.pump,
        )
        self.num_threads = num_threads
        self.namespace = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )
        if backend is not None:
            self.attach(backend)

    # ------------------------------------------------------------------------ doing

    def attach(self, backend: StorageBackend) -> None:
        """Use `backend`, without a probe."""
        self.data.attach_storage(
            self.manager.new_generation(), backend, num_threads=self.num_threads
        )
        self.manager.poll()
        assert self.manager.storage_state is LinkState.ATTACHED

    def pump(self, timeout: float) -> None:
        """Block a little, then poll."""
        if not self.manager.poll():
            self.data.wait(min(timeout, 0.02))
            self.manager.poll()

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Poll until `condition` holds; fails after so many seconds."""
        import time

        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            self.pump(0.02)

    def settle(self) -> None:
        """Poll until nothing is in flight."""
        self.until(lambda: not self.manager.num_jobs)
        self.manager.poll()

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the whole pages of a prompt."""
        return page_keys(self.namespace, tokens, PAGE)

    def slots(self, first: int, num_pages: int, first_page: int = 0) -> DeviceSlots:
        """Device pages ``first`` … for pages from `first_page` of a prompt on."""
        pages = np.arange(first, first + num_pages)
        planes: dict[str, Any] = {}
        for plane in self.geometry.planes:
            rows = self.geometry.rows_per_page(plane)
            if plane.name == "state":
                planes["state"] = [first + num_pages - 1]
            elif plane.rows_per_page is not None:
                planes[plane.name] = (pages[:, None] * rows + np.arange(rows)).ravel()
        tokens = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        return DeviceSlots(self.geometry, tokens, planes, first_page=first_page)

    def store(self, tokens: Sequence[int], at: int = 0, **given: Any) -> StoreHandle:
        """Offer a prompt whose pages lie from device page `at` on."""
        keys = self.keys(tokens)
        if "state" in self.tensors and keys:
            given.setdefault("state_page", len(keys) - 1)
        handle = self.manager.store(keys, self.slots(at, len(keys)), **given)
        self.manager.poll()
        return handle

    def match(self, tokens: Sequence[int]) -> Match:
        """Look a prompt up."""
        self.manager.poll()
        return self.manager.match(self.keys(tokens))

    def load(self, found: Match, at: int, skip: int = 0) -> LoadHandle:
        """Load a match to device pages from `at` on, behind `skip` pages; not waited for."""
        num_pages = found.num_tokens // PAGE - skip
        handle = self.manager.load(
            found,
            self.slots(at, max(num_pages, 1), skip),
            skip_tokens=skip * PAGE,
            has_state_slots="state" in self.tensors,
        )
        self.manager.poll()
        return handle

    def stored_in_storage(self, tokens: Sequence[int], at: int = 0) -> None:
        """Store a prompt, write all of it to storage and forget the host's copy."""
        self.store(tokens, at).wait(20)
        self.until(lambda: not self.manager.offer_all())
        self.settle()
        self.manager.reset()

    # ------------------------------------------------------------------------ looking

    def page(self, at: int) -> dict[str, npt.NDArray[np.uint8]]:
        """A copy of device page `at`, by plane; shape ``[L, R, E]``."""
        copies = {}
        for plane in self.geometry.planes:
            rows = self.geometry.rows_per_page(plane)
            copies[plane.name] = np.stack(
                [layer[at * rows : (at + 1) * rows] for layer in self.tensors[plane.name]]
            )
        return copies

    def pages(self, at: int, count: int) -> list[dict[str, npt.NDArray[np.uint8]]]:
        """Copies of `count` device pages."""
        return [self.page(page) for page in range(at, at + count)]

    def wipe(self, at: int, count: int) -> None:
        """Poison device pages, so that old bytes do not pass for loaded ones."""
        for plane in self.geometry.planes:
            rows = self.geometry.rows_per_page(plane)
            for layer in self.tensors[plane.name]:
                layer[at * rows : (at + count) * rows] = 0xA5

    def same(self, at: int, was: dict[str, Any], planes: Sequence[str] | None = None) -> bool:
        """Whether device page `at` has the bytes `was`, in these planes (None: but states)."""
        names = planes or [name for name in was if name != "state"]
        found = self.page(at)
        return all((found[name] == was[name]).all() for name in names)

    def slot_of(self, tokens: Sequence[int], page: int, kind: SlotKind = SlotKind.PAGE) -> int:
        """The host slot of a page of a prompt; -1: none."""
        node = self.index.node_of(self.keys(tokens)[page])
        if node is None:
            return -1
        return self.manager._control.tiers[kind].slot_of(node)

    def flip_host(
        self, tokens: Sequence[int], page: int, byte: int, kind: SlotKind = SlotKind.PAGE
    ) -> None:
        """Flip a bit of a page on the host."""
        view = self.pools[kind].slot_view(self.slot_of(tokens, page, kind))
        view[byte] ^= 1
        view.release()

    def check_idle(self) -> None:
        """Nothing is in flight, held or parked (I3, I6)."""
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert (stats.jobs, stats.readers, stats.prefetches, stats.num_parked) == (0, 0, 0, 0)
        for pool in self.pools.values():
            assert pool.num_leases == 0

    def close(self) -> None:
        """Give all back; fails if something is still held."""
        self.manager.close()
        self.manager.detach_storage()
        self.settle()
        assert self.data.close(20)
        self.manager.poll()
        self.check_idle()
        self.manager.reset()
        for engine in self.engines.values():
            engine.close()
        for pool in self.pools.values():
            pool.close()


def check_loaded(rig: Rig, at: int, was: list[dict[str, Any]], first: int = 0) -> None:
    """The pages that the planes need are at device page `at`, exactly."""
    count = first + len(was)
    for name, plane in ((plane.name, plane) for plane in rig.geometry.planes):
        if plane is STATE:
            assert rig.same(at + len(was) - 1, was[-1], ["state"])
            continue
        needed = plane.hit_rule.pages_needed(count, PAGE)
        for page in range(max(first, count - needed), count):
            assert rig.same(at + page - first, was[page - first], [name])


def quarantined(rig: Rig, tier: Tier) -> list[bytes]:
    """Keys that events say were put away."""
    return [
        key
        for event in rig.events.drain()
        if isinstance(event, PagesQuarantined) and event.tier is tier
        for key in event.keys
    ]
