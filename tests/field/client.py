"""A process with one cache over storage that fails; run as a script until its input ends.

Argument: a JSON object with ``storage`` (the section of the config) and ``seed``. It says
``begun``, and at the end a JSON object of what happened.
"""

from __future__ import annotations

import json
import random
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tests.field.replica import PAGE, Case, Rows, geometry_of, namespace_of, pages_of, prompts_of

from kvferry import KVFerry
from kvferry.errors import KVFerryError, StorageError
from kvferry.memory.pool_layout import PoolLayout
from kvferry.tiers import LinkState
from kvferry.types import SlotKind

_SECS = 60.0
_HOST_PAGES = 100
_SETTLE_SECS = 20.0


class Client:
    """One cache, and what is asked of it."""

    def __init__(self, storage: dict[str, Any], seed: int) -> None:
        self.case = Case(storage="", prompts=120, seed=1)  # the same prompts in all processes
        self.rng = random.Random(seed)
        self.geometry = geometry_of(self.case)
        self.rows = Rows(self.case, self.geometry)
        self.storage = storage
        self.cache = KVFerry(
            self.geometry,
            self.rows.view,
            namespace=namespace_of(self.geometry),
            host={"num_bytes": PoolLayout(self.geometry, SlotKind.PAGE).total_bytes(_HOST_PAGES)},
            store={"policy": "write_through"},
            load={"threshold_tokens": 1},
            prefetch={"policy": "timeout", "threshold_tokens": 1, "timeout_base_secs": 0.3,
                      "max_secs": 4.0},
            storage={"enabled": False, "breaker_secs": 0.5},
        )  # fmt: skip
        self.counts: dict[str, int] = dict.fromkeys(
            ("requests", "pages", "hits", "fetched", "resets", "attached", "refused", "forced"), 0
        )
        self.seen: list[dict[str, int]] = []

    def request(self) -> None:
        """One prompt from its submission to its end."""
        cache = self.cache
        prompt = self.rng.choice(self.prompts)
        keys = pages_of(prompt)
        fetch = cache.prefetch(prompt)
        deadline = time.monotonic() + _SECS
        while fetch.look() is None:
            assert time.monotonic() < deadline, "a prefetch that does not end"
            cache.wait(0.005)
        pages = self.rng.sample(range(self.case.device_pages), len(keys))
        slots = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()
        with cache.match(prompt) as found:
            load = cache.load(found, device_slots=slots[: found.num_tokens])
        load.wait(_SECS)
        hits = load.usable_tokens // PAGE
        for key, page in zip(keys[:hits], pages[:hits], strict=True):
            # Told at once: who is killed later tells nothing.
            if wrong := self.rows.wrong(key, page):
                raise AssertionError(f"{key.hex()}: {wrong}")
        for key, page in zip(keys[hits:], pages[hits:], strict=True):
            self.rows.compute(key, page)
        cache.store(prompt, device_slots=slots).wait(_SECS)
        cache.evicting(prompt, device_slots=slots).wait(_SECS)
        self.rows.poison(pages)
        for name, count in (("requests", 1), ("pages", len(keys)), ("hits", hits)):
            self.counts[name] += count
        self.counts["fetched"] += fetch.num_pages

    def something_else(self) -> None:
        """Forget all, or leave storage and come back."""
        if self.cache.stats().storage is not LinkState.ATTACHED:
            self.attach()
        elif self.rng.random() < 0.3:
            self.counts["resets"] += 1
            self.cache.reset()
        elif self.cache.detach_storage(2.0):
            self.seen.append(self.held())
        else:
            self.counts["forced"] += self.cache.detach_storage(2.0, force=True)

    def attach(self) -> None:
        """Use storage, if it can be opened."""
        options = dict(self.storage.get("options", {}))
        try:
            self.cache.attach_storage(self.storage["url"], timeout=10.0, **options)
            self.counts["attached"] += 1
        except StorageError:
            self.counts["refused"] += 1

    def held(self) -> dict[str, int]:
        """What the process has just now."""
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
        }

    def at_rest(self) -> dict[str, int]:
        """What it has when nothing is under way and storage is gone.

        Libraries close connections in their own time, so they are given some to come down to what
        they had before.
        """
        deadline = time.monotonic() + _SECS
        while (stats := self.cache.stats()).jobs or stats.waiting_for_storage:
            assert time.monotonic() < deadline, f"it does not come to rest: {stats}"
            self.cache.wait(0.02)
        self.cache.check_integrity()
        assert (stats.readers, stats.num_parked) == (0, 0), stats
        assert self.cache.detach_storage(20.0), "storage that works, and cannot be left"
        deadline = time.monotonic() + _SETTLE_SECS
        while time.monotonic() < deadline:
            told = self.held()
            if not self.seen or all(told[name] <= self.most(name) for name in told):
                break
            self.cache.wait(0.05)
        return self.held()

    def most(self, name: str) -> int:
        """The most there was whenever storage had been detached before."""
        return max((one[name] for one in self.seen), default=0)

    def run(self) -> dict[str, Any]:
        """Until the input ends."""
        self.prompts = prompts_of(self.case)
        self.attach()
        while not select.select([sys.stdin], [], [], 0)[0]:
            self.request()
            if self.rng.random() < 0.02:
                self.something_else()
        while self.cache.stats().storage is not LinkState.ATTACHED:
            self.something_else()
        self.request()
        late = self.at_rest()
        report = self.cache.close(_SECS)
        return {
            "counts": self.counts, "times_detached": len(self.seen), "late": late,
            "most": {name: self.most(name) for name in late}, "clean": report.clean,
        }  # fmt: skip


def say(line: str) -> None:
    """To whoever started it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    """Run one client."""
    given = json.loads(sys.argv[1])
    client = Client(given["storage"], given["seed"])
    say("begun")
    try:
        told = client.run()
    except (KVFerryError, AssertionError) as bad:
        say(json.dumps({"error": f"{type(bad).__name__}: {bad}"}))
        return 1
    say(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
