"""`make demo` with random weights, as a user runs it: in a process of its own."""

from __future__ import annotations

import os
import shutil
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
    """(status, stdout, stderr) of a good run, and of one with a byte of its first load changed and
    a bit of a file flipped."""
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
        for name, more in (("good", []), ("corrupt", ["--corrupt-load", "--corrupt-disk"]))
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
    """Exit status 0, nothing on stderr, and tables in which no row differs."""
    status, out, err = runs["good"]
    assert (status, err) == (0, "")
    assert out.count("identical") == 7
    assert "differs" not in out
    assert "23 of 23 pages verified" in out
    assert "page 17 refused" in out
    for size in ("576", "656"):
        assert f"elements of {size} bytes" in out


def test_the_second_process_finds_the_text_on_disk(runs: dict[str, tuple[int, str, str]]) -> None:
    """All of it, with checksums and digests compared; and a follow-up finds what came before it."""
    _, out, _ = runs["good"]
    assert "asked of a second process" in out
    assert out.count("from disk") == 2  # the request, and what was read for it
    assert "23 files, checksums right" in out
    assert out.count("23 of 23 pages verified") == 2
    assert out.count("1,472 of ") == 3  # two questions and the second process
    assert "1,600 of " in out  # the follow-up


def test_a_changed_byte_is_noticed(runs: dict[str, tuple[int, str, str]]) -> None:
    """One byte changed after the load: exit status 1, and the table and the text say where."""
    status, out, _ = runs["corrupt"]
    assert status == 1
    assert out.count("identical") == 6
    assert "differs: see below" in out
    first = "bytes of the cache after the load, first in values at layer 0, head 0, token 0, byte 3"
    assert first in out
    assert "logits from step 0 on" in out


def test_a_spoilt_file_is_a_miss(runs: dict[str, tuple[int, str, str]]) -> None:
    """One bit of a file flipped: what is before it is loaded, and the rest computed, the same."""
    _, out, _ = runs["corrupt"]
    assert "one bit of the file of page 11 flipped" in " ".join(out.split())
    assert "704 of " in out
    assert "file 11 refused and put away" in out
    assert "11 of 11 pages verified" in out
    assert not any("second process" in line for line in out.splitlines() if "differs:" in line)


def test_a_full_disk_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 before a model is loaded, with what is free and what is needed."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(9, 9, 0))
    monkeypatch.setattr(demo, "_FOR_SMOLLM2", ())
    assert demo.main([]) == 2
    message = capsys.readouterr().err
    assert "0 MB are free" in message
    assert "1024 MB" in message
    assert "TMPDIR" in message


def test_missing_packages_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2 and the line that installs them, before anything is loaded."""
    monkeypatch.setattr(demo, "_ALWAYS", ("rich", "no_such_package"))
    assert demo.main(["--random-weights"]) == 2
    message = capsys.readouterr().err
    assert "the demo needs no_such_package:" in message
    assert "pip install '.[demo]'" in message


def test_storage_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages go where a URL says, stay there, and the second process finds them; runs keep apart."""
    told = ["--random-weights", "--storage", f"file://{tmp_path}/kv?fsync=data"]
    for number in (1, 2):
        ran = subprocess.run(
            [sys.executable, "examples/demo.py", *told],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": str(_ROOT / "src"), "COLUMNS": "160"},
            text=True,
            capture_output=True,
            check=False,
            timeout=_TIMEOUT_SECS,
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert ran.stdout.count("identical") == 7
        assert "asked of a second process" in ran.stdout
        kept = len(list((tmp_path / "kv").glob("??/*.kvo")))
        assert kept % number == 0
        assert f"{kept // number} files;" in ran.stdout
    with pytest.raises(SystemExit):
        demo.main([*told, "--corrupt-disk"])
    assert "leave out --storage" in capsys.readouterr().err
