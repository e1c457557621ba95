"""The backend does what any must: over HTTP, in a folder, in memory."""

from __future__ import annotations

import itertools
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.storage.object_store.s3_rig import BUCKET, Server, opened, s3rver

from kvferry.storage.object_store import ObjectStoreBackend
from kvferry.testing import STORAGE_CHECKS, BackendFactory, check_storage_at

_NUMBERS = itertools.count()

each_check = pytest.mark.parametrize(
    "check", STORAGE_CHECKS, ids=lambda check: check.__name__.strip("_")
)


@each_check
def test_over_http(server: Server, check: Callable[[BackendFactory], None]) -> None:
    """Each check passes on backends with a prefix of their own, and so empty."""
    check(lambda _: opened(server.endpoint, f"contract/{next(_NUMBERS)}"))


@each_check
def test_in_a_folder(tmp_path: Path, check: Callable[[BackendFactory], None]) -> None:
    """The same in a folder for each backend."""
    check(lambda _: ObjectStoreBackend((tmp_path / str(next(_NUMBERS))).as_uri()))


@each_check
def test_in_memory(check: Callable[[BackendFactory], None]) -> None:
    """The same in memory."""
    check(lambda _: ObjectStoreBackend("memory:///"))


def test_with_a_second_server(tmp_path: Path) -> None:
    """One that keeps objects on disk takes it, too; but its own puts are not whole or nothing."""
    alone = [check for check in STORAGE_CHECKS if "many_threads" not in check.__name__]
    assert len(alone) == len(STORAGE_CHECKS) - 1
    with s3rver(tmp_path) as server:
        for check in alone:
            check(lambda _: opened(server.endpoint, f"contract/{next(_NUMBERS)}"))


def test_by_a_url(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """So do those that a URL names, and nothing is left; the secret comes by the environment."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "S3RVER")
    url = (
        f"s3://{BUCKET}/by-url?endpoint={server.endpoint}&region=us-east-1&access_key_id=S3RVER"
        f"&deadline_secs=20&num_requests=4"
    )
    told = list(check_storage_at(url))
    assert [one for one in told if one.complaint] == []
    assert len(told) == 1 + len(STORAGE_CHECKS)
    listed = f"{server.endpoint}/{BUCKET}?prefix=by-url"
    with urllib.request.urlopen(listed, timeout=20) as answer:  # noqa: S310  http, by the rig
        assert b"<Key>" not in answer.read()
