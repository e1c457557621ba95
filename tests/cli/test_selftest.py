"""``kvferry selftest``: its table, its JSON and its exit status."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from kvferry.cli.main import main
from kvferry.errors import NoDeviceError
from kvferry.testing.round_trip import RoundTrip
from kvferry.transfer.numpy_mover import move_span_numpy
from kvferry.transfer.paths import CpuPath


@pytest.fixture(autouse=True)
def _few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One size of each kind: what the self-test finds is the matter of its own tests."""
    monkeypatch.setattr("kvferry.testing.selftest._QUICK_SIZES", (132,))


def _break_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def does_nothing(move: Any, *_: Any, **__: Any) -> Any:
        return np.ones(len(move.host_slots), dtype=np.bool_)

    monkeypatch.setattr("kvferry.transfer.paths._PORTABLE", CpuPath("cpu_numpy", does_nothing))


def test_the_table_names_every_path(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0, a line a path with its counts, and one sentence that all was exact."""
    assert main(["selftest", "--quick"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["path", "transfers", "failed", "MB", "moved"]
    assert ["cpu_numpy", "160", "0"] in [line.split()[:3] for line in lines]
    assert lines[-1].startswith("All exact: ")


def test_json_has_the_counts(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object with ok, transfers, failures, paths, seconds and bytes."""
    assert main(["selftest", "--quick", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["failures"] == []
    for path in {"cpu", "cpu_numpy"} & set(told["paths"]):
        assert told["paths"][path]["transfers"] == 160
    assert told["bytes"] == sum(path["bytes"] for path in told["paths"].values()) > 0
    assert told["seconds"] >= 0
    known = {"cpu", "cpu_numpy", "flat", "realign", "grouped", "staged"}
    assert set(told["paths"]) | set(told["absent"]) == known


@pytest.mark.parametrize("as_json", [False, True])
def test_a_difference_is_a_status(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that copies wrongly gives status 1, and is named with the first cases that failed."""
    _break_numpy(monkeypatch)
    assert main(["selftest", "--quick", *["--json"] * as_json]) == 1
    out = capsys.readouterr().out
    if as_json:
        told = json.loads(out)
        assert told["ok"] is False
        assert told["failed"] == told["paths"]["cpu_numpy"]["failed"] == 80
        assert len(told["failures"]) == 20
        assert told["failures"][0]["path"] == "cpu_numpy"
        assert told["failures"][0]["direction"] == "store"
        assert told["failures"][0]["element_size"] == 132
    else:
        assert "cpu_numpy: store, 132 B, page, run 1, flat to host_pool:" in out
        assert "... and 60 more" in out
        assert "FAILED on cpu_numpy: 80 of " in out


def test_the_way_out_is_told_when_another_path_is_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable that switches the bad path off is shown only if a path is left."""
    _break_numpy(monkeypatch)
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")
    assert main(["selftest", "--quick"]) == 1
    out = capsys.readouterr().out
    assert "KVFERRY_DISABLE_PATHS=" not in out
    assert "Not tested: cpu. Why: switched off by KVFERRY_DISABLE_PATHS." in out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_that_took_no_case_is_told(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is among those that were not tested, and not all is called exact."""
    monkeypatch.setattr(RoundTrip, "takes", lambda _, path: path != "cpu_numpy")
    monkeypatch.setattr("kvferry.transfer.paths._COMPILED", CpuPath("cpu", move_span_numpy))
    monkeypatch.setattr("kvferry.transfer.paths.native_library", object)
    assert main(["selftest", "--quick", *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    if as_json:
        told = json.loads(out)
        assert "cpu_numpy" not in told["paths"]
        assert told["absent"]["cpu_numpy"] == "took no case"
    else:
        assert "Not tested: cpu_numpy. Why: took no case." in out
        assert "All exact" not in out
        assert out.splitlines()[-1].startswith("What was tested is exact: 160 transfers")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_kernel_that_is_not_built_is_told(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the compiled kernel the self-test says why, what it costs and what to do."""
    monkeypatch.setattr("kvferry.transfer.paths.native_library", lambda: None)
    assert main(["selftest", "--quick", *["--json"] * as_json]) == 0
    out = capsys.readouterr().out
    told = json.loads(out)["absent"]["cpu"] if as_json else out
    assert "not installed: there was no C compiler" in told
    assert "Install a compiler, then kvferry again" in told


def test_a_terminal_shows_what_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal one line of stderr counts the cases, and is empty in the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["selftest", "--quick"]) == 0
    out, err = capsys.readouterr()
    shown = err.split("\r")
    assert shown[1].startswith("case 1 of 80: 132 B, page, run 1,")
    assert shown[-3].startswith("case 80 of 80: ")
    assert shown[-2].strip() == shown[-1] == ""
    assert "case" not in out
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert main(["selftest", "--quick"]) == 0
    assert capsys.readouterr().err == ""


def test_no_path_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With every path switched off the status is 2 and the variable is named."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu,cpu_numpy")
    assert main(["selftest", "--quick"]) == 2
    assert "KVFERRY_DISABLE_PATHS" in capsys.readouterr().err


def test_why_no_gpu_path_is_tested_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what the driver said, and only what is switched off has that as its reason."""

    def absent() -> None:
        raise NoDeviceError("the NVIDIA driver does not open (gone); install it")

    monkeypatch.setattr("kvferry.transfer.paths.process_loader", absent)
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "staged")
    assert main(["selftest", "--quick"]) == 0
    out = capsys.readouterr().out
    said = "Not tested: flat, realign, grouped. Why: the NVIDIA driver does not open (gone)"
    assert out.count(said) == 1
    assert "Not tested: staged. Why: switched off by KVFERRY_DISABLE_PATHS." in out
