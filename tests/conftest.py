"""What every test gets: a clean environment, a hypothesis profile, and skips for absent GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import pytest

# A slow machine is no failure, and a failing example must be repeatable from the log alone.
hypothesis.settings.register_profile("kvferry", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvferry")


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the tests go on that are marked `soak`."""
    parser.addoption(
        "--soak-factor",
        type=int,
        default=1,
        help="repeat what tests marked `soak` repeat so many times as often; `make soak` sets it",
    )


@pytest.fixture
def soak_factor(request: pytest.FixtureRequest) -> int:
    """By how much a test marked `soak` is to multiply its rounds."""
    factor: int = request.config.getoption("--soak-factor")
    return factor


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take kvferry's variables out of the environment: a test sets those it is about."""
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


_ALL_BYTES = bytes(range(256))


@pytest.fixture(autouse=True)
def _shared_bytes_are_whole() -> Iterator[None]:
    """Fail the test in which native code wrote into a bytes object that all of Python shares."""
    yield
    shared = [_ALL_BYTES[at : at + 1] for at in range(256)]
    assert [one[0] for one in shared] == list(_ALL_BYTES), "a one-byte bytes object was written to"


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
