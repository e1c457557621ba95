"""What a cache costs an engine, and what it gives: examples/engine.py, with random weights.

    python3 benchmarks/gpu/toy_engine.py --json benchmarks/results/toy_engine.json

    idle         what a cache that finds and stores nothing costs: three engines in lockstep,
                 without a cache, with an idle one, and without one again, which is the control
    repeats      whether the model computes the same bits twice here, with nobody's cache
    tokens       tokens/s of requests that run together: without a cache, with one that stores all,
                 and with one that has every prompt
    answers      whether all those ways give the same answers, in float32
    first_token  from submitting one long prompt to its first token: computed, from the host, and
                 from files

`cost` is the median over rounds of how much longer the idle engine took than the one without a
cache, and `low` to `high` has that median with 95 %. `in_calls` is the share of the idle engine's
time that passes inside of kvferry, counted call by call in every fourth round, which is not
compared. Seconds are those of a caller. No figure is told unless hits are as many as they should
be.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

import rig
from lockstep import Counted, Spent, in_lockstep, median_interval, quiet

if TYPE_CHECKING:
    from kvferry import KVFerry

_EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
_PLENTY_SECS = 120.0
_ROOM_PAGES = 16
_LEAST_ROUNDS, _WARM_ROUNDS, _COUNTED_EVERY = 20, 2, 4
_SIDES = ("off", "idle", "off again")
_WAYS = ("off", "stores", "hits")


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
    add("--requests", type=int, default=8, help="of a round; 8 run together")
    add("--prompt", type=int, default=2050, help="tokens of each of them")
    add("--new", type=int, default=96, help="tokens that each generates")
    add("--long", type=int, default=16386, help="tokens of the long prompt")
    add("--chunk", type=int, default=2048, help="tokens of a prompt computed at once")
    add("--folder", type=pathlib.Path, help="where files go; the system's folder for such, else")
    add("--rounds", type=int, default=24, help="of engines in lockstep, after two that warm up")
    add("--seconds", type=float, default=40.0, help="no more rounds then, once there are 20")
    add("--turns", type=int, default=4, help="of the other figures, after one that warms up")
    return parser


def line_of(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    more = [f"{name.replace('_', ' ')} {row[name]}" for name in row if name not in ("case", "what")]
    return "  ".join([f"{row['case']:12}", f"{row['what']:20}", *more])


class Serving:
    """One engine, with and without its cache."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        import torch

        if str(_EXAMPLES) not in sys.path:
            sys.path.append(str(_EXAMPLES))
        import engine as toy

        self.args, self.device, self.toy = args, device, toy
        self.page_size: int = toy.PAGE
        self.rng = np.random.default_rng(1)
        self._build(torch.bfloat16)

    def _build(self, dtype: Any) -> None:
        """The model, and an engine with its pool."""
        args, toy = self.args, self.toy
        shape = toy.Shape(
            layers=args.layers, width=args.width, heads=args.width // 64,
            kv_heads=max(1, args.width // 128), dim=64, words=args.words, dtype=dtype,
        )  # fmt: skip
        self.model = toy.Model(shape, self.device)
        longest = max(8 * (args.prompt + args.new + toy.BLOCK), args.long + 2 * toy.BLOCK)
        self.num_blocks = -(-longest // toy.BLOCK)
        self.engine = self._engine()
        self.pool = self.engine.pool
        self.token_bytes = self.pool[:, 0].numel() * self.pool.element_size()

    def _engine(self) -> Any:
        pool = self.model.new_pool(self.num_blocks)
        return self.toy.Engine(self.model, pool, chunk=self.args.chunk)

    def rows(self) -> Iterator[dict[str, Any]]:
        """All figures."""
        import torch

        num_tokens = self.args.requests * (self.args.prompt + self.args.new)
        yield from self._idle()
        yield self._repeats()
        with self._cache(num_tokens) as cache:
            yield from self._tokens(cache)
        with self._cache(self.args.long) as cache:
            yield from self._first_token(cache)
        self._build(torch.float32)
        yield self._repeats()
        with self._cache(num_tokens) as cache:
            yield from self._answers(cache)

    def _cache(self, num_tokens: int, **sections: Any) -> KVFerry:
        page_bytes = self.page_size * self.token_bytes
        num_bytes = int((num_tokens / self.page_size + _ROOM_PAGES) * page_bytes * 1.02)
        prefetch = {"policy": "wait_complete", "max_secs": _PLENTY_SECS, "threshold_tokens": 1,
                    "budget_pages": num_tokens // self.page_size + 1}  # fmt: skip
        given = {"host": {"num_bytes": num_bytes}, "prefetch": prefetch, **sections}
        made: KVFerry = self.toy.open_cache(self.pool, **given)
        return made

    def _prompt(self, num_tokens: int) -> list[int]:
        drawn: list[int] = self.rng.integers(0, self.args.words, num_tokens).tolist()
        return drawn

    def _prompts(self) -> list[list[int]]:
        return [self._prompt(self.args.prompt) for _ in range(self.args.requests)]

    # ---------------------------------------------------------------------------- idle

    def _idle(self) -> Iterator[dict[str, Any]]:
        """What an engine with nothing in its cache takes, over one that has none."""
        args = self.args
        engines = {way: self._engine() for way in _SIDES}
        took: dict[str, list[float]] = {way: [] for way in _SIDES}
        shares: list[float] = []
        per_step: list[float] = []
        with self.toy.open_cache(
            engines["idle"].pool,
            host={"num_bytes": _ROOM_PAGES * self.page_size * self.token_bytes * 2},
        ) as cache:
            cache.switches.flip(store=False)
            began = time.monotonic()
            for turn in range(_WARM_ROUNDS + args.rounds):
                late = time.monotonic() - began > args.seconds
                if late and turn >= _WARM_ROUNDS + _LEAST_ROUNDS:
                    break
                # Counting takes time of its own: rounds that count are not compared.
                counts = turn % _COUNTED_EVERY == 0
                spent = Spent()
                engines["idle"].cache = Counted(cache, spent) if counts else cache
                seconds, asked = in_lockstep(engines, self._prompts(), args.new, turn=turn)
                found = sum(one.hits for way in _SIDES for one in asked[way])
                assert not found, found
                if turn < _WARM_ROUNDS:
                    continue
                if counts:
                    shares.append(spent.seconds / seconds["idle"])
                    per_step.append(spent.seconds / args.new)
                    continue
                for way in _SIDES:
                    took[way].append(seconds[way])
        for way in _SIDES:
            pairs = zip(took[way], took["off"], strict=True)
            cost = median_interval([one / other - 1 for one, other in pairs])
            rates = [args.requests * args.new / one for one in took[way]]
            row: dict[str, Any] = {
                "case": "idle", "what": way, "tokens_per_sec": round(statistics.median(rates), 1),
                "rounds": len(rates), "spread": round(max(rates) / min(rates) - 1, 4),
            }  # fmt: skip
            if way != "off":
                row |= {name: round(value, 5) for name, value in cost._asdict().items()}
                row["cost"] = row.pop("median")
            if way == "idle":
                row["in_calls"] = round(statistics.median(shares), 5)
                row["us_per_step"] = round(statistics.median(per_step) * 1e6, 1)
            yield row

    def _repeats(self) -> dict[str, Any]:
        """A prompt and a step of all, each computed twice into the same places."""
        import torch

        args, device = self.args, self.device
        batch, count = self.toy.MAX_RUNNING, args.prompt
        slots = torch.arange(batch * count, device=device).view(batch, count)
        drawn = torch.tensor([self._prompt(count) for _ in range(batch)], device=device)
        row: dict[str, Any] = {"case": "repeats", "what": str(self.pool.dtype).split(".")[-1]}
        first = torch.zeros(1, dtype=torch.int64, device=device)
        last = torch.full((batch,), count - 1, dtype=torch.int64, device=device)
        calls = {
            "prompt": (drawn[:1, :-1], first, slots[:1]),
            "step": (drawn[:, -1:], last, slots),
        }
        with torch.inference_mode():
            for name, given in calls.items():
                made = []
                for _ in range(2):
                    tokens = self.model.forward(self.pool, *given)
                    made.append((self.pool.clone(), tokens))
                (one, said), (two, again) = made
                differ = (one != two).flatten(1).any(1).nonzero().flatten().tolist()
                row[name] = "the same bits"
                if differ:
                    row[name] = f"other bits from layer {differ[0]} on"
                elif not torch.equal(said, again):
                    row[name] = "other bits behind the layers"
        return row

    # ------------------------------------------------------------------------ together

    def _round(self, cache: KVFerry, way: str, prompts: list[list[int]]) -> tuple[float, list[Any]]:
        """Seconds and requests of one way."""
        self.engine.cache = None if way.startswith("off") else cache
        cache.switches.flip(store=way in ("stores", "hits"))
        if way != "hits":
            cache.reset()
        with quiet():
            began = time.perf_counter()
            asked = [self.engine.submit(prompt, self.args.new) for prompt in prompts]
            self.engine.run()
            took = time.perf_counter() - began
        self.engine.cache = None
        hits = sum(one.hits for one in asked)
        pages = (self.args.prompt - 1) // self.page_size
        assert hits == (way == "hits") * len(prompts) * pages * self.page_size, (way, hits)
        return took, asked

    def _tokens(self, cache: KVFerry) -> Iterator[dict[str, Any]]:
        """Tokens a second, all ways in turns: every way has the same prompts in a round."""
        took: dict[str, list[float]] = {way: [] for way in _WAYS}
        hits = 0
        for turn in range(self.args.turns + 1):
            prompts = self._prompts()
            for way in _WAYS:
                seconds, asked = self._round(cache, way, prompts)
                hits = sum(one.hits for one in asked)
                if turn:  # the first warms up
                    took[way].append(seconds)
        for way, found in took.items():
            pairs = zip(took["off"], found, strict=True)
            rates = [self.args.requests * self.args.new / one for one in found]
            row = {
                "case": "tokens", "what": way,
                "tokens_per_sec": round(statistics.median(rates), 1),
                "over_off": round(statistics.median(off / one for off, one in pairs), 4),
                "spread": round(max(rates) / min(rates) - 1, 4),
            }  # fmt: skip
            if way == "off":
                row["model_mb"] = round(self._model_bytes() / 1e6)
            if way == "hits":
                row["hit_tokens"] = hits
            yield row

    def _model_bytes(self) -> int:
        import torch

        weights = [one for one in vars(self.model).values() if isinstance(one, torch.Tensor)]
        return sum(one.numel() * one.element_size() for one in weights)

    def _answers(self, cache: KVFerry) -> Iterator[dict[str, Any]]:
        """All ways once, with the same prompts; rows of a batch are the same in all of them."""
        prompts = self._prompts()[: self.toy.MAX_RUNNING]
        outputs = {}
        for way in ("off", "off again", "idle", "stores", "hits"):
            outputs[way] = [one.output for one in self._round(cache, way, prompts)[1]]
        for way in list(outputs)[1:]:
            pairs = zip(outputs[way], outputs["off"], strict=True)
            differing = sum(found != expected for found, expected in pairs)
            yield {"case": "answers", "what": way, "of": len(prompts), "differing": differing}

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
        for turn in range(self.args.turns + 1):
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
