"""Eight rank processes of one model, whose bytes follow from the prompt; run as a script.

Arguments: a folder for what each rank reports, and a JSON object with the fields of `Case`. torch
is imported once and the ranks are forked. Every rank draws the same requests from the same seed;
how long it waits, and for what, is its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from kvferry import Geometry, KVFerry, Namespace, Plane, PoolView
from kvferry.memory.pool_layout import PoolLayout
from kvferry.ranks import ProcessGroupRanks
from kvferry.types import SlotKind

PAGE = 4
_SECS = 60.0
_CONTENT_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run."""

    storage: str
    """URL of the pool."""

    size: int = 8
    requests: int = 1000
    seed: int = 1
    latent_layers: int = 6
    index_layers: int = 2
    device_pages: int = 40
    host_ratio: float = 2.5
    """Host pages over device pages."""

    prompts: int = 60
    longest: int = 8
    """Pages of a prompt."""

    prefetch_secs: float = 0.02
    """About as long as a prefetch takes here, so that it passes for some and not for others."""

    budget_secs: float = 600.0
    """A rank that takes longer ends by itself."""


def geometry_of(case: Case) -> Geometry:
    """Latents of 656 bytes and index keys of 132, as GLM-5.2 has in more layers."""
    return Geometry(
        planes=(
            Plane(name="latent", num_layers=case.latent_layers, element_size=656),
            Plane(name="index_key", num_layers=case.index_layers, element_size=132),
        ),
        page_size=PAGE,
    )


def namespace_of(geometry: Geometry) -> Namespace:
    """The same on all ranks, as their bytes are."""
    return Namespace(model="field", revision="1", dtype="u8", geometry=geometry.fingerprint)


def prompts_of(case: Case) -> list[list[int]]:
    """Prompts that share their beginnings: each page of one is one of three that follow."""
    rng = random.Random(case.seed)
    return [
        [token for _ in range(rng.randint(1, case.longest)) for token in [rng.randrange(3)] * PAGE]
        for _ in range(case.prompts)
    ]


def pages_of(prompt: list[int]) -> list[bytes]:
    """What stands for each whole page: all tokens up to its end. Not by kvferry's keys."""
    whole = range(PAGE, len(prompt) + 1, PAGE)
    return [hashlib.sha256(repr(prompt[:end]).encode()).digest() for end in whole]


class Rows:
    """The device tensors of one rank, and what they must hold."""

    def __init__(self, case: Case, geometry: Geometry) -> None:
        self.geometry = geometry
        self.pages = case.device_pages
        self.tensors = {
            plane.name: [
                np.full((self.pages * PAGE, plane.element_size), 0xA5, np.uint8)
                for _ in range(plane.num_layers)
            ]
            for plane in geometry.planes
        }
        self.view = PoolView.from_tensors(geometry, self.tensors)
        rng = np.random.default_rng(7)
        self._content = rng.integers(0, 256, 2 * _CONTENT_BYTES, dtype=np.uint8)

    def expected(self, page: bytes, plane: Plane, layer: int) -> Any:
        """The rows of a page of `pages_of`, plane and layer. Shape ``[P, element_size]``."""
        told = hashlib.sha256(page + f"{plane.name} {layer}".encode()).digest()
        begin = int.from_bytes(told[:8], "big") % _CONTENT_BYTES
        size = PAGE * plane.element_size
        return self._content[begin : begin + size].reshape(PAGE, plane.element_size)

    def compute(self, what: bytes, page: int) -> None:
        """As a forward pass would."""
        for plane in self.geometry.planes:
            for layer, tensor in enumerate(self.tensors[plane.name]):
                tensor[page * PAGE : (page + 1) * PAGE] = self.expected(what, plane, layer)

    def wrong(self, what: bytes, page: int) -> str:
        """The first coordinate that is not what it must be; empty: there is none."""
        for plane in self.geometry.planes:
            for layer, tensor in enumerate(self.tensors[plane.name]):
                found = tensor[page * PAGE : (page + 1) * PAGE]
                differ = np.argwhere(found != self.expected(what, plane, layer))
                if len(differ):
                    token, byte = differ[0]
                    return f"{plane.name}, layer {layer}, token {token}, byte {byte}"
        return ""

    def poison(self, pages: list[int]) -> None:
        """Nobody may read what was there."""
        for layers in self.tensors.values():
            for tensor in layers:
                for page in pages:
                    tensor[page * PAGE : (page + 1) * PAGE] = 0xA5


class Rank:
    """One process of the replica."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.geometry = geometry_of(case)
        self.rows = Rows(case, self.geometry)
        group = dist.new_group(backend="gloo")
        assert group is not None
        self.ranks = ProcessGroupRanks(group)
        slots = int(case.host_ratio * case.device_pages)
        self.cache = KVFerry(
            self.geometry,
            self.rows.view,
            namespace=namespace_of(self.geometry),
            ranks=self.ranks,
            writes_storage=rank == 0,
            host={"num_bytes": PoolLayout(self.geometry, SlotKind.PAGE).total_bytes(slots)},
            store={"policy": "write_through"},
            load={"threshold_tokens": 1},
            prefetch={
                "policy": "timeout",
                "threshold_tokens": 1,
                "timeout_base_secs": case.prefetch_secs,
                "timeout_secs_per_1024_tokens": 0.0,
            },
            storage=case.storage,
        )
        self.same = random.Random(case.seed)
        self.own = random.Random(1000 * case.seed + rank)
        self.free = list(range(case.device_pages))
        self.computed: set[bytes] = set()
        self.report: dict[str, Any] = {
            "wrong": [], "hits": [], "too_far": 0, "late": 0, "aborted": 0, "from_storage": 0,
        }  # fmt: skip

    def request(self, prompt: list[int], *, aborted: bool) -> None:
        """One from its submission to its end."""
        cache, keys = self.cache, pages_of(prompt)
        fetch = cache.prefetch(prompt)
        if aborted:
            for _ in range(self.own.randrange(3)):
                cache.poll()
            fetch.cancel()
            self.report["aborted"] += 1
            return
        deadline = time.monotonic() + _SECS
        while fetch.look() is None:
            assert time.monotonic() < deadline, "a prefetch that does not end"
            cache.wait(self.own.choice([0.0, 0.0005, 0.003]))
        told = fetch.result()
        self.report["from_storage"] += fetch.num_pages
        self.report["late"] += told.reason == "deadline"
        pages = [self.free.pop() for _ in keys]
        slots = (np.array(pages)[:, None] * PAGE + np.arange(PAGE)).ravel()
        with cache.match(prompt) as found:
            load = cache.load(found, device_slots=slots[: found.num_tokens])
        load.wait(_SECS)
        hits = load.agreed_tokens() // PAGE
        self.report["hits"].append(hits)
        known = next((at for at, key in enumerate(keys) if key not in self.computed), len(keys))
        self.report["too_far"] += hits > known
        for key, page in zip(keys[:hits], pages[:hits], strict=True):
            if wrong := self.rows.wrong(key, page):
                self.report["wrong"].append(f"{key.hex()}: {wrong}")
        for key, page in zip(keys[hits:], pages[hits:], strict=True):
            self.rows.compute(key, page)
        self.computed.update(keys)
        cache.store(prompt, device_slots=slots).wait(_SECS)
        cache.evicting(prompt, device_slots=slots).wait(_SECS)
        self.rows.poison(pages)
        self.free += pages

    def run(self) -> None:
        """All requests, and the end."""
        prompts = prompts_of(self.case)
        for _ in range(self.case.requests):
            self.request(self.same.choice(prompts), aborted=self.same.random() < 0.1)
        self.cache.check_integrity()
        flushed = self.cache.flush(_SECS)
        stats = self.cache.stats()
        self.report |= {
            "flushed": flushed.complete,
            "breaker": stats.breaker,
            "transient": stats.transient_pages,
            "keys": sorted(key.hex() for key in self.computed),
        }
        report = self.cache.close(_SECS)
        self.report["clean"] = report.clean
        self.ranks.close()


def _run_rank(folder: Path, case: Case, rank: int) -> None:
    signal.alarm(int(case.budget_secs))
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.size
    )
    one = Rank(case, rank)
    one.run()
    (folder / f"{rank}.json").write_text(json.dumps(one.report))


def main(folder: Path, case: Case) -> int:
    """Fork the ranks; how many of them failed."""
    children = []
    for rank in range(case.size):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _run_rank(folder, case, rank)
                status = 0
            except BaseException as bad:
                (folder / f"{rank}.error").write_text(f"{type(bad).__name__}: {bad}")
                raise
            finally:
                os._exit(status)
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Case(**json.loads(sys.argv[2]))))
