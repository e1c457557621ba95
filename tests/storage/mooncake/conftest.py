"""One master and one other client for all tests of a module that do not break them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.storage.mooncake.pool_rig import Master, Member


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """A master with a client that gives 128 MiB."""
    with Master() as master, Member(master.address, 128 << 20):
        yield master
