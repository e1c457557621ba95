"""How long the runs of host slots stay, and what a call costs, after random traffic at 90 % fill.

    python benchmarks/host_runs.py --json benchmarks/results/host_runs.json

Entries of 1 to 64 pages are stored and evicted, as many as --operations says; then 32 pages are
asked for again and again while that goes on. The same seed gives the same runs. A call's time is
its least in several identical repeats, so that what is left of it is its own.
"""

from __future__ import annotations

import argparse
import enum
import gc
import json
import os
import pathlib
import platform
import random
import sys
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex

from kvferry.memory import SlotRun, SlotRunAllocator

_FILL = 0.9
_MAX_PAGES = 64
_ASKED = 32
_STEPS_BETWEEN_ASKS = 10

_LEGEND = """\
slots     of the pool                          evicted   entry: one at random, whole
pieces    free runs                                      oldest: the oldest, page by page
free run  mean length of a free run                      tail: some last pages of one at random
mean run  of those handed out for 32 pages               page: one page at random
alloc us, free us   mean time of a call        worst us  the slowest of all calls

The target is a mean run of 8 or more under `entry`. Under `page` no allocator can reach it in the
long run: what is taken again at 90 % fill has by then lost about 19 % of its pages, here and there,
and free slots strewn like that lie in runs of 1.24. Which pages are evicted decides there."""


class Evicted(enum.StrEnum):
    """What one eviction frees."""

    ENTRY = "entry"
    """An entry at random, whole."""

    OLDEST = "oldest"
    """The last page of the oldest entry."""

    TAIL = "tail"
    """Some of the last pages, or all, of an entry at random."""

    PAGE = "page"
    """A page at random."""


class Allocator(Protocol):
    """What the traffic needs of an allocator; tests have worse ones than the pool's."""

    @property
    def num_slots(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def allocate(self, num_slots: int, /) -> Sequence[SlotRun] | None: ...

    def free(self, slots: Iterable[SlotRun | SupportsIndex], /) -> None: ...


class Traffic:
    """Entries stored in `allocator` and evicted from it; its fill is 90 %, give or take an entry.

    `call_ns` has the time of every allocate and free, a negative one for a free.
    """

    def __init__(self, allocator: Allocator, evicted: Evicted, seed: int) -> None:
        self._allocator = allocator
        self._evicted = evicted
        self._rng = random.Random(seed)  # noqa: S311
        self._min_free = round(allocator.num_slots * (1 - _FILL))
        # Of each entry what is left, which for `entry` is runs and otherwise slots.
        self._held: list[list[SlotRun | SupportsIndex]] = []
        self._oldest = 0
        self.call_ns = array("q")
        while self._has_room():
            self._store()

    def run(self, operations: int) -> None:
        """Store where there is room, evict where there is none, `operations` times."""
        for _ in range(operations):
            if self._has_room():
                self._store()
            else:
                self._evict()

    def mean_run(self, asks: int) -> float:
        """The mean run, in slots, of those handed out for 32 pages, asked for `asks` times."""
        num_runs = 0
        for _ in range(asks):
            runs = self._allocator.allocate(_ASKED)
            assert runs is not None
            num_runs += len(runs)
            self._allocator.free(runs)
            self.run(_STEPS_BETWEEN_ASKS)
        return asks * _ASKED / num_runs

    def _has_room(self) -> bool:
        return self._allocator.num_free > self._min_free

    def _store(self) -> None:
        num_pages = self._rng.randint(1, _MAX_PAGES)
        begun = time.perf_counter_ns()
        runs = self._allocator.allocate(num_pages)
        self.call_ns.append(time.perf_counter_ns() - begun)
        assert runs is not None
        if self._evicted is Evicted.ENTRY:
            self._held.append(list(runs))
            return
        slots = [slot for run in runs for slot in run.slots]
        if self._evicted is Evicted.PAGE:
            self._held.extend([slot] for slot in slots)
        else:
            self._held.append(list(slots))

    def _evict(self) -> None:
        freed = self._take_evicted()
        begun = time.perf_counter_ns()
        self._allocator.free(freed)
        self.call_ns.append(begun - time.perf_counter_ns())

    def _take_evicted(self) -> list[SlotRun | SupportsIndex]:
        held = self._held
        if self._evicted is Evicted.OLDEST:
            # Entries that are gone stay in the list as empty ones, so that none has to move up.
            oldest = held[self._oldest]
            slot = oldest.pop()
            self._oldest += not oldest
            return [slot]
        at = self._rng.randrange(len(held))
        held[at], held[-1] = held[-1], held[at]
        entry = held.pop()
        kept = self._rng.randrange(len(entry)) if self._evicted is Evicted.TAIL else 0
        if kept:
            held.append(entry[:kept])
        return entry[kept:]


class _Row(NamedTuple):
    num_slots: int
    evicted: str
    num_free_runs: int
    mean_free_run: float
    mean_run: float
    alloc_us: float
    free_us: float
    worst_us: float


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--slots",
        type=int,
        nargs="+",
        metavar="N",
        default=[20_000, 200_000, 1_000_000],
        help="sizes of the pool (%(default)s)",
    )
    parser.add_argument(
        "--evicted",
        nargs="+",
        choices=[str(kind) for kind in Evicted],
        default=[str(kind) for kind in Evicted],
        help="what one eviction frees (all)",
    )
    parser.add_argument(
        "--operations",
        type=int,
        metavar="N",
        default=1_000_000,
        help="stores and evictions before anything is measured but time (%(default)s)",
    )
    parser.add_argument(
        "--asks",
        type=int,
        metavar="N",
        default=2000,
        help="requests for 32 pages that a mean run is of (%(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=3,
        help="identical repeats of which a call's time is the least (%(default)s)",
    )
    parser.add_argument("--seed", type=int, metavar="N", default=1, help="(%(default)s)")
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the figures to this file too"
    )
    args = parser.parse_args()

    print(
        f"{_machine()['cpu']}, Python {platform.python_version()}; {args.operations} operations "
        f"at {_FILL:.0%} fill, then {args.asks} requests\n\n{_LEGEND}\n"
    )
    print(
        f"{'slots':>9} {'evicted':<7} {'pieces':>7} {'free run':>8} {'mean run':>8} "
        f"{'alloc us':>8} {'free us':>7} {'worst us':>8}"
    )
    rows = []
    for evicted in map(Evicted, args.evicted):
        for num_slots in args.slots:
            row = _measure(num_slots, evicted, args.operations, args.asks, args.repeats, args.seed)
            rows.append(row._asdict())
            print(
                f"{row.num_slots:>9} {row.evicted:<7} {row.num_free_runs:>7} "
                f"{row.mean_free_run:>8.2f} {row.mean_run:>8.2f} {row.alloc_us:>8.2f} "
                f"{row.free_us:>7.2f} {row.worst_us:>8.1f}",
                flush=True,
            )
    if args.json:
        told = {"command": " ".join(sys.argv), "machine": _machine(), "rows": rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def _measure(
    num_slots: int, evicted: Evicted, operations: int, asks: int, repeats: int, seed: int
) -> _Row:
    allocator, traffic = _run(num_slots, evicted, operations, seed)
    call_ns = traffic.call_ns
    for _ in range(repeats - 1):
        again = _run(num_slots, evicted, operations, seed)[1].call_ns
        call_ns = array("q", map(_least, call_ns, again))
    allocator.check_integrity()
    allocs = [ns for ns in call_ns if ns >= 0]
    frees = [-ns for ns in call_ns if ns < 0]
    return _Row(
        num_slots=num_slots,
        evicted=str(evicted),
        num_free_runs=allocator.num_free_runs,
        mean_free_run=round(allocator.num_free / allocator.num_free_runs, 2),
        mean_run=round(traffic.mean_run(asks), 2),
        alloc_us=round(sum(allocs) / len(allocs) / 1e3, 2),
        free_us=round(sum(frees) / len(frees) / 1e3, 2),
        worst_us=round(max(*allocs, *frees) / 1e3, 1),
    )


def _run(
    num_slots: int, evicted: Evicted, operations: int, seed: int
) -> tuple[SlotRunAllocator, Traffic]:
    allocator = SlotRunAllocator(num_slots)
    traffic = Traffic(allocator, evicted, seed)
    del traffic.call_ns[:]
    # The collector would walk the entries of this benchmark, in the middle of a call.
    gc.collect()
    gc.disable()
    traffic.run(operations)
    gc.enable()
    return allocator, traffic


def _least(one: int, other: int) -> int:
    return min(one, other, key=abs)


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
