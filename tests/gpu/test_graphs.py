"""Transfers beside CUDA graphs, and inside of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_rig import DEVICE, GpuRig, latent, new_stream, random_bytes, scattered

from kvferry import TransferPlan
from kvferry.errors import PoolInUseError, TransferError, TransferFaultError
from kvferry.testing import memory_at
from kvferry.transfer import CapturedTransfer
from kvferry.types import Direction

pytestmark = pytest.mark.gpu

_PAGES = 8
_NUM_ROWS = 1024


class _Scene:
    """A graph that reads every row, and a load that changes all it reads."""

    def __init__(self, rig: GpuRig) -> None:
        self.rig = rig
        self.engine = rig.engine()
        self.slots = list(range(_PAGES))
        self.rows = rows = scattered(1, _PAGES, 64, _NUM_ROWS)
        self.load = TransferPlan.load(rig.geometry, host_slots=self.slots, device_slots=rows)
        rig.fill(1)
        store = TransferPlan.store(rig.geometry, host_slots=self.slots, device_slots=rows)
        self.engine.store(store).wait()
        self.new = rig.tensor.clone()
        at = torch.from_numpy(rows.reshape(-1)).to(DEVICE)
        rig.poison()
        self.new = torch.full_like(rig.tensor, 0xA5)
        self.engine.load(self.load).wait()
        self.new[:, at] = rig.tensor[:, at]
        self.old = torch.full_like(rig.tensor, 0xA5)
        rig.poison()
        self.seen = torch.zeros_like(rig.tensor)
        torch.cuda.synchronize()

    def capture(self, meanwhile: Callable[[], None] = lambda: None) -> torch.cuda.CUDAGraph:
        """The graph; `meanwhile` is called while it is captured."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            meanwhile()
            self.seen.copy_(self.rig.tensor)
        torch.cuda.synchronize()
        return graph


@pytest.fixture
def scene(make_rig: Callable[..., GpuRig]) -> _Scene:
    """A device pool of poison, and other bytes on the host."""
    return _Scene(make_rig(latent(), num_rows=_NUM_ROWS, num_slots=_PAGES))


@pytest.mark.parametrize("is_ordered", [True, False], ids=["wait_all", "control"])
def test_a_replay_reads_what_was_loaded(
    scene: _Scene, slow: Callable[[Any], None], is_ordered: bool
) -> None:
    """A replay after `wait_all` on its stream sees the load; without, the rows before it."""
    graph = scene.capture()
    for _ in range(2):  # the second replay has stale bytes of its own to see
        scene.rig.poison()
        work, replayer = new_stream(), new_stream()
        torch.cuda.synchronize()
        slow(work)
        handle = scene.engine.load(scene.load, work.cuda_stream)
        with torch.cuda.stream(replayer):
            if is_ordered:
                handle.wait_all()
            graph.replay()
        replayer.synchronize()
        assert torch.equal(scene.seen, scene.new if is_ordered else scene.old)
        handle.wait()
        assert handle.verified_pages == _PAGES


def test_a_graph_takes_no_transfer_that_comes_once(scene: _Scene) -> None:
    """Submitting into a capture is refused before anything moves, and the capture goes on."""

    def submit() -> None:
        with pytest.raises(TransferError, match="put there by the engine's `capture`"):
            scene.engine.load(scene.load)

    graph = scene.capture(submit)
    scene.rig.check_device({"latent": scene.old})
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(scene.seen, scene.old)
    scene.engine.load(scene.load).wait()
    scene.rig.check_device({"latent": scene.new})


def test_a_graph_waits_for_no_transfer(scene: _Scene, slow: Callable[[Any], None]) -> None:
    """Waiting inside a capture would be left out of every replay: it is refused."""
    work = new_stream()
    slow(work)
    handle = scene.engine.load(scene.load, work.cuda_stream)

    def wait() -> None:
        orders: list[Callable[[], None]] = [handle.wait_all, lambda: handle.wait_layer(0)]
        for order in orders:
            with pytest.raises(TransferError, match="call wait_all before each replay"):
                order()

    scene.capture(wait)
    handle.wait()
    scene.rig.check_device({"latent": scene.new})


def test_transfers_go_on_beside_a_capture(scene: _Scene, slow: Callable[[Any], None]) -> None:
    """While one stream captures, handles may be looked at and other streams may transfer."""
    other = new_stream()
    handles = []

    def go_on() -> None:
        slow(other)
        for _ in range(2):
            handles.append(scene.engine.load(scene.load, other.cuda_stream))
        assert not handles[0].done

    graph = scene.capture(go_on)
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == _PAGES
    scene.rig.check_device({"latent": scene.new})
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(scene.seen, scene.new)


def _captured(scene: _Scene, plan: TransferPlan) -> tuple[torch.cuda.CUDAGraph, CapturedTransfer]:
    """A graph with `plan` between a copy of `seen` to the pool and one back."""
    made: list[CapturedTransfer] = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if plan.direction is Direction.STORE:
            scene.rig.tensor.copy_(scene.seen)
        made.append(scene.engine.capture(plan))
        if plan.direction is Direction.LOAD:
            scene.seen.copy_(scene.rig.tensor)
    torch.cuda.synchronize()
    return graph, made[0]


def _store_plan(scene: _Scene) -> TransferPlan:
    return TransferPlan.store(scene.rig.geometry, host_slots=scene.slots, device_slots=scene.rows)


def test_a_captured_load_loads_at_every_replay(scene: _Scene) -> None:
    """Each replay brings what the host holds then, before the rest of the graph reads it."""
    graph, captured = _captured(scene, scene.load)
    scene.rig.check_device({"latent": scene.old})
    assert captured.path == "flat"
    assert captured.bad_pages == tuple(range(_PAGES)), "nothing was loaded yet"
    for seed in (5, 6):
        scene.rig.fill(seed)
        scene.engine.store(_store_plan(scene)).wait()
        scene.rig.poison()
        images = scene.rig.after_load(scene.slots, {"latent": scene.rows})
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        scene.rig.check_device(images)
        assert torch.equal(scene.seen, images["latent"])
        assert (captured.error, captured.bad_pages) == (None, ())
        assert captured.verified_pages == _PAGES


def test_a_captured_store_stores_at_every_replay(scene: _Scene) -> None:
    """Each replay takes what the graph has computed before it, with digests that a load accepts."""
    graph, captured = _captured(scene, _store_plan(scene))
    for seed in (5, 6):
        scene.seen.copy_(random_bytes(seed, *scene.seen.shape))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert captured.verified_pages == _PAGES
        at = torch.from_numpy(scene.rows.reshape(-1)).to(DEVICE)
        assert torch.equal(scene.rig.on_host("latent", scene.slots), scene.seen[:, at])
        loaded = scene.engine.load(scene.load)
        loaded.wait()
        assert loaded.verified_pages == _PAGES


def test_a_replay_checks_digests(scene: _Scene) -> None:
    """A page that was changed meanwhile is bad in that replay, and good once it is mended."""
    graph, captured = _captured(scene, scene.load)
    byte = memory_at(scene.rig.host.view.view("latent", 2).row_address(scene.slots[5] * 64), 1)
    for bad in ((5,), ()):
        byte ^= 1
        graph.replay()
        torch.cuda.synchronize()
        assert captured.bad_pages == bad
        assert captured.verified_pages == (5 if bad else _PAGES)


def test_a_replay_reads_indices_on_the_gpu_anew(scene: _Scene) -> None:
    """Rows that are changed in place between replays are where the next one goes."""
    at = torch.from_numpy(scene.rows).to(DEVICE)
    plan = TransferPlan.load(scene.rig.geometry, host_slots=scene.slots, device_slots=at)
    graph, captured = _captured(scene, plan)
    for seed in (3, 4):
        rows = scattered(seed, _PAGES, 64, _NUM_ROWS)
        at.copy_(torch.from_numpy(rows).to(DEVICE))
        scene.rig.poison()
        images = scene.rig.after_load(scene.slots, {"latent": rows})
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        scene.rig.check_device(images)
        assert captured.verified_pages == _PAGES
    at[6, 7] = _NUM_ROWS
    graph.replay()
    torch.cuda.synchronize()
    assert captured.bad_pages == (6,)
    assert captured.verified_pages == 0
    assert isinstance(captured.error, TransferFaultError)
    assert "page 6, row 7" in str(captured.error)


def test_a_captured_transfer_keeps_its_pool(scene: _Scene) -> None:
    """Until it is closed the pool stays open; closed twice is closed once."""
    _, captured = _captured(scene, scene.load)
    with pytest.raises(PoolInUseError):
        scene.rig.host.close()
    captured.close()
    captured.close()
    with pytest.raises(TransferError, match="captured transfer is closed"):
        captured.verified_pages  # noqa: B018 (it raises)
    _, other = _captured(scene, scene.load)
    scene.engine.close()
    with pytest.raises(TransferError, match="captured transfer is closed"):
        other.bad_pages  # noqa: B018
    scene.rig.host.close()


def test_capturing_needs_a_capture(scene: _Scene) -> None:
    """Outside of one nothing is enqueued, and the error says what to do instead."""
    with pytest.raises(TransferError, match="not being captured into a graph"):
        scene.engine.capture(scene.load)
    torch.cuda.synchronize()
    scene.rig.check_device({"latent": scene.old})
