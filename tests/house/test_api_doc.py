"""The tables of docs/api.md name what the code takes and has."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import kvferry
import kvferry.cache
import kvferry.tiers

# Where a name is looked up, in this order: handles and reports are given, and seldom imported.
_HOMES = (kvferry, kvferry.cache, kvferry.tiers)

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
    found = next(getattr(home, first) for home in _HOMES if hasattr(home, first))
    for part in rest:
        found = getattr(found, part)
    return found


def _set_in_init(found: type) -> set[str]:
    """What instances get when they are made."""
    written = [vars(base).get("__init__") for base in found.__mro__]
    sources = [
        inspect.getsource(one)
        for one in written
        if inspect.isfunction(one) and not dataclasses.is_dataclass(found)
    ]
    return {name for source in sources for name in re.findall(r"self\.(\w+)\b[^=\n]*=", source)}


@pytest.mark.parametrize(("what", "name", "body"), _TABLES, ids=lambda one: str(one)[:40])
def test_tables_name_what_there_is(what: str, name: str, body: str) -> None:
    """Arguments in their order, and all members; of "some members" each is there."""
    found, named = _found(name), _named(body)
    if what == "Arguments":
        arguments = [one for one in inspect.signature(found).parameters if one != "self"]
        assert named == arguments
        return
    members = {*dir(found), *_set_in_init(found)}
    for base in found.__mro__:
        members.update(getattr(base, "__annotations__", ()))
    public = {one for one in members if not one.startswith("_")}
    if what == "Members":
        assert sorted(named) == sorted(public)
    else:
        assert named
        assert set(named) <= public


def test_no_table_is_left_out() -> None:
    """Each heading was recognised."""
    assert len(_TABLES) == _TEXT.count("\n### ") == 28


def test_calls_that_share_a_table_take_the_same() -> None:
    """What the page says of `prefetch`, `keys`, `explain` and `evicting` without a table."""

    def arguments(name: str) -> dict[str, Any]:
        found = inspect.signature(getattr(kvferry.KVFerry, name)).parameters
        return {one: parameter.default for one, parameter in found.items()}

    match = arguments("match")
    assert arguments("prefetch") == arguments("keys") == match
    assert arguments("explain") == {**match, "storage_timeout": 0.0}
    assert arguments("evicting") == arguments("store")
