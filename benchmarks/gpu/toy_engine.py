"""What a cache costs an engine, and what it gives: examples/engine.py, with random weights.

    python3 benchmarks/gpu/toy_engine.py --json benchmarks/results/toy_engine.json

    tokens       tokens/s of requests that run together: without a cache, with one that finds and
                 stores nothing, with one that stores all, and with one that has every prompt
    first_token  from submitting one long prompt to its first token: computed, from the host, and
                 from files

`off again` is the control: what two rounds differ by that are alike, in time and in answers.
`in calls` is the share of an idle round that passes inside of calls of the cache: rounds are not
alike enough on every machine to tell a percent, and this is what of it can be counted.

Rounds go through the ways in turns, in one engine, and figures are medians over the rounds. Seconds
are those of a caller. No figure is told unless hits are as many as they should be.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import rig

if TYPE_CHECKING:
    from kvferry import KVFerry

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_PLENTY_SECS = 120.0
_ROOM_PAGES = 16
_WAYS = ("off", "idle", "off again", "stores", "hits")


def main() -> int:
    """Print the figures; with --json write them as well."""
    args = arguments().parse_args()
    link = rig.begin()
    rows = []
    for row in Serving(args, rig.DEVICE).rows():
        rows.append(row)
        print(line_of(row), flush=True)
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--layers", type=int, default=16)
    add("--width", type=int, default=1024)
    add("--words", type=int, default=32000)
    add("--requests", type=int, default=16, help="of a round; 8 run together")
    add("--prompt", type=int, default=2050, help="tokens of each of them")
    add("--new", type=int, default=96, help="tokens that each generates")
    add("--long", type=int, default=16386, help="tokens of the long prompt")
    add("--chunk", type=int, default=2048, help="tokens of a prompt computed at once")
    add("--folder", type=pathlib.Path, help="where files go; the system's folder for such, else")
    add("--rounds", type=int, default=11)
    return parser


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    more = [f"{name.replace('_', ' ')} {row[name]}" for name in row if name not in ("case", "what")]
    return "  ".join([f"{row['case']:12}", f"{row['what']:20}", *more])


def cost(off: Sequence[float], on: Sequence[float]) -> float:
    """How much slower `on` is, as a share: the median of rounds that ran side by side."""
    return statistics.median(before / after - 1 for before, after in zip(off, on, strict=True))


class _Timed:
    """A cache that adds up how long its calls take."""

    def __init__(self, cache: KVFerry) -> None:
        self._cache = cache
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._cache, name)

        def timed(*args: Any, **given: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **given)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


class Serving:
    """One engine, with and without its cache."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        import torch

        if str(_EXAMPLES) not in sys.path:
            sys.path.append(str(_EXAMPLES))
        import engine as toy

        self.args, self.device = args, device
        shape = toy.Shape(
            layers=args.layers, width=args.width, heads=args.width // 64,
            kv_heads=max(1, args.width // 128), dim=64, words=args.words, dtype=torch.bfloat16,
        )  # fmt: skip
        self.model = toy.Model(shape, device)
        weights = [one for one in vars(self.model).values() if isinstance(one, torch.Tensor)]
        self.model_bytes = sum(one.numel() * one.element_size() for one in weights)
        longest = max(8 * (args.prompt + args.new + toy.BLOCK), args.long + 2 * toy.BLOCK)
        self.pool = self.model.new_pool(-(-longest // toy.BLOCK))
        self.token_bytes = self.pool[:, 0].numel() * self.pool.element_size()
        self.engine: Any = toy.Engine(self.model, self.pool, chunk=args.chunk)
        self.page_size = toy.PAGE
        self.open_cache = toy.open_cache
        self.rng = np.random.default_rng(1)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All figures."""
        with self._cache(self.args.requests * (self.args.prompt + self.args.new)) as cache:
            yield from self._tokens(cache)
        with self._cache(self.args.long) as cache:
            yield from self._first_token(cache)

    def _cache(self, num_tokens: int, **sections: Any) -> KVFerry:
        page_bytes = self.page_size * self.token_bytes
        num_bytes = int((num_tokens / self.page_size + _ROOM_PAGES) * page_bytes * 1.02)
        prefetch = {"policy": "wait_complete", "max_secs": _PLENTY_SECS, "threshold_tokens": 1,
                    "budget_pages": num_tokens // self.page_size + 1}  # fmt: skip
        given = {"host": {"num_bytes": num_bytes}, "prefetch": prefetch, **sections}
        made: KVFerry = self.open_cache(self.pool, **given)
        return made

    def _prompt(self, num_tokens: int) -> list[int]:
        drawn: list[int] = self.rng.integers(0, self.args.words, num_tokens).tolist()
        return drawn

    # ------------------------------------------------------------------------ together

    def _tokens(self, cache: KVFerry) -> Iterator[dict[str, Any]]:
        """Tokens a second, all ways in turns: every way has the same prompts in a round."""
        args = self.args
        rates: dict[str, list[float]] = {way: [] for way in _WAYS}
        hits, outputs, differing = 0, dict[str, list[list[int]]](), dict.fromkeys(rates, 0)
        shares: list[float] = []
        for turn in range(args.rounds + 1):
            prompts = [self._prompt(args.prompt) for _ in range(args.requests)]
            # Neither of the two that are compared is always the first.
            compared = _WAYS[:3] if turn % 2 else _WAYS[2::-1]
            for way in (*compared, *_WAYS[3:]):
                timed = _Timed(cache)
                self.engine.cache = {"off": None, "off again": None, "idle": timed}.get(way, cache)
                cache.switches.flip(store=way in ("stores", "hits"))
                if way != "hits":
                    cache.reset()
                began = time.perf_counter()
                asked = [self.engine.submit(prompt, args.new) for prompt in prompts]
                self.engine.run()
                took = time.perf_counter() - began
                hits = sum(one.hits for one in asked)
                pages = (args.prompt - 1) // self.page_size
                assert hits == (way == "hits") * args.requests * pages * self.page_size, (way, hits)
                outputs[way] = [one.output for one in asked]
                if turn:  # the first warms up
                    rates[way].append(args.requests * args.new / took)
                if turn and way == "idle":
                    shares.append(timed.seconds / took)
            for way in rates:
                pairs = zip(outputs[way], outputs["off"], strict=True)
                differing[way] += sum(found != expected for found, expected in pairs)
        self.engine.cache = None
        for way, found in rates.items():
            row = {
                "case": "tokens", "what": way,
                "tokens_per_sec": round(statistics.median(found), 1),
                "over_off": round(1 / (1 + cost(rates["off"], found)), 4),
                "spread": round(max(found) / min(found) - 1, 4), "differing": differing[way],
            }  # fmt: skip
            if way == "off":
                row["model_mb"] = round(self.model_bytes / 1e6)
            if way == "idle":
                row["cost"] = round(cost(rates["off"], found), 4)
                row["in_calls"] = round(statistics.median(shares), 4)
            if way == "hits":
                row["hit_tokens"] = hits
            yield row

    # --------------------------------------------------------------------- first token

    def _first_token(self, cache: KVFerry) -> Iterator[dict[str, Any]]:
        """One long prompt that nobody runs beside."""
        self.engine.cache = None
        yield self._first("computed", lambda: None, 0)
        self.engine.cache = cache
        prompt = self._prompt(self.args.long)
        whole = (self.args.long - 1) // self.page_size * self.page_size
        self._ask(prompt)
        yield self._first("from the host", lambda: None, whole, prompt)
        if importlib.util.find_spec("xxhash") is None:
            reason = "xxhash is not installed, and storage checks every page by it"
            yield {"case": "first_token", "what": "from files", "skipped": reason}
            return
        with tempfile.TemporaryDirectory(dir=self.args.folder, prefix="kvferry-") as folder:
            room = 2 * self.args.long * self.token_bytes + (64 << 20)
            cache.attach_storage("file", path=folder, capacity_bytes=room)
            report = cache.flush(_PLENTY_SECS)
            assert report.complete, report
            yield self._first("from files", cache.reset, whole, prompt)
            cache.detach_storage()
        self.engine.cache = None

    def _first(
        self, what: str, prepare: Any, hits: int, prompt: list[int] | None = None
    ) -> dict[str, Any]:
        seconds = []
        for turn in range(self.args.rounds + 1):
            prepare()
            given = prompt or self._prompt(self.args.long)
            took, found = self._ask(given)
            assert found == hits, (what, found, hits)
            if turn:
                seconds.append(took)
        return {
            "case": "first_token", "what": what, "tokens": self.args.long,
            "ms": round(statistics.median(seconds) * 1e3, 2), "hit_tokens": hits,
            "mb": round(hits * self.token_bytes / 1e6),
        }  # fmt: skip

    def _ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and hits."""
        told: list[float] = []

        class Watched(list[int]):
            """The first token is there when it is appended, whatever the engine does then."""

            def append(self, token: int) -> None:
                told.append(time.perf_counter())
                super().append(token)

        began = time.perf_counter()
        request = self.engine.submit(prompt, 2)
        request.output = Watched()
        self.engine.run()
        return told[0] - began, request.hits


if __name__ == "__main__":
    sys.exit(main())
