"""A GPU made of host memory that the adapter takes for a real one, with an engine's tensors."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from tests.adapters.sglang.hicache_rig import Plane, Rows, table
from tests.transfer.fake_gpu import FakeGpu
from tests.transfer.fake_loader import FakeLoader

from kvferry.adapters.sglang import row_tensors

KINDS = ("int32 on the GPU", "int64 on the GPU", "int32", "int64")
LAYERS = 3
ROWS = (96, 80)


class CudaTensor(torch.Tensor):
    """A tensor that says it is on a GPU; what it holds is host memory that the fake one knows."""

    is_cuda = True
    device = torch.device("cuda:0")
    kept: ClassVar[collections.deque[Any]] = collections.deque(maxlen=64)

    def record_stream(self, _: Any) -> None:
        """As torch has it: the memory stays until what is in the stream now is over."""
        self.kept.append(self)

    def cpu(self, *_: Any, **__: Any) -> torch.Tensor:
        """As torch has it."""
        return self.as_subclass(torch.Tensor).clone()


class World:
    """A fake GPU, with memory that is its own, pinned, or neither."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.stream = 0

    def on_device(self, num_bytes: int) -> torch.Tensor:
        """Memory of the GPU, on 256 bytes."""
        return self.to_device(_aligned(num_bytes))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that the GPU has from now on."""
        self.gpu.device_memory[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor.as_subclass(CudaTensor)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Pinned host memory."""
        tensor = _aligned(num_bytes)
        self.gpu.registered[tensor.data_ptr()] = num_bytes
        return tensor

    def rows(self, rows: Rows, kind: str) -> torch.Tensor:
        """An index list of some kind."""
        name, _, where = kind.partition(" ")
        tensor = torch.from_numpy(rows.copy()).to(getattr(torch, name))
        return self.to_device(tensor) if where else tensor

    def plane(self, size: int, *, token_major: bool = False, seed: int = 0, **more: Any) -> Plane:
        """A plane on both sides."""
        given = {"layers": LAYERS, "rows": ROWS, "places": (self.on_device, self.pinned), **more}
        return Plane(size, token_major=token_major, seed=seed, **given)

    def table(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """A table of addresses on the GPU."""
        made: torch.Tensor = table(tensors, self.to_device)
        return made


def _aligned(num_bytes: int) -> torch.Tensor:
    whole = torch.empty(num_bytes + 256, dtype=torch.uint8)
    skip = -whole.data_ptr() % 256
    return whole[skip : skip + num_bytes]


def a_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A GPU that the adapter finds, and that nobody has used wrongly in the end."""
    gpu = FakeGpu()
    loader = FakeLoader(gpu)
    made = World(gpu)
    monkeypatch.setattr(row_tensors, "process_loader", lambda: loader)
    monkeypatch.setattr(row_tensors, "_gpus", {})
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=made.stream)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield made
    gpu.release()
    assert gpu.faults == []
