"""Loads of the same pages by several GPUs: each all of them, or each a share and an exchange.

    python3 benchmarks/gpu/sharded.py --json benchmarks/results/sharded.json

For 1, 2, … GPUs, a process each: a plain pinned copy of as many bytes on all of them at once, loads
that each does whole, and loads in shares over NCCL; of 12,288 tokens in 61 layers of 656 bytes
unless told otherwise. GB/s are the bytes that a GPU has in the end, over the median time from a
barrier to the end of the slowest rank, for each GPU and for all together. Every byte is compared
before anything is timed.

With fewer than two GPUs there is nothing to share: it says "skipped" and why, with status 0.
`--device cpu` goes through the same over gloo, in host memory, to try out the script itself.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import rig

if TYPE_CHECKING:
    import torch

    from kvferry import TransferHandle
    from kvferry.exchange import ShardedLoader

_WAIT_SECS = 120.0


def main() -> int:
    """Print a line a number of ranks and way; with --json write the figures."""
    args = arguments().parse_args()
    on_gpu = args.device == "cuda"
    if on_gpu:
        import torch

        found = torch.cuda.device_count()
        if found < 2:
            print(f"skipped: loads in shares need two GPUs or more, and there is {found or 'none'}")
            return 0
    else:
        found = max(args.ranks or [2])
    link = rig.begin() if on_gpu else {}
    rows: list[dict[str, Any]] = []
    for size in args.ranks or range(1, found + 1):
        if size > found:
            print(f"skipped: {size} ranks, as there are {found} GPUs")
            continue
        rows += _measured(size, args)
        for row in rows[-3:]:
            print(line_of(row), flush=True)
    if on_gpu:
        rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--ranks", nargs="+", type=int, help="how many; all numbers up to that of the GPUs")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--tokens", type=int, default=12288)
    add("--layers", type=int, default=61)
    add("--element", type=int, default=656, help="bytes a token and layer")
    add("--exchange-mib", type=int, default=128, help="device memory that pages pass through")
    add("--repeats", type=int, default=9)
    return parser


def row_of(way: str, size: int, num_bytes: int, seconds: list[list[float]]) -> dict[str, Any]:
    """What one way gave.

    Args:
        way: Its name.
        size: How many ranks.
        num_bytes: That each of them has in the end.
        seconds: By rank and repeat.
    """
    slowest = [max(of_all) for of_all in zip(*seconds, strict=True)]
    took = statistics.median(slowest)
    return {
        "way": way,
        "ranks": size,
        "ms": round(took * 1e3, 3),
        "gb_per_sec_each": rig.gb_per_sec(num_bytes, took),
        "gb_per_sec_all": rig.gb_per_sec(num_bytes * size, took),
    }


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    return (
        f"{row['ranks']} ranks  {row['way']:8} {row['ms']:9.3f} ms  "
        f"{row['gb_per_sec_each']:7.2f} GB/s each  {row['gb_per_sec_all']:8.2f} GB/s all"
    )


def _measured(size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        told = [spawn.SimpleQueue() for _ in range(size)]
        ranks = [
            spawn.Process(target=_run_rank, args=(rank, size, folder, args, told[rank]))
            for rank in range(size)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        if any(one.exitcode for one in ranks):
            sys.exit(f"a rank of {size} failed: {[one.exitcode for one in ranks]}")
        found = [one.get() for one in told]
    num_bytes = args.tokens // rig.PAGE_SIZE * rig.PAGE_SIZE * args.layers * args.element
    return [
        {
            **row_of(way, size, num_bytes, [one["seconds"][way] for one in found]),
            **({"path": found[0]["path"], "first_layer_ms": _first_layer(found)}
               if way == "sharded" else {}),
        }
        for way in ("memcpy", "whole", "sharded")
    ]  # fmt: skip


def _first_layer(found: list[dict[str, Any]]) -> float:
    firsts: list[list[float]] = [one["first"] for one in found]
    slowest: list[float] = [max(of_all) for of_all in zip(*firsts, strict=True)]
    return round(statistics.median(slowest) * 1e3, 3)


def _run_rank(rank: int, size: int, folder: str, args: argparse.Namespace, told: Any) -> None:
    """One rank's process: it tells its seconds of every way and repeat."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_gpu = args.device == "cuda"
    device = f"cuda:{rank}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    num_pages = args.tokens // rig.PAGE_SIZE
    # The same bytes on every rank, in rows of its own.
    source = torch.from_numpy(
        np.random.default_rng(1).integers(
            0, 256, (args.layers, num_pages * rig.PAGE_SIZE, args.element), dtype=np.uint8
        )
    )
    bench = _Bench(rank, source, device, args)
    seconds: dict[str, list[float]] = {}
    seconds["memcpy"] = bench.timed(bench.memcpy, args.repeats)
    path = ""
    for way in ("whole", "sharded"):
        loader = bench.loader(way)
        path = bench.check(loader)
        seconds[way] = bench.timed(lambda loader=loader: bench.load(loader), args.repeats)  # type: ignore[misc]
        if way == "sharded":
            first = bench.timed(lambda loader=loader: bench.load(loader, first=True), args.repeats)  # type: ignore[misc]
            told.put({"seconds": seconds, "first": first, "path": path})
        loader.close()
    dist.barrier()
    dist.destroy_process_group()


class _Bench:
    """The pools of one rank."""

    def __init__(
        self, rank: int, source: torch.Tensor, device: str, args: argparse.Namespace
    ) -> None:
        import torch

        from kvferry import HostPool, PoolView, SlotOwner, TransferEngine, TransferPlan

        self._args, self._device, self._source = args, device, source
        self._geometry = rig.latent(args.element, args.layers)
        num_pages = args.tokens // rig.PAGE_SIZE
        self._host = HostPool(self._geometry, num_slots=num_pages)
        self._host.allocate(num_pages, SlotOwner.INDEX)
        self._rows = rig.device_slots(np.random.default_rng(rank + 2), num_pages, 1)
        slots = np.arange(num_pages)
        self._pool = torch.empty_like(source, device=device)
        self._pool[:, torch.from_numpy(self._rows.ravel()).to(device)] = source.to(device)
        self._view = PoolView.from_tensors(self._geometry, {"latent": self._pool})
        self._engine = TransferEngine(self._view, self._host)
        given = {"host_slots": slots, "device_slots": self._rows}
        self._engine.store(TransferPlan.store(self._geometry, **given)).wait()
        self._plan = TransferPlan.load(self._geometry, **given)
        self._pinned = torch.empty(
            self._plan.num_bytes, dtype=torch.uint8, pin_memory=device != "cpu"
        )
        self._target = torch.empty(self._plan.num_bytes, dtype=torch.uint8, device=device)

    def loader(self, way: str) -> ShardedLoader:
        """One that does all loads in this way."""
        import torch.distributed as dist

        from kvferry.exchange import ShardedLoader
        from kvferry.ranks import ByteExchange, GlooExchange, NcclExchange, ProcessGroupRanks

        agreeing = dist.new_group(backend="gloo")
        exchanging = dist.new_group(backend="gloo" if self._device == "cpu" else "nccl")
        assert agreeing is not None
        assert exchanging is not None
        exchange: ByteExchange = (
            GlooExchange(exchanging)
            if self._device == "cpu"
            else NcclExchange(exchanging, self._device)
        )
        return ShardedLoader(
            self._engine,
            self._view,
            self._host,
            ProcessGroupRanks(agreeing),
            exchange,
            exchange_bytes=self._args.exchange_mib << 20,
            way=way,
        )

    def check(self, loader: ShardedLoader) -> str:
        """Load into poisoned rows and compare all of them; returns the path."""
        import torch

        self._pool.fill_(rig.POISON)
        handle = loader.load(self._plan)
        handle.wait(_WAIT_SECS)
        rows = torch.from_numpy(self._rows.ravel()).to(self._device)
        assert handle.verified_pages == self._plan.num_pages
        assert torch.equal(self._pool[:, rows].cpu(), self._source), handle.path
        return handle.path

    def load(self, loader: ShardedLoader, *, first: bool = False) -> TransferHandle:
        """All of it, or until the first layer is there."""
        handle = loader.load(self._plan)
        if first:
            handle.wait_layer(self._plan.model_layers[0])
            self._synchronize()
        else:
            handle.wait(_WAIT_SECS)
        return handle

    def memcpy(self) -> None:
        """A plain copy of as many bytes."""
        self._target.copy_(self._pinned, non_blocking=True)
        self._synchronize()

    def timed(self, work: Callable[[], TransferHandle | None], repeats: int) -> list[float]:
        """Seconds of each repeat, from a barrier on; all ranks begin together."""
        import torch.distributed as dist

        found = []
        for repeat in range(repeats + 1):
            dist.barrier()
            started = time.perf_counter()
            rest = work()
            if repeat:  # the first is a warm-up
                found.append(time.perf_counter() - started)
            if rest is not None:
                rest.wait(_WAIT_SECS)
            self._synchronize()
        return found

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize(self._device)


if __name__ == "__main__":
    sys.exit(main())
