"""The cubin cache: sound or absent, never half; and where it goes when it cannot go home."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import kvferry
from kvferry.errors import ConfigError, CubinCacheError
from kvferry.kernels.jit import CacheCounts, CubinCache, cubin_cache

_KEY = "0123456789abcdef" * 4
_OTHER = "fedcba9876543210" * 4
_CUBIN = b"\x7fELF" + bytes(range(256)) * 8


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A system's temporary folder of the test's own, and no home."""
    folder = tmp_path / "system-tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return folder


def _counts(**values: int) -> dict[str, int]:
    return dataclasses.asdict(CacheCounts(**values))


def _file(folder: Path, key: str = _KEY) -> Path:
    return folder / f"{key}.cubin"


def test_what_is_put_is_got(tmp_path: Path) -> None:
    """In this process and in the next, as exact bytes; other keys have none."""
    folder = tmp_path / "a" / "b"
    cache = CubinCache(folder)
    assert cache.get(_KEY) is None
    assert cache.put(_KEY, _CUBIN) == _file(folder)
    assert cache.get(_KEY) == _CUBIN
    assert CubinCache(folder).get(_KEY) == _CUBIN
    assert cache.get(_OTHER) is None
    assert dataclasses.asdict(cache.counts) == _counts(hits=1, misses=2, stored=1)
    assert (cache.location, cache.reason) == (folder, None)


def test_an_empty_cubin_is_kept_too(tmp_path: Path) -> None:
    """Length 0 is a length."""
    cache = CubinCache(tmp_path)
    cache.put(_KEY, b"")
    assert cache.get(_KEY) == b""


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    """Folder and files are private, whatever the process creates otherwise."""
    before = os.umask(0)
    try:
        path = CubinCache(tmp_path / "cache").put(_KEY, _CUBIN)
    finally:
        os.umask(before)
    assert path is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_odd_names_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces and letters beyond ASCII in the path."""
    folder = tmp_path / "Zwischen speicher ü 缓存"
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    CubinCache.from_environment().put(_KEY, _CUBIN)
    assert CubinCache.from_environment().get(_KEY) == _CUBIN
    assert _file(folder).exists()


def _damages() -> dict[str, Any]:
    packed = cubin_cache._pack(_KEY, _CUBIN)
    flipped = {
        f"bit at {at}": packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :]
        for at in (0, 8, 12, 16, 24, 55, 56, 87, 88, len(packed) // 2, len(packed) - 1)
    }
    return {
        "empty": b"",
        "cut in the header": packed[:40],
        "header alone": packed[:88],
        "one byte short": packed[:-1],
        "one byte long": packed + b"\0",
        "a raw cubin": _CUBIN,
        "noise": os.urandom(len(packed)),
        "another key's": cubin_cache._pack(_OTHER, _CUBIN),
        "zeros, as after a power cut": bytes(len(packed)),
        **flipped,
    }


@pytest.mark.parametrize("damage", _damages())
def test_a_damaged_file_is_removed_and_counted(tmp_path: Path, damage: str) -> None:
    """It is a miss, once: it is gone, and what is stored after it is sound."""
    cache = CubinCache(tmp_path)
    _file(tmp_path).write_bytes(_damages()[damage])
    assert cache.get(_KEY) is None
    assert not _file(tmp_path).exists()
    assert dataclasses.asdict(cache.counts) == _counts(damaged=1, misses=1)
    cache.put(_KEY, _CUBIN)
    assert cache.get(_KEY) == _CUBIN


def test_what_is_no_file_is_not_followed(tmp_path: Path) -> None:
    """Links, pipes and folders under a cubin's name are misses; nothing blocks."""
    target = tmp_path / "elsewhere"
    target.write_bytes(cubin_cache._pack(_KEY, _CUBIN))
    for make in (
        lambda path: path.symlink_to(target),
        os.mkfifo,
        lambda path: path.mkdir(),
    ):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        make(_file(folder))
        cache = CubinCache(folder)
        assert cache.get(_KEY) is None
        assert cache.counts.damaged + cache.counts.unreadable == 1
        assert cache.put(_KEY, _CUBIN) is not None
        assert cache.get(_KEY) == _CUBIN
    assert target.exists()


def test_a_damaged_file_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays a miss, and the log says so."""
    _file(tmp_path).write_bytes(b"noise")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    cache = CubinCache(tmp_path)
    assert cache.get(_KEY) is None
    assert "could not be removed" in caplog.text


def _fail_below(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, flags: int = os.O_CREAT
) -> None:
    """Let opening with `flags` fail below `folder` as a full or read-only disk does."""
    opening = os.open

    def fail(path: Any, how: int, *rest: Any, **more: Any) -> int:
        if how & flags == flags and Path(path).is_relative_to(folder):
            raise OSError(code, os.strerror(code), str(path))
        return opening(path, how, *rest, **more)

    monkeypatch.setattr(os, "open", fail)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EDQUOT, errno.ENOSPC])
def test_where_it_cannot_write_it_goes_to_a_temporary_folder(
    tmp_path: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    code: int,
) -> None:
    """It says where and why, keeps what it is given, and still reads what was there."""
    folder = tmp_path / "cache"
    CubinCache(folder).put(_OTHER, b"from before")
    _fail_below(monkeypatch, folder, code)
    cache = CubinCache(folder)
    path = cache.put(_KEY, _CUBIN)
    private = temporary / f"kvferry-{os.geteuid()}"
    assert path == _file(private)
    assert cache.location == private
    assert cache.reason is not None
    assert os.strerror(code) in cache.reason
    assert str(folder) in cache.reason
    assert cache.reason in caplog.text
    assert cache.get(_KEY) == _CUBIN
    assert cache.get(_OTHER) == b"from before"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == [_file(folder, _OTHER)]
    assert dataclasses.asdict(cache.counts) == _counts(hits=2, stored=1, unwritable=1)


def test_a_disk_that_fills_up_while_writing(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file is never seen, and the temporary one does not stay."""
    folder = tmp_path / "cache"
    opening = os.open

    def full(path: Any, how: int, *rest: Any, **more: Any) -> int:
        if how & os.O_CREAT and Path(path).is_relative_to(folder):
            os.close(opening(path, how, *rest, **more))
            # The kernel's own full disk: it takes the open and refuses the bytes.
            return opening("/dev/full", os.O_WRONLY)
        return opening(path, how, *rest, **more)

    monkeypatch.setattr(os, "open", full)
    cache = CubinCache(folder)
    cache.put(_KEY, _CUBIN)
    assert list(folder.iterdir()) == []
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert os.strerror(errno.ENOSPC) in str(cache.reason)
    assert cache.get(_KEY) == _CUBIN


def test_where_nothing_can_be_written_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no location, both reasons are told, and nothing raises."""
    _fail_below(monkeypatch, tmp_path, errno.ENOSPC)
    cache = CubinCache(tmp_path / "cache")
    assert cache.put(_KEY, _CUBIN) is None
    assert cache.put(_KEY, _CUBIN) is None
    assert cache.get(_KEY) is None
    assert cache.location is None
    assert str(cache.reason).count(os.strerror(errno.ENOSPC)) == 2
    assert "memory only" in caplog.text
    assert cache.counts.unwritable == 2


def test_a_folder_that_cannot_be_made(tmp_path: Path, temporary: Path) -> None:
    """A file in the way, as above a read-only home."""
    (tmp_path / "file").write_text("")
    cache = CubinCache(tmp_path / "file" / "cache")
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert str(tmp_path / "file") in str(cache.reason)
    assert cache.put(_KEY, _CUBIN) == _file(cache.location)


def test_a_folder_that_is_not_writable_is_still_read(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that came with an image is used, and new cubins go elsewhere."""
    CubinCache(tmp_path / "cache").put(_OTHER, b"from the image")
    monkeypatch.setattr(os, "access", lambda *_: False)
    cache = CubinCache(tmp_path / "cache")
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert "not writable" in str(cache.reason)
    assert cache.get(_OTHER) == b"from the image"
    assert cache.put(_KEY, _CUBIN) == _file(cache.location)


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a miss that is counted, and is not removed: it may be sound."""
    CubinCache(tmp_path).put(_KEY, _CUBIN)
    _fail_below(monkeypatch, tmp_path, errno.EIO, flags=os.O_NONBLOCK)
    cache = CubinCache(tmp_path)
    assert cache.get(_KEY) is None
    assert cache.counts.unreadable == 1
    assert _file(tmp_path).exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"KVFERRY_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg", "HOME": "/home"}, "/own"),
        ({"KVFERRY_CACHE_DIR": "", "XDG_CACHE_HOME": "/xdg", "HOME": "/home"}, "/xdg/kvferry"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home"}, "/home/.cache/kvferry"),
        ({"HOME": "/home"}, "/home/.cache/kvferry"),
    ],
)
def test_the_environment_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    """Our own variable, then XDG's, then the home."""
    for name, value in variables.items():
        monkeypatch.setenv(name, f"{tmp_path}{value}" if value.startswith("/") else value)
    cache = CubinCache.from_environment()
    assert (str(cache.location), cache.reason) == (f"{tmp_path}{expected}", None)


@pytest.mark.parametrize("home", [None, "", "not/absolute"])
def test_without_a_home_it_is_temporary(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """It says that no variable names a folder, and shares the folder with the next process."""
    if home is not None:
        monkeypatch.setenv("HOME", home)
    cache = CubinCache.from_environment()
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert "HOME" in str(cache.reason)
    cache.put(_KEY, _CUBIN)
    assert CubinCache.from_environment().get(_KEY) == _CUBIN


def test_a_relative_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be another in each directory."""
    monkeypatch.setenv("KVFERRY_CACHE_DIR", "cache")
    with pytest.raises(ConfigError, match="absolute"):
        CubinCache.from_environment()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o770, 0o720])
def test_a_folder_that_others_may_write_is_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """Named by the user it is an error with the way out; found as the default it is passed over."""
    folder = tmp_path / "xdg" / "kvferry"
    folder.mkdir(parents=True)
    _file(folder).write_bytes(cubin_cache._pack(_KEY, b"planted"))
    folder.chmod(mode)
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    with pytest.raises(CubinCacheError, match=f"{mode:o}.*chmod go-w"):
        CubinCache.from_environment()
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder / "inside"))
    assert CubinCache.from_environment().location == folder / "inside"
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = CubinCache.from_environment()
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert f"{mode:o}" in str(cache.reason)
    assert cache.get(_KEY) is None


def _owned_by_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let `folder` be another user's than this process; who that is."""
    if os.geteuid() == 0:
        os.chown(folder, 1234, -1)
        return 1234
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    return owner


def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nobody else may write it: named it is an error, as the default it is passed over."""
    folder = tmp_path / "xdg" / "kvferry"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    _file(folder).write_bytes(cubin_cache._pack(_KEY, b"planted"))
    owner = _owned_by_another(folder, monkeypatch)
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(folder))
    with pytest.raises(CubinCacheError, match=f"owner {owner}, .*chown it"):
        CubinCache.from_environment()
    monkeypatch.delenv("KVFERRY_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = CubinCache.from_environment()
    assert cache.location == temporary / f"kvferry-{os.geteuid()}"
    assert f"owner {owner}" in str(cache.reason)
    assert cache.get(_KEY) is None


def test_a_folder_of_root_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that came with an image is read by every user."""
    CubinCache(tmp_path / "cache").put(_KEY, _CUBIN)
    monkeypatch.setattr(cubin_cache, "ROOT", os.geteuid())
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    assert CubinCache(tmp_path / "cache").get(_KEY) == _CUBIN


def _squat_file(path: Path) -> None:
    path.write_text("")


def _squat_link(path: Path) -> None:
    path.with_name("target").mkdir(mode=0o700)
    path.symlink_to(path.with_name("target"))


def _squat_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def _squat_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


@pytest.mark.parametrize("squat", [_squat_file, _squat_link, _squat_open, _squat_group])
def test_a_temporary_folder_that_is_not_ours_is_not_used(temporary: Path, squat: Any) -> None:
    """Its name can be guessed, so somebody may have been there first."""
    squat(temporary / f"kvferry-{os.geteuid()}")
    cache = CubinCache(None)
    assert cache.location is None
    assert f"kvferry-{os.geteuid()}" in str(cache.reason)
    assert cache.put(_KEY, _CUBIN) is None


def test_a_temporary_folder_of_another_user_is_not_used(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if its mode is right."""
    stranger = os.geteuid() + 1
    (temporary / f"kvferry-{stranger}").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    assert CubinCache(None).location is None


def test_what_dead_processes_left_is_removed(tmp_path: Path) -> None:
    """Temporary files older than an hour go; younger ones, and what is not ours, stay."""
    ages = {".a.1.x.tmp": 3700, ".b.1.x.tmp": 3500, "note.tmp": 3700, ".hidden": 3700}
    for name, age in ages.items():
        (tmp_path / name).write_text("x")
        now = (tmp_path / name).stat().st_mtime
        os.utime(tmp_path / name, (now - age, now - age))
    cache = CubinCache(tmp_path)
    cache.put(_KEY, _CUBIN)
    left = {path.name for path in tmp_path.iterdir() if path.is_file()}
    assert left == {".b.1.x.tmp", "note.tmp", ".hidden", _file(tmp_path).name}


_DIE = """
import os, pathlib, signal, sys
from kvferry.kernels.jit import CubinCache, cubin_cache
folder, name, key, cubin = sys.argv[1:]
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
if name == "replace": pathlib.Path.replace = die
elif name == "write":
    opened = os.fdopen
    class Half:
        def __init__(self, file): self.file = file
        def __enter__(self): return self
        def __exit__(self, *error): pass
        def write(self, data):
            self.file.write(data[: len(data) // 2]); self.file.flush(); die()
    os.fdopen = lambda descriptor, mode: Half(opened(descriptor, mode))
elif name == "fsync": os.fsync = die
else:
    # The second sync is that of the folder, when the file already has its name.
    sync, seen = os.fsync, []
    def fsync(descriptor):
        seen.append(descriptor)
        die() if len(seen) == 2 else sync(descriptor)
    os.fsync = fsync
cache = CubinCache(pathlib.Path(folder))
cache.put(key, bytes.fromhex(cubin))
"""


@pytest.mark.parametrize("at", ["write", "fsync", "replace", "after"])
def test_a_kill_while_storing_leaves_no_half_file(tmp_path: Path, at: str) -> None:
    """The file is whole or absent, and at most one temporary file stays, for an hour."""
    folder = tmp_path / "cache"
    died = subprocess.run(
        [sys.executable, "-c", _DIE, str(folder), at, _KEY, _CUBIN.hex()],
        env={**os.environ, "PYTHONPATH": str(Path(kvferry.__file__).parents[1])},
        check=False,
        timeout=60,
    )
    assert died.returncode == -9
    left = [path for path in folder.iterdir() if path.suffix == ".tmp"]
    assert len(left) == (0 if at == "after" else 1)
    cache = CubinCache(folder)
    assert cache.get(_KEY) == (_CUBIN if at == "after" else None)
    assert cache.counts.damaged == 0
    for path in left:
        os.utime(path, (0, 0))
    cache.put(_KEY, _CUBIN)
    assert [path.name for path in folder.iterdir()] == [_file(folder).name]


def test_a_warning_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A second store to the temporary folder has nothing new to say."""
    caplog.set_level(logging.WARNING)
    cache = CubinCache(None)
    for key in (_KEY, _OTHER):
        cache.put(key, _CUBIN)
    assert len(caplog.records) == 1
