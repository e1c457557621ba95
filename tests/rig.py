"""Guarded pools that know what every transfer should have left in them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.compiler import needs_kernel

from kvferry.geometry import Geometry, LayerView, PoolView
from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
from kvferry.testing import (
    POISON,
    DeviceLayout,
    GuardedBuffer,
    assert_bytes_equal,
    memory_at,
    moved_view,
    num_pool_bytes,
    pattern_rows,
    place_device_layers,
    place_host_layers,
    read_rows,
    write_rows,
)
from kvferry.transfer import TransferEngine, TransferHandle, TransferPlan
from kvferry.types import Direction, Layout, SlotKind

each_path = pytest.mark.parametrize(
    "path",
    [
        pytest.param("cpu", marks=needs_kernel),
        "cpu_numpy",
    ],
)
"""Runs a test on every path that this machine can have."""

each_host_layout = pytest.mark.parametrize("host_layout", [None, *Layout], ids=str)
"""Runs a test with kvferry's own host pool (None) and with an engine's in every layout."""

each_device_layout = pytest.mark.parametrize("device_layout", list(DeviceLayout), ids=str)


@dataclasses.dataclass
class Memory:
    """A piece of memory that tests compare whole."""

    address: int
    inside: npt.NDArray[np.uint8]
    guarded: GuardedBuffer | None

    def check(self, expected: npt.NDArray[np.uint8], what: str) -> None:
        """Fail unless the memory is `expected` and its guards, if any, are whole."""
        if self.guarded is not None:
            self.guarded.check(expected, what)
        else:
            assert_bytes_equal(self.inside, expected, what, ["byte"])


def guarded(num_bytes: int) -> Memory:
    """Poisoned memory between guards."""
    buffer = GuardedBuffer(num_bytes)
    return Memory(buffer.address, buffer.inside, buffer)


class Rig:
    """A device pool and a host pool, every byte of which is accounted for.

    `transfer` works out what both pools should hold afterwards with plain copies of rows, carries
    the plan out, and compares all memory: rows, padding, slots not named, guards.
    """

    def __init__(
        self,
        geometry: Geometry,
        device: PoolView,
        host: HostPool | RegisteredHostPool,
        *,
        device_memory: list[Memory],
        host_memory: list[Memory],
    ) -> None:
        self.geometry = geometry
        self.device = device
        self.host = host
        self.device_memory = device_memory
        self.host_memory = host_memory

    @classmethod
    def make(
        cls,
        geometry: Geometry,
        *,
        num_rows: int | Mapping[str, int],
        num_slots: int = 4,
        device_layout: DeviceLayout = DeviceLayout.FLAT,
        host_layout: Layout | None = None,
        block_rows: int = 16,
        kind: SlotKind = SlotKind.PAGE,
    ) -> Rig:
        """Pools of their own for every plane; device rows filled with the pattern."""
        planes = {span.plane.name: span.plane for span in geometry.spans(kind)}
        device_layers: dict[str, tuple[LayerView, ...]] = {}
        host_layers: dict[str, tuple[LayerView, ...]] = {}
        device_memory, host_memory = [], []
        for name, plane in planes.items():
            rows = num_rows if isinstance(num_rows, int) else num_rows[name]
            place = functools.partial(
                place_device_layers, device_layout, plane, num_rows=rows, block_rows=block_rows
            )
            device_memory.append(guarded(num_pool_bytes(place(base=0))))
            device_layers[name] = place(base=device_memory[-1].address)
            if host_layout is not None:
                place_host = functools.partial(
                    place_host_layers,
                    host_layout,
                    plane,
                    rows_per_page=geometry.rows_per_page(plane),
                    num_pages=num_slots,
                )
                host_memory.append(guarded(num_pool_bytes(place_host(base=0))))
                host_layers[name] = place_host(base=host_memory[-1].address)
        host: HostPool | RegisteredHostPool
        if host_layout is None:
            host, memory = own_pool(geometry, num_slots, kind)
            host_memory.append(memory)
        else:
            host = RegisteredHostPool(geometry, PoolView(geometry, host_layers), kind=kind)
        rig = cls(
            geometry,
            PoolView(geometry, device_layers),
            host,
            device_memory=device_memory,
            host_memory=host_memory,
        )
        rig.fill_device()
        return rig

    def fill_device(self, seed: int = 0) -> None:
        """Give every device row its pattern; padding stays poison."""
        for number, (name, layers) in enumerate(self.device.layers.items()):
            size = self.geometry.plane(name).element_size
            for layer, view in enumerate(layers):
                slots = np.arange(view.num_rows)
                write_rows(
                    view,
                    slots,
                    pattern_rows(seed, pool=number, layer=layer, slots=slots, element_size=size),
                )

    def poison_device(self) -> None:
        """Poison all device memory, so that stale bytes cannot pass for loaded ones."""
        for memory in self.device_memory:
            memory.inside[:] = POISON

    def store(self, path: str, **given: Any) -> TransferHandle:
        """Build a store, carry it out and compare all memory."""
        return self.transfer(TransferPlan.store(self.geometry, **given), path)

    def load(self, path: str, **given: Any) -> TransferHandle:
        """Build a load, carry it out and compare all memory; every page must be verified."""
        return self.transfer(TransferPlan.load(self.geometry, **given), path)

    def round_trip(self, path: str, host_slots: Any, sources: Any, targets: Any) -> None:
        """Store `sources`, poison the device, load into `targets`; all compared."""
        self.store(path, host_slots=host_slots, device_slots=sources)
        self.poison_device()
        self.load(path, host_slots=host_slots, device_slots=targets)

    def transfer(self, plan: TransferPlan, path: str, **options: Any) -> TransferHandle:
        """Carry `plan` out on `path` and compare all memory."""
        device_images, device = self.copies(self.device_memory, self.device)
        host_images, host = self.copies(self.host_memory, self.host.view)
        move_rows(plan, device, host)
        engine = TransferEngine(self.device, self.host, path=path, **options)
        is_load = plan.direction is Direction.LOAD
        handle = engine.load(plan) if is_load else engine.store(plan)
        handle.wait()
        assert handle.path == path
        assert handle.bad_pages == ()
        assert handle.verified_pages == (plan.num_pages if engine.verify else 0)
        self.compare(self.device_memory, device_images, f"device after the {plan.direction}")
        self.compare(self.host_memory, host_images, f"host after the {plan.direction}")
        return handle

    @contextlib.contextmanager
    def nothing_moves(self) -> Iterator[None]:
        """Fail if a byte of either pool, or a digest, is another one after the block."""
        device_images, _ = self.copies(self.device_memory, self.device)
        host_images, _ = self.copies(self.host_memory, None)
        digests = None if getattr(self.host, "closed", False) else self.host.digests.copy()
        yield
        self.compare(self.device_memory, device_images, "device")
        self.compare(self.host_memory, host_images, "host")
        if digests is not None:
            assert_bytes_equal(self.host.digests, digests, "digests")

    def copies(
        self, memories: list[Memory], view: PoolView | None
    ) -> tuple[list[npt.NDArray[np.uint8]], PoolView]:
        """The memory copied, and `view` over the copies."""
        images = [memory.inside.copy() for memory in memories]
        if view is None:
            return images, self.device
        layers = {}
        for name, views in view.layers.items():
            moved = []
            for layer in views:
                index = next(
                    index
                    for index, memory in enumerate(memories)
                    if 0 <= layer.address - memory.address < memory.inside.size
                )
                moved.append(
                    moved_view(
                        layer,
                        from_address=memories[index].address,
                        to_address=int(images[index].ctypes.data),
                    )
                )
            layers[name] = tuple(moved)
        return images, PoolView(self.geometry, layers, shared_storage=True)

    @staticmethod
    def compare(memories: list[Memory], images: list[npt.NDArray[np.uint8]], what: str) -> None:
        for number, (memory, image) in enumerate(zip(memories, images, strict=True)):
            memory.check(image, f"{what}, buffer {number}")


def own_pool(
    geometry: Geometry, num_slots: int, kind: SlotKind = SlotKind.PAGE
) -> tuple[HostPool, Memory]:
    """A poisoned `HostPool`, all of it allocated, and its memory, padding of slots included."""
    pool = HostPool(geometry, num_slots=num_slots, kind=kind)
    pool.allocate(num_slots, SlotOwner.INDEX)
    inside = memory_at(pool.address, num_slots * pool.slot_bytes)
    inside[:] = POISON
    return pool, Memory(pool.address, inside, None)


def move_rows(plan: TransferPlan, device: PoolView, host: PoolView) -> None:
    """What `plan` means, as plain copies of rows."""
    for span in plan.spans:
        name = span.plane.name
        on_device, on_host = device.view(name, span.layer), host.view(name, span.layer)
        rows = plan.rows_on_host(name).ravel()
        host_rows = (plan.host_slots[:, None] * span.rows + np.arange(span.rows)).ravel()
        if not rows.size:
            continue
        if plan.direction is Direction.STORE:
            write_rows(on_host, host_rows, read_rows(on_device, rows))
        else:
            write_rows(on_device, rows, read_rows(on_host, host_rows))


def scattered(seed: int, *, pages: int, per_page: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Device rows for `pages` pages, all different, in no order. Shape ``[pages, per_page]``."""
    rng = np.random.default_rng(seed)
    return rng.permutation(num_rows)[: pages * per_page].reshape(pages, per_page)
