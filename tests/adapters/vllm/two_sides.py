"""Both sides of the connector without vLLM: requests, blocks and steps by hand."""

from __future__ import annotations

import dataclasses
import pickle
import time
from typing import Any

import torch

from kvferry.adapters.vllm.messages import StepMetadata
from kvferry.adapters.vllm.pools import BlockGroup
from kvferry.adapters.vllm.scheduler_side import SchedulerSide
from kvferry.adapters.vllm.worker_side import WorkerSide
from kvferry.config import Config

BLOCK = 4
NUM_BLOCKS = 64
LAYERS = ("first", "second")


@dataclasses.dataclass
class Request:
    """As much of vLLM's request as the connector looks at."""

    request_id: str
    all_token_ids: list[int]
    cache_salt: str | None = None
    lora_request: Any = None
    kv_transfer_params: dict[str, Any] | None = None
    mm_features: tuple[Any, ...] = ()
    block_hashes: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        """As vLLM has it."""
        return len(self.all_token_ids)


def told(sections: dict[str, Any] | None = None) -> Config:
    """A small cache."""
    given: dict[str, Any] = {
        "host": {"num_bytes": "1MiB", "reserve_bytes": 0},
        "load": {"threshold_tokens": 0},
        "prefetch": {"threshold_tokens": 0, "policy": "wait_complete"},
        **(sections or {}),
    }
    return Config.resolve(None, {}, **given).config


class TwoSides:
    """A scheduler's side and one worker's side a rank, with pickled messages between."""

    def __init__(
        self,
        sections: dict[str, Any] | None = None,
        *,
        ranks: int = 1,
        replicated: bool = False,
        between_steps: bool = True,
    ) -> None:
        config = told(sections)
        names = {"model": "m", "revision": "1", "dtype": "float32", "shard": f"tp{ranks}"}
        self.scheduler = SchedulerSide(
            config, names, between_steps=between_steps, tells_events=True, hash_tokens=BLOCK
        )
        group = BlockGroup(0, LAYERS, BLOCK)
        self.workers = []
        self.caches = []
        for rank in range(ranks):
            worker = WorkerSide(
                config,
                [group],
                rank=rank,
                num_ranks=ranks,
                replicated=replicated,
                between_steps=between_steps,
            )
            rng = torch.Generator().manual_seed(0 if replicated else rank)
            caches = {name: torch.randn(NUM_BLOCKS, 2, BLOCK, 6, generator=rng) for name in LAYERS}
            worker.register(caches, NUM_BLOCKS, ["test"])
            self.workers.append(worker)
            self.caches.append(caches)
        shakes = [pickle.loads(pickle.dumps(one.handshake())) for one in self.workers]  # noqa: S301
        self.scheduler.start(shakes)
        self.loaded: set[str] = set()
        self.lost: set[int] = set()

    def step(self, *scheduled: tuple[str, int, int]) -> StepMetadata:
        """One step: (request, tokens computed, tokens to compute) of each that runs."""
        for request_id, num_computed, num_new in scheduled:
            self.scheduler.scheduled(request_id, num_computed, num_new)
        meta = self.scheduler.take_step()
        report: Any = None
        by_rank = []
        for worker in self.workers:
            mine = pickle.loads(pickle.dumps(meta))  # noqa: S301  our own
            worker.order_after_stores()
            worker.begin(mine)
            for name in LAYERS:
                worker.wait_layer(name)
            worker.end()
            loaded, lost = worker.results()
            by_rank.append(loaded)
            self.lost |= lost
            mine_done = worker.report()
            report = mine_done if report is None else report
            if report is not None and mine_done is not None and report is not mine_done:
                report = report.aggregate(mine_done)
        self.loaded |= set.intersection(*by_rank)
        self.scheduler.take_report(report)
        return meta

    def rest(self) -> None:
        """Step until nothing is in flight."""
        deadline = time.monotonic() + 20
        while self.scheduler.has_work:
            assert time.monotonic() < deadline, "it does not come to rest"
            self.step()
        self.scheduler.manager.check_integrity()

    def compute(self, request: Request, blocks: list[int]) -> None:
        """A request without hits, computed in one step; its pages are stored."""
        assert self.look_up(request) == 0
        self.scheduler.allocated(request, [blocks], 0)
        self.step((request.request_id, 0, request.num_tokens))
        self.scheduler.finished(request.request_id)
        self.rest()

    def look_up(self, request: Request, num_computed: int = 0) -> int:
        """Hits, asked for as often as it takes."""
        deadline = time.monotonic() + 20
        while True:
            found, _ = self.scheduler.look_up(request, num_computed)
            if found is not None:
                return found
            assert time.monotonic() < deadline, "the look-up does not end"
            self.step()

    def wipe(self, blocks: list[int]) -> list[dict[str, Any]]:
        """What all ranks have in `blocks`, and zeros in place of it."""
        kept = []
        for caches in self.caches:
            kept.append({name: cache[blocks].clone() for name, cache in caches.items()})
            for cache in caches.values():
                cache[blocks] = 0
        return kept

    def holds(self, blocks: list[int], kept: list[dict[str, Any]], pages: range) -> bool:
        """Whether `blocks`, of these pages, hold what was kept."""
        at = list(pages)
        return all(
            torch.equal(caches[name][[blocks[page] for page in at]], told[name][at])
            for caches, told in zip(self.caches, kept, strict=True)
            for name in LAYERS
        )

    def close(self) -> None:
        """Give everything back."""
        self.scheduler.close()
        for worker in self.workers:
            worker.close()
