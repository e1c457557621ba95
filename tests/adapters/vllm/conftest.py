"""One `Engines` for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.adapters.vllm.engines import Engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Runs of the engine."""
    engines = Engines(tmp_path_factory.mktemp("engines"))
    yield engines
    engines.close()
