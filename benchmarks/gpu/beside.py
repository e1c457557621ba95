"""What transfers and compute cost each other, and both directions at once.

    python3 benchmarks/gpu/beside.py --json benchmarks/results/beside.json

Compute runs in a stream of normal priority, from before the first transfer until after the last: a
loop of bf16 products of 8192 x 8192 matrices (`gemm`, which fills the multiprocessors) or of a
32768 x 32768 matrix with a vector (`gemv`, which fills the memory's bandwidth). Transfers follow
one another in another stream. Each case is measured alike for plain pinned copies of as many bytes.

    GB/s      median of the transfers, 10^9 bytes of payload a second; of both directions: the sum,
              over the time in which both are at it
    slower    what an iteration of the compute takes longer than alone, in the same seconds
    ms/GB     compute time lost for 10^9 bytes moved
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import rig
from overlap import Span, inside, lost, rate, rates_of_both

if TYPE_CHECKING:
    from kvferry import TransferHandle

_SIDES = {"gemm": 8192, "gemv": 32768}
# Before the gate opens all of the compute and some transfers are submitted.
_GATE_SECS = 0.02
# Two marks are not closer than this: a stream takes about a thousand commands before the CPU waits.
_MARK_MS = 1.5
_SLOWEST_SHARE = 0.35
_TRIES = 4
# Transfers begin behind so many marks of the compute.
_FIRST_MARK = 2


class Compute(NamedTuple):
    """One step of a compute loop: some iterations between two marks."""

    name: str
    iterate: Callable[[], object]
    iterations: int
    step_ms: float
    """About what a step takes alone."""


def main() -> int:
    """Print the figures; with --json write them as well."""
    args = arguments().parse_args()
    link = rig.begin()
    rows: list[dict[str, Any]] = []
    for row in _measure(args):
        if row["direction"] in link:
            row["over_m"] = round(row["gb_per_sec"] / link[row["direction"]], 3)
        same = [
            other["gb_per_sec"]
            for other in rows
            if (other["compute"], other["direction"]) == (row["compute"], row["direction"])
            and other["mover"] == "memcpy"
        ]
        if same:
            row["over_memcpy"] = round(row["gb_per_sec"] / same[0], 3)
        rows.append(row)
        print(_line(row), flush=True)
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--mover", nargs="+", choices=["direct", "staged"], default=["staged"])
    add("--compute", nargs="*", choices=list(_SIDES), default=list(_SIDES))
    add("--element", type=int, default=656)
    add("--layers", type=int, default=61)
    add("--tokens", type=int, default=12288, help="of a transfer")
    add("--run", type=int, default=1, help="device run, in tokens")
    add("--host-run", type=int, default=8, help="pages in neighbouring host slots")
    add("--staging-mib", type=int, default=64, help="of a direction")
    add("--transfers", type=int, default=8, help="that follow one another")
    add("--rounds", type=int, default=3, help="of which a figure is the median")
    return parser


def _line(row: Mapping[str, Any]) -> str:
    text = (
        f"{row['mover']:<8} beside {row['compute']:<5} {row['direction']:<5} "
        f"{row['gb_per_sec']:>6.1f} GB/s"
    )
    if "over_m" in row:
        text += f" ({row['over_m']:.2f} M)"
    if "over_memcpy" in row:
        text += f" ({row['over_memcpy']:.2f} of memcpy)"
    if "slowdown" in row:
        text += (
            f"  {row['alone_ms']:.3f} -> {row['beside_ms']:.3f} ms, {row['slowdown']:+.1%} slower, "
            f"{row['extra_ms_per_gb']:+.2f} ms/GB"
        )
    return text


Works = Mapping[str, Callable[[], "TransferHandle | None"]]
"""By direction: submits one transfer, for which the caller's current stream waits."""


def _measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    geometry = rig.latent(args.element, args.layers)
    num_pages = args.tokens // rig.PAGE_SIZE
    num_bytes = num_pages * geometry.page_bytes
    told = {"element_size": args.element, "device_run": args.run, "host_run": args.host_run,
            "layers": args.layers, "num_bytes": num_bytes}  # fmt: skip
    computes = [None, *(_compute(name) for name in args.compute)]
    for mover, works in _movers(args, num_pages, num_bytes):
        for compute in computes:
            name = "none" if compute is None else compute.name
            for direction, work in works.items():
                one = {direction: work}
                found = (
                    _alone(one, num_bytes, args)
                    if compute is None
                    else _beside(compute, one, num_bytes, args)
                )
                yield {"mover": mover, "compute": name, "direction": direction, **found, **told}
        spans = [_run(works, args.transfers, None)[0] for _ in range(args.rounds)]
        rates = [rates_of_both(each, num_bytes) for each in spans]
        by_direction = {way: statistics.median(each[way] for each in rates) for way in works}
        total = statistics.median(sum(each.values()) for each in rates)
        yield {
            "mover": mover, "compute": "none", "direction": "both",
            "gb_per_sec": round(total, 2),
            **{way: round(value, 2) for way, value in by_direction.items()},
            **told,
        }  # fmt: skip


def _movers(
    args: argparse.Namespace, num_pages: int, num_bytes: int
) -> Iterator[tuple[str, Works]]:
    """Plain copies, then each mover; bytes of a mover are compared before it is handed out."""
    import torch

    hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [rig.random_bytes(3 + index, num_bytes) for index in range(2)]
    hosts[1].copy_(devices[1])
    yield (
        "memcpy",
        {
            "h2d": partial(_copy, devices[1], hosts[1]),
            "d2h": partial(_copy, hosts[0], devices[0]),
        },
    )
    del hosts, devices
    # Stores take pages of the first half of the pool, loads bring those of the second, so that both
    # can go on at once.
    with rig.pools(rig.latent(args.element, args.layers), 2 * num_pages) as pools:
        rng = np.random.default_rng(2)
        order = rig.in_runs(rng, num_pages, args.host_run)
        slots = rig.device_slots(rng, num_pages, args.run)
        (store, _), (store_second, load_second) = (
            rig.plans(
                pools.geometry,
                order + half * num_pages,
                slots + half * num_pages * rig.PAGE_SIZE,
            )
            for half in range(2)
        )
        pools.target.copy_(pools.source)
        second = pools.target[:, num_pages * rig.PAGE_SIZE :]
        for mover in args.mover:
            options = {"mover": mover, "staging_bytes": args.staging_mib << 20}
            with rig.engine(pools, pools.target, **options) as engine:
                engine.store(store_second).wait()
                second.fill_(rig.POISON)
                loaded = engine.load(load_second)
                loaded.wait()
                torch.cuda.synchronize()
                assert torch.equal(pools.source, pools.target), "bytes differ"
                assert loaded.verified_pages == num_pages, loaded.bad_pages
                yield (
                    mover,
                    {
                        "h2d": partial(rig.carry, engine, load_second),
                        "d2h": partial(rig.carry, engine, store),
                    },
                )


def _copy(target: Any, source: Any) -> None:
    target.copy_(source, non_blocking=True)


def _compute(name: str) -> Compute:
    import torch

    side = _SIDES[name]
    matrix = torch.randn(side, side, dtype=torch.bfloat16, device=rig.DEVICE)
    if name == "gemm":
        other, product = torch.randn_like(matrix), torch.empty_like(matrix)
        iterate = partial(torch.mm, matrix, other, out=product)
    else:
        vector = torch.randn(side, dtype=torch.bfloat16, device=rig.DEVICE)
        iterate = partial(torch.mv, matrix, vector, out=torch.empty_like(vector))
    once = Compute(name, iterate, 1, _MARK_MS)
    marks = _run({}, 0, once, 20)[1]
    alone_ms = statistics.median(inside(marks, marks[4], marks[-1]))
    iterations = max(1, math.ceil(_MARK_MS / alone_ms))
    print(f"{name}: {alone_ms:.3f} ms alone", flush=True)
    return once._replace(iterations=iterations, step_ms=iterations * alone_ms)


def _alone(works: Works, num_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    ((direction, _),) = works.items()
    rates = []
    for _ in range(args.rounds):
        spans, _ = _run(works, args.transfers, None)
        rates.append(rate(spans[direction], num_bytes))
    return {"gb_per_sec": round(statistics.median(rates), 2)}


def _beside(
    compute: Compute, works: Works, num_bytes: int, args: argparse.Namespace
) -> dict[str, Any]:
    ((direction, _),) = works.items()
    slowest_ms = args.transfers * num_bytes / (_SLOWEST_SHARE * 50e9) * 1e3
    steps = math.ceil(slowest_ms / compute.step_ms) + 10
    rates, losses = [], []
    for _ in range(args.rounds):
        for _ in range(_TRIES):
            # Alone before and after, so that a GPU that slows down is none of the transfers' doing.
            before = _run({}, 0, compute, steps)[1]
            spans, marks = _run(works, args.transfers, compute, steps)
            alone = [before, _run({}, 0, compute, steps)[1]]
            loss = lost(alone, marks, spans[direction])
            if loss is not None:
                break
            steps *= 2
        else:
            raise RuntimeError(f"{direction} beside {compute.name}: the compute always ended first")
        losses.append(loss)
        rates.append(rate(spans[direction], num_bytes))
    moved = args.transfers * num_bytes
    middle = [statistics.median(values) for values in zip(*losses, strict=True)]
    return {
        "gb_per_sec": round(statistics.median(rates), 2),
        "alone_ms": round(middle[0] / compute.iterations, 4),
        "beside_ms": round(middle[1] / compute.iterations, 4),
        "slowdown": round(statistics.median(loss.slowdown for loss in losses), 4),
        "extra_ms_per_gb": round(
            statistics.median(loss.extra_ms_per_gb(moved) for loss in losses), 3
        ),
    }


def _run(
    works: Works, transfers: int, compute: Compute | None, steps: int = 0
) -> tuple[dict[str, list[Span]], list[float]]:
    """`transfers` of each of `works`, beside `steps` steps of `compute`, on one clock.

    Everything waits behind a gate while the CPU submits; where there is compute the transfers begin
    when some of it is done.

    Returns:
        By direction when each transfer began and ended, and when each step did.
    """
    import torch

    torch.cuda.synchronize()
    gate, busy, *streams = _streams()[: 2 + len(works)]
    opened = rig.timed_event()
    with torch.cuda.stream(gate):
        rig.sleep(_GATE_SECS)
        opened.record()
    started, marks = opened, []
    if compute is not None:
        with torch.cuda.stream(busy):
            busy.wait_event(opened)
            marks.append(_recorded())
            for _ in range(steps):
                for _ in range(compute.iterations):
                    compute.iterate()
                marks.append(_recorded())
        started = marks[_FIRST_MARK]
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in works}
    handles = []
    for stream in streams:
        stream.wait_event(started)
    for _ in range(transfers):
        for (name, work), stream in zip(works.items(), streams, strict=True):
            with torch.cuda.stream(stream):
                begun = _recorded()
                handles.append(work())
                events[name].append((begun, _recorded()))
    for handle in handles:
        if handle is not None:
            handle.wait()
    torch.cuda.synchronize()
    spans = {
        name: [(opened.elapsed_time(begun), opened.elapsed_time(ended)) for begun, ended in each]
        for name, each in events.items()
    }
    return spans, [opened.elapsed_time(mark) for mark in marks]


@functools.cache
def _streams() -> list[Any]:
    """The same ones in every run: a library makes its workspace anew for each stream it meets."""
    import torch

    return [torch.cuda.Stream() for _ in range(4)]  # type: ignore[no-untyped-call]


def _recorded() -> Any:
    event = rig.timed_event()
    event.record()
    return event


if __name__ == "__main__":
    sys.exit(main())
