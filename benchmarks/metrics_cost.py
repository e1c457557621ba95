"""What telling metrics costs a cache, off and on.

    python3 benchmarks/metrics_cost.py --json metrics_cost.json

Nanoseconds per call of `transferred`, the dearest method: of `NullMetrics`, of `NullMetrics` behind
a look at `enabled`, and of `Metrics`. Medians over rounds; an empty loop is taken off.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable

from kvferry.metrics import Metrics, MetricsSink, NullMetrics
from kvferry.types import Direction

_ROUNDS = 15
_CALLS = 20_000


def main() -> int:
    """Print the figures; with --json write them as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    empty = _nanoseconds(lambda: None)
    figures = {
        "off_ns": _nanoseconds(_telling(NullMetrics())) - empty,
        "off_behind_a_look_ns": _nanoseconds(_looking(NullMetrics())) - empty,
        "on_ns": _nanoseconds(_telling(Metrics())) - empty,
    }
    for name, value in figures.items():
        print(f"{name:<22} {value:8.1f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _telling(sink: MetricsSink) -> Callable[[], None]:
    def tell() -> None:
        sink.transferred(
            Direction.LOAD, "flat", pages=8, num_bytes=1 << 20, tokens=512, seconds=0.01, ok=True
        )

    return tell


def _looking(sink: MetricsSink) -> Callable[[], None]:
    tell = _telling(sink)

    def look() -> None:
        if sink.enabled:
            tell()

    return look


def _nanoseconds(call: Callable[[], None]) -> float:
    found = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        found.append((time.perf_counter_ns() - begin) / _CALLS)
    return statistics.median(found)


if __name__ == "__main__":
    raise SystemExit(main())
