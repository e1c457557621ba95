"""``kvferry config``: values and origins, for people and programs, and bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from kvferry.config import PRECEDENCE, SECRET, Config


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that sets some things, one of them a secret."""
    path = tmp_path / "kvferry.toml"
    path.write_text(
        '[host]\nnum_bytes = "8GiB"\n\n[storage]\nenabled = true\npath = "/var/kv"\n\n'
        '[storage.options]\nregion = "eu"\nsecret_key = "hunter2"\n'
    )
    return path


def _printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["config", *args]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def _rows(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines() if "." in line[:20]}


def test_the_table_has_every_setting_and_its_origin(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line a setting: what holds and where from; the precedence is stated below."""
    monkeypatch.setenv("KVFERRY_STORE_POLICY", "write_back")
    monkeypatch.setenv("KVFERRY_STORAGE_ENABLED", "false")
    text = _printed(capsys, "--config", str(file))
    rows = _rows(text)
    assert list(rows) == list(Config.resolve(environ={}).origin_of)
    assert rows["host.num_bytes"] == ["8,589,934,592", "file", str(file)]
    assert rows["host.reserve_bytes"] == ["none", "default"]
    assert rows["store.policy"] == ["write_back", "environment", "KVFERRY_STORE_POLICY"]
    assert rows["storage.enabled"] == ["false", "environment", "KVFERRY_STORAGE_ENABLED"]
    assert rows["storage.path"] == ["/var/kv", "file", str(file)]
    assert "region=eu" in text
    assert text.splitlines()[-1] == f"An earlier source wins: {PRECEDENCE}."


def test_json_has_the_same(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values keep their types, and origin and place are apart."""
    told: Any = json.loads(_printed(capsys, "--config", str(file), "--json"))
    assert told["file"] == str(file)
    assert told["precedence"] == ["keyword", "environment", "file", "default"]
    settings = told["settings"]
    assert list(settings) == list(Config.resolve(environ={}).origin_of)
    assert settings["host.num_bytes"] == {"value": 8 << 30, "origin": "file", "place": str(file)}
    assert settings["store.enabled"] == {"value": True, "origin": "default", "place": None}
    assert settings["storage.path"]["value"] == "/var/kv"
    assert settings["storage.options"]["value"] == {"region": "eu", "secret_key": SECRET}
    assert json.loads(_printed(capsys, "--json"))["file"] is None


@pytest.mark.parametrize("args", [[], ["--json"]])
def test_secrets_are_not_printed(
    file: Path, args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that are named like secrets are not shown to whoever looks over a shoulder."""
    out = _printed(capsys, "--config", str(file), *args)
    assert "secret_key" in out
    assert "hunter2" not in out


def test_the_variable_names_the_file(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --config it is the file that a cache would read."""
    monkeypatch.setenv("KVFERRY_CONFIG", str(file))
    assert json.loads(_printed(capsys, "--json"))["file"] == str(file)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[host]\nnum_bites = 1\n", "host.num_bites: there is no such setting; the nearest is"),
        ("[host]\nnum_bytes = 0\n", "host.num_bytes: 0 is not accepted; it must be 1 or more"),
        ("[host\n", "cannot read the config file"),
        ("[storage]\nenabled = true\n", "set storage.path"),
    ],
)
def test_mistakes_are_a_message_and_status_2(
    content: str, named: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line on stderr, nothing on stdout."""
    file.write_text(content)
    assert main(["config", "--config", str(file), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert err.count("\n") == 1
    assert named in err


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that was asked for and is absent is no empty file."""
    assert main(["config", "--config", str(tmp_path / "no.toml")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["config", "--config", "\0"]) == 2
    assert "cannot read the config file" in capsys.readouterr().err
