"""``kvferry selftest``: every path on this machine, compared byte for byte."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.testing import SelfTestReport

__all__ = ["EXIT_DIFFERENCE", "add_parser", "run"]

EXIT_DIFFERENCE = 1

_MB = 1_000_000


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
            "copies too. The exit status is 0 only if all are right."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="take fewer element sizes")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was tried and what differed."""
    from kvferry.testing import run_selftest

    report = run_selftest(quick=args.quick)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print("\n".join(_table(report)))
    return 0 if report.ok else EXIT_DIFFERENCE


def _table(report: SelfTestReport) -> Sequence[str]:
    rows = [("path", "transfers", "different", "MB moved")]
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
    total = f"{report.cases:,} transfers, {report.num_bytes:,} bytes, {report.seconds:.1f} s"
    if report.absent:
        lines.append(f"Not tested: {', '.join(report.absent)} (switched off, or not installed).")
    if report.ok:
        lines.append(f"All exact: {total}.")
        return lines
    bad = [name for name, counts in report.paths.items() if counts.num_failures]
    lines.append(f"FAILED on {', '.join(bad)}: {report.num_failures:,} of {total}.")
    if len(bad) < len(report.paths):
        lines.append(f"To do without: KVFERRY_DISABLE_PATHS={','.join(bad)}")
    return lines
