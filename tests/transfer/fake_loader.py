"""Where kernels come from over a fake GPU."""

from __future__ import annotations

from types import SimpleNamespace

from tests.transfer.fake_gpu import FakeGpu, kernel_handle

from kvferry.kernels.jit import Context, Driver


class FakeLoader:
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
        handle=kernel_handle(name.removeprefix("kvferry_")),
        max_threads=1024,
        shared_bytes=0,
        allow_dynamic_shared=lambda _: None,
    )
