"""docs/faults.md names tests that exist, and no fault without one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_DOCUMENT = _ROOT / "docs" / "faults.md"
_NAMED = re.compile(r"`(?P<path>[^`\s]+?)::(?P<name>[^`]*)`")
_RULE = re.compile(r"\|[-|]+\|")
_NO_TEST = "not tested"


@functools.cache
def _tests_of(path: Path) -> frozenset[str]:
    """Names that pytest would collect from `path`."""
    if not path.is_file() or not path.name.startswith("test_"):
        return frozenset()
    return frozenset(
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


def _rows(text: str) -> list[str]:
    """Rows of the document's tables, without their heads."""
    lines = text.splitlines()
    heads = {number - 1 for number, line in enumerate(lines) if _RULE.fullmatch(line)}
    return [
        line
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in heads and not _RULE.fullmatch(line)
    ]


def _complaints(text: str) -> list[str]:
    """Tests that are named and do not exist, and rows that name none and do not say so."""
    absent = [
        found[0]
        for found in _NAMED.finditer(text)
        if found["name"] not in _tests_of(_ROOT / found["path"])
    ]
    bare = [row for row in _rows(text) if not _NAMED.search(row) and _NO_TEST not in row]
    return absent + bare


def test_every_test_that_is_named_exists() -> None:
    """Each `path::name` is a test, and each kind of fault has one or says that it has none."""
    text = _DOCUMENT.read_text()
    assert _complaints(text) == []
    assert len(_rows(text)) > 40


@pytest.mark.parametrize(
    "line",
    [
        "`tests/house/test_faults_doc.py::test_that_is_not_there`",
        "`tests/house/no_such_file.py::test_every_test_that_is_named_exists`",
        "`tests/house/test_faults_doc.py::_rows`",
        "`tests/house/test_faults_doc.py::`",
        "`tests/conftest.py::pytest_collection_modifyitems`",
        "| a fault | ruled out by hope | |",
        "| a fault | ruled out by hope | `tests/house/test_faults_doc.py` |",
    ],
)
def test_what_is_not_there_is_seen(line: str) -> None:
    """A name without a test, a file without one, and a row without either are complaints."""
    assert len(_complaints(f"| kind | by | test |\n|---|---|---|\n{line}\n")) == 1


def test_what_is_there_passes() -> None:
    """A row with a test that exists is none, nor is one that says that it has no test."""
    own = "`tests/house/test_faults_doc.py::test_what_is_there_passes`"
    text = f"| kind | test |\n|---|---|\n| a fault | {own} |\n| another | not tested |\n"
    assert _complaints(text) == []
