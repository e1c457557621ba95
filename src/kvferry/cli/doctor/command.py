"""The command itself: its arguments, and its output for people and for programs."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.cli.doctor.diagnosis import Check

__all__ = ["EXIT_FAILED", "add_parser", "run"]

EXIT_FAILED = 1

_WIDTH = 100


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="show what works on this machine, and what to do about the rest",
        description=(
            "Look at driver, GPUs, compiler, kernel cache, host memory and the links to the GPUs, "
            "and try each transfer path with a few pages; check the environment variables too. The "
            "exit status is 0 if no check failed, with or without a GPU, and 1 if one did. GPUs "
            "are tried in a process of their own, which gets a minute."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what was found; 0 if no check failed."""
    from kvferry.cli.doctor.diagnosis import diagnose
    from kvferry.cli.doctor.gpu_report import ask_gpus
    from kvferry.cli.doctor.host_reading import read_host

    gpus = ask_gpus()
    host = read_host(bus_ids=[gpu.bus_id for gpu in gpus.gpus])
    checks, works = diagnose(host, gpus)
    failed = [check.name for check in checks if check.status == "fail"]
    if args.json:
        described = {"ok": not failed, "checks": [check._asdict() for check in checks]}
        print(json.dumps(described, indent=2, ensure_ascii=False))
    else:
        print("\n".join(_told(checks, failed, works=works)))
    return EXIT_FAILED if failed else 0


def _told(checks: Sequence[Check], failed: Sequence[str], *, works: bool) -> Iterator[str]:
    width = max(len(check.name) for check in checks)
    for check in checks:
        head = f"{check.status:<4}  {check.name:<{width}}  "
        yield from _wrapped(head, check.found)
        if check.advice:
            yield from _wrapped(" " * len(head) + "-> ", check.advice)
    worse = [check for check in checks if check.status != "ok"]
    yield ""
    if failed:
        verdict = "kvferry works here in part" if works else "No transfer path works here"
        yield from _wrapped("", f"{verdict}. Failed: {', '.join(failed)}.")
    elif worse:
        yield f"kvferry works here; {len(worse)} of {len(checks)} checks have advice."
    else:
        yield "Everything works here."


def _wrapped(head: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
