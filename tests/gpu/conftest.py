"""What every GPU test needs: one GPU, pools on it, and streams that are slow on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def device() -> str:
    """The first GPU."""
    return "cuda:0"


@pytest.fixture
def slow() -> Callable[[torch.cuda.Stream], None]:
    """Keeps a stream busy long enough that whoever should wait for it and does not is caught."""

    def keep_busy(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]  # cycles, about 30 ms

    return keep_busy


@pytest.fixture(autouse=True)
def _leaves_no_error() -> Iterator[None]:
    """A test that leaves the device with a pending error fails itself, not the next one."""
    yield
    torch.cuda.synchronize()
