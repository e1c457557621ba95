"""``kvferry config``: the settings that hold here, and where each came from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.cli.json_text import json_text

if TYPE_CHECKING:
    from kvferry.config import Resolved

__all__ = ["add_parser", "run"]


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "config",
        help="show the settings that hold here, and where each came from",
        description=(
            "Show every setting of a cache with its value and its origin. Keyword arguments of the "
            "program win over environment variables KVFERRY_<SECTION>_<FIELD>, these over the TOML "
            "file, and it over defaults; this command has no keyword arguments. A key that is not "
            "known, or a value that is not accepted, is an error. Options of a backend that are "
            "named like secrets are not shown."
        ),
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file (the one that KVFERRY_CONFIG names, if any)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the settings."""
    from kvferry.config import Config

    resolved = Config.resolve(args.config)
    if args.json:
        print(json_text(_told(resolved)))
    else:
        print("\n".join(_table(resolved)))
    return 0


def _values(resolved: Resolved) -> dict[str, Any]:
    """Every setting by its name, in plain values, without secrets."""
    from kvferry.config import Options

    values: dict[str, Any] = {}
    for name in resolved.origin_of:
        section, _, field = name.partition(".")
        value = getattr(getattr(resolved.config, section), field)
        if isinstance(value, Options):
            value = value.shown()
        values[name] = str(value) if isinstance(value, Path) else value
    return values


def _told(resolved: Resolved) -> dict[str, Any]:
    from kvferry.config import OriginKind

    return {
        "precedence": [kind.value for kind in OriginKind],
        "file": None if resolved.file is None else str(resolved.file),
        "settings": {
            name: {
                "value": value,
                "origin": resolved.origin_of[name].kind.value,
                "place": resolved.origin_of[name].place or None,
            }
            for name, value in _values(resolved).items()
        },
    }


def _table(resolved: Resolved) -> list[str]:
    from kvferry.config import PRECEDENCE

    rows = [("setting", "value", "from")]
    rows += [
        (name, _shown(value), str(resolved.origin_of[name]))
        for name, value in _values(resolved).items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return [*lines, "", f"An earlier source wins: {PRECEDENCE}."]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{name}={one}" for name, one in value.items()) or "{}"
    return f"{value:,}" if isinstance(value, int) else str(value)
