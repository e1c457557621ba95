"""``kvferry ctl``: a cache that runs in another process: how it stands, and its storage."""

from __future__ import annotations

import argparse
from typing import Any

from kvferry.cli.json_text import json_text
from kvferry.errors import ConfigError

__all__ = ["EXIT_NOT_DONE", "add_parser", "run"]

EXIT_NOT_DONE = 1
_SECS = 30.0

_EXAMPLES = """\
examples:
  kvferry ctl --socket /run/kvferry/engine.sock status
  kvferry ctl --socket /run/kvferry/engine.sock attach file:///var/cache/kv
  kvferry ctl --socket /run/kvferry/engine.sock --timeout 60 flush
  kvferry ctl --socket /run/kvferry/engine.sock detach --force
"""


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "ctl",
        help="ask a cache that runs how it stands; attach, detach or flush its storage",
        description=(
            "Give an order to a cache in another process of the same user, which listens where its "
            "setting control.socket says. It is carried out while that process polls its cache. "
            "Exit status 1: it was not done, or not wholly."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="of the process (control.socket of the config)"
    )
    parser.add_argument(
        "--timeout", type=float, default=_SECS, metavar="SECONDS",
        help=f"for all of it ({_SECS:g})",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    actions = parser.add_subparsers(title="orders", metavar="ORDER", dest="action", required=True)
    for name, told in (
        ("status", "how many host slots are in which state, what is in flight, how storage is"),
        ("attach", "use storage from now on, after trying it out"),
        ("detach", "use storage no more; what is in flight ends first"),
        ("flush", "write every page of the host that storage lacks"),
    ):
        made = actions.add_parser(name, help=told, description=told.capitalize() + ".")
        if name == "attach":
            made.add_argument("url", metavar="URL", help="such as file:///var/cache/kv")
        if name == "detach":
            made.add_argument(
                "--force", action="store_true", help="give up what is not over in time"
            )
    return parser


def run(args: argparse.Namespace) -> int:
    """Give the order, and print what came of it."""
    from kvferry.control import Order, ask

    if not 0 < args.timeout < float("inf"):
        raise ConfigError(f"--timeout {args.timeout}: give seconds above 0")
    options: dict[str, Any] = {}
    if args.action == "attach":
        options["url"] = args.url
    if args.action == "detach":
        options["force"] = args.force
    answer = ask(_socket_of(args), Order(args.action, options, args.timeout))
    done = answer.ok and answer.result.get("detached", True) and answer.result.get("complete", True)
    if args.json:
        print(json_text({"ok": answer.ok, "error": answer.error, **answer.result}))
    elif answer.ok:
        print("\n".join(_lines(answer.result)))
    else:
        print(f"not done: {answer.error}")
    return 0 if done else EXIT_NOT_DONE


def _socket_of(args: argparse.Namespace) -> str:
    from kvferry.config import Config

    if args.socket is not None:
        return str(args.socket)
    found = Config.resolve().config.control.socket
    if found is None:
        raise ConfigError(
            "no control socket: give --socket, or set control.socket as the process has it"
        )
    return str(found)


def _lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, value in result.items():
        if isinstance(value, dict):
            for kind, states in value.items():
                told = ", ".join(f"{count:,} {state}" for state, count in states.items() if count)
                lines.append(f"{name} ({kind}): {told}")
        else:
            lines.append(f"{name.replace('_', ' ')}: {value}")
    return lines
