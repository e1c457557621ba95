"""Transfers between a GPU and the host, exact, where there is no GPU: the kernels are emulated."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from tests.transfer.device_rig import PAGE, DeviceRig, IndexTensor, latent, same
from tests.transfer.fake_gpu import CALLER, FakeGpu

from kvferry.errors import ConfigError, PlanError, TransferFaultError
from kvferry.geometry import Geometry, Plane
from kvferry.transfer import TransferHandle, TransferPlan

_KEYS_AND_VALUES = Geometry(
    planes=(
        Plane(name="keys", num_layers=3, element_size=640),
        Plane(name="values", num_layers=3, element_size=384),
    ),
    page_size=PAGE,
)
_TWO_KINDS = Geometry(
    planes=(
        Plane(name="latent", num_layers=6, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(1, 4)),
    ),
    page_size=PAGE,
)

each_pool = pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])


@each_pool
@pytest.mark.parametrize("verify", [True, False], ids=["digests", "no digests"])
@pytest.mark.parametrize("path", [None, "flat", "realign", "grouped"])
@pytest.mark.parametrize(
    "geometry",
    [latent(576, 7), latent(528, 1), _KEYS_AND_VALUES],
    ids=["latent", "one layer", "K and V"],
)
def test_what_is_stored_is_loaded(
    gpu: FakeGpu, geometry: Geometry, path: str | None, verify: bool, registered: bool
) -> None:
    """Exactly: other rows on the device and other slots of the host stay as they were."""
    rig = DeviceRig(gpu, geometry, registered=registered)
    source, target = rig.rows(5), rig.rows(5)
    slots, others = [7, 2, 3, 11, 0], [1, 4, 5, 6, 8, 9, 10]
    untouched = rig.on_host(others)
    with rig.engine(path=path, verify=verify) as engine:
        before = rig.images()
        stored = rig.store(engine, slots, source)
        stored.wait()
        rig.check_device(before, "after a store")
        moved = rig.on_device(source)
        same(rig.on_host(slots), moved, "the host")
        same(rig.on_host(others), untouched, "other slots")
        rig.poison()
        expected = rig.images()
        for name, image in expected.items():
            image[:, target.ravel()] = moved[name]
        loaded = rig.load(engine, slots, target)
        loaded.wait()
        rig.check_device(expected, "after a load")
        for handle in (stored, loaded):
            assert handle.path == rig.told(path or "flat")
            assert handle.bad_pages == ()
            assert handle.verified_pages == (5 if verify else 0)
        assert np.count_nonzero(rig.host.digests.all(axis=1)) == (5 if verify else 0)
    rig.host.close()
    assert gpu.registered == {}
    assert gpu.holdings == {"device bytes": 0, "pinned bytes": 0, "events": 0}


@each_pool
def test_layers_go_by_the_kernel_that_fits(gpu: FakeGpu, registered: bool) -> None:
    """Sizes that no package divides are realigned beside others, and a subset of layers moves."""
    rig = DeviceRig(gpu, _TWO_KINDS, registered=registered)
    rows = rig.rows(3)
    with rig.engine() as engine:
        stored = rig.store(engine, [1, 2, 3], rows)
        stored.wait()
        staged = "staged " if gpu.mover == "staged" else ""
        assert stored.path == f"{staged}{rig.told('flat+realign')}"
        moved = rig.on_device(rows)
        same(rig.on_host([1, 2, 3]), moved, "the host")
        rig.poison()
        expected = rig.images()
        expected["latent"][4][rows.ravel()] = moved["latent"][4]
        expected["index_key"][1][rows.ravel()] = moved["index_key"][1]
        loaded = rig.load(engine, [1, 2, 3], rows, layers=[4])
        loaded.wait()
        assert loaded.verified_pages == 3
        rig.check_device(expected, "after a load of layer 4")


@pytest.mark.parametrize("path", ["flat", "realign", "grouped"])
def test_a_flipped_bit_and_a_missing_digest_are_found(gpu: FakeGpu, path: str) -> None:
    """On the host, before a load: the pages are bad, and no other."""
    rig = DeviceRig(gpu)
    with rig.engine(path=path) as engine:
        rows = rig.rows(4)
        rig.store(engine, [0, 1, 2, 3], rows).wait()
        rig.pool.slot_view(1)[1000] ^= 4
        rig.host.digests[3, 2] = 0
        loaded = rig.load(engine, [0, 1, 2, 3], rows)
        loaded.wait()
        assert loaded.bad_pages == (1, 3)
        assert loaded.verified_pages == 1


@pytest.mark.parametrize("path", ["flat", "realign", "grouped"])
def test_an_index_on_the_device_that_is_out_of_range(gpu: FakeGpu, path: str) -> None:
    """Its element is left out, its page is bad, and the handle names it; a store vouches not."""
    rig = DeviceRig(gpu)
    rows = rig.rows(3)
    rows[1, 5] = rig.num_rows
    with rig.engine(path=path) as engine:
        stored = rig.store(engine, [4, 5, 6], IndexTensor(rows))
        with pytest.raises(TransferFaultError, match=r"plane 'latent'.* page 1, row 5"):
            stored.wait()
        assert stored.bad_pages == (1,)
        assert not rig.host.digests[5].any()
        assert rig.host.digests[[4, 6]].all()


def test_layers_can_be_waited_for_one_by_one(gpu: FakeGpu) -> None:
    """What the caller's stream does after `wait_layer` waits for the bytes and finds them."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    rig.store(engine, [0, 1], rows).wait()
    moved = rig.on_device(rows)
    rig.poison()
    seen: list[bool] = []

    def look(layer: int) -> None:
        found = rig.tensors["latent"][layer][rows.ravel()]
        seen.append(np.array_equal(found, moved["latent"][layer]))

    with gpu.held():
        loaded = rig.load(engine, [0, 1], rows)
        for layer in range(4):
            loaded.wait_layer(layer, CALLER)
            gpu.enqueue(CALLER, functools.partial(look, layer))
        assert seen == []
        assert not loaded.done
    assert seen == [True] * 4
    loaded.wait()
    engine.close()


def _check_stored(rig: DeviceRig, handle: TransferHandle, slots: list[int]) -> None:
    handle.wait()
    assert handle.verified_pages == handle.plan.num_pages
    assert rig.host.digests[slots].all()


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_index_tensors_are_the_caller_s_after_submitting(
    gpu: FakeGpu, index: type[np.signedinteger]
) -> None:
    """What the caller's stream writes into one right after a submit is for the next transfer."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    old = rig.rows(4)
    new = rig.rows(4, besides=old)
    tensor = IndexTensor(old.astype(index))
    plan = TransferPlan.store(rig.geometry, host_slots=[0, 1, 2, 3], device_slots=tensor)
    gpu.hold()
    first = engine.store(plan, stream=CALLER)
    gpu.enqueue(CALLER, lambda: np.copyto(tensor.indices, new.astype(index)))
    gpu.release()
    _check_stored(rig, first, [0, 1, 2, 3])
    same(rig.on_host([0, 1, 2, 3]), rig.on_device(old), "the first store")
    _check_stored(rig, engine.store(plan, stream=CALLER), [0, 1, 2, 3])
    same(rig.on_host([0, 1, 2, 3]), rig.on_device(new), "the second store")
    engine.close()


def test_index_tensors_are_read_after_the_caller_wrote_them(gpu: FakeGpu) -> None:
    """A transfer goes by what the caller's stream has put there when it comes to the submit."""
    rig = DeviceRig(gpu)
    engine = rig.warm_engine()
    rows = rig.rows(2)
    tensor = IndexTensor(np.zeros_like(rows))
    with gpu.held(CALLER):
        gpu.enqueue(CALLER, lambda: np.copyto(tensor.indices, rows))
        stored = rig.store(engine, [2, 3], tensor)
        assert not stored.done
    _check_stored(rig, stored, [2, 3])
    same(rig.on_host([2, 3]), rig.on_device(rows), "the store")
    engine.close()


def test_a_promise_that_indices_do_not_keep(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KVFERRY_DEBUG=1 a wrong device_run of indices on the device is refused, a true taken."""
    monkeypatch.setenv("KVFERRY_DEBUG", "1")
    rig = DeviceRig(gpu, latent(24))
    runs = np.random.default_rng(3).permutation(rig.num_rows // 4)[:8]
    kept = (runs[:, None] * 4 + np.arange(4)).reshape(2, PAGE)
    broken = kept.copy()
    broken[1, [6, 7]] = broken[1, [7, 6]]
    with rig.engine() as engine:
        for wrong in (broken, kept + 1):
            with pytest.raises(PlanError, match="device_run"):
                rig.store(engine, [0, 1], IndexTensor(wrong), device_run=4)
        rig.store(engine, [0, 1], IndexTensor(kept), device_run=4).wait()
        same(rig.on_host([0, 1]), rig.on_device(kept), "the host")


def test_a_store_without_digests_leaves_none(gpu: FakeGpu) -> None:
    """What an earlier store vouched for is not there any more."""
    rig = DeviceRig(gpu)
    rows = rig.rows(3)
    with rig.engine() as engine, rig.engine(verify=False) as unverified:
        rig.store(engine, [0, 1, 2], rows).wait()
        assert rig.host.digests[:3].all()
        rig.store(unverified, [0, 2], rows[:2]).wait()
        assert rig.host.digests.any(axis=1).tolist() == [False, True, *[False] * 10]
        loaded = rig.load(engine, [0, 1, 2], rows)
        loaded.wait()
        assert loaded.bad_pages == (0, 2)


def test_grouped_needs_realign_for_its_digests(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With realign switched off grouped is refused with that reason, and serves without digests."""
    monkeypatch.setenv("KVFERRY_DISABLE_PATHS", "realign")
    rig = DeviceRig(gpu)
    rows = rig.rows(2)
    with pytest.raises((ConfigError, PlanError), match="realign"):
        rig.store(rig.engine(path="grouped"), [0, 1], rows)
    assert "realign" not in gpu.kernels
    with rig.engine(path="grouped", verify=False) as engine:
        rig.store(engine, [0, 1], rows).wait()
    assert set(gpu.kernels) == {"grouped"}
    same(rig.on_host([0, 1]), rig.on_device(rows), "the host")
