"""What every GPU test needs: pools on it that are given back, and streams that are slow on purpose.

A test file here says ``pytestmark = pytest.mark.gpu``: a mark in this file would mark nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_rig import GpuRig

from kvferry import Geometry

# About 0.1 s on the fastest GPUs, which is many times what a test submits meanwhile.
_SLOW_CYCLES = 200_000_000


@pytest.fixture
def slow() -> Callable[[Any], None]:
    """Keeps a stream busy long enough that whoever should wait for it and does not is caught."""

    def keep_busy(stream: Any) -> None:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_SLOW_CYCLES)  # type: ignore[no-untyped-call]

    return keep_busy


@pytest.fixture(params=["direct", "staged"])
def make_rig(request: pytest.FixtureRequest) -> Iterator[Callable[..., GpuRig]]:
    """Makes pools; engines and pools are closed after the test. With each mover."""
    made: list[GpuRig] = []

    def make(geometry: Geometry, **options: Any) -> GpuRig:
        made.append(GpuRig(geometry, mover=request.param, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture(autouse=True)
def _leaves_no_error() -> Iterator[None]:
    """A test that leaves the device with a pending error fails itself, not the next one."""
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
