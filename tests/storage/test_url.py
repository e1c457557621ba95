"""Where storage is, in one line."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError, KVFerryError, StorageError
from kvferry.storage import (
    FileBackend,
    MemoryBackend,
    is_storage_url,
    open_backend,
    parse_storage_url,
    try_backend,
)

_HERE = __name__


class Typed(MemoryBackend):
    """Takes options of every kind, and keeps what it was given."""

    def __init__(
        self,
        *,
        url: str = "",
        size_bytes: int | None = 1,
        count: int = 2,
        secs: float = 0.5,
        fast: bool = False,
        word: str = "",
    ) -> None:
        super().__init__()
        self.given = {"url": url, "size_bytes": size_bytes, "count": count, "secs": secs,
                      "fast": fast, "word": word}  # fmt: skip


class Open(MemoryBackend):
    """Takes any option."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.given = more


@pytest.mark.parametrize(
    ("url", "name", "place", "texts"),
    [
        ("file:///var/kv", "file", {"path": "/var/kv"}, {}),
        ("FILE:///var/kv", "file", {"path": "/var/kv"}, {}),
        ("file:///a%20b/%3F", "file", {"path": "/a b/?"}, {}),
        ("file:///x?fsync=data&num_threads=2", "file", {"path": "/x"},
         {"fsync": "data", "num_threads": "2"}),
        ("memory://", "memory", {}, {}),
        ("memory://?capacity_bytes=1MiB", "memory", {}, {"capacity_bytes": "1MiB"}),
        ("mooncake://10.0.0.1:50051", "mooncake", {"address": "10.0.0.1:50051"}, {}),
        ("mooncake://[::1]:5/?key_prefix=a%26b", "mooncake", {"address": "[::1]:5"},
         {"key_prefix": "a&b"}),
        ("s3://b/p/q?region=eu", "object_store", {"url": "s3://b/p/q"}, {"region": "eu"}),
        ("gs://b", "object_store", {"url": "gs://b"}, {}),
        ("az://b/p", "object_store", {"url": "az://b/p"}, {}),
        ("a.b:C?x=", "a.b:C", {}, {"x": ""}),
        ("a.b:C", "a.b:C", {}, {}),
    ],
)  # fmt: skip
def test_what_a_url_says(url: str, name: str, place: dict[str, str], texts: dict[str, str]) -> None:
    """Scheme, place and options."""
    assert parse_storage_url(url) == (name, place, texts)
    assert is_storage_url(url) == (url != "a.b:C")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nowhere://x", "no storage scheme 'nowhere': kvferry has az, file"),
        ("file://", "absolute path"),
        ("file://host/x", "absolute path"),
        ("file:///x%00", "absolute path"),
        ("memory://x", "no place behind it"),
        ("mooncake://host", "mooncake://10.0.0.1:50051"),
        ("mooncake://host:port", "mooncake://10.0.0.1:50051"),
        ("mooncake://host:70000", "mooncake://10.0.0.1:50051"),
        ("mooncake://:1", "mooncake://10.0.0.1:50051"),
        ("mooncake://host:1/x", "mooncake://10.0.0.1:50051"),
        ("s3://", "s3://bucket/prefix"),
        ("s3:///x", "s3://bucket/prefix"),
        ("file:///x?fsync", "name=value"),
        ("file:///x?fsync=data&", "name=value"),
        ("file:///x?=data", "name=value"),
        ("file:///x?fsync=data&fsync=full", "fsync comes twice"),
        ("file:///x?path=/y", "path is what stands before"),
        ("s3://b?url=s3://c", "url is what stands before"),
        ("file:///x#y", "no '#'"),
        ("s3://me@b/p", "user or password"),
        ("s3://b?secret_access_key=x", "looks like a secret"),
        ("az://b?account_key=x", "looks like a secret"),
        ("a.b:C?password=x", "looks like a secret"),
    ],
)
def test_what_is_no_url(url: str, words: str) -> None:
    """The message says what is wrong and how it is written."""
    with pytest.raises(ConfigError, match=words):
        parse_storage_url(url)
    with pytest.raises(ConfigError, match=words):
        open_backend(url)


def test_options_have_the_kinds_of_parameters() -> None:
    """Sizes have units, switches are words, none is None, text stays text."""
    backend = open_backend(f"{_HERE}:Typed?size_bytes=2KiB&count=1_000&secs=3&fast=true&word=7")
    assert isinstance(backend, Typed)
    assert backend.given == {
        "url": "", "size_bytes": 2048, "count": 1000, "secs": 3.0, "fast": True, "word": "7"
    }  # fmt: skip
    assert type(backend.given["secs"]) is float
    backend = open_backend(f"{_HERE}:Typed?size_bytes=none&word=none", count=4)
    assert isinstance(backend, Typed)
    assert (backend.given["size_bytes"], backend.given["word"]) == (None, "none")
    assert backend.given["count"] == 4
    backend = open_backend(f"{_HERE}:Open?a=1&b=x")
    assert isinstance(backend, Open)
    assert backend.given == {"a": "1", "b": "x"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("counts=1", "no option counts; the nearest is count, of url, size_bytes"),
        ("count=1KiB", r"count='1KiB' must be a whole number$"),
        ("count=none", "count='none' must be a whole number"),
        ("size_bytes=big", "a whole number of bytes, or such as 8GiB"),
        ("secs=soon", "secs='soon' must be a number"),
        ("fast=yes", "fast='yes' must be true or false"),
    ],
)
def test_options_that_do_not_fit(options: str, words: str) -> None:
    """An unknown option and a value of another kind are errors, before anything is opened."""
    with pytest.raises(ConfigError, match=words):
        open_backend(f"{_HERE}:Typed?{options}")


def test_an_option_is_given_once() -> None:
    """In the URL or beside it."""
    for beside in ({"count": 1}, {"path": "/y"}):
        url = f"{_HERE}:Typed?count=1" if "count" in beside else "file:///x"
        with pytest.raises(ConfigError, match="is given twice"):
            open_backend(url, **beside)


def test_kvferry_s_own_by_url(tmp_path: Path) -> None:
    """Files and memory work by their URLs."""
    file = open_backend(f"file://{tmp_path}/a%20b?capacity_bytes=1MiB&fsync=data&direct_io=false")
    assert isinstance(file, FileBackend)
    assert file.path == f"{tmp_path}/a b"
    assert file.stats().capacity_bytes == 1 << 20
    assert not file.direct_io
    memory = open_backend("memory://?capacity_bytes=64KiB")
    for backend in (file, memory):
        assert try_backend(backend).ok
        backend.close()
    with pytest.raises(ConfigError, match="no option clock"):
        open_backend(f"file://{tmp_path}?clock=x")
    with pytest.raises(ConfigError, match="no option capacity; the nearest is capacity_bytes"):
        open_backend("memory://?capacity=1")


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("mooncake://127.0.0.1:1", "mooncake.store", r"kvferry\[mooncake\]"),
     ("s3://bucket", "obstore", r"kvferry\[object-store\]")],
)  # fmt: skip
def test_a_library_that_is_not_there(
    url: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the extra to install."""
    for name in [library, *(name for name in sys.modules if name.startswith(f"{library}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(KVFerryError, match=extra):
        open_backend(url)


def _claimed(monkeypatch: pytest.MonkeyPatch, classes: Sequence[str]) -> None:
    points = [importlib.metadata.EntryPoint("typed", cls, "kvferry.storage") for cls in classes]

    def entry_points(*, group: str) -> list[importlib.metadata.EntryPoint]:
        assert group == "kvferry.storage"
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_schemes_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry point adds one; its class gets the URL up to the options, and these by name."""
    _claimed(monkeypatch, [f"{_HERE}:Typed", f"{_HERE} : Typed"])
    backend = open_backend("typed://host/a%20b?count=3")
    assert isinstance(backend, Typed)
    assert backend.given["url"] == "typed://host/a%20b"
    assert backend.given["count"] == 3
    with pytest.raises(ConfigError, match="url is what stands before"):
        open_backend("typed://host?url=x")
    with pytest.raises(ConfigError, match="no storage scheme 'other'"):
        open_backend("other://host")
    _claimed(monkeypatch, [f"{_HERE}:Typed", f"{_HERE}:Open"])
    with pytest.raises(ConfigError, match=f"claimed by {_HERE}:Open and {_HERE}:Typed"):
        open_backend("typed://host")
    _claimed(monkeypatch, ["no.such.module:Class"])
    with pytest.raises(StorageError, match="cannot be imported"):
        open_backend("typed://host")
