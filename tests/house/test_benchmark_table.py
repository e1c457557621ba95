"""The tables of docs/performance.md: what `make gpu` wrote, and nothing by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.transfer.span_launcher import DEFAULT_BLOCKS

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "benchmarks" / "table.py"


def _row(what: str, h2d: float, d2h: float, size: int = 576) -> dict[str, Any]:
    return {
        "element_size": size, "device_run": 1, "host_layout": "layer_first", "what": what,
        "h2d": h2d * 50, "d2h": d2h * 50, "h2d_over_m": h2d, "d2h_over_m": d2h,
    }  # fmt: skip


_RESULTS = {
    "machine": {
        "gpu": "NVIDIA H999", "driver": "999.1", "python": "3.12.3", "date": "2026-11-30 10:00",
        "commit": "0123456789abcdef", "packages": {"torch": "2.11.0"},
    },
    "steps": {
        "pytest": {"result": None},
        "direct_layer_first": {
            "result": {
                "command": "benchmarks/direct.py --layouts layer_first",
                "link": {"h2d": 50.0, "d2h": 50.0},
                "rows": [
                    _row("flat", 0.9, 0.8),
                    _row("grouped", 0.5, 0.4),
                    _row("torch index+copy", 0.3, 0.2),
                    _row("realign", 0.55, 0.1, size=132),
                ],
            }
        },
    },
}  # fmt: skip


def _run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    results = tmp_path / "gpu.json"
    results.write_text(json.dumps(_RESULTS))
    return subprocess.run(
        [sys.executable, str(_SCRIPT), str(results), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_table_has_figures_targets_and_what_misses_them(tmp_path: Path) -> None:
    """Each case is a row with its target beside it, and a share below that stands out."""
    ran = _run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("NVIDIA H999, driver 999.1, torch 2.11.0")
    assert "M is 50.0 GB/s H2D and 50.0 D2H" in ran.stdout
    assert (
        "| layer_first | 576 | 1 | flat | 45.0 / 40.0 | 0.90 / **0.80** | 0.87 / 0.87 | "
        "0.50 / 0.40 | 0.30 / 0.20 |"
    ) in lines
    assert (
        "| layer_first | 132 | 1 | realign | 27.5 / 5.0 | 0.55 / 0.10 | 0.50 / - | - | - |"
    ) in lines


def test_a_document_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    """What stood there is replaced, the rest stays, and a second run changes nothing."""
    document = tmp_path / "a.md"
    document.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    assert _run(tmp_path, "--write", str(document)).returncode == 0
    first = document.read_text()
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    assert "NVIDIA H999" in first
    assert "old" not in first
    assert _run(tmp_path, "--write", str(document)).returncode == 0
    assert document.read_text() == first


@pytest.mark.parametrize("text", ["", "<!-- tables: begin -->", "<!-- tables: end -->"])
def test_a_document_without_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    """Where the marks are missing nothing is written, and the status is not 0."""
    document = tmp_path / "a.md"
    document.write_text(text)
    ran = _run(tmp_path, "--write", str(document))
    assert ran.returncode == 2
    assert "has no <!-- tables: begin -->" in ran.stderr
    assert document.read_text() == text


def test_the_document_has_the_marks() -> None:
    """docs/performance.md can be written."""
    text = (_ROOT / "docs" / "performance.md").read_text()
    assert 0 < text.find("<!-- tables: begin -->") < text.find("<!-- tables: end -->")


def test_the_document_has_the_default_blocks() -> None:
    """The quotas it names are those that launches get."""
    text = (_ROOT / "docs" / "performance.md").read_text()
    named = re.findall(r"^\| `(\w+)` \| (\d+) \|$", text, re.MULTILINE)
    assert dict(named) == {path.value: str(blocks) for path, blocks in DEFAULT_BLOCKS.items()}
