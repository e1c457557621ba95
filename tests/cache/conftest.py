"""What several files of tests take: an engine, a promise kept at the end, and the GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.cache.ferry_rig import Engine
from tests.transfer.conftest import gpu

__all__ = ["engine", "gpu", "release"]


@pytest.fixture
def engine() -> Engine:
    """An engine with K and V."""
    return Engine()


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays blocked."""
    event = threading.Event()
    yield event
    event.set()
