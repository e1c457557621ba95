"""`make gpu` and its script: there is no GPU here, so what is tested is all around it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "scripts" / "gpu.py"


def _script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with every GPU hidden, where there is one."""
    return subprocess.run(
        [sys.executable, str(_SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_script", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_target_runs_the_script_with_any_python() -> None:
    """`make gpu` is the script under the interpreter that is named, from src/, and no set-up."""
    # As a user calls it: not as part of the `make test` that may be running this.
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    shown = subprocess.run(
        ["make", "-n", "gpu", "PYTHON=some-python", "GPU_ARGS=--only jit"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=env,
    ).stdout.strip()
    assert shown.endswith("some-python scripts/gpu.py --only jit")
    assert shown.startswith('PYTHONPATH="src')
    assert ".venv" not in shown


def test_help_needs_no_gpu() -> None:
    """The options and the steps are told anywhere."""
    ran = _script("--help")
    assert ran.returncode == 0
    for word in ("--only", "--results", "pytest", "selftest", "memcheck"):
        assert word in ran.stdout


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """One line says what is missing and what to do, the status is not 0, nothing is written."""
    ran = _script("--results", str(tmp_path))
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith("gpu: ")
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_does_not_exist() -> None:
    """A misspelt step is refused with the names there are, before anything runs."""
    ran = _script("--only", "pytest,selftests")
    assert ran.returncode == 2
    assert (
        "there is no step selftests; there are: pytest, cache, prefix_cache, ranks," in ran.stderr
    )


def _step(gpu: ModuleType, code: str, **options: Any) -> Any:
    given = {"timeout_secs": 30, **options}
    return gpu._run(gpu._Step("a step", (sys.executable, "-c", code, "{json}"), **given))


def test_the_outcome_of_a_step(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Status, exit status and what was printed are kept, and what it wrote as JSON."""
    passed = _step(gpu, "import sys; print('hello'); open(sys.argv[1], 'w').write('[1, 2]')")
    assert (passed.status, passed.exit_status, passed.result) == ("passed", 0, [1, 2])
    assert passed.output == "hello\n"
    failed = _step(gpu, "import sys; print('on stdout'); sys.exit('on stderr')")
    assert (failed.status, failed.exit_status, failed.result) == ("failed", 1, None)
    assert "on stderr" in failed.output
    assert "on stdout" in capsys.readouterr().out


def test_a_step_that_prints_json(gpu: ModuleType) -> None:
    """Its object is the result, also where it failed; what is no JSON fails."""
    told = json.dumps({"ok": False})
    found = _step(gpu, f"import sys; print('{told}'); sys.exit(1)", prints_json=True)
    assert (found.status, found.result) == ("failed", {"ok": False})
    broken = _step(gpu, "print('{')", prints_json=True)
    assert (broken.status, broken.exit_status) == ("failed", 0)
    assert "what was to be JSON is not" in broken.output


def test_a_step_that_hangs(gpu: ModuleType) -> None:
    """After its time a step is stopped with all that it started, and what it printed is kept."""
    code = (
        "import subprocess, sys; print('began', flush=True); "
        "subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
    )
    found = _step(gpu, code, timeout_secs=1)
    assert (found.status, found.exit_status) == ("timed out", None)
    assert found.output.startswith("began")
    assert found.output.endswith("stopped after 1 s")


def test_a_step_that_tested_nothing(gpu: ModuleType) -> None:
    """pytest is content when every test is skipped; the step is not."""
    (step,) = (step for step in gpu._steps(quick=False) if step.name == "pytest")
    for summary, status in (
        ("57 skipped in 0.31s", "failed"),
        ("0 passed, 57 skipped in 0.31s", "failed"),
        ("no tests ran in 0.01s", "failed"),
        ("57 passed in 31s", "passed"),
        ("3 passed, 54 skipped, 12 deselected in 3.1s", "passed"),
    ):
        found = _step(gpu, f"print('{summary}')", must_print=step.must_print)
        assert found.status == status, summary
        assert ("it tested nothing" in found.output) is (status == "failed")


@pytest.mark.parametrize(
    ("statuses", "verdict", "status"),
    [
        (("passed", "passed"), "all steps passed", 0),
        (("passed", "skipped"), "passed, but skipped: b", 0),
        (("failed", "skipped"), "FAILED: a; skipped: b", 1),
        (("passed", "timed out"), "FAILED: b", 1),
    ],
)
def test_the_verdict(gpu: ModuleType, statuses: tuple[str, str], verdict: str, status: int) -> None:
    """What was skipped is never said to have passed, and is no failure either."""
    assert gpu._verdict(dict(zip("ab", statuses, strict=True))) == (verdict, status)


def test_a_step_that_cannot_be_run(gpu: ModuleType) -> None:
    """It is skipped with its reason, and nothing is started."""
    found = _step(gpu, "raise SystemExit(3)", skipped="there is no such tool")
    assert (found.status, found.output) == ("skipped", "there is no such tool")
