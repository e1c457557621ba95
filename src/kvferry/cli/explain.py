"""``kvferry explain``: which GPU path carries an element, or how a whole transfer goes, and why."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from kvferry.cli.explain_plan import OF_A_PLAN, add_plan_options, run_plan
from kvferry.cli.geometry_options import add_geometry_options, given_options
from kvferry.cli.whole_number import whole_number
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.kernels import CopyDecision, GroupedAnswer

__all__ = ["EXIT_REFUSED", "add_parser", "run"]

EXIT_REFUSED = 1

_EXAMPLES = """\
examples:
  kvferry explain --element-size 576
  kvferry explain --element-size 132 --page-size 64
  kvferry explain --element-size 656 --unroll 8 --json
  kvferry explain --plan config.json --tokens 12288
  kvferry explain --plan --element-size 656 --layers 61 --tokens 12288 --host-run 1
"""

_GROUPED_FIELDS = ("unroll", "threads", "bytes_per_thread", "package", "packages_per_thread")


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "explain",
        help="show which GPU path carries an element, and why",
        description=(
            "Show which GPU path carries elements of some size between dense pools, what the other "
            "paths would do, and why. Loads and stores choose alike. What KVFERRY_DISABLE_PATHS "
            "switches off is left out, and digests count as on. Padded or misaligned pools may "
            "choose another path; the handle of a transfer names the one that it took. With "
            "--plan, show how a transfer of all planes goes: which mover carries it and why, how "
            "long each way would take, in which steps, copies and kernels. Copies of many pages in "
            "one call are counted as there, which takes a driver of CUDA 12.8. No GPU is needed. "
            "Where an engine would refuse, the exit status is not 0."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--element-size",
        type=whole_number,
        metavar="BYTES",
        help="what one token keeps in one layer of one plane",
    )
    parser.add_argument(
        "--unroll",
        type=whole_number,
        metavar="U",
        help="ask for grouped, with 32 / U threads an element: 1, 2, 4, 8, 16 or 32 (not asked)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plan", action="store_true", help="show how a whole transfer goes")
    # The default of a page is one token on its own, and that of --plan the geometry's.
    add_geometry_options(
        parser.add_argument_group("a geometry, with --plan"),
        optional=True,
        page_size="tokens a host page (64); without --plan, tokens that keep neighbouring slots on "
        "both sides (1)",
    )
    add_plan_options(parser.add_argument_group("a transfer, with --plan"))
    return parser


def run(args: argparse.Namespace) -> int:
    """Print which path carries elements of ``args.element_size`` bytes, or a plan's route."""
    if args.plan:
        if args.unroll is not None:
            raise ConfigError("--unroll asks for a kernel, and --plan tells which one is taken")
        return run_plan(args)
    misplaced = [_named(name) for name in given_options(args, OF_A_PLAN)]
    if misplaced:
        raise ConfigError(f"{', '.join(misplaced)}: with --plan only")
    if args.element_size is None:
        args.complain("--element-size is needed, or --plan with a geometry")
    from kvferry.kernels import MAX_ROWS, refused_paths, resolve_copy
    from kvferry.transfer import check_gpu_paths, disabled_gpu_paths

    page_size = 1 if args.page_size is None else args.page_size
    if not 1 <= page_size <= MAX_ROWS:
        raise ConfigError(f"--page-size must be from 1 to {MAX_ROWS:,} tokens, not {page_size:,}")
    check_gpu_paths(disabled_gpu_paths())
    refused = refused_paths(args.element_size * page_size, disabled=disabled_gpu_paths())
    decision = resolve_copy(args.element_size, rows=page_size, unroll=args.unroll, refused=refused)
    if args.json:
        print(json.dumps(_described(decision), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_told(decision)))
    return EXIT_REFUSED if decision.chosen is None else 0


def _named(argument: str) -> str:
    return "CONFIG" if argument == "config" else f"--{argument.replace('_', '-')}"


def _described(decision: CopyDecision) -> dict[str, Any]:
    return {
        "element_size": decision.element_size,
        "page_size": decision.rows,
        "chosen": decision.chosen,
        "reason": decision.reason,
        "flat": dataclasses.asdict(decision.flat),
        "realign": dataclasses.asdict(decision.realign),
        "grouped": _grouped(decision.grouped),
    }


def _grouped(answer: GroupedAnswer) -> dict[str, Any]:
    config = dataclasses.asdict(answer.config) if answer.config else {}
    numbers = {name: config.get(name) for name in _GROUPED_FIELDS}
    return {"eligible": answer.eligible, "reason": answer.reason, **numbers}


def _told(decision: CopyDecision) -> list[str]:
    size = f"{decision.element_size:,} byte{'s' * (decision.element_size != 1)}"
    together = f"{decision.rows:,} side by side" if decision.rows > 1 else "each on its own"
    head = f"Elements of {size}, {together}: {decision.chosen or 'no path'}"
    lines = [head, ""]
    for name in ("flat", "realign", "grouped"):
        answer = getattr(decision, name)
        mark = "taken" if decision.chosen == name else "can" if answer.eligible else "cannot"
        lines.append(f"{name:<8} {mark:<7} {answer.reason}")
    if decision.chosen is None:
        lines += ["", "An engine refuses to carry them."]
    return lines
