"""A GPU for the tests of transfers, where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tests.transfer.fake_gpu import FakeGpu

from kvferry.kernels.jit import Context, Driver


class _Loader:
    """Stands for the `KernelLoader` of the process."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.driver = Driver(gpu, "13.0.0")

    def load(self, _: object, device: int) -> SimpleNamespace:
        """A module of which every kernel is there."""
        context = self.driver.context(device)
        return SimpleNamespace(function=lambda name: _function(context, name))


def _function(context: Context, name: str) -> SimpleNamespace:
    return SimpleNamespace(
        context=context,
        name=name,
        handle=name.removeprefix("kvferry_"),
        max_threads=1024,
        shared_bytes=0,
        allow_dynamic_shared=lambda _: None,
    )


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
    loader = _Loader(made)
    for name, module in list(sys.modules.items()):
        if name.startswith("kvferry.") and hasattr(module, "process_loader"):
            monkeypatch.setattr(module, "process_loader", lambda: loader)
    yield made
    made.release()
    assert made.faults == []
