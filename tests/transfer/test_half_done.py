"""Transfers that end midway, move nothing or share bytes: nobody goes on before all is over."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import PAGE, DeviceRig, IndexTensor, latent, same
from tests.transfer.fake_gpu import CALLER, FINISH, FakeGpu, Status

from kvferry.errors import DriverError, TransferFaultError
from kvferry.geometry import Geometry, Plane, PoolView
from kvferry.transfer import TransferPlan
from kvferry.types import Direction

_TWO_GROUPS = Geometry(
    planes=(
        Plane(name="one", num_layers=2, element_size=64),
        Plane(name="other", num_layers=2, element_size=64),
    ),
    page_size=PAGE,
)


@pytest.mark.parametrize("seed", range(6))
def test_planes_on_the_same_bytes(gpu: FakeGpu, seed: int) -> None:
    """A store of one plane is over before a load of another writes the bytes that both have."""
    rig = DeviceRig(gpu, _TWO_GROUPS)
    layers = rig.device.layers["one"]
    rig.device = PoolView(_TWO_GROUPS, {"one": layers, "other": layers}, shared_storage=True)
    engine, rows = rig.engine(), rig.rows(4)
    rig.store(engine, [4, 5, 6, 7], rows, planes=["other"]).wait()
    rig.fill()
    wanted = rig.on_device(rows)["one"].copy()
    gpu.hold_all()
    stored = rig.store(engine, [0, 1, 2, 3], rows, planes=["one"])
    loaded = rig.load(engine, [4, 5, 6, 7], rows, planes=["other"])
    gpu.interleave(seed)
    stored.wait()
    loaded.wait()
    same({"one": rig.on_host([0, 1, 2, 3])["one"]}, {"one": wanted}, "what was stored")
    gpu.release()
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("interrupted", [False, True], ids=["refused", "interrupted"])
def test_indices_of_a_failed_transfer_do_not_come_later(gpu: FakeGpu, interrupted: bool) -> None:
    """Their copy in the caller's stream is over before the buffer is another transfer's."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(8)
    others = rig.rows(8, besides=rows)
    gpu.hold(CALLER)
    count = [0]

    def first(*_: Any) -> Status | None:
        count[0] += 1
        if count[0] > 1:
            return None
        if interrupted:
            raise KeyboardInterrupt
        return Status.CUDA_ERROR_OUT_OF_MEMORY

    gpu.hooks["cuEventRecord"] = first
    with contextlib.suppress(KeyboardInterrupt):
        rig.store(engine, [0, 1, 2, 3], IndexTensor(rows[:4]))
    del gpu.hooks["cuEventRecord"]
    assert count[0]
    handles = [rig.store(engine, [4 + i], others[i : i + 1]) for i in range(3)]
    gpu.release()
    for i, handle in enumerate(handles):
        handle.wait()
        assert handle.verified_pages == 1
        same(rig.on_host([4 + i]), rig.on_device(others[i : i + 1]), f"store {i} after it")
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_no_pages_are_over_when_their_streams_are(gpu: FakeGpu, direction: Direction) -> None:
    """Not before: what the kernels report is read behind what they were told."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    gpu.hold(gpu.stream_of[direction])
    move = rig.load if direction is Direction.LOAD else rig.store
    handle = move(engine, np.zeros(0, int), np.zeros((0, PAGE), int))
    assert not handle.done
    gpu.release()
    handle.wait()
    assert handle.error is None
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("layer", [None, 0], ids=["all", "one layer"])
def test_rows_of_a_failed_load_are_mended_behind_it(gpu: FakeGpu, layer: int | None) -> None:
    """A wait that raises orders the stream all the same: what is computed anew stays."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    rig.store(engine, [0, 1], rows).wait()
    gpu.hold_all()
    with gpu.failing("cuLaunchKernel", when=lambda kernel, *_: kernel == FINISH):
        loaded = rig.load(engine, [0, 1], rows)
    gpu.release(CALLER)
    wait = loaded.wait_all if layer is None else functools.partial(loaded.wait_layer, layer)
    with pytest.raises(TransferFaultError):
        wait(stream=CALLER)

    def compute_anew() -> None:
        for tensor in rig.tensors.values():
            tensor[:, rows.ravel()] = 7

    gpu.enqueue(CALLER, compute_anew)
    gpu.release()
    for tensor in rig.tensors.values():
        assert (tensor[:, rows.ravel()] == 7).all()
    assert loaded.done
    engine.close()
    rig.host.close()


@pytest.mark.parametrize("element_size", [576, 131, 66])
def test_an_element_without_a_row_brings_nobody_s_bytes(gpu: FakeGpu, element_size: int) -> None:
    """Its place on the host stays as it is, or is zeros where a page crosses the link whole."""
    rig = DeviceRig(gpu, latent(element_size))
    engine = rig.engine()
    rows = rig.rows(4)
    rig.store(engine, [0, 1, 2, 3], rows).wait()
    before = rig.on_host([0])["latent"].copy()
    indices = rig.rows(1, besides=rows)
    indices[0, 5] = rig.num_rows + 3
    stored = rig.store(engine, [0], IndexTensor(indices))
    with pytest.raises(TransferFaultError, match="page 0, row 5"):
        stored.wait()
    assert stored.bad_pages == (0,)
    assert not rig.host.digests[0].any()
    found = rig.on_host([0])["latent"][:, 5]
    wanted = np.zeros_like(found) if gpu.mover == "staged" else before[:, 5]
    assert np.array_equal(found, wanted)
    engine.close()
    rig.host.close()


def test_an_interrupt_where_a_transfer_ends(gpu: FakeGpu) -> None:
    """All that was enqueued is over, nothing is leased, and the engine goes on."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    launched, raised = len(gpu.kernels), [False]

    def interrupt(*_: Any) -> None:
        if len(gpu.kernels) > launched and gpu.kernels[-1] == "finish" and not raised[0]:
            raised[0] = True
            raise KeyboardInterrupt

    gpu.hooks["cuEventRecord"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        rig.store(engine, [0, 1], rows)
    del gpu.hooks["cuEventRecord"]
    rig.store(engine, [2, 3], rows).wait()
    assert rig.pool.num_leases == 0
    engine.close()
    rig.host.close()


def test_streams_of_an_engine_that_cannot_be_made(gpu: FakeGpu) -> None:
    """Whichever of them is refused, those before it are given back."""
    rig = DeviceRig(gpu)
    for nth in range(9):
        before = set(gpu._streams) - gpu._destroyed
        count = iter(range(1 << 20))
        with (
            gpu.failing("cuStreamCreateWithPriority", when=lambda *_, n=nth, c=count: next(c) == n),
            pytest.raises(DriverError),
        ):
            rig.engine()
        assert set(gpu._streams) - gpu._destroyed == before


def test_a_captured_store_without_digests_leaves_none(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the bytes before would vouch for what a replay brings."""
    rig = DeviceRig(gpu)
    engine, unchecked = rig.engine(), rig.engine(verify=False)
    rows = rig.rows(2)
    rig.store(engine, [0, 1], rows).wait()
    plan = TransferPlan.store(rig.geometry, host_slots=[0, 1], device_slots=rows)
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "_cu_stream_is_capturing", lambda _: 1)
        captured = unchecked.capture(plan, stream=CALLER)
    assert not rig.host.digests[[0, 1]].any()
    captured.close()
    engine.close()
    unchecked.close()
    rig.host.close()
