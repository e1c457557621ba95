"""`make bench` and its script."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "bench.py"
_SCRIPTS: dict[str, str] = runpy.run_path(str(_SCRIPT), run_name="bench_script")["_SCRIPTS"]
# These need a GPU, draw pictures or print tables.
_OTHERS = {"jit", "plots", "table"}


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_no_benchmark_is_left_out() -> None:
    """Every script of the folder runs, or says why it is none of these."""
    assert {file.stem for file in (_ROOT / "benchmarks").glob("*.py")} == {*_SCRIPTS, *_OTHERS}


@pytest.mark.parametrize("name", _SCRIPTS)
def test_each_takes_a_file_for_its_figures(name: str) -> None:
    """As the script hands one to it."""
    source = (_ROOT / "benchmarks" / f"{name}.py").read_text()
    options = re.findall(r"--[a-z-]+", _SCRIPTS[name])
    assert all(f'"{option}"' in source for option in ("--json", *options))


def test_figures_land_where_they_are_asked_for(tmp_path: Path) -> None:
    """The quickest of them, as a user would."""
    ran = _bench("--only", "metrics_cost", "--results", str(tmp_path / "new"))
    assert ran.returncode == 0, ran.stderr
    assert "=== metrics_cost" in ran.stdout
    assert json.loads((tmp_path / "new" / "metrics_cost.json").read_text())


def test_a_benchmark_that_is_not_there_is_named() -> None:
    """With those that are."""
    ran = _bench("--only", "gpu,index")
    assert ran.returncode == 2
    assert "no benchmark gpu; there are cpu_copy, host_runs" in ran.stderr
