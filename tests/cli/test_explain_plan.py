"""``kvferry explain --plan``: words, JSON, both kinds of geometry, profiles, and bad input."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.transfer import conftest
from tests.transfer.fake_gpu import FakeGpu

from kvferry.cli import main
from kvferry.errors import MissingDependencyError
from kvferry.geometry import Geometry
from kvferry.transfer import BUILT_IN, save_profile
from kvferry.types import Direction

gpu = conftest.gpu

_SIZED = ("--element-size", "656", "--layers", "61", "--tokens", "12288")
_FAST_KERNELS = dataclasses.replace(
    BUILT_IN, source="calibrated", direct=dict.fromkeys(Direction, 100.0)
)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no driver can be reached."""

    def absent() -> None:
        raise MissingDependencyError("no driver bindings")

    monkeypatch.setattr("kvferry.kernels.jit.process_loader", absent)


def _printed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main(["explain", "--plan", *args, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def _words(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", "--plan", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(len(line) for line in out.splitlines()) <= 100
    return " ".join(out.split())


def _refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["explain", *args, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.usefixtures("no_gpu")
def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """What was asked, what it was planned with, and a route each way."""
    told = _printed(capsys, *_SIZED, "--host-run", "8", "--device-run", "16")
    assert told["tokens"] == 12288
    assert told["page_size"] == told["geometry"]["page_size"] == 64
    assert (told["device_run"], told["host_layout"]) == (16, "page_major")
    assert told["staging_bytes"] == 64 << 20
    assert told["profile"] == {"from": "no GPU can be used here", **BUILT_IN.to_dict()}
    load, store = told["routes"]
    assert (load["direction"], store["direction"]) == ("load", "store")
    for route in (load, store):
        assert (route["num_pages"], route["num_runs"]) == (192, 24)
        assert route["planned_for"] == {"num_pages": 128, "num_runs": 16}
        assert route["num_bytes"] == 12288 * 656 * 61
        assert route["mover"] == "staged"
        assert sum(route["layers_per_step"]) == 61
        assert all(seconds > 0 for seconds in route["estimated_seconds"].values())
        assert 1 <= route["copy_calls_of_many_pieces"] <= route["copy_calls"]
        (kernel,) = route["kernels"]
        assert (kernel["plane"], kernel["kernel"]) == ("kv", "flat")
        assert kernel["layers"] == list(range(61))
        assert "spans of 10,496 bytes" in kernel["reason"]
    assert set(load["estimated_seconds"]) == {"direct", "staged by layers"}
    assert set(store["estimated_seconds"]) == {*load["estimated_seconds"], "staged by pages"}
    assert store["layers_per_step"] == [61]
    assert store["copy_widths"] == [[64 * 656 * 61]]


@pytest.mark.usefixtures("no_gpu")
def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Mover, reason, times, steps, widths, copy calls and kernels."""
    told = _words(capsys, *_SIZED, "--direction", "store")
    for expected in (
        "profile built-in (no GPU can be used here)",
        "store 12,288 tokens in 192 pages of 64, 491.7 MB; the host pool is page_major, and the",
        "pages lie there in 1 run of neighbours",
        "mover staged, by pages: the copy engine is faster",
        "estimated direct",
        "staged by layers",
        "steps 1, of 61 layers as planned for 128 pages in 1 run: counts are rounded",
        "copies of each page: 2,561,024 bytes in step 1 in 19 calls for 19 pieces of staging: 19",
        "kernel flat for kv, 61 layers: spans of 656 bytes move in 16-byte packages",
    ):
        assert expected in told
    assert "load" not in told
    told = _words(capsys, "--element-size", "131", "--layers", "2", "--tokens", "1")
    assert "load 1 token in 1 page of 64, 16.8 KB; the host pool is page_major" in told
    assert "as planned" not in told
    assert "kernel realign for kv, 2 layers: flat: " in told
    assert "mover direct, faster than staged" in told
    told = _words(capsys, *_SIZED, "--direction", "load", "--host-run", "8")
    assert "steps 7, of 2, 2, 4, 8, 16, 16 and 13 layers" in told
    assert "83,968 bytes in steps 1 and 2, 167,936 in step 3, " in told
    assert "in 20 calls for 20 pieces of staging: 1 strided, 19 of many pages each" in told
    told = _words(capsys, *_SIZED, "--direction", "load", "--host-layout", "layer_first")
    assert "steps 18, of 1, 1, 2, 4 (14 times) and 1 layers" in told
    assert "2 x 41,984 in step 3, 4 x 41,984 in steps 4 to 17" in told


@pytest.mark.usefixtures("no_gpu")
def test_both_geometries_are_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with planes, and --element-size with --layers, give the same routes."""
    path = tmp_path / "planes.json"
    planes = [{"name": "kv", "num_layers": 61, "element_size": 656}]
    path.write_text(json.dumps({"planes": planes, "page_size": 32}))
    by_file = _printed(capsys, str(path), "--tokens", "12288")
    assert _printed(capsys, *_SIZED, "--page-size", "32") == by_file
    assert by_file["page_size"] == 32
    assert _printed(capsys, str(path), "--tokens", "12288", "--page-size", "64") == _printed(
        capsys, *_SIZED
    )


@pytest.mark.usefixtures("no_gpu")
def test_a_model_with_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of `kvferry geometry` reach the planes, and every plane has its kernel."""
    config = {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hidden_size": 1024,
        "torch_dtype": "bfloat16",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    given = (str(path), "--tp", "2", "--override", "num_hidden_layers=6", "--tokens", "640")
    told = _printed(capsys, *given, "--direction", "load")
    expected = Geometry.from_hf_config({**config, "num_hidden_layers": 6}, tp=2)
    assert told["geometry"]["fingerprint"] == expected.fingerprint
    (load,) = told["routes"]
    assert [one["plane"] for one in load["kernels"]] == ["k", "v"]
    assert _refused(capsys, "--plan", str(path), "--tokens", "5", "--tp", "3")


@pytest.mark.usefixtures("no_gpu")
def test_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """--mover, --staging-mib and --host-layout change the route, and the reason says so."""
    (load, _) = _printed(capsys, *_SIZED, "--mover", "direct")["routes"]
    assert (load["mover"], load["reason"]) == ("direct", "asked for")
    assert (load["copy_calls"], load["pieces"], load["copy_widths"]) == (0, 0, [])
    assert "staged by layers" in load["estimated_seconds"]
    (load, _) = _printed(capsys, *_SIZED, "--staging-mib", "0")["routes"]
    assert load["reason"] == "not staged: staging_bytes is 0"
    (load, _) = _printed(capsys, *_SIZED, "--host-layout", "token_major")["routes"]
    assert "page_major and layer_first" in load["reason"]
    (load, _) = _printed(capsys, *_SIZED, "--host-layout", "layer_first")["routes"]
    assert set(map(len, load["copy_widths"])) == set(load["layers_per_step"])
    err = _refused(capsys, "--plan", *_SIZED, "--host-layout", "token_major", "--mover", "staged")
    assert "this transfer cannot be staged" in err
    large = ("--element-size", "65536", "--layers", "2", "--tokens", "64")
    err = _refused(capsys, "--plan", *large, "--staging-mib", "1")
    assert "staging_bytes=1,048,576 is too little" in err
    err = _refused(capsys, "--plan", *_SIZED, "--staging-mib", "0", "--mover", "staged")
    assert "staging_bytes is 0; change that, or leave mover out" in err
    err = _refused(
        capsys, "--plan", "--element-size", "3000000000", "--layers", "1", "--tokens", "1"
    )
    assert "cannot move as asked: " in err
    assert "choose a smaller page_size" in err


@pytest.mark.usefixtures("no_gpu")
def test_profiles_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile alone, one of the cache folder, and the output of calibrate are all read."""
    path = tmp_path / "profile.json"
    for told in (_FAST_KERNELS.to_dict(), {"device": {}, "profile": _FAST_KERNELS.to_dict()}):
        path.write_text(json.dumps(told))
        printed = _printed(capsys, *_SIZED, "--profile", str(path))
        assert printed["profile"] == {"from": str(path), **_FAST_KERNELS.to_dict()}
        assert [route["mover"] for route in printed["routes"]] == ["direct", "direct"]
    assert f"profile calibrated ({path})" in _words(capsys, *_SIZED, "--profile", str(path))
    for bad in ("no json", "[]", "{}", '{"profile": 3}', '{"profile": {"format": 0}}'):
        path.write_text(bad)
        assert f"--profile {path}: " in _refused(capsys, "--plan", *_SIZED, "--profile", str(path))
    err = _refused(capsys, "--plan", *_SIZED, "--profile", str(tmp_path / "absent"))
    assert "cannot be read (No such file or directory); name a file that kvferry calibrate" in err
    path.write_text('{"model_type": "llama"}')
    err = _refused(capsys, "--plan", *_SIZED, "--profile", str(path))
    assert "it is no device profile, as it has no field `format`" in err


def test_the_profile_of_this_machine(
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a GPU is: its calibrated figures, or the built-in ones with the reason."""
    from kvferry.kernels.jit import process_loader

    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path / "cache"))
    told = _printed(capsys, *_SIZED)["profile"]
    assert told["from"] == "nobody calibrated GPU 0; run kvferry calibrate"
    assert told["source"] == "built-in"
    context = process_loader().driver.context(0)
    saved = save_profile(context, _FAST_KERNELS)
    assert _printed(capsys, *_SIZED)["profile"] == {
        "from": f"GPU 0, {saved.path}",
        **_FAST_KERNELS.to_dict(),
    }


def test_kernels_that_are_switched_off(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """KVFERRY_DISABLE_PATHS counts as in an engine."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "staged, flat")
    (load, _) = _printed(capsys, *_SIZED)["routes"]
    assert load["reason"] == "not staged: switched off by KVFERRY_DISABLE_PATHS"
    assert [one["kernel"] for one in load["kernels"]] == ["realign"]
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat,realign,grouped")
    assert "every path for GPU pools is switched off" in _refused(capsys, "--plan", *_SIZED)
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat,realign")
    err = _refused(capsys, "--plan", *_SIZED)
    assert "plane 'kv', layer 0 cannot move as asked: flat: switched off" in err


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "--plan needs a geometry: CONFIG, or --element-size with --layers"),
        (["--element-size", "8", "--tokens", "1"], "--plan needs a geometry"),
        (["--layers", "8", "--tokens", "1"], "--plan needs a geometry"),
        (["config.json", "--layers", "8"], "not both"),
        (["config.json", "--element-size", "8"], "not both"),
        (["no-such-folder/config.json", "--tokens", "8"], "no-such-folder/config.json"),
        (["--element-size", "8", "--layers", "2"], "--plan needs --tokens"),
        ([*_SIZED, "--tokens", "0"], "--tokens must be from 1 to 1,099,511,627,776, not 0"),
        ([*_SIZED, "--tokens", "-64"], "not -64"),
        ([*_SIZED, "--tokens", str(1 << 40)], "split the transfer"),
        ([*_SIZED, "--layers", "0"], "num_layers must"),
        ([*_SIZED, "--element-size", "0"], "element_size must"),
        ([*_SIZED, "--page-size", "0"], "page_size must"),
        ([*_SIZED, "--host-run", "0"], "--host-run must be from 1"),
        ([*_SIZED, "--device-run", "0"], "--device-run must be from 1"),
        ([*_SIZED, "--staging-mib", "-1"], "--staging-mib must be from 0 to 1,048,576, not -1"),
        (
            [*_SIZED, "--host-layout", "rows"],
            "--host-layout 'rows' is none of layer_first, page_major, token_major",
        ),
        ([*_SIZED, "--direction", "h2d"], "--direction 'h2d' is none of load, store"),
        ([*_SIZED, "--mover", "fast"], "--mover 'fast' is none of direct, staged"),
        ([*_SIZED, "--tp", "2", "--kv-dtype", "fp8"], "--tp, --kv-dtype: with a model's CONFIG"),
        ([*_SIZED, "--unroll", "4"], "--unroll asks for a kernel"),
    ],
)
def test_bad_input_is_a_message_and_status_2(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr with the value and what may be given, and nothing on stdout."""
    assert named in _refused(capsys, "--plan", *args)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["config.json"], "CONFIG: with --plan only"),
        (["--tokens", "64", "--host-run", "1"], "--tokens, --host-run: with --plan only"),
        (["--kv-dtype", "fp8"], "--kv-dtype: with --plan only"),
    ],
)
def test_options_of_a_plan_need_plan(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --plan they are refused, not passed over."""
    assert named in _refused(capsys, "--element-size", "8", *args)
