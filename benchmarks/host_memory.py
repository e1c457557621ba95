"""How fast host memory is committed: kinds of pages, private or shared, by one thread and several.

    python benchmarks/host_memory.py --mebibytes 2048 --json host_memory.json

Figures are GiB/s, the median and the slowest of several mappings, made in turns. Threads help where
cores are free and the memory is the machine's own: a virtual machine may have to fetch it first.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

from kvferry.errors import BudgetError
from kvferry.memory import HostMapping, HugePages


class _Case(NamedTuple):
    huge_pages: HugePages
    shared: bool
    threads: int


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mebibytes", type=int, default=1024, help="size (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="mappings a figure (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    kinds: tuple[HugePages, ...] = ("never", "transparent", "always")
    cases = [
        _Case(huge_pages, shared, threads)
        for huge_pages in kinds
        for shared in (False, True)
        for threads in sorted({1, min(cores, 16)})
    ]
    seconds: dict[_Case, list[float]] = {case: [] for case in cases}
    got: dict[_Case, str] = {}
    for _ in range(arguments.repeats):
        for case in cases:
            begin = time.perf_counter()
            try:
                with HostMapping(arguments.mebibytes << 20, **case._asdict()) as mapping:
                    seconds[case].append(time.perf_counter() - begin)
                    got[case] = str(mapping.backing)
            except BudgetError as bad:
                got[case] = f"refused: {bad}"
    rows = []
    for case in cases:
        gib = arguments.mebibytes / 1024
        times = seconds[case]
        median = gib / statistics.median(times) if times else None
        slowest = gib / max(times) if times else None
        rows.append({**case._asdict(), "median": median, "slowest": slowest, "got": got[case]})
        figures = f"{median:6.2f} {slowest:6.2f}" if median and slowest else "     -      -"
        where = "shared" if case.shared else "private"
        print(f"{case.huge_pages:12}{where:8}{case.threads:3} threads {figures}  {got[case]}")
    if arguments.json:
        report = {"argv": sys.argv, "mebibytes": arguments.mebibytes, "cores": cores, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
