"""What the control plane costs: a long prompt looked up, stored, loaded and prefetched, and a poll.

    python benchmarks/tiers.py [--tokens 131072] [--page 64] [--repeat 5] [--json FILE]

No byte moves: the data plane here answers at once. Times are the best of some repeats.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.geometry import Geometry, Plane
from kvferry.index import Namespace, PrefixIndex, page_keys
from kvferry.memory import SlotOwners
from kvferry.storage import ItemStatus
from kvferry.tiers import (
    Command,
    Completion,
    DeviceSlots,
    Found,
    Moved,
    MovePages,
    ProbeStorage,
    StorageAttached,
    StorageDone,
    TierManager,
    TierOptions,
)
from kvferry.types import SlotKind


class AtOnce:
    """A data plane that has always just finished, well."""

    def __init__(self) -> None:
        self.answers: list[Completion] = [StorageAttached(1)]

    def submit(self, command: Command) -> None:
        """Answer it."""
        if isinstance(command, MovePages):
            self.answers.append(Moved(command.job, verified=True, path="none"))
        elif isinstance(command, ProbeStorage):
            self.answers.append(Found(command.job, (True,) * len(command.keys)))
        else:
            keys = getattr(command, "keys", ())
            self.answers.append(StorageDone(command.job, (ItemStatus.OK,) * len(keys)))

    @property
    def has_news(self) -> bool:
        """Whether there are answers."""
        return bool(self.answers)

    def poll(self) -> list[Completion]:
        """The answers."""
        answers, self.answers = self.answers, []
        return answers


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of one call."""
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def settle(manager: TierManager) -> None:
    """Poll until nothing is in flight."""
    while manager.poll():
        pass


def run(tokens: int, page: int) -> dict[str, float]:
    """One round, in milliseconds by step."""
    plane = Plane(name="latent", num_layers=61, element_size=576)
    geometry = Geometry(planes=(plane,), page_size=page)
    pages = tokens // page
    manager = TierManager(
        geometry,
        PrefixIndex(),
        {SlotKind.PAGE: SlotOwners(2 * pages)},
        AtOnce(),
        options=TierOptions(prefetch_budget_pages=pages, max_queue_pages=pages),
    )
    manager.poll()
    name = Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint)
    prompt = np.random.default_rng(0).integers(0, 100_000, tokens, dtype=np.uint32)
    slots = np.arange(tokens)
    keys: list[bytes] = []
    took = {"keys": timed(lambda: keys.extend(page_keys(name, prompt, page)))}
    rows = DeviceSlots(geometry, slots)
    took["store"] = timed(lambda: manager.store(keys, rows))
    took["store is over, written to storage"] = timed(lambda: settle(manager))
    found: list[Any] = []
    took["match"] = timed(lambda: found.append(manager.match(keys)))
    took["load"] = timed(lambda: manager.load(found[0], rows))
    took["load is over"] = timed(lambda: settle(manager))
    found[0].release()
    took["reset"] = timed(manager.reset)
    took["prefetch"] = timed(lambda: manager.prefetch(keys))
    took["prefetch is over"] = timed(lambda: settle(manager))
    took["poll, idle"] = min(timed(manager.poll) for _ in range(100))
    return took


def main() -> None:
    """Print the best of some rounds, and write them where that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path)
    given = parser.parse_args()
    rounds = [run(given.tokens, given.page) for _ in range(given.repeat)]
    best = {step: min(one[step] for one in rounds) for step in rounds[0]}
    print(f"{given.tokens} tokens in pages of {given.page}, milliseconds:")
    for step, milliseconds in best.items():
        print(f"  {step:36} {milliseconds:9.3f}")
    if given.json:
        told = {"tokens": given.tokens, "page": given.page, "milliseconds": best}
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
