"""``kvferry explain``: the JSON that programs read, the words for people, and bad input."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli import main

_GROUPED = ("unroll", "threads", "bytes_per_thread", "package", "packages_per_thread")


def _printed(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    assert main(["explain", *args, "--json"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_json_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """All paths are reported with eligibility and reason, and their numbers."""
    told = _printed(capsys, "--element-size", "656")
    assert told["element_size"] == 656
    assert told["page_size"] == 1
    assert told["chosen"] == "flat"
    assert told["reason"] == f"flat: {told['flat']['reason']}"
    for path in ("flat", "realign", "grouped"):
        assert told[path]["eligible"] is True
        assert told[path]["reason"]
    assert (told["flat"]["span_bytes"], told["flat"]["package"]) == (656, 16)
    assert [told["grouped"][name] for name in _GROUPED] == [8, 4, 164, 4, 41]


def test_json_of_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Where grouped is refused its numbers are null, and the others are still told."""
    told = _printed(capsys, "--element-size", "66")
    assert told["chosen"] == "realign"
    assert told["flat"]["eligible"] is False
    assert (told["flat"]["span_bytes"], told["flat"]["package"]) == (66, 2)
    assert told["grouped"]["eligible"] is False
    assert set(told["grouped"]) == {"eligible", "reason", *_GROUPED}
    assert [told["grouped"][name] for name in _GROUPED] == [None] * 5


def test_page_size_makes_longer_spans(capsys: pytest.CaptureFixture[str]) -> None:
    """--page-size says how many tokens are neighbours on both sides."""
    told = _printed(capsys, "--element-size", "66", "--page-size", "64")
    assert told["chosen"] == "flat"
    assert (told["flat"]["span_bytes"], told["flat"]["package"]) == (4224, 16)


def test_unroll_asks_for_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """--unroll takes grouped in that form, or says why not and what carries it instead."""
    told = _printed(capsys, "--element-size", "576", "--unroll", "4")
    assert told["chosen"] == "grouped"
    assert [told["grouped"][name] for name in _GROUPED] == [4, 8, 72, 8, 9]
    refused = _printed(capsys, "--element-size", "1024", "--unroll", "8")
    assert refused["chosen"] == "flat"
    assert refused["grouped"]["eligible"] is False
    assert "packages of 32 bytes" in refused["grouped"]["reason"]
    assert refused["reason"].startswith("grouped: with unroll 8")


def test_a_path_that_is_switched_off_is_not_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as such, and what is chosen is what an engine would take."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flat")
    told = _printed(capsys, "--element-size", "656")
    assert told["chosen"] == "realign"
    assert told["flat"]["eligible"] is False
    assert told["flat"]["reason"] == "switched off by KVFERRY_DISABLE_PATHS"
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "realign, flat")
    told = _printed(capsys, "--element-size", "656", "--unroll", "8", status=1)
    assert told["chosen"] is None
    assert told["grouped"]["reason"] == "its digests are made by realign, which is switched off"
    assert main(["explain", "--element-size", "656"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Elements of 656 bytes, each on its own: no path"
    assert [line.split()[1] for line in lines[2:5]] == ["cannot"] * 3
    assert lines[-1] == "An engine refuses to carry them."
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "realign, flat, grouped")
    assert main(["explain", "--element-size", "656"]) == 2
    assert "every path for GPU pools is switched off" in capsys.readouterr().err
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "flatt")
    assert main(["explain", "--element-size", "656"]) == 2
    assert "flatt is no path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("element_size", "page_size"), [(1 << 31, 1), ((1 << 31) - 8, 2), (1 << 40, 1 << 20)]
)
def test_spans_that_kernels_cannot_count_have_no_path(
    capsys: pytest.CaptureFixture[str], element_size: int, page_size: int
) -> None:
    """From 2^31 bytes on all three refuse, with the length and the limit."""
    args = ["--element-size", str(element_size), "--page-size", str(page_size), "--unroll", "4"]
    told = _printed(capsys, *args, status=1)
    assert told["chosen"] is None
    for path in ("flat", "realign", "grouped"):
        assert told[path]["eligible"] is False
        assert f"spans of {element_size * page_size:,} bytes" in told[path]["reason"]
        assert "2,147,483,647" in told[path]["reason"]
    assert _printed(capsys, "--element-size", str((1 << 31) - 8))["chosen"] == "flat"


def test_words(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json: one line a path, which is taken, which can and which cannot."""
    assert main(["explain", "--element-size", "4104", "--page-size", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Elements of 4,104 bytes, each on its own: flat"
    assert lines[2].split()[:2] == ["flat", "taken"]
    assert "spans of 4,104 bytes move in 8-byte packages" in lines[2]
    assert lines[3].split()[:2] == ["realign", "can"]
    assert lines[4].split()[:2] == ["grouped", "can"]
    assert "only on request" in lines[4]
    assert main(["explain", "--element-size", "1", "--page-size", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Elements of 1 byte, 2 side by side: realign"
    assert lines[2].split()[:2] == ["flat", "cannot"]
    assert lines[4].split()[:2] == ["grouped", "cannot"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--element-size", "0"], "from 1 to 1,099,511,627,776, not 0"),
        (["--element-size", "-4"], "not -4"),
        (["--element-size", str((1 << 40) + 1)], "not 1099511627777"),
        (["--element-size", "8", "--unroll", "3"], "unroll must be 1, 2, 4, 8, 16 or 32, not 3"),
        (["--element-size", "8", "--unroll", "0"], "not 0"),
        (["--element-size", "8", "--page-size", "0"], "--page-size must be from 1 to 1,048,576"),
        (["--element-size", "8", "--page-size", "-1"], "not -1"),
        (["--element-size", "8", "--page-size", str((1 << 20) + 1)], "not 1,048,577"),
    ],
)
def test_bad_numbers_are_a_message_and_status_2(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers out of range are one line on stderr and nothing on stdout."""
    assert main(["explain", *args, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvferry: error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize("args", [[], ["--element-size", "six"], ["--element-size", "1.5"]])
def test_what_is_no_number_is_status_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A missing size, or one that is no number, is the parser's own message."""
    with pytest.raises(SystemExit) as stopped:
        main(["explain", *args])
    assert stopped.value.code == 2
    assert "--element-size" in capsys.readouterr().err
