"""How long a caller waits, on the CPU's clock: one page, the first layer, the submit, the digests.

    python3 benchmarks/gpu/latency.py --json benchmarks/results/latency.json

    one page      64 tokens x 61 layers x 576 B, from `load` until the handle is done, against one
                  pinned cuMemcpyHtoDAsync of the same bytes with a synchronise, in turns
    first layer   12,288 tokens x 61 layers x 656 B, from `load` until the stream that waits for
                  layer 0 goes on, against the bytes of one layer at M
    submit        `load` itself, with a plan that was just made, in one run of host slots and in
                  many: what each further copy call costs
    digests       what making and checking them adds to the GPU's time of a transfer

Microseconds are medians; pages are of other memory each time, more than a GPU's L2 holds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import rig

if TYPE_CHECKING:
    from kvferry import TransferEngine, TransferPlan

_LAYERS = 61
_MOVERS = ("best", "direct", "staged")
# 64 pages of 2.25 MB.
_POOL_PAGES = 64


def main() -> int:
    """Print the figures; with --json write them as well."""
    args = arguments().parse_args()
    link = rig.begin()
    rows = []
    for row in (*_one_page(args, link), *_large(args, link)):
        rows.append(row)
        print(
            ", ".join(
                f"{name.replace('_', ' ')} {value}" if name != "case" else str(value)
                for name, value in row.items()
            ),
            flush=True,
        )
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--mover", nargs="+", choices=_MOVERS, default=list(_MOVERS), help="best: as it chooses")
    add("--page-element", type=int, default=576, help="element size of the one page, bytes")
    add("--element", type=int, default=656, help="element size of the large load, bytes")
    add("--tokens", type=int, default=12288, help="of the large load")
    add(
        "--host-run",
        type=int,
        nargs="+",
        default=[192, 96, 64, 48, 24, 8, 4, 1],
        help="pages in neighbouring host slots, for the cost of a further copy",
    )
    add("--repeats", type=int, default=40)
    return parser


def further_copy_us(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """What each copy call adds to a submit, from loads in as many steps but with more calls.

    Where many pages are pieces of one call there are no further calls, so those loads do not
    count. None where no two loads are alike.
    """
    found: tuple[int, float] | None = None
    of_runs = [row for row in rows if not row["pieces"]]
    for steps in {row["steps"] for row in of_runs}:
        alike = sorted((row["copies"], row["us"]) for row in of_runs if row["steps"] == steps)
        (fewest, least), (most, longest) = alike[0], alike[-1]
        if most > fewest and (found is None or most - fewest > found[0]):
            found = most - fewest, (longest - least) / (most - fewest)
    return None if found is None else found[1]


# --------------------------------------------------------------------------------------- one page


def _one_page(args: argparse.Namespace, link: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    import torch

    geometry = rig.latent(args.page_element, _LAYERS)
    rng = np.random.default_rng(2)
    with rig.pools(geometry, _POOL_PAGES) as pools:
        slots = rig.device_slots(rng, _POOL_PAGES, 1)
        order = rng.permutation(_POOL_PAGES)
        copy = _memcpy(pools, geometry.page_bytes)
        with rig.engine(pools, pools.source) as writer:
            for mover in args.mover:
                options = {} if mover == "best" else {"mover": mover}
                with rig.engine(pools, pools.target, **options) as engine:
                    rig.check_round_trip(pools, writer, engine, rig.plans(geometry, order, slots))
                    times: dict[str, list[float]] = {"done": [], "usable": [], "memcpy": []}
                    carried = ""
                    count = 5 * args.repeats
                    for repeat in range(count + 5):
                        page = slice(repeat % _POOL_PAGES, repeat % _POOL_PAGES + 1)
                        plans = [rig.plans(geometry, order[page], slots[page])[1] for _ in range(2)]
                        torch.cuda.synchronize()
                        times["memcpy"].append(_clock(partial(copy, repeat % _POOL_PAGES)))
                        times["done"].append(_clock(partial(_done, engine, plans[0])))
                        times["usable"].append(_clock(partial(_usable, engine, plans[1])))
                        handle = engine.load(plans[0])
                        handle.wait()
                        assert handle.verified_pages == 1, handle.bad_pages
                        carried = handle.path
                us = {name: statistics.median(each[5:]) * 1e6 for name, each in times.items()}
                yield {
                    "case": "one_page",
                    "mover": mover,
                    "path": carried,
                    "num_bytes": geometry.page_bytes,
                    "us": round(us["done"], 1),
                    "p95_us": round(sorted(times["done"][5:])[-1 - count // 20] * 1e6, 1),
                    "usable_us": round(us["usable"], 1),
                    "memcpy_us": round(us["memcpy"], 1),
                    "over_memcpy": round(us["done"] / us["memcpy"], 3),
                    "link_us": round(geometry.page_bytes / link["h2d"] / 1e3, 1),
                }


def _memcpy(pools: rig.Pools, num_bytes: int) -> Callable[[int], None]:
    """A pinned copy of `num_bytes` to the device, and the wait for it; of piece 0, 1, …"""
    import torch

    from kvferry.kernels.jit import Driver

    bindings = Driver.open().bindings
    host = torch.empty(pools.num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=rig.DEVICE)
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    handle, sources, targets = stream.cuda_stream, host.data_ptr(), device.data_ptr()

    def copy(piece: int) -> None:
        offset = piece * num_bytes
        statuses = (
            bindings.cuMemcpyHtoDAsync(targets + offset, sources + offset, num_bytes, handle)[0],
            bindings.cuStreamSynchronize(handle)[0],
        )
        assert not any(statuses), statuses
        # Here for the pieces to outlive the calls.
        assert host.data_ptr() == sources
        assert device.data_ptr() == targets

    return copy


def _clock(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _done(engine: TransferEngine, plan: TransferPlan) -> None:
    engine.load(plan).wait()


def _usable(engine: TransferEngine, plan: TransferPlan, layer: int | None = None) -> None:
    """Until the caller's stream has got past its wait for `layer`, or for all of them."""
    import torch

    handle = engine.load(plan)
    if layer is None:
        handle.wait_all()
    else:
        handle.wait_layer(layer)
    torch.cuda.current_stream().synchronize()


# --------------------------------------------------------------------------------- the large load


def _large(args: argparse.Namespace, link: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    geometry = rig.latent(args.element, _LAYERS)
    num_pages = args.tokens // rig.PAGE_SIZE
    rng = np.random.default_rng(2)
    slots = rig.device_slots(rng, num_pages, 1)
    order = rig.in_runs(rng, num_pages, 8)
    with rig.pools(geometry, num_pages) as pools:
        for mover in args.mover:
            options = {} if mover == "best" else {"mover": mover}
            with (
                rig.engine(pools, pools.source, **options) as writer,
                rig.engine(pools, pools.target, **options) as engine,
            ):
                rig.check_round_trip(pools, writer, engine, rig.plans(geometry, order, slots))
                yield {
                    "case": "first_layer",
                    "mover": mover,
                    **_first_layer(engine, pools, (order, slots), args.repeats, link),
                }
                if mover != "best":
                    yield from _submits(engine, mover, pools, rng, args)
        for mover in args.mover:
            if mover != "best":
                yield from _digests(pools, mover, rig.plans(geometry, order, slots), args.repeats)


def _first_layer(
    engine: TransferEngine,
    pools: rig.Pools,
    pages: tuple[Any, Any],
    repeats: int,
    link: Mapping[str, float],
) -> dict[str, Any]:
    import torch

    times, on_gpu = [], []
    route = engine.route(rig.plans(pools.geometry, *pages)[1])
    assert route is not None
    for _ in range(repeats + 3):
        # A plan of its own each time, as in serving: what `load` works out of it counts.
        plan = rig.plans(pools.geometry, *pages)[1]
        torch.cuda.synchronize()
        times.append(_clock(partial(_usable, engine, plan, 0)))
        torch.cuda.synchronize()
        started, ended = rig.timed_event(), rig.timed_event()
        rig.sleep(0.005)
        started.record()
        handle = engine.load(plan)
        handle.wait_layer(0)
        ended.record()
        handle.wait()
        assert handle.verified_pages == pools.num_pages, handle.bad_pages
        on_gpu.append(started.elapsed_time(ended) * 1e3)
    layer_us = pools.num_bytes / _LAYERS / link["h2d"] / 1e3
    return {
        "layers_per_step": list(route.sizes),
        "us": round(statistics.median(times[3:]) * 1e6, 1),
        "gpu_us": round(statistics.median(on_gpu[3:]), 1),
        "layer_us": round(layer_us, 1),
        "most_us": round(1.5 * layer_us + 150, 1),
    }


def _submits(
    engine: TransferEngine,
    mover: str,
    pools: rig.Pools,
    rng: np.random.Generator,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    num_pages = pools.num_pages
    slots = rig.device_slots(rng, num_pages, 1)
    cases = {
        run: rig.in_runs(rng, num_pages, run)
        for run in dict.fromkeys(min(run, num_pages) for run in args.host_run)
    }
    times: dict[int, list[float]] = {run: [] for run in cases}
    told: dict[int, dict[str, Any]] = {}
    for repeat in range(args.repeats + 3):
        for run, order in cases.items():
            plan = rig.plans(pools.geometry, order, slots)[1]
            if repeat == 0:
                route = engine.route(plan)
                assert route is not None
                copies, pieces = _count_copies(engine, plan)
                told[run] = {
                    "copies": copies,
                    "pieces": pieces,
                    "steps": len(route.sizes),
                    "num_runs": len(plan.host_runs),
                }
                continue
            began = time.perf_counter()
            handle = engine.load(plan)
            times[run].append((time.perf_counter() - began) * 1e6)
            handle.wait()
            assert handle.verified_pages == num_pages, handle.bad_pages
    rows = [
        {
            "case": "submit",
            "mover": mover,
            "host_run": run,
            **told[run],
            "us": round(statistics.median(times[run][2:]), 1),
        }
        for run in cases
    ]
    yield from rows
    further = further_copy_us(rows)
    if further is not None:
        yield {"case": "further_copy", "mover": mover, "us": round(further, 2)}


def _count_copies(engine: TransferEngine, plan: TransferPlan) -> tuple[int, int]:
    """How many calls of the copy engine a load makes, and how many pieces some of them have."""
    from kvferry.kernels.jit import PieceCopy, RowCopy

    calls, pieces = 0, 0
    copy_rows, copy_pieces = RowCopy.submit, PieceCopy.submit

    def counted_rows(self: RowCopy, *args: Any, **kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        copy_rows(self, *args, **kwargs)

    def counted_pieces(
        self: PieceCopy, stream: Any, targets: Any, sources: Any, sizes: Any
    ) -> None:
        nonlocal calls, pieces
        calls, pieces = calls + 1, pieces + len(sizes)
        copy_pieces(self, stream, targets, sources, sizes)

    # Compiled code makes the same calls, which nobody can count.
    staged: Any = getattr(engine, "_carrier")._staged  # noqa: B009
    by_python = mock.patch.object(staged, "_compiled", None) if staged else contextlib.nullcontext()
    with (
        mock.patch.object(RowCopy, "submit", counted_rows),
        mock.patch.object(PieceCopy, "submit", counted_pieces),
        by_python,
    ):
        engine.load(plan).wait()
    return calls, pieces


def _digests(
    pools: rig.Pools, mover: str, plans: tuple[TransferPlan, TransferPlan], repeats: int
) -> Iterator[dict[str, Any]]:
    """In turns, with digests and without."""
    for direction in ("h2d", "d2h"):
        tensor = pools.target if direction == "h2d" else pools.source
        with (
            rig.engine(pools, tensor, mover=mover) as with_digests,
            rig.engine(pools, tensor, mover=mover, verify=False) as without,
        ):
            plan = plans[direction == "h2d"]
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(5):
                # With them last: loads that follow are checked.
                for on, engine in ((False, without), (True, with_digests)):
                    timing = rig.gpu_timing(partial(rig.carry, engine, plan), max(3, repeats // 5))
                    seconds[on].append(timing.seconds)
            checked = rig.carry(with_digests, plan)
            checked.wait()
            assert checked.verified_pages == pools.num_pages, checked.bad_pages
            took = {on: statistics.median(each) for on, each in seconds.items()}
            yield {
                "case": "digests",
                "mover": mover,
                "direction": direction,
                "on": rig.gb_per_sec(pools.num_bytes, took[True]),
                "off": rig.gb_per_sec(pools.num_bytes, took[False]),
                "cost": round(took[True] / took[False] - 1, 4),
            }


if __name__ == "__main__":
    sys.exit(main())
