"""Pools, an engine with little staging, and what both pools hold when all transfers are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tests.transfer.device_rig import DeviceRig, Rows
from tests.transfer.fake_gpu import FakeGpu

from kvferry.geometry import Geometry
from kvferry.kernels.jit import Context, Driver
from kvferry.testing import assert_bytes_equal
from kvferry.transfer import TransferEngine, TransferHandle
from kvferry.transfer.movers import Streams
from kvferry.types import Direction, Layout


class Scene:
    """Every slot has been stored once; `submit` then says what each transfer does to the pools.

    Args:
        gpu: Both pools are its.
        geometry: Of both pools; every plane has the rows of a page.
        seed: Of all that is random.
        num_slots: Of the host; the device has room for twice as many pages.
        staging_bytes: For each direction; None: for two pages to nine, at random.
        registered: The host pool is an engine's.
        layout: Of such a pool.
        prepare: What is done with the pools before there is an engine.
    """

    def __init__(
        self,
        gpu: FakeGpu,
        geometry: Geometry,
        seed: int,
        *,
        num_slots: int = 24,
        staging_bytes: int | None = None,
        registered: bool = False,
        layout: Layout = Layout.LAYER_FIRST,
        prepare: Callable[[DeviceRig], object] = lambda _: None,
    ) -> None:
        self.gpu = gpu
        self.rng = np.random.default_rng(seed)
        self.num_slots = num_slots
        self.rig = DeviceRig(
            gpu,
            geometry,
            num_pages=2 * num_slots,
            num_slots=num_slots,
            registered=registered,
            layout=layout,
            seed=seed,
        )
        prepare(self.rig)
        if staging_bytes is None:
            staging_bytes = int(self.rng.uniform(2.1, 9) * staged_bytes(geometry))
        self.engine: TransferEngine = self.rig.engine(staging_bytes=staging_bytes)
        everything = np.arange(num_slots)
        first = np.arange(num_slots * self.rig.page).reshape(num_slots, self.rig.page)
        self.rig.store(self.engine, everything, first).wait()
        self.device = self.rig.images()
        self.host = self.rig.on_host(everything)

    def streams(self, direction: Direction) -> Streams:
        """Those in which the engine carries transfers of a direction."""
        carrier: Any = self.engine._carrier
        found: Streams = carrier._streams[direction]
        return found

    def submit(self, is_load: bool, count: int) -> tuple[TransferHandle, Rows]:
        """A transfer of some random pages and rows, and the rows."""
        slots = self.rng.permutation(self.num_slots)[:count]
        if self.rng.integers(2):
            slots = np.sort(slots)  # longer runs
        rows = self.rig.rows(count)
        return self.move(is_load, slots, rows), rows

    def move(
        self, is_load: bool, slots: Any, rows: Rows, layers: Sequence[int] | None = None
    ) -> TransferHandle:
        """A transfer of these pages and rows, of all layers or some."""
        given = {} if layers is None else {"layers": layers}
        move = self.rig.load if is_load else self.rig.store
        handle = move(self.engine, slots, rows, **given)
        at = self.host_rows(slots)
        for span in handle.plan.spans:
            device, host = (images[span.plane.name][span.layer] for images in self.images)
            if is_load:
                device[rows.ravel()] = host[at]
            else:
                host[at] = device[rows.ravel()]
        return handle

    @property
    def images(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the device and the host hold in the end. Shape of each: ``[L, rows, E]``."""
        return self.device, self.host

    def host_rows(self, slots: Any) -> Rows:
        """The rows of some host slots. Shape ``[N·P]``."""
        found: Rows = np.asarray(slots)[:, None] * self.rig.page + np.arange(self.rig.page)
        return found.ravel()

    def check(self) -> None:
        """Fail unless both pools hold what they should, and no guard was overwritten."""
        self.rig.check_device(self.device, "in the end")
        found = self.rig.on_host(np.arange(self.num_slots))
        for name, expected in self.host.items():
            assert_bytes_equal(found[name], expected, f"host plane {name}")

    def close(self) -> None:
        """Give everything back; nothing is left."""
        self.gpu.release()
        self.engine.close()
        self.rig.host.close()
        assert set(self.gpu.holdings.values()) == {0}
        assert self.gpu.registered == {}


def staged_bytes(geometry: Geometry) -> int:
    """The most that a page takes of staging: each span on an aligned address."""
    return sum(-(-span.num_bytes // 256) * 256 for span in geometry.spans())


def context_of(gpu: FakeGpu) -> Context:
    """A context of the fake GPU, to be made current."""
    return Driver(gpu, "13.0.0").context(0)
