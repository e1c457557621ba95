"""The tables of docs/api.md name what the code takes and has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvferry

_TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
_TABLE = re.compile(
    r"^### (?P<what>Arguments|Members|Some members) of `(?P<name>[\w.]+)`$(?P<body>.*?)(?=^##|\Z)",
    re.MULTILINE | re.DOTALL,
)
_TABLES = [(found["what"], found["name"], found["body"]) for found in _TABLE.finditer(_TEXT)]


def _named(body: str) -> list[str]:
    """What the first column of a table has in backquotes."""
    cells = [line.split("|")[1] for line in body.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def _found(name: str) -> Any:
    first, *rest = name.split(".")
    found = getattr(kvferry, first)
    for part in rest:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(("what", "name", "body"), _TABLES, ids=lambda one: str(one)[:40])
def test_tables_name_what_there_is(what: str, name: str, body: str) -> None:
    """Arguments in their order, and all members; of "some members" each is there."""
    found, named = _found(name), _named(body)
    members = {*dir(found), *getattr(found, "__annotations__", ())}
    public = {one for one in members if not one.startswith("_")}
    if what == "Arguments":
        assert named == list(inspect.signature(found).parameters)
    elif what == "Members":
        assert sorted(named) == sorted(public)
    else:
        assert named
        assert set(named) <= public


def test_no_table_is_left_out() -> None:
    """Each heading was recognised."""
    assert len(_TABLES) == _TEXT.count("\n### ") == 8
