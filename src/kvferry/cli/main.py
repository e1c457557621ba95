"""The parser of the ``kvferry`` command, and what every subcommand has in common.

A subcommand is a module with ``add_parser(subparsers)`` and ``run(args) -> int``, named in
`_COMMANDS`. It imports what is heavy inside ``run``, so that ``kvferry --help`` stays quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from kvferry import __version__
from kvferry.cli import doctor, explain, geometry, selftest
from kvferry.errors import KVFerryError

__all__ = ["EXIT_BAD_INPUT", "main"]

EXIT_BAD_INPUT = 2
_EXIT_BROKEN_PIPE = 128 + 13
_EXIT_INTERRUPTED = 128 + 2


class _Command(Protocol):
    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


_COMMANDS: tuple[_Command, ...] = (geometry, explain, selftest, doctor)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Bad input is a message on stderr and status 2, never a traceback. A reader that goes away ends
    the command quietly.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        if args.version:
            print(f"kvferry {__version__}")
            status = 0
        elif args.run is None:
            parser.print_help(sys.stderr)
            status = EXIT_BAD_INPUT
        else:
            status = args.run(args)
        sys.stdout.flush()
    except KVFerryError as bad:
        print(f"kvferry: error: {bad}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and would report the pipe there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return int(status)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry",
        description="Carries an LLM's KV cache between device memory, host memory and storage.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        command.add_parser(subparsers).set_defaults(run=command.run)
    return parser
