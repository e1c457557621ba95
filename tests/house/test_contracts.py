"""The import contracts of pyproject.toml hold, and would notice if they did not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvferry

_ROOT = Path(__file__).parents[2]
_PACKAGE = Path(kvferry.__file__).parent

_LINT = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"


def _lint_imports(source: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts over the kvferry in `source`, with its pyproject.toml in `cwd`."""
    env = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", _LINT, "--no-cache"],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_contracts_hold() -> None:
    """The source tree keeps every contract."""
    ran = _lint_imports(_PACKAGE.parent, _ROOT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " 0 broken" in ran.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("geometry/upward.py", "import kvferry.memory", "Imports go downwards only"),
        ("memory/sideways.py", "import kvferry.transfer", "Imports go downwards only"),
        ("geometry/framework.py", "import torch", "torch and CUDA stay"),
        ("memory/engine.py", "import transformers", "An engine is imported"),
        ("types.py", "import numpy", "The leaves need nothing"),
        ("homeless.py", "", "Imports go downwards only"),
    ],
)
def test_a_broken_contract_is_seen(tmp_path: Path, module: str, line: str, contract: str) -> None:
    """A forbidden import, or a module without a place, breaks the contract it should."""
    package = tmp_path / "src" / "kvferry"
    shutil.copytree(_PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_ROOT / "pyproject.toml", tmp_path)
    with (package / module).open("a") as file:
        file.write(f"\n{line}\n")
    ran = _lint_imports(package.parent, tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    broken = [row for row in ran.stdout.splitlines() if row.endswith("BROKEN")]
    assert any(row.startswith(contract) for row in broken), ran.stdout
