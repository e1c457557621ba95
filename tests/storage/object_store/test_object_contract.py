"""The backend does what any must: over HTTP, in a folder, in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.storage.object_store.s3_rig import Server, opened, s3rver

from kvferry.storage.object_store import ObjectStoreBackend
from kvferry.testing import STORAGE_CHECKS, BackendFactory

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
