"""docs/configuration.md is the config of the code."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kvferry.config import PRECEDENCE, SECTIONS, settings_of

_DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


def _default(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}"
    return str(value) if isinstance(value, float | str) else "empty"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_table_of_a_section_is_true(section: str) -> None:
    """Fields in order, what is allowed, the default and the meaning are those of the code."""
    text = _DOCUMENT.read_text().partition(f"\n### `{section}`\n")[2].partition("\n##")[0]
    of = SECTIONS[section]
    fields = {field.name: field.default for field in dataclasses.fields(of)}  # type: ignore[arg-type]
    assert list(fields) == list(settings_of(of))
    expected = [
        f"| `{name}` | {setting.kind.allowed} | {_default(fields[name])} | {setting.meaning} |"
        for name, setting in settings_of(of).items()
    ]
    assert re.findall(r"^\| `.*\|$", text, re.MULTILINE) == expected


def test_no_other_section_is_described() -> None:
    """The sections of the document are those of the code, in order."""
    text = _DOCUMENT.read_text()
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == list(SECTIONS)
    assert PRECEDENCE in " ".join(text.replace("`", "").split())
