"""``kvferry storage``: what lies in a folder, whether it is whole, what may go; and `check`."""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.cli import storage_check
from kvferry.cli.json_text import json_text
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.storage import KnownFile, StorageInspector

__all__ = ["EXIT_DAMAGED", "add_parser", "run"]

EXIT_DAMAGED = 1

_EXAMPLES = """\
examples:
  kvferry storage ls /var/cache/kv --limit 20
  kvferry storage stats /var/cache/kv --json
  kvferry storage verify /var/cache/kv --quarantine
  kvferry storage prune /var/cache/kv --max-bytes 200G --unused-days 7 --dry-run
  kvferry storage check file:///var/cache/kv?fsync=data
"""
_MOST_DAYS = 1_000_000
_DAY_NS = 86_400 * 10**9


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add this command's arguments to the ``kvferry`` parser."""
    parser = subparsers.add_parser(
        "storage",
        help="look at a storage folder, check it, clear it up; try out any storage",
        description=(
            "Look at the folder of a file backend, check every object in it, or remove what is no "
            "longer wanted. Caches that use the folder may go on meanwhile. `check` tries out "
            "storage of any kind."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action", required=True)
    made = {}
    for name, told in (
        ("ls", "name the objects, those used last first"),
        ("stats", "add up what lies there"),
        ("verify", "read every object and check it; exit status 1 if one is damaged"),
        ("prune", "remove what dead writers left, quarantined objects, and what is asked for"),
    ):
        made[name] = actions.add_parser(name, help=told, description=told.capitalize() + ".")
        made[name].add_argument("folder", metavar="FOLDER", help="of the file backend, or its URL")
        made[name].add_argument("--json", action="store_true", help="print one JSON object")
    checks = "does storage do what it must? exit status 1 if not; what is written is removed again"
    storage_check.add_arguments(
        actions.add_parser("check", help=checks, description=checks.capitalize() + ".")
    )
    made["ls"].add_argument(
        "--limit", type=int, metavar="N", help="at most so many objects (all of them)"
    )
    made["verify"].add_argument(
        "--quarantine", action="store_true", help="move damaged objects out of service"
    )
    made["prune"].add_argument(
        "--max-bytes", metavar="SIZE",
        help="remove objects used longest ago until the others take no more, such as 200G or 64Mi",
    )  # fmt: skip
    made["prune"].add_argument(
        "--unused-days", type=float, metavar="DAYS", help="remove objects not used for so long"
    )
    made["prune"].add_argument("--dry-run", action="store_true", help="tell, and remove nothing")
    return parser


def run(args: argparse.Namespace) -> int:
    """Carry out ``args.action`` on ``args.folder`` or ``args.url``."""
    from kvferry.storage import StorageInspector

    if args.action == "check":
        return storage_check.run(args)
    action = {"ls": _list, "stats": _stats, "verify": _verify, "prune": _prune}[args.action]
    return action(args, StorageInspector(_folder(args.folder)))


def _folder(text: str) -> str:
    """The folder that a path or URL names; what else the URL says is for those who open it."""
    from kvferry.storage import parse_storage_url

    if "://" not in text:
        return text
    url = parse_storage_url(text)
    if url.name != "file":
        raise ConfigError(
            f"{text.partition('?')[0]!r} is no folder, and only these can be looked at: give one, "
            f"or a URL file://…"
        )
    return url.place["path"]


def _list(args: argparse.Namespace, inspector: StorageInspector) -> int:
    contents, _ = inspector.contents()
    limit = len(contents.files) if args.limit is None else args.limit
    if limit < 0:
        raise ConfigError(f"--limit {limit}: give 0 or more")
    shown = contents.files[:limit]
    if args.json:
        rows = [{"key": file.key.hex(), "bytes": file.num_bytes, "last_used": _when(file)}
                for file in shown]  # fmt: skip
        print(json_text({"objects": rows, "not_shown": len(contents.files) - len(shown)}))
        return 0
    for file in shown:
        print(f"{_when(file)}  {file.num_bytes:>14,}  {file.key.hex()}")
    if len(shown) < len(contents.files):
        print(f"and {len(contents.files) - len(shown):,} more")
    return 0


def _stats(args: argparse.Namespace, inspector: StorageInspector) -> int:
    contents, _ = inspector.contents()
    told: dict[str, Any] = {
        "objects": len(contents.files),
        "object_bytes": contents.object_bytes,
        "temporary_bytes": contents.temporary_bytes,
        "quarantine_bytes": contents.quarantine_bytes,
        "ignored_names": contents.ignored,
        "free_bytes": contents.free_bytes,
        "first_used": _when(contents.files[-1]) if contents.files else None,
        "last_used": _when(contents.files[0]) if contents.files else None,
    }
    return _print(args, told)


def _verify(args: argparse.Namespace, inspector: StorageInspector) -> int:
    whole = whole_bytes = 0
    damaged: list[dict[str, str]] = []
    foreign: list[dict[str, str]] = []
    for one in inspector.verify():
        if not one.complaint:
            whole += 1
            whole_bytes += one.file.num_bytes
            continue
        is_damaged = one.fault is None or one.fault.value == "damaged"
        row = {"key": one.file.key.hex(), "reason": one.complaint}
        (damaged if is_damaged else foreign).append(row)
        if is_damaged and args.quarantine:
            row["quarantined"] = "yes" if inspector.quarantine(one.file) else "it was gone"
    if args.json:
        print(json_text({"whole": whole, "whole_bytes": whole_bytes, "damaged": damaged,
                         "of_another_version": foreign}))  # fmt: skip
    else:
        for kind, rows in (("damaged", damaged), ("another version", foreign)):
            for row in rows:
                moved = ", moved to quarantine" if row.get("quarantined") == "yes" else ""
                print(f"{kind}: {row['key']}: {row['reason']}{moved}")
        print(f"{whole:,} objects of {whole_bytes:,} bytes are whole, {len(damaged):,} damaged, "
              f"{len(foreign):,} of another version")  # fmt: skip
    return EXIT_DAMAGED if damaged else 0


def _prune(args: argparse.Namespace, inspector: StorageInspector) -> int:
    from kvferry.config import size_of

    before = None
    if args.unused_days is not None:
        if not 0 <= args.unused_days <= _MOST_DAYS:
            raise ConfigError(f"--unused-days {args.unused_days}: give 0 to {_MOST_DAYS}")
        before = time.time_ns() - int(args.unused_days * _DAY_NS)
    max_bytes = None if args.max_bytes is None else size_of("--max-bytes", args.max_bytes)
    pruned = inspector.prune(max_bytes=max_bytes, used_before_ns=before, dry_run=args.dry_run)
    told = {
        "dry_run": args.dry_run,
        "objects": pruned.objects,
        "object_bytes": pruned.object_bytes,
        "dead_writers": pruned.dead_writers,
        "quarantined": pruned.quarantined,
        "not_removed": pruned.not_removed,
    }
    return _print(args, told)


def _print(args: argparse.Namespace, told: dict[str, Any]) -> int:
    if args.json:
        print(json_text(told))
        return 0
    shown: dict[type, Callable[[Any], str]] = {
        int: "{:,}".format, bool: lambda value: "yes" if value else "no", type(None): lambda _: "-",
    }  # fmt: skip
    for name, value in told.items():
        print(f"{name.replace('_', ' '):<18} {shown.get(type(value), str)(value)}")
    return 0


def _when(file: KnownFile) -> str:
    used = datetime.datetime.fromtimestamp(file.used_ns / 1e9, tz=datetime.UTC)
    return used.strftime("%Y-%m-%dT%H:%M:%SZ")
