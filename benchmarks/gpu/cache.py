"""The tiered cache on a GPU: what a prompt takes through it, and what it takes of the CPU.

    python3 benchmarks/gpu/cache.py --json benchmarks/results/cache.json

    engine    a plain transfer of the same pages, without a cache
    host      store, and match with load, between device and host memory; digests on
    disk      the same pages written to files, prefetched from there, and loaded
    cpu       the CPU's time of each call for that prompt
    idle      a poll with nothing to do, and what a cache takes that nobody calls
    metrics   what it costs to time every transfer

GB/s of `engine`, `host` and `metrics` are by the GPU's clock, as in throughput.py. Milliseconds are
those of a caller, from the call until it is done. All are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import rig

if TYPE_CHECKING:
    from kvferry import Geometry, KVFerry, TransferHandle

_DIRECTIONS = ("d2h", "h2d")
_PLENTY_SECS = 120.0
_IDLE_SECS = 1.0


def main() -> int:
    """Print the figures; with --json write them as well."""
    args = arguments().parse_args()
    link = rig.begin()
    rows = []
    for row in _Prompt(args, link).rows():
        rows.append(row)
        print(line_of(row), flush=True)
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=int, default=12288, help="of the prompt")
    add("--layers", type=int, default=61)
    add("--element", type=int, default=656, help="bytes a token and layer")
    add("--run", type=int, default=1, help="device run, in tokens")
    add("--workers", type=int, nargs="+", default=[4, 8], help="threads that read and write files")
    add("--folder", type=pathlib.Path, help="where files go; the system's folder for such, else")
    add("--repeats", type=int, default=20)
    return parser


def line_of(row: Mapping[str, Any]) -> str:
    """A row as it is printed."""
    words = [f"{row['case']:8}", f"{row['what']:24}"]
    words += [
        f"{name.replace('_', ' ')} {value}"
        for name, value in row.items()
        if name not in ("case", "what")
    ]
    return "  ".join(words)


def cpu_row(what: str, seconds: list[float], case: str = "cpu") -> dict[str, Any]:
    """Microseconds of a call, as a row."""
    return {"case": case, "what": what, "us": round(statistics.median(seconds) * 1e6, 1)}


class _Prompt:
    """One prompt on the device, and caches that it goes through."""

    def __init__(self, args: argparse.Namespace, link: Mapping[str, float]) -> None:
        self.args = args
        self.link = link
        self.geometry: Geometry = rig.latent(args.element, args.layers)
        self.num_pages = args.tokens // rig.PAGE_SIZE
        self.num_tokens = self.num_pages * rig.PAGE_SIZE
        self.num_bytes = self.num_pages * self.geometry.page_bytes
        rng = np.random.default_rng(1)
        self.tokens = rng.integers(0, 128_000, self.num_tokens, dtype=np.uint32)
        self.other = rng.integers(0, 128_000, self.num_tokens, dtype=np.uint32)
        # What is stored lies in the first half of the pool, and is loaded into the second.
        self.device = rig.random_bytes(1, args.layers, 2 * self.num_tokens, args.element)
        self.source = rig.device_slots(rng, self.num_pages, args.run).reshape(-1)
        self.target = rig.device_slots(rng, self.num_pages, args.run).reshape(-1) + self.num_tokens
        self.engine_rate: dict[str, float] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """All figures."""
        yield from self._engine()
        yield from self._host()
        yield from self._metrics()
        yield from self._disk()

    # ------------------------------------------------------------------------ caches

    @contextlib.contextmanager
    def cache(self, **given: Any) -> Iterator[KVFerry]:
        """One with room for the prompt, without storage unless it is given."""
        from kvferry import KVFerry, Namespace, PoolView

        size = 8 * len(self.geometry.spans()) + self.geometry.slot_bytes()
        sections: dict[str, Any] = {
            "host": {"num_bytes": (self.num_pages + 8) * size + 4096},
            "load": {"threshold_tokens": 1},
            "prefetch": {
                "threshold_tokens": 1,
                "policy": "wait_complete",
                "max_secs": _PLENTY_SECS,
                "budget_pages": self.num_pages,
            },
        }
        name = Namespace(
            model="benchmark", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )
        view = PoolView.from_tensors(self.geometry, {"latent": self.device})
        with KVFerry(self.geometry, view, namespace=name, **{**sections, **given}) as made:
            yield made

    def store(self, cache: KVFerry) -> Any:
        """Store the prompt anew, and let the current stream wait for it."""
        cache.reset()
        return self.store_anew(cache)

    def store_anew(self, cache: KVFerry) -> Any:
        """Store the prompt, of which nothing is there."""
        stored = cache.store(self.tokens, device_slots=self.source)
        assert stored.num_submitted == self.num_pages, stored
        stored.wait_all()
        return stored

    def load(self, cache: KVFerry) -> Any:
        """Match and load it, and let the current stream wait for it."""
        with cache.match(self.tokens) as found:
            assert found.num_tokens == self.num_tokens, found
            loaded = cache.load(found, device_slots=self.target)
        loaded.wait_all()
        return loaded

    def check(self, cache: KVFerry) -> str:
        """A round trip, compared whole; no figure is worth printing without. What carried it."""
        import torch

        self.device[:, self.num_tokens :].fill_(rig.POISON)
        self.store(cache).wait()
        loaded = self.load(cache)
        loaded.wait()
        assert loaded.verified_pages == self.num_pages, loaded.bad_pages
        source, target = (
            torch.from_numpy(rows).to(rig.DEVICE) for rows in (self.source, self.target)
        )
        for layer in self.device:
            assert torch.equal(layer[source], layer[target]), "bytes differ after a round trip"
        return str(loaded.paths[0])

    def rate(self, direction: str, submit: Callable[[], Any]) -> dict[str, Any]:
        """GB/s by the GPU's clock."""
        timing = rig.gpu_timing(submit, self.args.repeats)
        found = rig.gb_per_sec(self.num_bytes, timing.seconds)
        return {
            "direction": direction,
            "gb_per_sec": found,
            "over_m": round(found / self.link[direction], 3),
            "num_exposed": timing.num_exposed,
        }

    # ------------------------------------------------------------------------- cases

    def _engine(self) -> Iterator[dict[str, Any]]:
        from kvferry import HostPool, PoolView, SlotOwner, TransferEngine

        order = np.arange(self.num_pages)
        with HostPool(self.geometry, num_slots=self.num_pages) as host:
            host.allocate(self.num_pages, SlotOwner.INDEX)
            view = PoolView.from_tensors(self.geometry, {"latent": self.device})
            with TransferEngine(view, host) as engine:
                for direction in _DIRECTIONS:
                    slots = self.source if direction == "d2h" else self.target
                    plan = rig.plans(
                        self.geometry, order, slots.reshape(self.num_pages, rig.PAGE_SIZE)
                    )[direction == "h2d"]
                    handles: list[TransferHandle] = []

                    def submit(plan: Any = plan, handles: list[Any] = handles) -> Any:
                        handles[:] = [rig.carry(engine, plan)]
                        return handles[0]

                    row = self.rate(direction, submit)
                    assert handles[0].verified_pages == self.num_pages
                    self.engine_rate[direction] = row["gb_per_sec"]
                    what = "load" if direction == "h2d" else "store"
                    yield {"case": "engine", "what": what, "path": handles[0].path, **row}

    def _host(self) -> Iterator[dict[str, Any]]:
        with self.cache() as cache:
            path = self.check(cache)
            works = {"d2h": ("store", self.store), "h2d": ("match and load", self.load)}
            for direction, (what, work) in works.items():
                row = self.rate(direction, partial(work, cache))
                if direction == "d2h":
                    wall = self._wall(partial(self.store_anew, cache), cache.reset)
                else:
                    wall = self._wall(partial(self.load, cache))
                yield {
                    "case": "host", "what": what, "path": path, **row,
                    "over_engine": round(row["gb_per_sec"] / self.engine_rate[direction], 3),
                    "ms": round(wall * 1e3, 2),
                }  # fmt: skip
            yield from self._cpu(cache)

    def _wall(self, work: Callable[[], Any], before: Callable[[], None] = lambda: None) -> float:
        """Seconds until a caller has it, from the call on."""
        import torch

        times = []
        for _ in range(max(3, self.args.repeats // 2)):
            before()
            torch.cuda.synchronize()
            began = time.perf_counter()
            work().wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def _cpu(self, cache: KVFerry) -> Iterator[dict[str, Any]]:
        """The CPU's time of each call, with the prompt on the host."""
        times: dict[str, list[float]] = {}

        def clock(what: str, work: Callable[[], Any]) -> Any:
            began = time.perf_counter()
            found = work()
            times.setdefault(what, []).append(time.perf_counter() - began)
            return found

        for _ in range(self.args.repeats):
            cache.reset()
            clock("keys of the prompt", partial(cache.keys, self.tokens))
            clock("match, nothing there", partial(cache.match, self.other))
            stored = clock("store", partial(cache.store, self.tokens, device_slots=self.source))
            stored.wait()
            found = clock("match, all there", partial(cache.match, self.tokens))
            loaded = clock("load", partial(cache.load, found, device_slots=self.target))
            loaded.wait()
            assert loaded.verified_pages == self.num_pages, loaded.bad_pages
            clock("release", found.release)
        for what, seconds in times.items():
            yield cpu_row(what, seconds)
        polls = []
        for _ in range(50):
            began = time.perf_counter()
            for _ in range(100):
                cache.poll()
            polls.append((time.perf_counter() - began) / 100)
        yield cpu_row("poll", polls, "idle")

    def _metrics(self) -> Iterator[dict[str, Any]]:
        """Transfers that are timed, against those that are not, in turns."""
        from kvferry.metrics import NullMetrics

        class Listening(NullMetrics):
            enabled = True

        for direction, work in (("d2h", self.store), ("h2d", self.load)):
            rates: dict[str, list[float]] = {"off": [], "on": []}
            calls: dict[str, list[float]] = {"off": [], "on": []}
            with self.cache() as off, self.cache(metrics=Listening()) as on:
                for _ in range(5):
                    for name, cache in (("off", off), ("on", on)):
                        self.store(cache).wait()
                        row = self.rate(direction, partial(work, cache))
                        rates[name].append(row["gb_per_sec"])
                        began = time.perf_counter()
                        handle = work(cache)
                        calls[name].append(time.perf_counter() - began)
                        handle.wait()
            found = {name: statistics.median(each) for name, each in rates.items()}
            us = {name: statistics.median(each) * 1e6 for name, each in calls.items()}
            yield {
                "case": "metrics", "what": "store" if direction == "d2h" else "match and load",
                "direction": direction, **{name: round(each, 2) for name, each in found.items()},
                "cost": round(found["off"] / found["on"] - 1, 4),
                "call_us": round(us["on"] - us["off"], 1),
            }  # fmt: skip

    def _disk(self) -> Iterator[dict[str, Any]]:
        if importlib.util.find_spec("xxhash") is None:
            reason = "xxhash is not installed, and storage checks every page by it"
            yield {"case": "disk", "what": "nothing", "skipped": reason}
            return
        for workers in self.args.workers:
            with tempfile.TemporaryDirectory(dir=self.args.folder, prefix="kvferry-") as folder:
                yield from self._files(folder, workers)

    def _files(self, folder: str, workers: int) -> Iterator[dict[str, Any]]:
        from kvferry.storage import open_backend

        times: dict[str, list[float]] = {"write": [], "prefetch": [], "prefetch and load": []}
        room = 2 * self.num_bytes + (64 << 20)
        backend = open_backend("file", path=pathlib.Path(folder), capacity_bytes=room)
        given: dict[str, Any] = {"storage": backend}
        with self.workers(workers, given) as cache:
            for turn in range(max(3, self.args.repeats // 5)):
                if turn == 0:
                    self.store(cache).wait()
                    began = time.perf_counter()
                    report = cache.flush(_PLENTY_SECS)
                    times["write"].append(time.perf_counter() - began)
                    assert report.complete, report
                cache.reset()
                began = time.perf_counter()
                fetch = cache.prefetch(self.tokens)
                fetch.wait(_PLENTY_SECS)
                times["prefetch"].append(time.perf_counter() - began)
                assert fetch.result().num_tokens == self.num_tokens, fetch.result()
                loaded = self.load(cache)
                loaded.wait()
                times["prefetch and load"].append(time.perf_counter() - began)
                assert loaded.verified_pages == self.num_pages, loaded.bad_pages
            for what, seconds in times.items():
                took = statistics.median(seconds)
                yield {
                    "case": "disk", "what": what, "workers": workers, "ms": round(took * 1e3, 1),
                    "gb_per_sec": rig.gb_per_sec(self.num_bytes, took),
                }  # fmt: skip
            used = time.process_time()
            began = time.perf_counter()
            threading.Event().wait(_IDLE_SECS)
            took = time.perf_counter() - began
            used = (time.process_time() - used) / took * 1e3
            yield {
                "case": "idle", "what": f"nobody calls, {workers} threads",
                "ms_per_sec": round(used, 2),
            }  # fmt: skip

    @contextlib.contextmanager
    def workers(self, workers: int, given: dict[str, Any]) -> Iterator[KVFerry]:
        """A cache whose storage has so many threads."""
        from kvferry.config import Config

        config = Config.resolve(None, {}, storage={"workers": workers}).config
        with self.cache(config=config, **given) as cache:
            yield cache


if __name__ == "__main__":
    sys.exit(main())
