"""One line of JSON each way: an order and its answer."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvferry.errors import ControlError

__all__ = ["MAX_LINE_BYTES", "Answer", "Order"]

MAX_LINE_BYTES = 1 << 16
_MAX_SECS = 86_400.0


@dataclasses.dataclass(frozen=True)
class Order:
    """What is to be done.

    Attributes:
        command: Its name.
        options: By name, as JSON can tell them.
        timeout: Seconds, above 0: what is not done by then is answered as it is.
    """

    command: str
    options: dict[str, Any]
    timeout: float

    def line(self) -> bytes:
        """As it is sent. Raises ControlError where it is longer than a line may be."""
        return _line(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: bytes) -> Order:
        """An order from a line; raises ControlError for anything else."""
        told = _object(line)
        if set(told) != {"command", "options", "timeout"}:
            raise ControlError(
                f"an order has command, options and timeout, and not {', '.join(sorted(told))}"
            )
        command, options, timeout = told["command"], told["options"], told["timeout"]
        if not isinstance(command, str) or not isinstance(options, dict):
            raise ControlError("an order's command is text, and its options are an object")
        if isinstance(timeout, bool) or not isinstance(timeout, int | float):
            raise ControlError(f"timeout is {timeout!r}; give seconds")
        if not 0 < timeout <= _MAX_SECS:
            raise ControlError(f"timeout is {timeout!r}; give seconds above 0 and to {_MAX_SECS:g}")
        return cls(command, options, float(timeout))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of an order.

    Attributes:
        ok: Whether it was done; if not, `error` says why.
        result: What there is to tell.
        error: Empty, or why not.
    """

    ok: bool
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    error: str = ""

    def line(self) -> bytes:
        """As it is sent. Raises ControlError where it is longer than a line may be."""
        return _line(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: bytes) -> Answer:
        """An answer from a line; raises ControlError for anything else."""
        told = _object(line)
        ok, result, error = told.get("ok"), told.get("result"), told.get("error")
        if not (isinstance(ok, bool) and isinstance(result, dict) and isinstance(error, str)):
            raise ControlError(f"the answer is none: {line[:80]!r}")
        return cls(ok, result, error)


def _line(told: dict[str, Any]) -> bytes:
    line = json.dumps(told).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ControlError(f"a message of {len(line):,} bytes; at most {MAX_LINE_BYTES:,} are sent")
    return line


def _object(line: bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as bad:
        raise ControlError(f"a line that is no JSON: {line[:80]!r}") from bad
    if not isinstance(told, dict):
        raise ControlError(f"a line that is no JSON object: {line[:80]!r}")
    return told
