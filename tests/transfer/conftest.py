"""A GPU for the tests of transfers, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from tests.transfer.fake_gpu import FakeGpu
from tests.transfer.fake_loader import FakeLoader

_STAGED = ("staged", "staged, old driver")

only_staged = pytest.mark.parametrize("gpu", _STAGED, indirect=True)
"""For tests about the staged mover: those of engines that stage nothing do not exist."""


@pytest.fixture(params=["direct", *_STAGED])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """The GPU that kvferry finds; nothing may have used memory of it that was gone.

    Every test that has one runs with each mover; copies of many pieces came with CUDA 12.8.
    """
    made = FakeGpu()
    made.mover, _, old = request.param.partition(", ")
    made.batches = not old
    if old:  # so that the calls from Python are gone through, too
        monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "cpu")
    loader = FakeLoader(made)
    for name, module in list(sys.modules.items()):
        if name.startswith("kvferry.") and hasattr(module, "process_loader"):
            monkeypatch.setattr(module, "process_loader", lambda: loader)
    yield made
    made.release()
    assert made.faults == []
