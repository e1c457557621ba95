"""What every test gets: a clean environment, a hypothesis profile, and skips for absent GPUs."""

from __future__ import annotations

import os

import hypothesis
import pytest

# A slow machine is no failure, and a failing example must be repeatable from the log alone.
hypothesis.settings.register_profile("kvferry", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvferry")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kvferry's variables out of the environment: a test sets those it is about."""
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device, and nowhere else."""
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if not needing:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in needing:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))
