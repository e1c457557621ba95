"""``kvferry storage``: every action, in words and JSON, on folders that are whole and are not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from tests.storage.storage_rig import SMALL, Pages, key_of

from kvferry.cli import main
from kvferry.storage import FileBackend, ItemResult, ItemStatus, MemoryBackend, PageStore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of five objects, the first used longest ago."""
    backend = FileBackend(tmp_path / "store", num_threads=1)
    pages = Pages(SMALL, 5, seed=1)
    keys = [key_of(number) for number in range(5)]
    wrote = PageStore(backend, SMALL).write(keys, pages.addresses, pages.digests)
    assert all(one.ok for one in wrote)
    backend.close()
    return tmp_path / "store"


def _file(folder: Path, number: int) -> Path:
    return next(folder.rglob(f"{key_of(number).hex()}.kvo"))


def _json(capsys: pytest.CaptureFixture[str], *args: object, status: int = 0) -> dict[str, Any]:
    assert main(["storage", *map(str, args), "--json"]) == status
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_ls(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Objects are named by key, the latest first, as many as asked for."""
    told = _json(capsys, "ls", folder)
    assert [row["key"] for row in told["objects"]] == [key_of(n).hex() for n in (4, 3, 2, 1, 0)]
    assert {row["bytes"] for row in told["objects"]} == {8192}
    told = _json(capsys, "ls", folder, "--limit", 2)
    assert (len(told["objects"]), told["not_shown"]) == (2, 3)
    assert main(["storage", "ls", str(folder), "--limit", "1"]) == 0
    first, more = capsys.readouterr().out.splitlines()
    assert first.split()[1:] == ["8,192", key_of(4).hex()]
    assert more == "and 4 more"


def test_stats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What lies there is added up, by what it is."""
    shard = _file(folder, 0).parent
    (shard / ".00-0.tmp").write_bytes(bytes(100))
    (shard / "notes").write_text("")
    FileBackend(folder, read_only=True).close()
    told = _json(capsys, "stats", folder)
    assert (told["objects"], told["object_bytes"]) == (5, 5 * 8192)
    assert (told["temporary_bytes"], told["ignored_names"]) == (100, 1)
    assert main(["storage", "stats", str(folder)]) == 0
    assert "object bytes       40,960" in capsys.readouterr().out
    empty = folder.with_name("empty")
    FileBackend(empty).close()
    assert _json(capsys, "stats", empty)["last_used"] is None


def test_verify(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Damage is named with its reason and status 1, and moved away on request alone."""
    assert main(["storage", "verify", str(folder)]) == 0
    assert "5 objects of 40,960 bytes are whole, 0 damaged" in capsys.readouterr().out
    flipped, cut, swapped = (_file(folder, number) for number in (1, 2, 3))
    data = bytearray(flipped.read_bytes())
    data[5000] ^= 1
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1])
    swapped.write_bytes(_file(folder, 4).read_bytes())
    told = _json(capsys, "verify", folder, status=1)
    reasons = {row["key"]: row["reason"] for row in told["damaged"]}
    assert told["whole"] == 2
    assert "checksum" in reasons[key_of(1).hex()]
    assert "8191" in reasons[key_of(2).hex()]
    assert key_of(4).hex() in reasons[key_of(3).hex()]
    assert flipped.exists()
    assert main(["storage", "verify", str(folder), "--quarantine"]) == 1
    assert capsys.readouterr().out.count("moved to quarantine") == 3
    assert not flipped.exists()
    told = _json(capsys, "verify", folder)
    assert (told["whole"], told["damaged"]) == (2, [])
    assert _json(capsys, "stats", folder)["quarantine_bytes"] == 3 * 8192 - 1


def test_prune(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Objects used longest ago go until the size is kept; a dry run removes nothing."""
    (_file(folder, 0).parent / ".00-0.tmp").write_bytes(bytes(100))
    told = _json(capsys, "prune", folder, "--max-bytes", "24Ki", "--dry-run")
    assert (told["objects"], told["object_bytes"], told["dry_run"]) == (2, 2 * 8192, True)
    assert len(list(folder.rglob("*.kvo"))) == 5
    told = _json(capsys, "prune", folder, "--max-bytes", "24Ki")
    assert (told["objects"], told["dead_writers"], told["not_removed"]) == (2, 1, 0)
    assert [row["key"] for row in _json(capsys, "ls", folder)["objects"]] == [
        key_of(number).hex() for number in (4, 3, 2)
    ]
    old = time.time() - 3 * 86400
    os.utime(_file(folder, 3), (old, old))
    assert _json(capsys, "prune", folder, "--unused-days", "2")["objects"] == 1
    assert _json(capsys, "prune", folder)["objects"] == 0
    for size in ("64Mi", "64MiB", "64M", "64mb", "1.5 GiB", "16384"):  # as a config has them
        assert _json(capsys, "prune", folder, "--max-bytes", size)["objects"] == 0
    assert main(["storage", "prune", str(folder), "--max-bytes", "0"]) == 0
    assert "objects            2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["stats", "nothing"], "cannot be opened"),
        (["stats", "."], "has no file KVFERRY"),
        (["ls", "store", "--limit", "-1"], "--limit -1"),
        (["prune", "store", "--max-bytes", "many"], "--max-bytes 'many' must be"),
        (["prune", "store", "--max-bytes", "-1"], "--max-bytes '-1' must be"),
        (["prune", "store", "--max-bytes", "1.5"], "--max-bytes '1.5' must be"),
        (["prune", "store", "--unused-days", "nan"], "--unused-days nan"),
        (["prune", "store", "--unused-days", "inf"], "--unused-days inf"),
    ],
)
def test_bad_input_is_a_message(
    folder: Path, args: list[str], words: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A folder that is none of ours, or a value that makes no sense, is told; nothing is made."""
    monkeypatch.chdir(folder.parent)
    joined = [f"{args[2]}={args[3]}"] if len(args) > 2 else []
    assert main(["storage", *args[:2], *joined]) == 2
    assert words in capsys.readouterr().err
    assert sorted(path.name for path in folder.parent.iterdir()) == ["store"]


def test_a_folder_by_its_url(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every action takes one; one of another scheme is no folder."""
    url = f"file://{folder}?fsync=data"
    assert len(_json(capsys, "ls", url)["objects"]) == 5
    assert _json(capsys, "stats", url)["objects"] == 5
    assert _json(capsys, "verify", url)["whole"] == 5
    assert _json(capsys, "prune", url, "--max-bytes", "0")["objects"] == 5
    for bad, words in (("s3://bucket/x", "'s3://bucket/x' is no folder"), ("x://y", "no storage")):
        assert main(["storage", "ls", bad]) == 2
        assert words in capsys.readouterr().err


def test_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each check is told, and the exit status says whether all passed."""
    told = _json(capsys, "check", f"file://{folder}")
    assert told["failed"] == 0
    assert {"check": "many_threads", "ok": True, "complaint": ""} in told["checks"]
    assert _json(capsys, "stats", folder)["objects"] == 5
    assert main(["storage", "check", "memory://"]) == 0
    assert capsys.readouterr().out.endswith("14 checks passed, 0 failed\n")
    told = _json(capsys, "check", f"{__name__}:Full", status=1)
    assert told == {
        "checks": [{"check": "usable", "ok": False,
                    "complaint": "the write of a probe: refused full"}],
        "failed": 1,
    }  # fmt: skip
    assert main(["storage", "check", f"{__name__}:Full"]) == 1
    assert "FAILED  usable" in capsys.readouterr().out
    assert main(["storage", "check", "memory://", "--timeout", "0"]) == 2
    assert main(["storage", "check", "x://y"]) == 2


class Full(MemoryBackend):
    """Takes nothing."""

    def write_from(self, keys: Any, buffers: Any) -> list[ItemResult]:  # noqa: ARG002
        return [ItemResult(ItemStatus.REFUSED, reason="full") for _ in keys]
