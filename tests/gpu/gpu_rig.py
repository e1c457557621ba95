"""Pools for GPU tests: guarded tensors of random bytes, page slots, and what both should hold."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry import (
    Geometry,
    HostPool,
    Plane,
    PoolView,
    RegisteredHostPool,
    TransferEngine,
    TransferHandle,
)
from kvferry.memory import SlotOwner
from kvferry.testing import (
    GUARD_BYTES,
    POISON,
    assert_bytes_equal,
    memory_at,
    pattern_rows,
    read_rows,
)
from kvferry.transfer.profile import BUILT_IN
from kvferry.types import Layout, SlotKind

DEVICE = "cuda:0"

EAGER = dataclasses.replace(BUILT_IN, launch_seconds=1e-12)
"""A device that starts kernels in no time."""

Rows = npt.NDArray[np.int64]


def latent(element_size: int = 576, num_layers: int = 4, page_size: int = 64) -> Geometry:
    """One plane of rows that no power of two divides."""
    plane = Plane(name="latent", num_layers=num_layers, element_size=element_size)
    return Geometry(planes=(plane,), page_size=page_size)


def random_bytes(seed: int, *shape: int) -> torch.Tensor:
    """Random bytes on the GPU."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)


def new_stream() -> Any:
    """A stream of the caller's, which does not wait for the default one."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def scattered(seed: int, pages: int, per_page: int, num_rows: int, run: int = 1) -> Rows:
    """Different device rows for `pages` pages, in runs that lie anywhere. Shape ``[N, R]``."""
    rng = np.random.default_rng(seed)
    starts = rng.permutation(num_rows // run)[: pages * per_page // run] * run
    rows: Rows = (starts[:, None] + np.arange(run)).reshape(pages, per_page)
    return rows


def kernel(handle: TransferHandle) -> str:
    """Which one carried it, whatever the mover was and whoever called the driver."""
    return handle.path.rpartition(" ")[2]


class GuardedTensor:
    """A tensor of bytes on the GPU with `GUARD_BYTES` of poison on either side."""

    def __init__(self, *shape: int) -> None:
        size = math.prod(shape)
        whole = torch.full((size + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8, device=DEVICE)
        self._guards = (whole[:GUARD_BYTES], whole[GUARD_BYTES + size :])
        self.inside = whole[GUARD_BYTES : GUARD_BYTES + size].view(shape)

    def check(self, expected: torch.Tensor, what: str) -> None:
        """Fail unless the guards are whole and the inside is `expected`."""
        for guard in self._guards:
            assert bool((guard == POISON).all()), f"{what}: a guard was overwritten"
        if not torch.equal(self.inside, expected):
            axes = ["layer", "row", "byte"] if self.inside.dim() == 3 else None
            assert_bytes_equal(self.inside.cpu().numpy(), expected.cpu().numpy(), what, axes)


class GpuRig:
    """A device pool, a host pool, and the engines over them.

    Args:
        geometry: The planes.
        num_rows: Rows of each layer of the device pool; by plane, or the same for all.
        num_slots: Page slots on the host.
        host_layout: An engine's layout, in tensors that torch pinned; None: a `HostPool`.
        kind: What a slot holds.
        mover: What engines are asked for, where the host's layout allows it.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        num_rows: int | Mapping[str, int],
        num_slots: int,
        host_layout: Layout | None = None,
        kind: SlotKind = SlotKind.PAGE,
        mover: str | None = None,
    ) -> None:
        self.geometry = geometry
        self.kind = kind
        self.mover = "direct" if host_layout is Layout.TOKEN_MAJOR else mover
        self.planes = [plane for plane in geometry.planes if plane.slot_kind is kind]
        self.memory = {
            plane.name: GuardedTensor(
                plane.num_layers,
                num_rows if isinstance(num_rows, int) else num_rows[plane.name],
                plane.element_size,
            )
            for plane in self.planes
        }
        self.tensors = {name: memory.inside for name, memory in self.memory.items()}
        self.view = PoolView.from_tensors(geometry, self.tensors)
        self.num_slots = num_slots
        self.host: HostPool | RegisteredHostPool
        if host_layout is None:
            self.host = owned_pool(geometry, num_slots, kind)
            self.slot_memory()[:] = POISON
        else:
            self.host = pinned_pool(geometry, self.planes, num_slots, host_layout, kind)
        self._engines: list[TransferEngine] = []

    @property
    def tensor(self) -> torch.Tensor:
        """The device tensor of the first plane. Shape ``[L, rows, E]``."""
        return self.tensors[self.planes[0].name]

    def slot_memory(self) -> npt.NDArray[np.uint8]:
        """All slots of a `HostPool`, padding too. Shape ``[slots, slot_bytes]``."""
        assert isinstance(self.host, HostPool)
        slot_bytes = self.host.slot_bytes
        return memory_at(self.host.address, self.num_slots * slot_bytes).reshape(-1, slot_bytes)

    def engine(self, **options: Any) -> TransferEngine:
        """An engine over both pools, closed with the rig.

        Every few bytes are worth a launch of their own, and staging has room for few pages: so
        transfers have many steps and pieces.
        """
        if "path" not in options:
            options = {"mover": self.mover, **options}
        room = max(1 << 20, 3 * self.geometry.slot_bytes(self.kind))
        options = {"profile": EAGER, "staging_bytes": room, **options}
        engine = TransferEngine(self.view, self.host, **options)
        self._engines.append(engine)
        return engine

    def fill(self, seed: int) -> None:
        """Random bytes in every device row."""
        for number, tensor in enumerate(self.tensors.values()):
            tensor.copy_(random_bytes(seed + 100 * number, *tensor.shape))

    def poison(self) -> None:
        """Poison in every device row."""
        for tensor in self.tensors.values():
            tensor.fill_(POISON)

    def put(self, seed: int, slots: Sequence[int] | Rows) -> None:
        """Random bytes in the host's `slots`, without digests."""
        rng = np.random.default_rng(seed)
        for plane in self.planes:
            for layer in range(plane.num_layers):
                view = self.host.view.view(plane.name, layer)
                for row in self.slot_rows(plane.name, slots):
                    at = memory_at(view.row_address(int(row)), plane.element_size)
                    at[:] = rng.integers(0, 256, plane.element_size, dtype=np.uint8)

    def slot_rows(self, plane: str, slots: Sequence[int] | Rows) -> Rows:
        """The rows of the host pool's view that `slots` are. Shape ``[N·R]``."""
        per_page = self.geometry.rows_per_page(self.geometry.plane(plane))
        rows: Rows = (np.asarray(slots)[:, None] * per_page + np.arange(per_page)).ravel()
        return rows

    def on_host(self, plane: str, slots: Sequence[int] | Rows) -> torch.Tensor:
        """What the host's `slots` hold, on the GPU. Shape ``[L, N·R, E]``."""
        rows = self.slot_rows(plane, slots)
        layers = [read_rows(view, rows) for view in self.host.view.layers[plane]]
        return torch.from_numpy(np.stack(layers)).to(DEVICE)

    def on_device(self, plane: str, rows: Rows) -> torch.Tensor:
        """A copy of device rows. Shape ``[L, N·R, E]``."""
        return self.tensors[plane][:, torch.from_numpy(rows.reshape(-1)).to(DEVICE)]

    def images(self) -> dict[str, torch.Tensor]:
        """Copies of the device tensors."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def check_stored(self, slots: Sequence[int] | Rows, rows: Mapping[str, Rows]) -> None:
        """Fail unless the host's `slots` hold what the device rows hold, and no others changed."""
        for name, of_plane in rows.items():
            found, expected = self.on_host(name, slots), self.on_device(name, of_plane)
            if not torch.equal(found, expected):
                assert_bytes_equal(
                    found.cpu().numpy(), expected.cpu().numpy(), f"host plane {name}"
                )
        if isinstance(self.host, HostPool):
            others = np.setdiff1d(np.arange(self.num_slots), slots)
            assert bool((self.slot_memory()[others] == POISON).all()), "another slot was written"

    def check_device(self, images: Mapping[str, torch.Tensor]) -> None:
        """Fail unless the device tensors are `images` and nothing around them changed."""
        for name, memory in self.memory.items():
            memory.check(images[name], f"device plane {name}")

    def after_load(
        self, slots: Sequence[int] | Rows, rows: Mapping[str, Rows]
    ) -> dict[str, torch.Tensor]:
        """What the device tensors hold once `slots` are loaded to `rows`."""
        images = self.images()
        for name, of_plane in rows.items():
            at = torch.from_numpy(of_plane.reshape(-1)).to(DEVICE)
            images[name][:, at] = self.on_host(name, slots)
        return images

    def close(self) -> None:
        """Wait for the GPU, then give everything back."""
        torch.cuda.synchronize()
        for engine in self._engines:
            engine.close()
        self.host.close()


def owned_pool(geometry: Geometry, num_slots: int, kind: SlotKind = SlotKind.PAGE) -> HostPool:
    """A host pool all of whose slots are in use, as transfers want them."""
    pool = HostPool(geometry, num_slots=num_slots, kind=kind)
    pool.allocate(num_slots, SlotOwner.INDEX)
    return pool


def pinned_pool(
    geometry: Geometry,
    planes: Sequence[Plane],
    num_slots: int,
    layout: Layout,
    kind: SlotKind = SlotKind.PAGE,
    **options: Any,
) -> RegisteredHostPool:
    """An engine's host pool in tensors that torch pinned, poisoned."""
    tensors = {}
    slot_dims: dict[str, tuple[int, ...]] = {}
    for plane in planes:
        per_page = geometry.rows_per_page(plane)
        rows, size = num_slots * per_page, plane.element_size
        shapes: dict[Layout, tuple[int, ...]] = {
            Layout.LAYER_FIRST: (plane.num_layers, rows, size),
            Layout.TOKEN_MAJOR: (rows, plane.num_layers, size),
            Layout.PAGE_MAJOR: (num_slots, plane.num_layers, per_page, size),
        }
        tensor = torch.empty(shapes[layout], dtype=torch.uint8, pin_memory=True)
        tensor.fill_(POISON)
        tensors[plane.name] = tensor
        slot_dims[plane.name] = (0, 1) if layout is Layout.PAGE_MAJOR else (0,)
    return RegisteredHostPool.from_tensors(
        geometry,
        tensors,
        slot_dims=slot_dims,
        layer_dim=0 if layout is Layout.LAYER_FIRST else 1,
        kind=kind,
        **options,
    )


def numbered(geometry: Geometry, plane: str, layer: int, rows: Rows) -> npt.NDArray[np.uint8]:
    """The pattern of device rows, wherever they are. Shape ``[rows, E]``."""
    size = geometry.plane(plane).element_size
    return pattern_rows(0, pool=0, layer=layer, slots=rows.reshape(-1), element_size=size)
