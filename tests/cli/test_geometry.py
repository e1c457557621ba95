"""``kvferry geometry``: both forms of its output, planes by hand, bad input, and a closed pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry.cli import main
from kvferry.cli.json_text import json_text
from kvferry.geometry import Geometry
from kvferry.geometry.kv_dtype import KV_DTYPES

GLM_52 = {
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "hidden_size": 6144,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_topk_freq": 4,
    "index_skip_topk_offset": 3,
    "num_nextn_predict_layers": 1,
    "dtype": "bfloat16",
}
BY_HAND = {"planes": [{"name": "k", "num_layers": 2, "element_size": 100}]}


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The path of a config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GLM_52))
    return str(path)


@pytest.fixture
def by_hand(tmp_path: Path) -> str:
    """The path of a file with planes."""
    path = tmp_path / "planes.json"
    path.write_text(json.dumps(BY_HAND))
    return str(path)


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    """The JSON object that a run with --json prints, after a look at its status."""
    assert main(["geometry", *args, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json_of_a_model(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The documented options give the documented fields, with exact numbers."""
    told = printed(
        capsys, config, "--tp", "8", "--tp-rank", "3", "--kv-dtype", "fp8_e4m3", "--page-size", "32"
    )
    assert [(p["name"], p["num_layers"], p["element_size"]) for p in told["planes"]] == [
        ("latent", 78, 656),
        ("index_key", 21, 132),
    ]
    assert set(told["planes"][0]) >= {"rows_per_page", "hit_rule", "last_tokens", "layer_ids"}
    expected = Geometry.from_hf_config(config, tp=8, kv_dtype="fp8_e4m3", page_size=32)
    assert told["page_size"] == 32
    assert told["bytes_per_token"] == 53940
    assert told["page_bytes"] == 53940 * 32
    assert told["slot_bytes"] == expected.slot_bytes()
    assert told["state_bytes"] == 0
    assert told["fingerprint"] == expected.fingerprint


def test_output_is_input(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What --json prints is a file with planes, of the same fingerprint."""
    told = printed(capsys, config)
    path = tmp_path / "again.json"
    path.write_text(json.dumps(told))
    assert printed(capsys, str(path)) == told


def test_stages_and_draft_layers(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--pp, --pp-rank and --draft-layers reach the geometry."""
    told = printed(capsys, config, "--pp", "2", "--pp-rank", "1", "--draft-layers", "planes")
    latent, _, draft, _ = told["planes"]
    assert latent["layer_ids"] == list(range(39, 78))
    assert (draft["name"], draft["layer_ids"]) == ("draft_latent", [78])


def test_a_split_of_the_engine_s_own(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--pp-layers says how many layers each stage has."""
    told = printed(capsys, config, "--pp-layers", "38,40", "--pp-rank", "1")
    assert told["planes"][0]["layer_ids"] == list(range(38, 78))


def test_overrides(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--override puts JSON in place of fields."""
    told = printed(
        capsys, config, "--override", "index_topk_freq=1", "--override", 'dtype="float32"'
    )
    assert [(p["num_layers"], p["element_size"]) for p in told["planes"]] == [(78, 2304), (78, 132)]


def test_what_is_assumed_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table and the JSON list what the config does not tell, and keep it when read again."""
    path = tmp_path / "config.json"
    bare = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 1024}
    path.write_text(json.dumps(bare))
    told = printed(capsys, str(path))
    assert len(told["assumed"]) == 4
    assert "head_dim is hidden_size / num_attention_heads, 128" in told["assumed"]
    assert main(["geometry", str(path)]) == 0
    table = " ".join(capsys.readouterr().out.split())
    assert all(sentence in table for sentence in told["assumed"])
    path.write_text(json.dumps(told))
    assert printed(capsys, str(path)) == told
    path.write_text(json.dumps({**told, "assumed": 3}))
    assert main(["geometry", str(path)]) == 2
    assert "assumed must be a list" in capsys.readouterr().err


def test_lists_of_layers_take_one_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers of a plane are one line of the JSON, not one each."""
    assert main(["geometry", config, "--json"]) == 0
    out = capsys.readouterr().out
    assert f'"layer_ids": {json.dumps([0, 1, 2, *range(6, 78, 4)])}' in out
    assert len(out.splitlines()) < 40


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        {"a": {}, "b": []},
        {"a": [1, 2.5, None, True], "b": {"c": [[1, 2], ["x", 'ü\n"']]}, 'd"': [{}, {"e": -1}]},
        "text",
        3,
    ],
)
def test_json_text_is_json(value: Any) -> None:
    """Whatever the line breaks, what is printed reads back as what it was."""
    assert json.loads(json_text(value)) == value


def test_help_names_every_kv_dtype(capsys: pytest.CaptureFixture[str]) -> None:
    """`kvferry geometry --help` says what each KV dtype is."""
    with pytest.raises(SystemExit):
        main(["geometry", "--help"])
    words = set(capsys.readouterr().out.replace(",", " ").split())
    assert set(KV_DTYPES) <= words


def test_a_kv_dtype_in_upper_case(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the same one."""
    assert printed(capsys, config, "--kv-dtype", "FP8") == printed(
        capsys, config, "--kv-dtype", "fp8_e4m3"
    )


def test_planes_by_hand(by_hand: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with planes is a geometry as it is, or with another page size."""
    assert printed(capsys, by_hand)["page_bytes"] == 200 * 64
    assert printed(capsys, by_hand, "--page-size", "16")["page_bytes"] == 200 * 16


def test_the_table(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: a row a plane, and the totals with thousands marked."""
    assert main(["geometry", config, "--kv-dtype", "fp8_e4m3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["latent", "78", "656", "64", "3,274,752", "every", "page"]
    assert lines[3].split() == ["index_key", "21", "132", "64", "177,408", "every", "page"]
    assert any(line.split() == ["a", "token", "53,940", "bytes"] for line in lines)


def test_the_table_of_windows_and_states(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows tell their tokens; states are counted by the checkpoint."""
    planes = [
        {
            "name": "k_window",
            "num_layers": 1,
            "element_size": 8,
            "hit_rule": "last_tokens",
            "last_tokens": 4096,
        },
        {
            "name": "state",
            "num_layers": 3,
            "element_size": 1000,
            "rows_per_page": 1,
            "hit_rule": "exact_boundary",
        },
    ]
    path = tmp_path / "planes.json"
    path.write_text(json.dumps({"planes": planes}))
    assert main(["geometry", str(path)]) == 0
    out = capsys.readouterr().out
    assert "the last 4,096 tokens" in out
    assert "a checkpoint" in out
    assert "3,000 bytes, in a slot of 4,096" in out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--tp", "3"], "--tp: planes given by hand"),
        (["--kv-dtype", "fp8", "--pp-rank", "0"], "--pp-rank, --kv-dtype: planes given by hand"),
        (["--page-size", "0"], "page_size must"),
    ],
)
def test_options_that_planes_by_hand_do_not_take(
    by_hand: str, args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of a model are refused beside planes, not passed over."""
    assert main(["geometry", by_hand, *args]) == 2
    assert f"kvferry: error: {named}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--tp", "0"], "tp must"),
        (["--tp", "2", "--tp-rank", "2"], "tp_rank must"),
        (["--pp-layers", "40,40"], "pp_layers [40, 40] are 80 layers, and the model has 78"),
        (["--pp-layers", "40;38"], "--pp-layers '40;38' must be whole numbers with commas"),
        (["--kv-dtype", "int3"], "'int3' is none of"),
        (["--draft-layers", "some"], "draft_layers 'some'"),
        (["--override", "head_dim"], "must be FIELD=JSON"),
        (["--override", "dtype=bf16"], "is not JSON"),
        (["--override", "num_hidden_layers=0"], "num_hidden_layers"),
    ],
)
def test_bad_options_are_a_message_and_status_2(
    config: str, args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input is one line on stderr and nothing on stdout."""
    assert main(["geometry", config, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert named in err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot read"),
        ("{", "is not a JSON file"),
        ("[]", "JSON object"),
        ("{}", "missing fields: num_hidden_layers"),
        ('{"planes": 3}', "list of planes"),
        ('{"planes": []}', "at least one plane"),
    ],
)
def test_bad_files_are_a_message_and_status_2(
    tmp_path: Path, content: str | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that holds no geometry is named, without a traceback."""
    path = tmp_path / "file.json"
    if content is not None:
        path.write_text(content)
    assert main(["geometry", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert named in err
    assert "Traceback" not in err


def test_no_command_is_help_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command the help goes to stderr; an unknown one is argparse's own error."""
    assert main([]) == 2
    assert "geometry" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["nothing"])
    assert stopped.value.code == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version is one line and status 0."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {kvferry.__version__}\n"


def _child(*args: str) -> list[str]:
    return [sys.executable, *args]


def test_help_loads_no_framework() -> None:
    """`kvferry --help` and a geometry import neither torch nor numpy."""
    script = (
        "import sys\n"
        "from kvferry.cli import main\n"
        "try:\n"
        "    main(['geometry', '--help'])\n"
        "except SystemExit as stopped:\n"
        "    assert stopped.code == 0\n"
        "print(sorted({'torch', 'numpy', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        _child("-c", script),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_quiet(config: str) -> None:
    """A reader that is gone before the first byte leaves no message and a status of its own."""
    child = subprocess.Popen(
        _child("-m", "kvferry", "geometry", config, "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=60) == 141
    assert err == ""


def test_the_module_is_the_command(config: str) -> None:
    """`python -m kvferry` prints what main does, and returns its status."""
    done = subprocess.run(
        _child("-m", "kvferry", "geometry", config + ".gone"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("kvferry: error: cannot read")
