"""`kvferry ctl`, given to a cache in a process of its own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.cli.main import main

_SECS = 60

_PROCESS = """
import select, sys
import numpy as np
from tests.cache.ferry_rig import TOKENS, Engine
with Engine().cache(control={"socket": sys.argv[1]}) as cache:
    cache.store(TOKENS, device_slots=np.arange(len(TOKENS))).wait(60)
    print("runs", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        cache.wait(0.01)
"""


@contextlib.contextmanager
def running(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process with a cache that polls."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stdout
        assert one.stdout.readline() == "runs\n"
        try:
            yield one
        finally:
            one.kill()


def test_a_process_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its storage is attached, written to and detached; then it ends, and that is told."""
    path = tmp_path / "s"
    url = (tmp_path / "kv").as_uri()
    with running(path) as process:
        ctl = ["ctl", "--socket", str(path)]
        assert main([*ctl, "status"]) == 0
        shown = capsys.readouterr().out
        assert "slots (page): " in shown
        assert "4 resident" in shown
        assert "storage: none" in shown
        assert main([*ctl, "flush"]) == 1  # there is nothing to write to
        capsys.readouterr()
        assert main([*ctl, "attach", url]) == 0
        capsys.readouterr()
        assert main([*ctl, "--json", "flush"]) == 0
        assert json.loads(capsys.readouterr().out) == {
            "ok": True, "error": "", "complete": True,
            "num_left": 0, "num_unstored": 0, "num_holes": 0,
        }  # fmt: skip
        assert main([*ctl, "attach", url]) == 1
        assert "not done: storage is attached already" in capsys.readouterr().out
        monkeypatch.setenv("KVFERRY_CONTROL_SOCKET", str(path))
        assert main(["ctl", "detach"]) == 0
        assert "detached: True" in capsys.readouterr().out
        process.kill()
        process.wait(_SECS)
    assert main([*ctl, "status"]) == 2
    assert "the process that did is gone" in capsys.readouterr().err
    assert main(["storage", "verify", str(tmp_path / "kv")]) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["status"], "no control socket"),
        (["--socket", "/no/such/socket", "status"], "nothing is at /no/such/socket"),
        (["--socket", "x" * 200, "status"], "at most 107"),
        (["--timeout", "0", "--socket", "/s", "status"], "--timeout 0"),
        (["--timeout", "nan", "--socket", "/s", "status"], "--timeout nan"),
        (["stop"], "invalid choice"),
    ],
)
def test_bad_input(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line and status 2."""
    try:
        status = main(["ctl", *given])
    except SystemExit as end:
        status = int(str(end.code))
    assert status == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
