"""Pools and engines over a fake GPU, with every byte of the device accounted for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.transfer.fake_gpu import CALLER, FakeGpu

from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
from kvferry.testing import POISON, GuardedBuffer, assert_bytes_equal, read_rows
from kvferry.transfer import TransferEngine, TransferHandle, TransferPlan
from kvferry.transfer.profile import BUILT_IN
from kvferry.types import Layout

EAGER = dataclasses.replace(BUILT_IN, launch_seconds=1e-12)
"""A device that starts kernels in no time."""

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

PAGE = 16


def latent(element_size: int = 576, num_layers: int = 4) -> Geometry:
    """One plane."""
    plane = Plane(name="latent", num_layers=num_layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=PAGE)


class IndexTensor:
    """Indices in device memory, as far as a plan looks at a tensor."""

    is_cuda = True
    device = "cuda:0"

    def __init__(self, indices: npt.NDArray[Any]) -> None:
        self.indices = indices.copy()
        self.shape = indices.shape
        self.dtype = f"torch.{indices.dtype}"

    def is_contiguous(self) -> bool:
        """As torch has it."""
        return True

    def data_ptr(self) -> int:
        """As torch has it."""
        return int(self.indices.ctypes.data)

    def element_size(self) -> int:
        """As torch has it."""
        return self.indices.itemsize

    def cpu(self) -> npt.NDArray[Any]:
        """A copy in host memory."""
        return self.indices.copy()


class DeviceRig:
    """A device pool with a guard on each side, a host pool, and engines over both."""

    def __init__(
        self,
        gpu: FakeGpu,
        geometry: Geometry | None = None,
        *,
        num_pages: int = 40,
        num_slots: int = 12,
        registered: bool = False,
        layout: Layout = Layout.LAYER_FIRST,
        seed: int = 0,
    ) -> None:
        self.gpu = gpu
        self.geometry = geometry or latent()
        self.page = self.geometry.page_size
        self.num_rows = num_pages * self.page
        self._rng = np.random.default_rng(seed)
        self._memory = {}
        self.tensors: dict[str, Bytes] = {}
        for plane in self.geometry.planes:
            shape = (plane.num_layers, self.num_rows, plane.element_size)
            self._memory[plane.name] = memory = GuardedBuffer(int(np.prod(shape)))
            self.tensors[plane.name] = memory.inside.reshape(shape)
        view = PoolView.from_tensors(self.geometry, self.tensors)
        layers = {
            name: tuple(dataclasses.replace(one, device="cuda:0", registered=None) for one in views)
            for name, views in view.layers.items()
        }
        self.device = PoolView(self.geometry, layers)
        self.host: HostPool | RegisteredHostPool
        if registered:
            self.host = self._registered(layout, num_slots)
        else:
            self.host = HostPool(self.geometry, num_slots=num_slots)
            assert self.host.allocate(num_slots, SlotOwner.INDEX) is not None
        self.fill()

    def _registered(self, layout: Layout, num_slots: int) -> RegisteredHostPool:
        """An engine's host pool, with a tensor a plane."""
        paged = layout is Layout.PAGE_MAJOR
        self.host_tensors = {}
        for plane in self.geometry.planes:
            outer = (num_slots, plane.num_layers, self.page) if paged else (
                plane.num_layers, num_slots * self.page)  # fmt: skip
            self.host_tensors[plane.name] = np.full((*outer, plane.element_size), POISON, np.uint8)
        return RegisteredHostPool.from_tensors(
            self.geometry,
            self.host_tensors,
            slot_dims=(0, 1) if paged else (0,),
            layer_dim=1 if paged else 0,
            pin_tensors=True,
        )

    @property
    def pool(self) -> HostPool:
        """The host pool, where it is one of kvferry's own."""
        assert isinstance(self.host, HostPool)
        return self.host

    def engine(self, **options: Any) -> TransferEngine:
        """An engine over both pools; every few bytes are worth a launch of their own.

        Its staging memory has room for one page or two, as a piece takes half of it.
        """
        if "path" not in options:
            options = {"mover": self.gpu.mover, **options}
        page = -(-self.geometry.slot_bytes() // 4096) * 4096
        given = {"profile": EAGER, "staging_bytes": 3 * page, **options}
        return TransferEngine(self.device, self.host, **given)

    def warm_engine(self, **options: Any) -> TransferEngine:
        """An engine that has stored and loaded once, so that its streams are known."""
        engine = self.engine(**options)
        rows = self.rows(1)
        self.store(engine, [0], rows).wait()
        self.load(engine, [0], rows).wait()
        return engine

    def told(self, kernels: str) -> str:
        """How a handle names `kernels`: with the old driver no compiled code is used."""
        by_python = not self.gpu.batches and kernels != "grouped"
        return f"{'interpreted ' if by_python else ''}{kernels}"

    def rows(self, num_pages: int, *, besides: Rows | None = None) -> Rows:
        """Different device rows, in no order, none of `besides`. Shape ``[N, P]``."""
        free = np.arange(self.num_rows) if besides is None else self.others(besides)
        drawn: Rows = self._rng.permutation(free)[: num_pages * self.page]
        return drawn.reshape(num_pages, self.page)

    def others(self, rows: Rows) -> Rows:
        """All device rows but these."""
        return np.setdiff1d(np.arange(self.num_rows), rows)

    def fill(self) -> None:
        """Random bytes in every device row."""
        for tensor in self.tensors.values():
            tensor[:] = self._rng.integers(0, 256, tensor.shape, dtype=np.uint8)

    def poison(self) -> None:
        """Poison in every device row."""
        for tensor in self.tensors.values():
            tensor[:] = POISON

    def store(self, engine: TransferEngine, slots: Any, rows: Any, **given: Any) -> TransferHandle:
        """Submit a store after what the caller's stream holds."""
        plan = TransferPlan.store(self.geometry, host_slots=slots, device_slots=rows, **given)
        return engine.store(plan, stream=CALLER)

    def load(self, engine: TransferEngine, slots: Any, rows: Any, **given: Any) -> TransferHandle:
        """Submit a load after what the caller's stream holds."""
        plan = TransferPlan.load(self.geometry, host_slots=slots, device_slots=rows, **given)
        return engine.load(plan, stream=CALLER)

    def on_device(self, rows: Rows) -> dict[str, Bytes]:
        """Copies of device rows. Shape ``[L, N·P, E]``."""
        return {name: tensor[:, rows.ravel()] for name, tensor in self.tensors.items()}

    def on_host(self, slots: Any) -> dict[str, Bytes]:
        """Copies of host slots, shaped alike."""
        rows = (np.asarray(slots)[:, None] * self.page + np.arange(self.page)).ravel()
        layers = self.host.view.layers
        return {name: np.stack([read_rows(one, rows) for one in layers[name]]) for name in layers}

    def check_device(self, expected: dict[str, Bytes], what: str) -> None:
        """Fail unless all device rows are `expected` and the guards are whole."""
        for name, memory in self._memory.items():
            memory.check(expected[name].ravel(), f"device plane {name} {what}")

    def images(self) -> dict[str, Bytes]:
        """Copies of the device tensors. Shape ``[L, rows, E]``."""
        return {name: tensor.copy() for name, tensor in self.tensors.items()}


def same(found: dict[str, Bytes], expected: dict[str, Bytes], what: str) -> None:
    """Fail unless every plane has the same bytes."""
    assert found.keys() == expected.keys()
    for name, bytes_there in found.items():
        assert_bytes_equal(bytes_there, expected[name], f"{what}, plane {name}")
