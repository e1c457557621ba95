"""``kvferry calibrate``: what it prints, what it keeps, and its exit status."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.transfer import conftest
from tests.transfer.fake_gpu import FakeGpu, Status
from tests.transfer.fake_time import Work

import kvferry
from kvferry.cli import main
from kvferry.kernels.jit import Driver
from kvferry.transfer import BUILT_IN, DeviceProfile, find_profile
from kvferry.transfer.calibration import calibrate
from kvferry.transfer.direct_trial import TrialSize
from kvferry.transfer.link_bench import Effort

gpu = conftest.gpu

_SMALL = Effort(
    buffer_bytes=1 << 20,
    batch_bytes=64 << 10,
    delay_bytes=4096,
    num_calls=4,
    trial=TrialSize(num_pages=2, num_layers=4),
    seconds=60.0,
)


def _cost(work: Work) -> float:
    return 1e-6 + work.num_bytes / 20e9


@pytest.fixture(autouse=True)
def _little_effort(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of host memory copies as much as it is told, and that takes its time."""
    gpu.time.cost = _cost
    _effort(monkeypatch, _SMALL)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _effort(monkeypatch: pytest.MonkeyPatch, effort: Effort) -> None:
    monkeypatch.setattr("kvferry.transfer.calibrate", functools.partial(calibrate, effort=effort))


def _printed(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    assert main(["calibrate", *args, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def _kept(gpu: FakeGpu) -> DeviceProfile:
    return find_profile(Driver(gpu, "13.0.0").context(0)).profile


def test_what_is_measured_is_kept(
    gpu: FakeGpu, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next process finds the very figures that were printed."""
    told = _printed(capsys)
    assert told["device"] == 0
    assert DeviceProfile.from_dict(told["profile"]) == _kept(gpu)
    assert told["profile"]["source"] == "calibrated"
    assert [str(path) for path in folder.iterdir()] == [told["file"]]
    assert told["not_saved"] is None
    assert told["bytes"] == sum(one["num_bytes"] for one in told["measured"]) > 0
    assert told["seconds"] > 0


def test_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a figure with its unit, what it took, and the file."""
    assert main(["calibrate"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].split() == ["a", "plain", "copy", "to", "the", "GPU", "19.6", "GB/s"]
    assert any(line.split()[-2:] == ["1.0", "us"] for line in lines if "copy call" in line)
    for said in ("rows of 656 bytes from the GPU", "rows of 41,984 bytes to", "a launch more"):
        assert sum(line.startswith(said) for line in lines) == 1
    assert sum("blocks of a kernel" in line for line in lines) == 2
    assert not any("built-in" in line for line in lines)
    assert lines[-1] == f"Kept in {next(folder.iterdir())}."


def test_a_dry_run_keeps_nothing(
    gpu: FakeGpu, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It measures all the same, and says so."""
    told = _printed(capsys, "--dry-run")
    assert told["profile"]["source"] == "calibrated"
    assert (told["file"], told["not_saved"]) == (None, None)
    assert not folder.exists()
    assert _kept(gpu) is BUILT_IN
    assert main(["calibrate", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "Not kept, as asked."


def test_what_there_was_no_time_for_is_marked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each figure that is a built-in one, and a line that names them."""
    _effort(monkeypatch, dataclasses.replace(_SMALL, seconds=0.0))
    assert main(["calibrate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = lines[: lines.index("")]
    assert all(line.endswith("(built-in)") for line in figures)
    assert sum("Time was up before link.load, link.store" in line for line in lines) == 1


def test_a_folder_that_cannot_be_written_is_a_status(
    gpu: FakeGpu, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1; the figures are printed all the same, with why they are not kept."""
    folder.mkdir()
    folder.chmod(0o777)
    told = _printed(capsys, status=1)
    assert told["file"] is None
    assert "others may write in" in told["not_saved"]
    assert main(["calibrate"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("NOT KEPT: others may write in")
    assert _kept(gpu) is BUILT_IN


@pytest.mark.parametrize("device", ["1", "-1"])
def test_a_gpu_that_is_not_there(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input: status 2 and one line that says how many there are."""
    assert main(["calibrate", "--device", device]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"kvferry: error: there is no GPU {device}: this process sees 1")


def test_a_gpu_that_is_full(gpu: FakeGpu, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The driver's own words and a hint, no traceback, and nothing is kept."""
    with gpu.failing("cuMemAlloc", Status.CUDA_ERROR_OUT_OF_MEMORY):
        assert main(["calibrate"]) == 2
    assert "CUDA_ERROR_OUT_OF_MEMORY" in capsys.readouterr().err
    assert not folder.exists()
    assert set(gpu.holdings.values()) == {0}


def test_without_a_driver_it_is_an_error_like_any_other(tmp_path: Path) -> None:
    """In a process that has no driver: status 2 and a line that says what to do."""
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    ran = subprocess.run(
        [sys.executable, "-m", "kvferry", "calibrate"],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": str(Path(kvferry.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("kvferry: error: ")
    assert "Traceback" not in ran.stderr
