"""Transfers beside CUDA graphs: a graph computes, transfers stay outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_rig import DEVICE, GpuRig, latent, new_stream, scattered

from kvferry import TransferPlan
from kvferry.errors import TransferError

pytestmark = pytest.mark.gpu

_PAGES = 8
_NUM_ROWS = 1024


class _Scene:
    """A graph that reads every row, and a load that changes all it reads."""

    def __init__(self, rig: GpuRig) -> None:
        self.rig = rig
        self.engine = rig.engine()
        self.slots = list(range(_PAGES))
        rows = scattered(1, _PAGES, 64, _NUM_ROWS)
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


def test_a_graph_takes_no_transfer(scene: _Scene) -> None:
    """Submitting into a capture is refused before anything moves, and the capture goes on."""

    def submit() -> None:
        with pytest.raises(TransferError, match="captured into a graph, which can hold no"):
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
