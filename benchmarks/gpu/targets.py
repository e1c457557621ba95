"""Every target that the GPU benchmarks have figures for, and the figures it is measured by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from results import BASELINES, NOTHING, Row, rows_of

_WIDE = (512, 528, 576, 584, 656, 1024, 1152, 2048, 4096, 37440)
_NARROW = (64, 66, 131, 132, 160, 288)
_HOST_RUN = 8


JIT: Sequence[tuple[str, str, str, float | None]] = (
    ("all kernels, compiled into an empty folder", "cold_all_kernels_secs", "s", None),
    ("`flat` and `realign` alone", "cold_flat_realign_secs", "s", 0.6),
    ("all kernels, from the folder", "warm_all_kernels_ms", "ms", 10),
    ("a raw `cuLaunchKernel`", "raw_launch_us", "µs", None),
    ("a prepared launch, over a raw one", "prepared_over_raw", "", 1.15),
    ("submitting a load of 61 layers, 4 pages", "submit_61_layers_us", "µs", 250),
    ("making its plan", "plan_us", "µs", None),
)


class Target(NamedTuple):
    """The least that a transfer should reach, as shares of M; None: there is no target."""

    h2d: float | None
    d2h: float | None


class Cell(NamedTuple):
    """One figure of a target: in what case, what was wanted and what was found."""

    target: str
    case: str
    wanted: float
    found: float
    at_least: bool
    unit: str = ""

    @property
    def difference(self) -> float:
        """Above 0: by so much it is met."""
        away = self.found - self.wanted
        return away if self.at_least else -away


def cells_of(results: Mapping[str, Mapping[str, Any]]) -> Iterator[Cell]:
    """Every figure that has a target; `results` by step."""
    for name, result in results.items():
        if name.startswith(("direct_", "staged_")):
            for row in result["rows"]:
                yield from _throughput_cells(row)
    for row in rows_of(results, "beside"):
        yield from _beside_cells(row)
    for row in rows_of(results, "latency"):
        yield from _latency_cells(row)
    for row in rows_of(results, "cache_bench"):
        yield from _cache_cells(row)
    for row in rows_of(results, "engine"):
        if "in_calls" in row:
            # All of the interval is to be good: a median alone says little where rounds differ.
            case = f"{row['cost'] * 100:.2f} %; with 95 % at most"
            yield Cell("an idle cache, of an engine's time", case, 0.01, row["high"], False, "%")
            case = "its calls, counted one by one"
            yield Cell("an idle cache, in its calls", case, 0.01, row["in_calls"], False, "%")
    jit = results.get("jit")
    if jit:
        for what, key, unit, most in JIT:
            if most is not None:
                yield Cell(what, NOTHING, most, jit[key], False, unit)


def target(row: Row) -> tuple[str, Target]:
    """The name of the target that a row of throughput is measured by, and its shares of M."""
    layout, size, run = row["host_layout"], row["element_size"], row["device_run"]
    host_run, mover = row.get("host_run", _HOST_RUN), row.get("mover", "direct")
    nothing = "", Target(None, None)
    if row["what"] in BASELINES or not row.get("digests", True):
        return nothing
    if layout == "page_major":
        if host_run == 1 and row.get("asked") == "best" and (size, run) == (656, 1):
            return "host runs of one page, the faster mover", Target(0.85, 0.85)
        if mover != "staged" or host_run < _HOST_RUN:
            return nothing
        if size in _WIDE:
            return "staged, elements of 512 B and more", Target(0.97, 0.95)
        return ("staged, elements below 512 B", Target(0.93, 0.90)) if size in _NARROW else nothing
    if mover != "direct":
        return nothing
    if layout == "token_major":
        known = {576: Target(0.87, 0.87), 656: Target(0.82, 0.82), 1152: Target(0.90, 0.90)}
        return f"direct, token_major, {size:,} B", known.get(size, Target(None, None))
    if run >= 16:
        if size * run >= 4096:
            return "direct, layer_first, spans of 4 KB and more", Target(0.91, 0.91)
        if size * run >= 1024:
            return "direct, layer_first, spans of 1 to 4 KB", Target(0.88, 0.88)
        return nothing
    if size >= 1152:
        return "direct, layer_first, run 1, 1,152 B and more", Target(0.92, 0.92)
    known = {576: Target(0.87, 0.87), 656: Target(0.81, 0.81), 132: Target(0.50, None)}
    return f"direct, layer_first, run 1, {size:,} B", known.get(size, Target(None, None))


def _throughput_cells(row: Row) -> Iterator[Cell]:
    name, wanted = target(row)
    if row.get("blocks"):  # an experiment, not what users get
        return
    case = (
        f"{row['element_size']:,} B, run {row['device_run']}, {row['num_bytes'] / 1e6:.0f} MB, "
        f"{row['what']}"
    )
    for way in ("h2d", "d2h"):
        least = getattr(wanted, way)
        if least is not None:
            yield Cell(f"{name}, {way.upper()}", case, least, row[f"{way}_over_m"], True, "M")


def _beside_cells(row: Row) -> Iterator[Cell]:
    if row["mover"] != "staged":
        return
    compute, way = row["compute"], row["direction"]
    if way == "both":
        yield Cell("staged, both directions at once", "all", 0.92, row["over_memcpy"], True,
                   "of two memcpys")  # fmt: skip
        return
    least = {"gemm": (0.70, 0.70), "gemv": (0.93, 0.88)}.get(compute)
    if least is None:
        return
    name = f"staged beside the {compute.upper()}"
    yield Cell(f"{name}, {way.upper()}", NOTHING, least[way == "d2h"], row["over_m"], True, "M")
    if compute == "gemm":
        yield Cell(f"{name}: time it loses", way.upper(), 1, row["extra_ms_per_gb"], False, "ms/GB")
    else:
        most = 0.09 if way == "h2d" else 0.06
        yield Cell(f"{name}: slower, {way.upper()}", NOTHING, most, row["slowdown"], False, "%")


def _latency_cells(row: Row) -> Iterator[Cell]:
    case, mover = row["case"], row.get("mover", "")
    if case == "first_layer" and mover == "best":
        yield Cell("the first layer of a load", mover, row["most_us"], row["us"], False, "µs")
    elif case == "one_page" and mover == "best":
        yield Cell("a load of one page", row["path"], 1.6, row["over_memcpy"], False, "times")
    elif case == "submit" and row["num_runs"] == 1:
        yield Cell("submitting a load of 61 layers, one host run", mover, 250, row["us"], False,
                   "µs")  # fmt: skip
    elif case == "further_copy":
        yield Cell("each further copy call", mover, 3, row["us"], False, "µs")
    elif case == "digests":
        yield Cell("digests on against off", f"{mover}, {row['direction'].upper()}", 0.02,
                   row["cost"], False, "%")  # fmt: skip


def _cache_cells(row: Row) -> Iterator[Cell]:
    case, what = row["case"], row["what"]
    if case == "host":
        yield Cell(f"{what} through a cache, over its engine alone", row["path"], 0.97,
                   row["over_engine"], True, "times")  # fmt: skip
    elif case == "metrics":
        yield Cell("transfers timed against not timed", what, 0.02, row["cost"], False, "%")
    elif case == "idle" and what == "poll":
        yield Cell("a poll of an idle cache", NOTHING, 20, row["us"], False, "µs")
