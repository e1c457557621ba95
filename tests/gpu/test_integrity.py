"""Digests: made and checked on the GPU, and the same as those of the CPU paths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import GpuRig, latent, new_stream, scattered

from kvferry import PoolView, TransferEngine, TransferPlan
from kvferry.testing import POISON, assert_bytes_equal, memory_at
from kvferry.types import Layout

pytestmark = pytest.mark.gpu

_PAGES = 6
_NUM_ROWS = 768
_SLOTS = [7, 2, 4, 0, 6, 1]
_KEYS = [b"page %d" % page for page in range(_PAGES)]

_Make = Callable[..., GpuRig]

each_path = pytest.mark.parametrize("path", ["flat", "realign", "grouped"])


def _rig(make_rig: _Make, element_size: int = 576, **options: Any) -> GpuRig:
    rig = make_rig(latent(element_size), num_rows=_NUM_ROWS, num_slots=9, **options)
    rig.fill(1)
    return rig


def _plans(rig: GpuRig, keys: list[bytes] | None = None) -> tuple[TransferPlan, TransferPlan]:
    given: dict[str, Any] = {
        "host_slots": _SLOTS,
        "device_slots": scattered(1, _PAGES, 64, _NUM_ROWS),
        "page_keys": _KEYS,
    }
    loaded = given if keys is None else {**given, "page_keys": keys}
    return TransferPlan.store(rig.geometry, **given), TransferPlan.load(rig.geometry, **loaded)


@each_path
@pytest.mark.parametrize("layer", [0, 3])
@pytest.mark.parametrize("byte", [0, 575, 64 * 576 - 1])
def test_a_flipped_bit(make_rig: _Make, path: str, layer: int, byte: int) -> None:
    """One bit of one layer makes its page bad, no other, and flipped back all are good."""
    rig = _rig(make_rig)
    engine = rig.engine(path=path)
    store, load = _plans(rig)
    engine.store(store).wait()
    first = rig.host.view.view("latent", layer).row_address(_SLOTS[3] * 64)
    at = memory_at(first + byte, 1)
    at ^= 0x08
    handle = engine.load(load)
    handle.wait()
    assert handle.bad_pages == (3,)
    assert handle.verified_pages == 3
    assert handle.error is None
    at ^= 0x08
    again = engine.load(load)
    again.wait()
    assert again.verified_pages == _PAGES


@each_path
def test_a_key_that_is_another_page_s(make_rig: _Make, path: str) -> None:
    """Right bytes under a wrong key are a bad page; two swapped keys are two."""
    rig = _rig(make_rig)
    engine = rig.engine(path=path)
    swapped = [*_KEYS]
    swapped[1], swapped[4] = swapped[4], swapped[1]
    store, load = _plans(rig, swapped)
    engine.store(store).wait()
    handle = engine.load(load)
    handle.wait()
    assert handle.bad_pages == (1, 4)
    assert handle.verified_pages == 1


def test_a_slot_that_was_never_stored(make_rig: _Make) -> None:
    """Bytes that nobody vouched for are bad, also zeros under a digest of zero."""
    rig = _rig(make_rig)
    engine = rig.engine()
    store, load = _plans(rig)
    engine.store(store).wait()
    rig.host.digests[_SLOTS[2]] = 0
    rig.slot_memory()[_SLOTS[2]] = 0
    handle = engine.load(load)
    handle.wait()
    assert handle.bad_pages == (2,)


def test_a_digest_that_was_changed(make_rig: _Make) -> None:
    """A digest of another layer in the place of one is noticed like a changed byte."""
    rig = _rig(make_rig)
    engine = rig.engine()
    store, load = _plans(rig)
    engine.store(store).wait()
    digests = rig.host.digests[_SLOTS[5]]
    digests[[0, 1]] = digests[[1, 0]]
    handle = engine.load(load)
    handle.wait()
    assert handle.bad_pages == (5,)


def test_swapped_pages(make_rig: _Make) -> None:
    """Two whole pages in each other's place, digests and all, are bad where keys are given."""
    rig = _rig(make_rig)
    engine = rig.engine()
    store, load = _plans(rig)
    engine.store(store).wait()
    both, other = [_SLOTS[0], _SLOTS[3]], [_SLOTS[3], _SLOTS[0]]
    slots, digests = rig.slot_memory(), rig.host.digests
    slots[both], digests[both] = slots[other].copy(), digests[other].copy()
    handle = engine.load(load)
    handle.wait()
    assert handle.bad_pages == (0, 3)


@pytest.mark.parametrize("element_size", [66, 131, 576])
@pytest.mark.parametrize("host_layout", [None, *Layout], ids=str)
def test_gpu_and_cpu_make_the_same_digests(
    make_rig: _Make, element_size: int, host_layout: Layout | None
) -> None:
    """What the GPU stored the CPU loads and verifies, and the reverse."""
    rig = _rig(make_rig, element_size, host_layout=host_layout)
    engine = rig.engine()
    store, load = _plans(rig)
    on_cpu = rig.tensor.cpu()
    view = PoolView.from_tensors(rig.geometry, {"latent": on_cpu})
    with TransferEngine(view, rig.host) as cpu:
        engine.store(store).wait()
        from_gpu = rig.host.digests[_SLOTS].copy()
        expected = torch.full_like(on_cpu, POISON)
        rows = torch.from_numpy(scattered(1, _PAGES, 64, _NUM_ROWS).reshape(-1))
        expected[:, rows] = on_cpu[:, rows]
        on_cpu.fill_(POISON)
        loaded = cpu.load(load)
        loaded.wait()
        assert loaded.verified_pages == _PAGES
        assert_bytes_equal(on_cpu.numpy(), expected.numpy(), "the CPU's pool")

        rig.host.digests[:] = 0
        stored = cpu.store(store)
        stored.wait()
        assert_bytes_equal(rig.host.digests[_SLOTS], from_gpu, "digests")
    rig.poison()
    handle = engine.load(load)
    handle.wait()
    assert handle.verified_pages == _PAGES
    rig.check_device({"latent": expected.to(rig.tensor.device)})


@each_path
def test_digests_are_off(make_rig: _Make, path: str) -> None:
    """Without digests bytes move all the same, nothing is called verified, no store vouches."""
    rig = _rig(make_rig)
    engine = rig.engine(path=path, verify=False)
    store, load = _plans(rig)
    handle = engine.store(store)
    handle.wait()
    assert (handle.verified, handle.verified_pages, handle.bad_pages) == (False, 0, ())
    assert not rig.host.digests.any()
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    rig.check_stored(_SLOTS, {"latent": rows})
    rig.poison()
    images = rig.after_load(_SLOTS, {"latent": rows})
    handle = engine.load(load)
    handle.wait()
    assert (handle.verified, handle.verified_pages, handle.bad_pages) == (False, 0, ())
    rig.check_device(images)
    checked = rig.engine(path=path).load(load)
    checked.wait()
    assert checked.bad_pages == tuple(range(_PAGES))


def test_an_old_digest_vouches_for_no_new_bytes(make_rig: _Make) -> None:
    """A store without digests over a page that had one leaves none that a load would accept."""
    rig = _rig(make_rig)
    store, load = _plans(rig)
    rig.engine().store(store).wait()
    rig.fill(2)
    rig.engine(verify=False).store(store).wait()
    handle = rig.engine().load(load)
    handle.wait()
    assert handle.bad_pages == tuple(range(_PAGES))


def test_a_late_transfer_vouches_for_nothing_yet(
    make_rig: _Make, slow: Callable[[Any], None]
) -> None:
    """Until a load is over no page counts, and one that turns out bad never does."""
    rig = _rig(make_rig)
    engine, work = rig.engine(), new_stream()
    store, load = _plans(rig)
    engine.store(store).wait()
    engine.load(load).wait()
    memory_at(rig.host.view.view("latent", 1).row_address(_SLOTS[0] * 64), 1)[:] ^= 1
    torch.cuda.synchronize()
    slow(work)
    handle = engine.load(load, work.cuda_stream)
    assert handle.verified_pages == 0
    assert not np.asarray(handle.bad_pages).size
    handle.wait()
    assert handle.verified_pages == 0
    assert handle.bad_pages == (0,)
