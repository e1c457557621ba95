"""`make demo` with random weights, as a user runs it: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("rich")

import demo

_ROOT = Path(__file__).parents[2]
_TIMEOUT_SECS = 100


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[int, str, str]]:
    """(status, stdout, stderr) of a good run and of one whose first load was corrupted."""
    env = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "COLUMNS": "160"}
    env["OMP_NUM_THREADS"] = (
        "1"  # both run at once; more threads than cores get in each other's way
    )
    started = {
        name: subprocess.Popen(
            [sys.executable, "examples/demo.py", "--random-weights", *more],
            cwd=_ROOT,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for name, more in (("good", []), ("corrupt", ["--corrupt-load"]))
    }
    told = {}
    try:
        for name, process in started.items():
            out, err = process.communicate(timeout=_TIMEOUT_SECS)
            told[name] = (process.returncode, out, err)
    finally:
        for process in started.values():
            process.kill()
    return told


def test_everything_is_identical(runs: dict[str, tuple[int, str, str]]) -> None:
    """Exit status 0, nothing on stderr, and one table in which no row differs."""
    status, out, err = runs["good"]
    assert (status, err) == (0, "")
    assert out.count("identical") == 6
    assert "differs" not in out
    assert "23 of 23 pages verified" in out
    assert "page 17 refused" in out
    for size in ("576", "656"):
        assert f"elements of {size} bytes" in out


def test_a_changed_byte_is_noticed(runs: dict[str, tuple[int, str, str]]) -> None:
    """One byte changed after the load: exit status 1, and the table and the text say where."""
    status, out, _ = runs["corrupt"]
    assert status == 1
    assert out.count("identical") == 5
    assert "differs: see below" in out
    first = "bytes of the cache after the load, first in values at layer 0, head 0, token 0, byte 3"
    assert first in out
    assert "logits from step 0 on" in out


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and the line that installs them, before anything is loaded."""
    monkeypatch.setattr(demo, "_ALWAYS", ("rich", "no_such_package"))
    assert demo.main(["--random-weights"]) == 2
    message = capsys.readouterr().err
    assert "the demo needs no_such_package:" in message
    assert "pip install '.[demo]'" in message
