"""JSON as people and programs like it: an object a block, a list of plain values a line."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["json_text"]

_STEP = "  "


def json_text(value: Any, indent: str = "") -> str:
    """`value` as JSON in ASCII, for any terminal. Lists of numbers take one line, however long."""
    inner = indent + _STEP
    if isinstance(value, dict) and value:
        entries = [f"{json.dumps(key)}: {json_text(of, inner)}" for key, of in value.items()]
        opened, closed = "{", "}"
    elif isinstance(value, list) and any(isinstance(one, dict | list | str) for one in value):
        entries = [json_text(one, inner) for one in value]
        opened, closed = "[", "]"
    else:
        return json.dumps(value)
    body = f",\n{inner}".join(entries)
    return f"{opened}\n{inner}{body}\n{indent}{closed}"
