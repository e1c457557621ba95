"""``kvferry selftest``: every path on this machine, compared byte for byte."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from kvferry.cli.json_text import json_text
from kvferry.env import disabled_paths

if TYPE_CHECKING:
    from kvferry.testing import SelfTestCase, SelfTestReport

__all__ = ["EXIT_DIFFERENCE", "add_parser", "run"]

EXIT_DIFFERENCE = 1

_MB = 1_000_000
_WIDTH = 100
_COMPILED = "cpu"


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "selftest",
        help="check every copy path on this machine, byte for byte",
        description=(
            "Store and load on every path there is, for the element sizes of real models, device "
            "runs of 1, 16 and 64, and every layout. All bytes are compared, those around the "
            "copies too; then a stored byte is flipped, and that page must be refused. It takes "
            "about ten seconds on two cores. The exit status is 0 if all transfers are exact, 1 if "
            "one failed, and 2 if there is nothing to test."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="take fewer element sizes")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was tried and what differed."""
    from kvferry.testing import run_selftest, selftest_cases

    progress = None
    if sys.stderr.isatty():
        progress = _Progress(sys.stderr, sum(1 for _ in selftest_cases(quick=args.quick)))
    report = run_selftest(quick=args.quick, progress=progress)
    if progress is not None:
        progress.clear()
    absent = _absent(report)
    if args.json:
        print(json_text({**report.to_dict(), "absent": absent}))
    else:
        print("\n".join(_table(report, absent)))
    return 0 if report.ok else EXIT_DIFFERENCE


class _Progress:
    """One line on a terminal that says which case runs."""

    def __init__(self, terminal: TextIO, num_cases: int) -> None:
        self._terminal = terminal
        self._num_cases = num_cases
        self._done = 0
        self._width = 0

    def __call__(self, case: SelfTestCase) -> None:
        self._done += 1
        self._show(f"case {self._done:,} of {self._num_cases:,}: {case}")

    def clear(self) -> None:
        """Leave the line empty."""
        self._show("")
        self._terminal.write("\r")
        self._terminal.flush()

    def _show(self, text: str) -> None:
        self._terminal.write("\r" + text.ljust(self._width))
        self._terminal.flush()
        self._width = len(text)


def _absent(report: SelfTestReport) -> Mapping[str, str]:
    """Why each path that was not tested was not."""
    from kvferry.transfer import why_no_gpu

    off = disabled_paths(frozenset((*report.paths, *report.absent)))
    reasons = {}
    for name in report.absent:
        if name in report.idle:
            reasons[name] = "took no case"
        elif name in off:
            reasons[name] = "switched off by KVFERRY_DISABLE_PATHS"
        elif name == _COMPILED:
            reasons[name] = (
                "not installed: there was no C compiler when kvferry was installed; copies take "
                "the slower cpu_numpy. Install a compiler, then kvferry again"
            )
        else:
            reasons[name] = why_no_gpu() or "no GPU path is left that could carry it"
    return reasons


def _table(report: SelfTestReport, absent: Mapping[str, str]) -> Sequence[str]:
    rows = [("path", "transfers", "failed", "MB moved")]
    for name, counts in report.paths.items():
        rows.append(
            (
                name,
                f"{counts.cases:,}",
                f"{counts.num_failures:,}",
                f"{counts.num_bytes / _MB:,.0f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    lines.append("")
    for failure in report.failures:
        lines.append(f"{failure.path}: {failure.direction.value}, {failure.case}:")
        lines.append(f"    {failure.message}")
    unshown = report.num_failures - len(report.failures)
    if unshown:
        lines.append(f"... and {unshown:,} more")
    total = (
        f"{report.cases:,} transfers, {report.num_bytes / _MB:,.0f} MB moved, "
        f"{report.seconds:.1f} s"
    )
    names: dict[str, list[str]] = {}
    for name, reason in absent.items():
        names.setdefault(reason, []).append(name)
    for reason, of in names.items():
        lines += textwrap.wrap(
            f"Not tested: {', '.join(of)}. Why: {reason}.", _WIDTH, break_on_hyphens=False
        )
    if report.ok:
        lines.append(f"{'What was tested is exact' if report.idle else 'All exact'}: {total}.")
        return lines
    bad = [name for name, counts in report.paths.items() if counts.num_failures]
    lines.append(f"FAILED on {', '.join(bad)}: {report.num_failures:,} of {total}.")
    if len(bad) < len(report.paths):
        lines.append(f"To do without: KVFERRY_DISABLE_PATHS={','.join(bad)}")
    return lines
