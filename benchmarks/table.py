"""The tables of docs/performance.md, from what `make gpu` wrote.

    python3 benchmarks/table.py benchmarks/results/gpu-nvidia-h200.json
    python3 benchmarks/table.py benchmarks/results/gpu-nvidia-h200.json --write docs/performance.md

It prints them, or with --write puts them between the two marks of that file. No table is written by
hand, so that a figure always has its machine, its command and its M beside it. Of several files the
steps are taken together, the later file's where both have one.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).parent / "gpu"))
from results import BASELINES, BATCH, GROUPED, NOTHING, TORCH, Row, results_of, together
from targets import JIT, Cell, Target, cells_of, target

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def main() -> int:
    """Print the tables, or write them into a document."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "results", type=pathlib.Path, nargs="+", help="JSON files that make gpu wrote"
    )
    parser.add_argument("--write", type=pathlib.Path, help="the document to put them into")
    args = parser.parse_args()
    text = "\n".join(tables(together([json.loads(file.read_text()) for file in args.results])))
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
    machine = told["machine"]
    results = results_of(told)
    yield (
        f"{machine['gpu']}, driver {machine['driver']}, torch {machine['packages']['torch']}, "
        f"Python {machine['python']}, {machine['date'][:10]}, commit "
        f"{(machine['commit'] or 'unknown')[:12]}."
    )
    yield ""
    yield from _proofs(told["steps"])
    yield from _targets(results)
    for name, result in results.items():
        if name.startswith(("direct_", "staged_")):
            yield ""
            yield from _throughput(result)
    for name, render in (("beside", _beside), ("latency", _latency), ("cache_bench", _cache),
                         ("engine", _engine), ("first_token", _first_token), ("jit", _jit),
                         ("long_contexts", _long_contexts)):  # fmt: skip
        if name in results:
            yield ""
            yield f"`{_command(results[name])}`"
            yield ""
            yield from render(results[name])


# ---------------------------------------------------------------------------------------- proofs

_PROOFS = {
    "pytest": "tests on the GPU",
    "cache": "tests of the cache on the GPU",
    "prefix_cache": "tests of `PrefixCache` on the GPU",
    "selftest": "`kvferry selftest`",
    "memcheck": "compute-sanitizer, memcheck",
    "racecheck": "compute-sanitizer, racecheck",
    "initcheck": "compute-sanitizer, initcheck",
    "long_write_backs": "200 write-backs of 2,048 pages through staging for 7",
    "long_contexts": "long contexts through a host pool that cannot hold them",
}
_TOLD = re.compile(r"\d+ passed[^=\n]*|\d+ transfers on [^\n]*|\d+ hazards displayed|\d+ errors?\b")


def _proofs(steps: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What was shown to be right, before what was shown to be fast."""
    shown = [(name, steps[name]) for name in _PROOFS if name in steps]
    if not shown:
        return
    yield "| step | status | it says | seconds |"
    yield "|---|---|---|---|"
    for name, step in shown:
        says = "; ".join(_TOLD.findall(step.get("output") or "")) or "-"
        status = _bold(step["status"], step["status"] != "passed")
        yield f"| {_PROOFS[name]} | {status} | {says} | {step['seconds']:.0f} |"
    yield ""


# --------------------------------------------------------------------------------------- targets


def _targets(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """One row for each target that there are figures for: the cell that is worst of all."""
    worst: dict[str, Cell] = {}
    counts: dict[str, int] = {}
    for cell in cells_of(results):
        counts[cell.target] = counts.get(cell.target, 0) + 1
        if cell.target not in worst or cell.difference < worst[cell.target].difference:
            worst[cell.target] = cell
    yield (
        "Every target that was measured: the cell that is worst of all, and how far it is on the "
        "good side (+) or short of it (-). **Bold** is missed."
    )
    yield ""
    yield "| target | wanted | found, at worst | where | of cells | difference | met |"
    yield "|---|---|---|---|---|---|---|"
    for name, cell in worst.items():
        met = cell.difference >= 0
        sign = "≥" if cell.at_least else "≤"
        found, away = _figure(cell.found, cell.unit), _figure(cell.difference, cell.unit, "+")
        yield (
            f"| {name} | {sign} {_figure(cell.wanted, cell.unit)} | {_bold(found, not met)} | "
            f"{cell.case} | {counts[name]} | {_bold(away, not met)} | {_bold(_yes(met), not met)} |"
        )


# ------------------------------------------------------------------------------- tables of figures


def _throughput(result: Mapping[str, Any]) -> Iterator[str]:
    link = result["link"]
    yield (
        f"`{_command(result)}`; M is {link['h2d']:.1f} GB/s H2D and {link['d2h']:.1f} D2H in this "
        f"run. Cells are H2D / D2H as shares of M."
    )
    yield ""
    yield (
        "| host pool | host run | element | run | path | GB/s | of M | target | `grouped` | torch "
        "| batch |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    batches: dict[tuple[Any, ...], Row] = {}
    for row in result["rows"]:
        page = (row["host_layout"], row.get("host_run", NOTHING), row["element_size"])
        if row["what"] == BATCH:
            batches[page] = row
            continue
        # `best` may take the same path as a mover that was asked for.
        what = row["what"] if row["what"] in BASELINES else f"{row.get('asked')} {row['what']}"
        cases.setdefault((*page, row["device_run"]), {}).setdefault(what, row)
    for case, found in cases.items():
        layout, host_run, size, run = case
        for what, row in found.items():
            if what in BASELINES:
                continue
            best = "chosen: " if row.get("asked") == "best" else ""
            exposed = ", with the CPU's time" if row.get("num_exposed") else ""
            wanted = target(row)[1]
            yield (
                f"| {layout} | {host_run} | {size:,} | {run} | {best}{row['what']}{exposed} | "
                f"{row['h2d']:.1f} / {row['d2h']:.1f} | {_of_m(row, wanted)} | {_wanted(wanted)} | "
                f"{_of_m(found.get(GROUPED))} | {_of_m(found.get(TORCH))} | "
                f"{_of_m(batches.get(case[:3]))} |"
            )


def _beside(result: Mapping[str, Any]) -> Iterator[str]:
    link = result["link"]
    yield (
        f"M is {link['h2d']:.1f} GB/s H2D and {link['d2h']:.1f} D2H in this run; `memcpy` are "
        f"plain pinned copies of as many bytes, beside the same compute."
    )
    yield ""
    yield (
        "| mover | beside | direction | GB/s | of M | of memcpy | compute alone, beside | slower "
        "| lost |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        cost = (
            f"{row['alone_ms']:.3f}, {row['beside_ms']:.3f} ms | {_figure(row['slowdown'], '%')} | "
            f"{row['extra_ms_per_gb']:.2f} ms/GB"
            if "slowdown" in row
            else " | ".join([NOTHING] * 3)
        )
        yield (
            f"| {row['mover']} | {row['compute'].replace('none', NOTHING)} | {row['direction']} | "
            f"{row['gb_per_sec']:.1f} | {_share(row, 'over_m')} | {_share(row, 'over_memcpy')} | "
            f"{cost} |"
        )


def _latency(result: Mapping[str, Any]) -> Iterator[str]:
    told: Mapping[str, Callable[[Row], str]] = {
        "one_page": lambda row: (
            f"{row['path']}; usable after {row['usable_us']} µs, 95 % after {row['p95_us']}; one "
            f"memcpy {row['memcpy_us']} µs: {row['over_memcpy']:.2f} times that"
        ),
        "first_layer": lambda row: (
            f"{row['gpu_us']} µs of the GPU; one layer takes {row['layer_us']} µs at M; layers a "
            f"step: {', '.join(map(str, row['layers_per_step']))}"
        ),
        "submit": lambda row: (
            f"host runs: {row['num_runs']}, copy calls: {row['copies']}, pieces of them: "
            f"{row['pieces']}, steps: {row['steps']}"
        ),
        "digests": lambda row: (
            f"{row['direction'].upper()}: {row['on']:.1f} GB/s with, {row['off']:.1f} without: "
            f"{_figure(row['cost'], '%')} longer"
        ),
        "further_copy": lambda _: "",
    }  # fmt: skip
    yield "| what | mover | µs | |"
    yield "|---|---|---|---|"
    for row in result["rows"]:
        what = row["case"].replace("_", " ")
        yield f"| {what} | {row['mover']} | {row.get('us', NOTHING)} | {told[row['case']](row)} |"


def _cache(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| what | | ms for a caller | GB/s | of M | |"
    yield "|---|---|---|---|---|---|"
    for row in result["rows"]:
        case, more = row["case"], []
        if "path" in row:
            more.append(row["path"])
        if "over_engine" in row:
            more.append(f"{row['over_engine']:.2f} of the engine alone")
        if "workers" in row:
            more.append(f"{row['workers']} threads")
        if "us" in row:
            more.append(f"{row['us']} µs")
        if "ms_per_sec" in row:
            more.append(f"{row['ms_per_sec']} ms of CPU a second")
        if "cost" in row:
            more.append(
                f"{row['on']:.1f} GB/s timed, {row['off']:.1f} not; a call takes "
                f"{row['call_us']} µs more"
            )
        if "skipped" in row:
            more.append(f"**skipped**: {row['skipped']}")
        if row.get("num_exposed"):
            more.append("with the CPU's time")
        rate = f"{row['gb_per_sec']:.1f}" if "gb_per_sec" in row else NOTHING
        yield (
            f"| {case} | {row['what']} | {row.get('ms', NOTHING)} | {rate} | "
            f"{_share(row, 'over_m')} | {'; '.join(more)} |"
        )


def _engine(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| what | | found | of the same without a cache | |"
    yield "|---|---|---|---|---|"
    rows = result["rows"]
    alone = next((row["ms"] for row in rows if row["what"] == "computed"), None)
    for row in rows:
        case, what = row["case"].replace("_", " "), row["what"]
        if "skipped" in row:
            yield f"| {case} | {what} | {NOTHING} | {NOTHING} | **skipped**: {row['skipped']} |"
        elif row["case"] == "repeats":
            told = f"a prompt: {row['prompt']}; a step of all: {row['step']}"
            yield f"| computed twice | {what} | {NOTHING} | {NOTHING} | {told} |"
        elif row["case"] == "answers":
            differing = f"{row['differing']} of {row['of']} answers differ"
            told = f"**{differing}**" if row["differing"] else differing
            yield f"| answers, float32 | {what} | {NOTHING} | {NOTHING} | {told} |"
        elif row["case"] in ("idle", "tokens"):
            more = [f"{row['spread'] * 100:.1f} % between rounds"]
            ratio = row.get("over_off", 1.0)
            if "cost" in row:
                ratio = 1 / (1 + row["cost"])
                low, high = row["low"] * 100, row["high"] * 100
                more.append(f"{row['cost'] * 100:.2f} % slower, {low:.2f} to {high:.2f} with 95 %")
            if "rounds" in row:
                more.append(f"{row['rounds']} rounds in lockstep")
            if "model_mb" in row:
                more.append(f"a model of {row['model_mb']} MB")
            if "in_calls" in row:
                more.append(
                    f"calls of the cache take {row['in_calls'] * 100:.2f} % of its time, "
                    f"{row['us_per_step']:.0f} µs a step"
                )
            if "hit_tokens" in row:
                more.append(f"{row['hit_tokens']:,} tokens of a round were loaded")
            found = f"{row['tokens_per_sec']:,.0f} tokens/s"
            yield f"| {case} | {what} | {found} | {ratio:.3f} | {'; '.join(more)} |"
        else:
            more = [f"{row['tokens']:,} tokens, {row['hit_tokens']:,} of them loaded"]
            if row["mb"]:
                more.append(f"{row['mb']:,} MB")
            yield (
                f"| {case} | {what} | {row['ms']:.1f} ms | {row['ms'] / alone:.3f} | "
                f"{'; '.join(more)} |"
            )


def _first_token(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| model | first token | ms | of computed | |"
    yield "|---|---|---|---|---|"
    computed = {row["case"]: row["ms"] for row in result["rows"] if row["what"] == "computed"}
    for row in result["rows"]:
        case, what = row["case"], row["what"]
        if "skipped" in row:
            yield f"| {case} | {what} | {NOTHING} | {NOTHING} | **skipped**: {row['skipped']} |"
            continue
        more = [
            f"{row['least_ms']:.1f} to {row['most_ms']:.1f} ms",
            f"{row['tokens']:,} tokens, {row['hit_tokens']:,} of them loaded",
        ]
        if "in_memory" in row:
            share = row["in_memory"]
            more.append(
                "whether the system had the files in memory is not known"
                if share == "unknown"
                else f"{share * 100:.0f} % of the files were in the system's memory"
            )
        yield (
            f"| {case} | {what} | {row['ms']:.1f} | {row['ms'] / computed[case]:.3f} | "
            f"{'; '.join(more)} |"
        )


def _jit(told: Mapping[str, Any]) -> Iterator[str]:
    yield "| what | found | at most |"
    yield "|---|---|---|"
    for what, name, unit, most in JIT:
        found = f"{told[name]} {unit}".strip()
        wanted = NOTHING if most is None else f"{most:g} {unit}".strip()
        yield f"| {what} | {_bold(found, most is not None and told[name] > most)} | {wanted} |"


def _long_contexts(result: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "| planes | sequences | host pool | stored, loaded, evicted | layers compared | bad pages "
        "| grown: device, resident |"
    )
    yield "|---|---|---|---|---|---|---|"
    for row in result["rows"]:
        planes = " + ".join(f"{layers} layers of {size} B" for _, layers, size in row["planes"])
        growth = f"{row['device_growth_mib']}, {row['resident_growth_mib']} MiB"
        yield (
            f"| {planes} | {row['sequences']} of {row['tokens']:,} tokens, "
            f"{row['sequence_bytes'] / 1e9:.1f} GB each | {row['pool_bytes'] / 1e9:.1f} GB | "
            f"{row['stores']}, {row['loads']}, {row['evictions']} | {row['compared']} | "
            f"{_bold(str(row['bad_pages']), row['bad_pages'] > 0)} | "
            f"{_bold(growth, not row['flat'])} |"
        )


# ------------------------------------------------------------------------------------------ cells


def _command(result: Mapping[str, Any]) -> str:
    """Without the file that `make gpu` has it write to, which is gone."""
    return re.sub(r" --json \S+", "", str(result["command"]))


def _of_m(row: Row | None, wanted: Target | None = None) -> str:
    if row is None:
        return NOTHING
    cells = []
    for name in ("h2d", "d2h"):
        share = float(row[f"{name}_over_m"])
        least = None if wanted is None else getattr(wanted, name)
        # What misses its target is told, not hidden.
        cells.append(_bold(f"{share:.2f}", least is not None and share < least))
    return " / ".join(cells)


def _wanted(wanted: Target) -> str:
    return " / ".join(NOTHING if share is None else f"{share:.2f}" for share in wanted)


def _share(row: Row, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else NOTHING


def _figure(value: float, unit: str, sign: str = "") -> str:
    if unit == "%":
        return f"{value * 100:{sign}.1f} %"
    digits = 3 if unit in ("M", "of two memcpys") else 0 if unit == "µs" and value >= 100 else 2
    return f"{value:{sign}.{digits}f} {unit}".strip()


def _bold(text: str, stands_out: bool) -> str:
    return f"**{text}**" if stands_out else text


def _yes(met: bool) -> str:
    return "yes" if met else "no"


if __name__ == "__main__":
    sys.exit(main())
