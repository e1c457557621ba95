"""The tables of docs/performance.md, from what `make gpu` wrote.

    python3 benchmarks/table.py benchmarks/results/gpu-nvidia-h200.json
    python3 benchmarks/table.py benchmarks/results/gpu-nvidia-h200.json --write docs/performance.md

It prints them, or with --write puts them between the two marks of that file. No table is written by
hand, so that a figure always has its machine, its command and its M beside it.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"

_TORCH = "torch index+copy"
_NOTHING = "-"


class Target(NamedTuple):
    """The least that a transfer should reach, as shares of M; None: there is no target."""

    h2d: float | None
    d2h: float | None


def main() -> int:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="a JSON file that make gpu wrote")
    parser.add_argument("--write", type=pathlib.Path, help="the document to put them into")
    args = parser.parse_args()
    text = "\n".join(tables(json.loads(args.results.read_text())))
    if args.write is None:
        print(text)
        return 0
    document = args.write.read_text()
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        parser.error(f"{args.write} has no {BEGIN} before {END}")
    args.write.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return 0


def tables(told: Mapping[str, Any]) -> Iterator[str]:
    """Markdown, line by line."""
    machine, steps = told["machine"], told["steps"]
    yield (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['packages']['torch']}, "
        f"Python {machine['python']}, {machine['date'][:10]}, commit "
        f"{(machine['commit'] or 'unknown')[:12]}."
    )
    direct = [
        step["result"]
        for name, step in steps.items()
        if name.startswith("direct_") and step["result"]
    ]
    for result in direct:
        yield ""
        yield from _direct(result)
    jit = steps.get("jit", {}).get("result")
    if jit:
        yield ""
        yield from _jit(jit)


def target(host_layout: str, element_size: int, run: int) -> Target:
    """What the direct mover should reach with host pages of 64 tokens."""
    if host_layout == "layer_first" and run >= 16:
        if element_size * run >= 4096:
            return Target(0.91, 0.91)
        return Target(0.88, 0.88) if element_size * run >= 1024 else Target(None, None)
    if host_layout == "layer_first":
        known = {576: Target(0.87, 0.87), 656: Target(0.81, 0.81), 132: Target(0.50, None)}
        least = Target(0.92, 0.92) if element_size >= 1152 else Target(None, None)
        return known.get(element_size, least)
    if host_layout == "token_major":
        known = {576: Target(0.87, 0.87), 656: Target(0.82, 0.82), 1152: Target(0.90, 0.90)}
        return known.get(element_size, Target(None, None))
    return Target(None, None)


def _direct(result: Mapping[str, Any]) -> Iterator[str]:
    link = result["link"]
    yield (
        f"`{_command(result)}`; M is {link['h2d']:.1f} GB/s H2D and {link['d2h']:.1f} D2H in this "
        f"run. Cells are H2D / D2H as shares of M."
    )
    yield ""
    yield "| host pool | element | run | path | GB/s | of M | target | `grouped` | torch |"
    yield "|---|---|---|---|---|---|---|---|---|"
    cases: dict[tuple[str, int, int], dict[str, Mapping[str, Any]]] = {}
    for row in result["rows"]:
        key = (row["host_layout"], row["element_size"], row["device_run"])
        cases.setdefault(key, {}).setdefault(row["what"], row)
    for (layout, size, run), found in cases.items():
        best = next((what for what in found if what not in (_TORCH, "grouped")), None)
        if best is None:
            continue
        row, wanted = found[best], target(layout, size, run)
        yield (
            f"| {layout} | {size:,} | {run} | {best} | {row['h2d']:.1f} / {row['d2h']:.1f} | "
            f"{_of_m(row, wanted)} | {_wanted(wanted)} | {_of_m(found.get('grouped'))} | "
            f"{_of_m(found.get(_TORCH))} |"
        )


def _command(result: Mapping[str, Any]) -> str:
    """Without the file that `make gpu` has it write to, which is gone."""
    return re.sub(r" --json \S+", "", str(result["command"]))


def _of_m(row: Mapping[str, Any] | None, wanted: Target | None = None) -> str:
    if row is None:
        return _NOTHING
    cells = []
    for name in ("h2d", "d2h"):
        share = float(row[f"{name}_over_m"])
        least = None if wanted is None else getattr(wanted, name)
        # What misses its target is told, not hidden.
        cells.append(f"{share:.2f}" if least is None or share >= least else f"**{share:.2f}**")
    return " / ".join(cells)


def _wanted(wanted: Target) -> str:
    return " / ".join(_NOTHING if share is None else f"{share:.2f}" for share in wanted)


def _jit(told: Mapping[str, Any]) -> Iterator[str]:
    rows = (
        ("all kernels, compiled into an empty folder", "cold_all_kernels_secs", "s", ""),
        ("`flat` and `realign` alone", "cold_flat_realign_secs", "s", "0.6"),
        ("all kernels, from the folder", "warm_all_kernels_ms", "ms", "10"),
        ("a raw `cuLaunchKernel`", "raw_launch_us", "µs", ""),
        ("a prepared launch, over a raw one", "prepared_over_raw", "", "1.15"),
        ("submitting a load of 61 layers", "submit_61_layers_us", "µs", "250"),
        ("making its plan", "plan_us", "µs", ""),
    )
    yield f"`{_command(told)}`"
    yield ""
    yield "| what | found | at most |"
    yield "|---|---|---|"
    for what, name, unit, most in rows:
        found = f"{told[name]} {unit}".strip()
        yield f"| {what} | {found} | {f'{most} {unit}'.strip() if most else _NOTHING} |"


if __name__ == "__main__":
    sys.exit(main())
