"""``kvferry storage check``: does the storage that a URL names do what a backend must?"""

from __future__ import annotations

import argparse

from kvferry.cli.json_text import json_text

__all__ = ["EXIT_FAILED", "add_arguments", "run"]

EXIT_FAILED = 1
_TIMEOUT_SECS = 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``check`` takes."""
    parser.add_argument(
        "url", metavar="URL", help="such as file:///var/cache/kv, or package.module:Class"
    )
    parser.add_argument(
        "--timeout", type=float, default=_TIMEOUT_SECS, metavar="SECONDS",
        help="the longest that one check may take (%(default)g)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the checks, and tell each as it ends."""
    from kvferry.testing import check_storage_at

    rows, num_failed = [], 0
    for told in check_storage_at(args.url, timeout=args.timeout):
        num_failed += bool(told.complaint)
        rows.append({"check": told.check, "ok": not told.complaint, "complaint": told.complaint})
        if not args.json:
            print(f"{'FAILED' if told.complaint else 'ok':<6}  {told.check:<14}  {told.about}")
            if told.complaint:
                print(f"{'':<8}{told.complaint}")
    if args.json:
        print(json_text({"checks": rows, "failed": num_failed}))
    else:
        print(f"{len(rows) - num_failed} checks passed, {num_failed} failed")
    return EXIT_FAILED if num_failed else 0
