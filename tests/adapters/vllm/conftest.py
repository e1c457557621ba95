"""One `Engines` for all tests of a session."""

from __future__ import annotations

import pytest
from tests.adapters.vllm.engines import Engines


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """Runs of the engine."""
    return Engines(tmp_path_factory.mktemp("engines"))
