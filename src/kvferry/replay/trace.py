"""Traces of requests: a JSON object a line, with a number for each block of the prompt.

The format is the one in which the Mooncake project publishes its traces: `timestamp` in
milliseconds, `input_length` and `output_length` in tokens, and `hash_ids`, one for each 512 tokens
of the prompt, the last of them begun or whole. Equal ids mean equal prompts up to there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import TraceError

__all__ = ["BLOCK_TOKENS", "TracedRequest", "read_trace"]

BLOCK_TOKENS = 512
"""Tokens that one id stands for."""

_MOST_MILLISECONDS = 1e15
_SHOWN_CHARACTERS = 60


class TracedRequest(NamedTuple):
    """One line."""

    timestamp: float
    """Milliseconds."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str | Path) -> Iterator[TracedRequest]:
    """The requests of a file, in its order. Empty lines are passed over.

    Raises:
        TraceError: There is no such file, or a line is no request; the message has its number.
    """
    try:
        with Path(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _request(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as unreadable:
        why = getattr(unreadable, "strerror", None) or unreadable
        raise TraceError(
            f"cannot read the trace {path}: {why}; give a file of JSON lines with hash_ids"
        ) from unreadable


def _request(line: str, where: str) -> TracedRequest:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError) as bad:
        raise TraceError(
            f"{where} is not JSON ({bad}): {line.strip()[:_SHOWN_CHARACTERS]}"
        ) from bad
    if not isinstance(told, dict):
        raise TraceError(f"{where} is no JSON object: {line.strip()[:_SHOWN_CHARACTERS]}")
    ids = told.get("hash_ids")
    if not isinstance(ids, list) or not all(_is_count(one) for one in ids):
        raise TraceError(
            f"{where}: hash_ids must be a list of whole numbers from 0 on, not {ids!r}"
        )
    if len(set(ids)) < len(ids):
        twice = next(one for at, one in enumerate(ids) if one in ids[:at])
        raise TraceError(
            f"{where}: hash_ids has {twice} twice; an id stands for a prompt up to there, and no "
            f"prompt comes behind itself"
        )
    lengths = {name: told.get(name, 0) for name in ("input_length", "output_length")}
    for name, value in lengths.items():
        if not _is_count(value):
            raise TraceError(f"{where}: {name} must be a number of tokens, not {value!r}")
    timestamp = told.get("timestamp", 0)
    is_number = isinstance(timestamp, int | float) and not isinstance(timestamp, bool)
    if not is_number or not abs(timestamp) <= _MOST_MILLISECONDS:  # nor is it NaN
        raise TraceError(f"{where}: timestamp must be milliseconds, not {timestamp!r}")
    return TracedRequest(timestamp, hash_ids=tuple(ids), **lengths)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
