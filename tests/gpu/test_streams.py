"""Order between a transfer and what the caller's streams do before and after it.

Slow streams make every race be lost: beside each test stands one without the order, which must see
the wrong bytes, or the test could not fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, GpuRig, Rows, latent, new_stream, random_bytes, scattered

from kvferry import TransferEngine, TransferHandle, TransferPlan
from kvferry.errors import TransferError, TransferTimeoutError

pytestmark = pytest.mark.gpu

_PAGES = 16
_NUM_ROWS = 2048
_LAYERS = 4

_Slow = Callable[[Any], None]


class _Scene:
    """Pools, plans and warm kernels, so that what a test submits next is on its way at once."""

    def __init__(self, rig: GpuRig) -> None:
        self.rig = rig
        self.engine = rig.engine()
        self.slots = np.random.default_rng(1).permutation(rig.num_slots)[:_PAGES]
        self.rows: Rows = scattered(2, _PAGES, 64, _NUM_ROWS)
        self.at = torch.from_numpy(self.rows.reshape(-1)).to(DEVICE)
        given: dict[str, Any] = {"host_slots": self.slots, "device_slots": self.rows}
        self.store = TransferPlan.store(rig.geometry, **given)
        self.load = TransferPlan.load(rig.geometry, **given)
        rig.fill(1)
        self.engine.store(self.store).wait()
        self.engine.load(self.load).wait()
        torch.cuda.synchronize()

    def new_on_host(self) -> torch.Tensor:
        """Store other bytes, and put the old ones back; what a load makes of the device."""
        old = self.rig.tensor.clone()
        self.rig.fill(2)
        self.engine.store(self.store).wait()
        new = old.clone()
        new[:, self.at] = self.rig.tensor[:, self.at]
        self.rig.tensor.copy_(old)
        torch.cuda.synchronize()
        return new

    def stored(self) -> torch.Tensor:
        """What the host holds."""
        return self.rig.on_host("latent", self.slots)


@pytest.fixture
def scene(make_rig: Callable[..., GpuRig]) -> _Scene:
    """A device pool of random bytes, all stored once."""
    return _Scene(make_rig(latent(num_layers=_LAYERS), num_rows=_NUM_ROWS, num_slots=_PAGES + 3))


def _produce_and_store(scene: _Scene, slow: _Slow, ordered_after: Any) -> torch.Tensor:
    """Write new rows late in a stream, submit a store meanwhile; what should be on the host."""
    work, rows = new_stream(), random_bytes(7, *scene.rig.tensor.shape)
    torch.cuda.synchronize()
    slow(work)
    with torch.cuda.stream(work):
        scene.rig.tensor.copy_(rows)
        handle = scene.engine.store(
            scene.store, None if ordered_after is None else ordered_after.cuda_stream
        )
    handle.wait()
    assert handle.verified_pages == _PAGES
    torch.cuda.synchronize()
    return rows[:, scene.at]


def test_a_store_follows_the_producer(scene: _Scene, slow: _Slow) -> None:
    """Rows that the current stream writes late are what is stored, without any other wait."""
    expected = _produce_and_store(scene, slow, None)
    assert torch.equal(scene.stored(), expected)


def test_a_store_follows_the_stream_it_is_told(scene: _Scene, slow: _Slow) -> None:
    """A stream given by its handle counts, whatever the current one is."""
    work, rows = new_stream(), random_bytes(7, *scene.rig.tensor.shape)
    torch.cuda.synchronize()
    slow(work)
    with torch.cuda.stream(work):
        scene.rig.tensor.copy_(rows)
    scene.engine.store(scene.store, work.cuda_stream).wait()
    torch.cuda.synchronize()
    assert torch.equal(scene.stored(), rows[:, scene.at])


def test_without_that_order_a_store_takes_old_rows(scene: _Scene, slow: _Slow) -> None:
    """Control: after a stream that has nothing to do with it, the store is too early."""
    expected = _produce_and_store(scene, slow, new_stream())
    assert not torch.equal(scene.stored(), expected)


def _store_and_overwrite(
    scene: _Scene, slow: _Slow, order: Callable[[TransferHandle, int], None]
) -> torch.Tensor:
    """Submit a store that is held back, overwrite its rows elsewhere; what should be stored."""
    expected = scene.rig.tensor[:, scene.at]
    work, later = new_stream(), new_stream()
    torch.cuda.synchronize()
    slow(work)
    handle = scene.engine.store(scene.store, work.cuda_stream)
    with torch.cuda.stream(later):
        for layer in range(_LAYERS):
            order(handle, layer)
            scene.rig.tensor[layer].fill_(0x5A)
    later.synchronize()
    handle.wait()
    return expected


@pytest.mark.parametrize(
    "order",
    [
        pytest.param(lambda handle, _: handle.wait_all(), id="wait_all"),
        pytest.param(lambda handle, layer: handle.wait_layer(layer), id="wait_layer"),
    ],
)
def test_rows_may_be_overwritten_after_a_wait(
    scene: _Scene, slow: _Slow, order: Callable[[TransferHandle, int], None]
) -> None:
    """A stream that waited for the store, or for each layer of it, may write the rows anew."""
    expected = _store_and_overwrite(scene, slow, order)
    assert torch.equal(scene.stored(), expected)
    assert bool((scene.rig.tensor == 0x5A).all())


def test_without_that_wait_the_store_takes_what_came_later(scene: _Scene, slow: _Slow) -> None:
    """Control: rows that are overwritten at once are stored with their new bytes."""
    _store_and_overwrite(scene, slow, lambda _, __: None)
    assert bool((scene.stored() == 0x5A).all())


def _read_and_load(scene: _Scene, slow: _Slow, ordered_after: Any) -> tuple[torch.Tensor, ...]:
    """Read rows late in a stream, submit a load over them meanwhile; what was seen, and before."""
    before, new = scene.rig.tensor.clone(), scene.new_on_host()
    seen, work = torch.zeros_like(before), new_stream()
    torch.cuda.synchronize()
    slow(work)
    with torch.cuda.stream(work):
        seen.copy_(scene.rig.tensor)
        handle = scene.engine.load(
            scene.load, None if ordered_after is None else ordered_after.cuda_stream
        )
    handle.wait()
    torch.cuda.synchronize()
    assert handle.verified_pages == _PAGES
    scene.rig.check_device({"latent": new})
    return seen, before


def test_a_load_follows_the_readers(scene: _Scene, slow: _Slow) -> None:
    """What the current stream still reads is overwritten only after it was read."""
    seen, before = _read_and_load(scene, slow, None)
    assert torch.equal(seen, before)


def test_without_that_order_a_reader_sees_new_rows(scene: _Scene, slow: _Slow) -> None:
    """Control: after an idle stream, the load overtakes the reader."""
    seen, before = _read_and_load(scene, slow, new_stream())
    assert not torch.equal(seen, before)


def _load_late(scene: _Scene, slow: _Slow) -> tuple[TransferHandle, torch.Tensor]:
    """A load that starts late, and the device as it leaves it."""
    new, work = scene.new_on_host(), new_stream()
    torch.cuda.synchronize()
    slow(work)
    return scene.engine.load(scene.load, work.cuda_stream), new


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "current"])
def test_a_consumer_waits_layer_by_layer(scene: _Scene, slow: _Slow, is_named: bool) -> None:
    """A loop over layers in another stream reads each one after its `wait_layer`."""
    handle, new = _load_late(scene, slow)
    seen, consumer = torch.zeros_like(new), new_stream()
    with torch.cuda.stream(consumer):
        for layer in range(_LAYERS):
            handle.wait_layer(layer, consumer.cuda_stream if is_named else None)
            seen[layer].copy_(scene.rig.tensor[layer])
    consumer.synchronize()
    assert torch.equal(seen, new)
    handle.wait()


def test_every_layer_can_be_waited_for_first(scene: _Scene, slow: _Slow) -> None:
    """In any order and each in a fresh stream, a layer is there after its `wait_layer`."""
    for turn in range(3):
        handle, new = _load_late(scene, slow)
        seen, streams = torch.zeros_like(new), []
        for layer in np.random.default_rng(turn).permutation(_LAYERS).tolist():
            streams.append(new_stream())
            with torch.cuda.stream(streams[-1]):
                handle.wait_layer(layer)
                seen[layer].copy_(scene.rig.tensor[layer])
        for stream in streams:
            stream.synchronize()
        assert torch.equal(seen, new)
        handle.wait()
        scene.rig.fill(1)
        scene.engine.store(scene.store).wait()


def test_without_waiting_a_consumer_sees_old_rows(scene: _Scene, slow: _Slow) -> None:
    """Control: a loop that asks for no layer is too early."""
    handle, new = _load_late(scene, slow)
    seen, consumer = torch.zeros_like(new), new_stream()
    with torch.cuda.stream(consumer):
        seen.copy_(scene.rig.tensor)
    consumer.synchronize()
    assert not torch.equal(seen, new)
    handle.wait()


def test_a_load_after_a_store_of_the_same_slots(scene: _Scene, slow: _Slow) -> None:
    """A stream that waited for a store carries that order on to a load of what it stored."""
    expected, work = scene.rig.tensor.clone(), new_stream()
    torch.cuda.synchronize()
    slow(work)
    with torch.cuda.stream(work):
        stored = scene.engine.store(scene.store)
        stored.wait_all()
        scene.rig.tensor[:, scene.at] = 0xA5
        loaded = scene.engine.load(scene.load)
    loaded.wait()
    assert (stored.verified_pages, loaded.verified_pages) == (_PAGES, _PAGES)
    torch.cuda.synchronize()
    scene.rig.check_device({"latent": expected})


def test_looking_at_a_handle_never_blocks(scene: _Scene, slow: _Slow) -> None:
    """While the transfer waits, it is not done, has no error and vouches for no page."""
    work = new_stream()
    slow(work)
    handle = scene.engine.load(scene.load, work.cuda_stream)
    assert not handle.done
    assert (handle.error, handle.bad_pages, handle.verified_pages) == (None, (), 0)
    handle.wait_all(new_stream().cuda_stream)
    handle.wait_layer(0, new_stream().cuda_stream)
    assert not work.query(), "looking took as long as the transfer"
    handle.wait()
    assert handle.done
    assert handle.verified_pages == _PAGES


def test_a_wait_has_a_deadline(scene: _Scene, slow: _Slow) -> None:
    """A wait that ends early says so, the transfer goes on, and a later wait is in order."""
    work = new_stream()
    slow(work)
    handle = scene.engine.load(scene.load, work.cuda_stream)
    with pytest.raises(TransferTimeoutError, match=r"load of 16 pages .* not over after 0 s"):
        handle.wait(timeout=0)
    handle.wait()
    assert handle.verified_pages == _PAGES


def test_a_layer_that_does_not_move(scene: _Scene) -> None:
    """Waiting for a layer that is not in the plan is an error, on the device too."""
    plan = TransferPlan.load(
        scene.rig.geometry, host_slots=scene.slots, device_slots=scene.rows, layers=[0, 2]
    )
    handle = scene.engine.load(plan)
    with pytest.raises(TransferError, match="model layer 1 is not part"):
        handle.wait_layer(1)
    handle.wait()


def test_nothing_to_move(scene: _Scene) -> None:
    """No pages are no work: the handle is there, every wait returns, and nothing changes."""
    images = scene.rig.images()
    for submit, make in ((scene.engine.store, TransferPlan.store),
                         (scene.engine.load, TransferPlan.load)):  # fmt: skip
        handle = submit(make(scene.rig.geometry, host_slots=[], device_slots=[]))
        handle.wait_layer(0)
        handle.wait_all()
        handle.wait()
        assert (handle.verified_pages, handle.bad_pages) == (0, ())
    scene.rig.check_device(images)


def test_a_closed_engine_takes_nothing(scene: _Scene) -> None:
    """Closed twice is closed once, and what is submitted afterwards is refused."""
    engine = TransferEngine(scene.rig.view, scene.rig.host)
    engine.close()
    engine.close()
    with pytest.raises(TransferError, match="engine is closed"):
        engine.load(scene.load)
    scene.engine.load(scene.load).wait()
