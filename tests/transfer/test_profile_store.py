"""Profiles on disk: found again, for their own device alone, and never in the way."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.transfer.fake_gpu import FakeGpu, Status

from kvferry.errors import ConfigError, DriverError
from kvferry.kernels.jit import Context, Driver
from kvferry.transfer import BUILT_IN, find_profile, load_profile, save_profile
from kvferry.transfer.profile_store import identify

PROFILE = dataclasses.replace(BUILT_IN, source="calibrated", copy_seconds=5e-6)


@pytest.fixture
def context(gpu: FakeGpu) -> Context:
    """Of the fake GPU."""
    return Driver(gpu, "13.0.0").context(0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache folder that the environment names; not there yet."""
    found = tmp_path / "cache"
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(found))
    return found


def saved(context: Context) -> Path:
    """The file that `PROFILE` is saved in."""
    result = save_profile(context, PROFILE)
    assert result.reason is None
    assert result.path is not None
    return result.path


def reason_not_used(context: Context) -> str:
    """Why the file that is there does not count."""
    found = find_profile(context)
    assert (found.profile, found.path, found.age_seconds) == (BUILT_IN, None, None)
    assert found.reason is not None
    return found.reason


def test_what_is_saved_is_found(context: Context, folder: Path) -> None:
    """With its file and its age; the folder is made, for this user alone."""
    path = saved(context)
    assert path.parent == folder
    assert folder.stat().st_mode & 0o077 == 0
    assert load_profile(context) == PROFILE
    os.utime(path, (path.stat().st_mtime - 3600,) * 2)
    found = find_profile(context)
    assert (found.profile, found.path, found.reason) == (PROFILE, path, None)
    assert found.age_seconds == pytest.approx(3600, abs=60)


def test_a_later_one_takes_the_place_of_the_first(context: Context, folder: Path) -> None:
    """One file a device, and no temporary one beside it."""
    path = saved(context)
    other = dataclasses.replace(PROFILE, copy_seconds=1e-6)
    assert save_profile(context, other).path == path
    assert load_profile(context) == other
    assert list(folder.iterdir()) == [path]


def test_without_one_the_built_in_holds(context: Context, folder: Path) -> None:
    """Nothing is wrong then, nothing is written, and there is nothing to tell."""
    assert load_profile(context) is BUILT_IN
    assert find_profile(context).reason is None
    assert not folder.exists()


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        ("_cu_device_get_name", b"Other GPU\0"),
        ("_cu_device_get_pcibus_id", b"0000:AC:00.0\0"),
        ("_cu_driver_get_version", 13010),
    ],
)
def test_another_device_or_driver_has_another_profile(
    gpu: FakeGpu,
    context: Context,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    function: str,
    answer: Any,
) -> None:
    """Name, place and driver are in the key; back at the first device its profile is there."""
    path = saved(context)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, function, lambda *_: answer)
        other = Driver(gpu, "13.0.0").context(0)
        assert find_profile(other).profile is BUILT_IN
        assert identify(other).file_name != path.name
    assert load_profile(Driver(gpu, "13.0.0").context(0)) == PROFILE


def test_the_kernel_s_folder_tells_driver_and_link(context: Context, tmp_path: Path) -> None:
    """A newer release of the driver, or a slower slot, is another key; without, both are empty."""
    nothing = identify(context, system=tmp_path)
    assert (nothing.driver, nothing.link) == ("", "")
    device = tmp_path / "bus/pci/devices/0000:ab:00.0"
    device.mkdir(parents=True)
    (device / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (device / "max_link_width").write_text("16\n")
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "module/nvidia/version").write_text("580.159.04\n")
    told = identify(context, system=tmp_path)
    assert (told.name, told.bus_id) == ("Fake GPU", "0000:ab:00.0")
    assert (told.driver, told.link) == ("580.159.04", "32.0 GT/s PCIe x16")
    (device / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    names = {one.file_name for one in (nothing, told, identify(context, system=tmp_path))}
    assert len(names) == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b"{", "damaged"),
        (b"\xff\xfe", "damaged"),
        (b"[]", "no profile of kvferry's"),
        (b'{"profile": {}}', "no profile of kvferry's"),
        (b'{"device": {}, "profile": {}}', "another device or driver"),
    ],
)
def test_a_damaged_file_is_passed_over_with_a_reason(
    context: Context, folder: Path, content: bytes, said: str
) -> None:
    """The built-in profile holds, and the file is named."""
    path = saved(context)
    path.write_bytes(content)
    reason = reason_not_used(context)
    assert reason.startswith(f"{path}: ")
    assert said in reason


@pytest.mark.parametrize(
    ("name", "value"), [("format", 99), ("link", {"load": -1, "store": 1}), ("widths", None)]
)
def test_figures_that_cannot_be_are_passed_over(
    context: Context, folder: Path, name: str, value: Any
) -> None:
    """A file of another version of kvferry, or one that somebody has edited."""
    path = saved(context)
    told = json.loads(path.read_text())
    told["profile"][name] = value
    path.write_text(json.dumps(told))
    assert name in reason_not_used(context)


def test_a_profile_that_was_cut_off_is_passed_over(context: Context, folder: Path) -> None:
    """At whatever byte: none is taken for a whole one."""
    path = saved(context)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, 7):
        path.write_bytes(whole[:length])
        assert load_profile(context) is BUILT_IN, length


def test_what_is_no_file_is_passed_over(context: Context, folder: Path) -> None:
    """A link, a folder or a pipe in its place; none of them blocks."""
    path = saved(context)
    elsewhere = path.rename(folder / "elsewhere")
    path.symlink_to(elsewhere)
    assert str(path) in reason_not_used(context)
    path.unlink()
    os.mkfifo(path)
    assert "it is no file" in reason_not_used(context)
    path.unlink()
    path.mkdir()
    assert str(path) in reason_not_used(context)
    assert "Is a directory" in str(save_profile(context, PROFILE).reason)


def _refuse_to_open(monkeypatch: pytest.MonkeyPatch, flags: int) -> None:
    """Let opening with `flags` fail, as without the right to: root may open anything."""
    really = os.open

    def refuse(path: Any, wanted: int, *rest: Any, **named: Any) -> int:
        if wanted & flags:
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, wanted, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)


def test_a_file_that_may_not_be_read(
    context: Context, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason names it."""
    path = saved(context)
    _refuse_to_open(monkeypatch, os.O_NONBLOCK)
    assert reason_not_used(context) == f"{path}: Permission denied"


def test_a_read_only_folder_is_a_value(
    context: Context, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing raises: it was not saved, why, and what to do."""
    _refuse_to_open(monkeypatch, os.O_CREAT)
    result = save_profile(context, PROFILE)
    assert result.path is None
    assert "Permission denied; let KVFERRY_CACHE_DIR name a folder" in str(result.reason)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_is_not_trusted(
    context: Context, folder: Path, mode: int
) -> None:
    """Neither to read from nor to write to, as with kernels."""
    path = saved(context)
    folder.chmod(mode)
    assert "others may write in" in reason_not_used(context)
    path.unlink()
    result = save_profile(context, PROFILE)
    assert result.path is None
    assert "others may write in" in str(result.reason)
    assert not path.exists()


def test_without_a_folder_nothing_is_kept(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the environment names no home either."""
    for name in ("KVFERRY_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert "names a folder" in reason_not_used(context)
    assert save_profile(context, PROFILE).path is None


def test_a_relative_folder_is_refused(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """As everywhere: it would be another one in each process."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "cache")
    with pytest.raises(ConfigError, match="KVFERRY_CACHE_DIR='cache' is relative"):
        find_profile(context)


def test_a_driver_that_does_not_answer_is_an_error(
    gpu: FakeGpu, context: Context, folder: Path
) -> None:
    """Typed, and nothing is saved under a key that is half known."""
    gpu.hooks["cuDeviceGetName"] = lambda *_: Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(DriverError, match="cuDeviceGetName"):
        save_profile(context, PROFILE)
    assert not folder.exists()
