"""What all commands share: output that cannot be written, and paths that cannot be read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.cli import main

# Each, and whether what it prints is the point of it.
_COMMANDS: dict[str, list[str]] = {
    "version": ["--version"],
    "help": ["--help"],
    "help of a command": ["geometry", "--help"],
    "table": ["geometry", "planes.json"],
    "json": ["geometry", "planes.json", "--json"],
    "selftest": ["selftest", "--quick", "--json"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file of planes, one name of which is not ASCII."""
    planes = [{"name": "größe", "num_layers": 2, "element_size": 8}]
    path = tmp_path / "planes.json"
    path.write_text(json.dumps({"planes": planes}))
    return tmp_path


def _run(
    folder: Path, redirected: str, *args: str, **env: str
) -> subprocess.CompletedProcess[bytes]:
    """`kvferry` as a shell runs it with `redirected` behind the command."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-m", "kvferry", *args],
        cwd=folder,
        capture_output=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), **env},
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", [name for name in _COMMANDS if name != "selftest"])
def test_output_that_cannot_be_written_is_a_message(
    folder: Path, command: str, unbuffered: str
) -> None:
    """A full device is one line on stderr and status 2, never a traceback or a success."""
    done = _run(folder, "> /dev/full", *_COMMANDS[command], PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 2
    assert done.stderr.startswith(b"kvferry: error: cannot read or write: No space left")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("command", [name for name in _COMMANDS if name != "selftest"])
def test_a_closed_stdout_is_quiet(folder: Path, command: str) -> None:
    """Who closes stdout wants no output, and gets the status alone."""
    done = _run(folder, ">&-", *_COMMANDS[command])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_selftest_without_an_output(folder: Path) -> None:
    """A command that works long before it prints ends the same way."""
    done = _run(folder, ">&-", *_COMMANDS["selftest"])
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("redirected", ["2>&-", "2> /dev/full", "2>&- >&-"])
def test_an_error_that_nobody_can_read_still_has_its_status(folder: Path, redirected: str) -> None:
    """With stderr closed or full the message is lost, and never takes the place of the output."""
    for args in (["geometry", "nothing.json"], ["geometry"], []):
        done = _run(folder, redirected, *args)
        assert (done.returncode, done.stdout, done.stderr) == (2, b"", b""), args


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_name_that_the_terminal_cannot_show(folder: Path, encoding: str) -> None:
    """A table escapes letters that the encoding has not; JSON is JSON in every encoding."""
    table = _run(folder, "", *_COMMANDS["table"], PYTHONIOENCODING=encoding)
    assert (table.returncode, table.stderr) == (0, b"")
    shown = "gr\\xf6\\xdfe" if encoding == "ascii" else "größe"
    assert table.stdout.decode(encoding).splitlines()[2].split()[0] == shown
    told = _run(folder, "", *_COMMANDS["json"], PYTHONIOENCODING=encoding)
    assert json.loads(told.stdout.decode(encoding))["planes"][0]["name"] == "größe"


def test_an_error_about_a_name_that_the_terminal_cannot_show(folder: Path) -> None:
    """A path in a message is escaped too, also one that is no text at all."""
    for path in ("größe.json", os.fsdecode(b"\xff\xfe")):
        done = _run(folder, "", "geometry", path, PYTHONIOENCODING="ascii")
        assert done.returncode == 2
        assert done.stderr.startswith(b"kvferry: error: cannot read the model config")
        assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("path", ["a" * 5000, "planes.json/config.json", "nothing/at/all", "\0"])
def test_a_path_that_cannot_be_looked_at(
    folder: Path, path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path too long, through a file, of nothing, or no path at all, is a message."""
    monkeypatch.chdir(folder)
    assert main(["geometry", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert len(err) < 500


@pytest.mark.parametrize("at", ["is_dir", "read_text"])
def test_a_folder_that_may_not_be_read(
    folder: Path, at: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal by the system is told, wherever it comes. Root sees none, so it is played."""

    def refused(*_args: object, **_kwargs: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, at, refused)
    assert main(["geometry", str(folder / "planes.json")]) == 2
    assert "cannot read the model config" in (err := capsys.readouterr().err)
    assert "Permission denied" in err


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            ["doctor", "--foo"],
            "kvferry doctor: error: unknown: --foo (see kvferry doctor --help)",
        ),
        (
            ["geometry", "config.json", "--tp", "two"],
            (
                "kvferry geometry: error: argument --tp: 'two' is no whole number; give digits, "
                "such as 64 (see kvferry geometry --help)"
            ),
        ),
        (["--foo"], "kvferry: error: unknown: --foo (see kvferry --help)"),
        (
            ["explain"],
            (
                "kvferry explain: error: --element-size is needed, or --plan with a geometry "
                "(see kvferry explain --help)"
            ),
        ),
    ],
)
def test_arguments_that_cannot_be_are_one_line_of_their_command(
    args: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that was called says what is wrong and where its options are; status 2."""
    with pytest.raises(SystemExit) as stopped:
        main(args)
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"{line}\n")
