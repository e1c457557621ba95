"""Rooms in device memory, with streams: what a share goes through on a GPU, but for NCCL itself."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import PAGE, DeviceRig
from tests.transfer.fake_gpu import CALLER, FakeGpu

from kvferry.exchange import ShardedLoad, Way, cut_shares
from kvferry.exchange.exchanger import Exchanger
from kvferry.geometry import Geometry, Plane
from kvferry.ranks import ExchangeBuffer, ExchangeRates
from kvferry.testing import POISON, memory_at
from kvferry.transfer import TransferPlan

SIZE = 3
NUM_PAGES = 8
_SIZES = (132, 576, 656, 3)


class _Lanes:
    """An exchange of one rank after another: chunks are kept, in stream order, for the last."""

    size = SIZE
    device = "cuda:0"

    def __init__(
        self, gpu: FakeGpu, rank: int, kept: dict[tuple[int, int], Any], late: str
    ) -> None:
        self.rank = rank
        self._gpu, self._kept, self._late = gpu, kept, late
        self._lanes = [gpu.new_stream(), gpu.new_stream()]
        self._count = 0

    def buffer(self, num_bytes: int) -> ExchangeBuffer:
        memory = np.full(num_bytes, POISON, np.uint8)
        address = int(memory.ctypes.data)
        # To a kernel it is as good as pinned memory, which the fake asks for where pages are read.
        self._gpu.pinned_memory[address] = num_bytes
        return ExchangeBuffer(memory, address, num_bytes)

    def stream(self, lane: int) -> int:
        if self._late == "share":
            self._gpu.hold(*set(self._gpu._streams) - set(self._lanes))
        return self._lanes[lane]

    def mark(self, stream: int | None) -> None:
        """The caller has no work."""

    def follow(self, mark: Any) -> None:
        pass

    def measure(self, buffer: ExchangeBuffer, *, timeout: float) -> ExchangeRates:
        raise NotImplementedError

    def break_off(self) -> None:
        pass

    def gather(self, buffer: ExchangeBuffer, chunk_bytes: int, *, lane: int, timeout: float) -> Any:
        del timeout
        number, self._count = self._count, self._count + 1
        chunks = buffer.tensor[: SIZE * chunk_bytes].reshape(SIZE, chunk_bytes)

        def exchange() -> None:
            self._kept[number, self.rank] = chunks[self.rank].copy()
            for rank in range(SIZE):
                if (number, rank) in self._kept:
                    chunks[rank] = self._kept[number, rank]

        # What is late is held up until somebody looks whether something is over: what is ordered
        # behind it comes behind it, and what is not comes long before.
        if self._late == "exchange":
            self._gpu.hold(self._lanes[lane])
        self._gpu.hooks["cuEventQuery"] = lambda *_: self._gpu.release()
        self._gpu.enqueue(self._lanes[lane], exchange)
        return _Behind()


class _Behind:
    def wait(self, timeout: float) -> None:
        """Later work of the lane is behind it as it is."""


def _rig(gpu: FakeGpu, geometry: Geometry) -> tuple[DeviceRig, TransferPlan, dict[str, Any]]:
    """All stored, the device poisoned, a plan into other rows, and what the device is to hold."""
    rig = DeviceRig(gpu, geometry, num_pages=3 * NUM_PAGES, num_slots=NUM_PAGES + 1)
    slots, sources = np.arange(1, NUM_PAGES + 1)[::-1].copy(), rig.rows(NUM_PAGES)
    engine = rig.engine()
    rig.store(engine, slots, sources).wait()
    engine.close()
    targets = rig.rows(NUM_PAGES, besides=sources)
    expected = {name: np.full_like(tensor, POISON) for name, tensor in rig.tensors.items()}
    for name, tensor in rig.tensors.items():
        expected[name][:, targets.ravel()] = tensor[:, sources.ravel()]
    rig.poison()
    plan = TransferPlan.load(geometry, host_slots=slots, device_slots=targets)
    return rig, plan, expected


def _load(plan: TransferPlan) -> ShardedLoad:
    return ShardedLoad(plan, Way(True, ""), verified=True, timeout=60, size=SIZE, mark=None)


def _carried(
    gpu: FakeGpu, rig: DeviceRig, plan: TransferPlan, room_pages: int, late: str
) -> tuple[list[int], ShardedLoad]:
    """The last rank's load, of which the other ranks brought their shares before."""
    kept: dict[tuple[int, int], Any] = {}
    layer = sum(-(-PAGE * plane.element_size // 16) * 16 for plane in rig.geometry.planes)
    good: list[int] = []
    load = _load(plan)
    for rank in range(SIZE):
        load = _load(plan)
        exchanger = Exchanger(
            rig.device,
            rig.host,
            _Lanes(gpu, rank, kept, late),
            exchange_bytes=2 * SIZE * room_pages * layer,
            staging_bytes=1 << 20,
            verify=True,
        )
        outcome = exchanger.carry(load)
        assert outcome.fault is None
        good = outcome.good.tolist()
        if rank < SIZE - 1:
            rig.poison()
        load.wait_layer(0, CALLER)
        exchanger.close()
    assert load.deadline > time.monotonic()
    return good, load


@pytest.mark.parametrize("late", ["share", "exchange"])
@pytest.mark.parametrize("room_pages", [2, 40])
@pytest.mark.parametrize("element_size", _SIZES)
def test_shares_are_exact_in_device_memory(
    gpu: FakeGpu, element_size: int, room_pages: int, late: str
) -> None:
    """Odd sizes, in rooms of a page and of all, with a slow link and a slow exchange."""
    geometry = Geometry(
        planes=(Plane(name="latent", num_layers=4, element_size=element_size),), page_size=PAGE
    )
    rig, plan, expected = _rig(gpu, geometry)
    good, load = _carried(gpu, rig, plan, room_pages, late)
    assert good == [1] * NUM_PAGES
    rig.check_device(expected, "after a load in shares")
    assert load.path.startswith("sharded ")


def test_a_bad_page_is_seen_behind_the_exchange(gpu: FakeGpu) -> None:
    """A bit of host memory in another rank's share: the digest on this rank says so."""
    geometry = Geometry(
        planes=(Plane(name="latent", num_layers=4, element_size=576),), page_size=PAGE
    )
    rig, plan, _ = _rig(gpu, geometry)
    page = cut_shares(NUM_PAGES, SIZE)[1][0]
    view = rig.pool.view.view("latent", 2)
    memory_at(view.row_address(int(plan.host_slots[page]) * PAGE), 1)[0] ^= 4
    good, _ = _carried(gpu, rig, plan, 40, "exchange")
    assert good == [int(one != page) for one in range(NUM_PAGES)]
