"""The parser of the ``kvferry`` command, and what every subcommand has in common.

A subcommand is a module with ``add_parser(subparsers)`` and ``run(args) -> int``, named in
`_COMMANDS`. It imports what is heavy inside ``run``, so that ``kvferry --help`` stays quick.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, TextIO

from kvferry import __version__
from kvferry.cli import calibrate, config, ctl, doctor, explain, geometry, replay, selftest, storage
from kvferry.errors import KVFerryError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

__all__ = ["EXIT_BAD_INPUT", "main"]

EXIT_BAD_INPUT = 2
_EXIT_BROKEN_PIPE = 128 + 13
_EXIT_INTERRUPTED = 128 + 2


class _Command(Protocol):
    def add_parser(
        self, subparsers: argparse._SubParsersAction[argparse.ArgumentParser]
    ) -> argparse.ArgumentParser: ...

    def run(self, args: argparse.Namespace) -> int: ...


_COMMANDS: tuple[_Command, ...] = (
    *(geometry, explain, config, replay, selftest, doctor, calibrate),
    *(storage, ctl),
)


class _Parser(argparse.ArgumentParser):
    """A parser whose help is output like any other, and whose errors are one line.

    argparse passes over help that it cannot write, and puts the usage before each error.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        print(self.format_help(), end="", file=file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Bad input, and output that cannot be written, are a message on stderr and status 2, never a
    traceback. A reader that goes away ends the command quietly. A name that the terminal's encoding
    has no letters for is printed with escapes.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # It was closed before Python started. Left so, the next file opened would take its
            # number, and argparse would print in the other stream.
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  open to the end
            setattr(sys, name, nowhere)
        elif isinstance(getattr(sys, name), io.TextIOWrapper):
            getattr(sys, name).reconfigure(errors="backslashreplace")
    try:
        try:
            return _run(argv)
        finally:
            # Also after `--help`, which ends inside argparse.
            sys.stdout.flush()
    except KVFerryError as bad:
        return _fail(str(bad))
    except BrokenPipeError:
        _drop(sys.stdout)
        return _EXIT_BROKEN_PIPE
    except OSError as bad:
        _drop(sys.stdout)
        of = f" {bad.filename!r}" if bad.filename is not None else ""
        return _fail(f"cannot read or write{of}: {bad.strerror or bad}{_next_step(bad)}")
    except KeyboardInterrupt:
        _drop(sys.stdout)
        return _EXIT_INTERRUPTED
    finally:
        # With stderr full there is nobody left to tell, and the status still does.
        try:
            sys.stderr.flush()
        except OSError:
            _drop(sys.stderr)


def _run(argv: Sequence[str] | None) -> int:
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.complain(f"unknown: {' '.join(unknown)}")
    if args.version:
        print(f"kvferry {__version__}")
        return 0
    if args.run is None:
        parser.print_help(sys.stderr)
        return EXIT_BAD_INPUT
    return int(args.run(args))


def _next_step(bad: OSError) -> str:
    """What helps, where the message itself does not say."""
    return "; free space, or write elsewhere" if bad.errno in (errno.ENOSPC, errno.EDQUOT) else ""


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):
        print(f"kvferry: error: {message}", file=sys.stderr)
    return EXIT_BAD_INPUT


def _drop(stream: TextIO) -> None:
    """Send what is left in `stream` nowhere; Python flushes it at exit, and would fail again."""
    with contextlib.suppress(io.UnsupportedOperation):  # a stream that is no file, under test
        target = stream.fileno()
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), target)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="kvferry",
        description="Carries an LLM's KV cache between device memory and host memory, exactly.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.set_defaults(run=None, complain=parser.error)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in _COMMANDS:
        of_command = command.add_parser(subparsers)
        of_command.set_defaults(run=command.run, complain=of_command.error)
    return parser
