"""One server for all tests that do not break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.storage.object_store.s3_rig import Server, moto


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """moto's server, with a bucket."""
    with moto() as server:
        yield server
