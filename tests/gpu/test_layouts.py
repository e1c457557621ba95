"""Planes and pools of every shape that engines have, between a GPU and the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, GpuRig, Rows, latent, owned_pool, random_bytes, scattered

from kvferry import Geometry, HitRule, Plane, PoolView, TransferEngine, TransferPlan
from kvferry.errors import PlanError
from kvferry.testing import moved_view, read_rows
from kvferry.types import Layout, SlotKind

pytestmark = pytest.mark.gpu

_PAGES = 4
_SLOTS = [5, 0, 3, 2]
_NUM_ROWS = 384

_Make = Callable[..., GpuRig]


def _round_trip(
    rig: GpuRig, sources: dict[str, Rows], targets: dict[str, Rows], **options: Any
) -> None:
    """Store and load with rows for each plane; every byte of both pools is compared."""
    engine = rig.engine(**options)
    rig.fill(1)
    given: dict[str, Any] = {"host_slots": _SLOTS, "kind": rig.kind}
    stored = engine.store(TransferPlan.store(rig.geometry, plane_slots=sources, **given))
    stored.wait()
    assert stored.verified_pages == _PAGES
    rig.check_stored(_SLOTS, sources)
    rig.poison()
    images = rig.after_load(_SLOTS, targets)
    loaded = engine.load(TransferPlan.load(rig.geometry, plane_slots=targets, **given))
    loaded.wait()
    assert loaded.verified_pages == _PAGES
    rig.check_device(images)


@pytest.mark.parametrize("path", [None, "realign"])
@pytest.mark.parametrize("host_layout", [None, *Layout], ids=str)
@pytest.mark.parametrize(("k_size", "v_size"), [(384, 256), (128, 64), (192, 131)])
def test_keys_and_values_of_different_width(
    make_rig: _Make, k_size: int, v_size: int, host_layout: Layout | None, path: str | None
) -> None:
    """K and V rows need not be equally long, in any layout, and share one table of rows."""
    geometry = Geometry(
        planes=(
            Plane(name="k", num_layers=3, element_size=k_size),
            Plane(name="v", num_layers=3, element_size=v_size),
        )
    )
    assert geometry.page_bytes == 3 * 64 * (k_size + v_size)
    rig = make_rig(geometry, num_rows=_NUM_ROWS, num_slots=6, host_layout=host_layout)
    engine = rig.engine(path=path)
    rig.fill(1)
    rows, targets = scattered(1, _PAGES, 64, _NUM_ROWS), scattered(2, _PAGES, 64, _NUM_ROWS)
    engine.store(TransferPlan.store(geometry, host_slots=_SLOTS, device_slots=rows)).wait()
    rig.check_stored(_SLOTS, {"k": rows, "v": rows})
    rig.poison()
    images = rig.after_load(_SLOTS, {"k": targets, "v": targets})
    plan = TransferPlan.load(geometry, host_slots=_SLOTS, device_slots=targets)
    handle = engine.load(plan)
    handle.wait()
    assert handle.verified_pages == _PAGES
    rig.check_device(images)


def test_planes_with_rows_of_their_own(make_rig: _Make) -> None:
    """Packed pages, one row each, beside tokens, with layers of their own: several row tables."""
    geometry = Geometry(
        planes=(
            Plane(name="latent", num_layers=5, element_size=656),
            Plane(name="index_key", num_layers=2, element_size=8448, rows_per_page=1,
                  layer_ids=(1, 3)),
            Plane(name="scale", num_layers=5, element_size=20, rows_per_page=16),
        )
    )  # fmt: skip
    per_page = {"latent": 64, "index_key": 1, "scale": 16}
    num_rows = {"latent": _NUM_ROWS, "index_key": 11, "scale": 100}
    rig = make_rig(geometry, num_rows=num_rows, num_slots=6)
    sources, targets = (
        {
            name: scattered(seed + number, _PAGES, count, num_rows[name])
            for number, (name, count) in enumerate(per_page.items())
        }
        for seed in (10, 20)
    )
    _round_trip(rig, sources, targets)


def test_some_planes_and_layers_move_alone(make_rig: _Make) -> None:
    """What is left out of a plan stays as it is, on both sides."""
    geometry = Geometry(
        planes=(
            Plane(name="k", num_layers=6, element_size=256),
            Plane(name="v", num_layers=6, element_size=192),
        )
    )
    rig = make_rig(geometry, num_rows=_NUM_ROWS, num_slots=6)
    engine = rig.engine()
    rig.fill(1)
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    given: dict[str, Any] = {
        "host_slots": _SLOTS, "device_slots": rows, "planes": ["v"], "layers": [1, 4],
    }  # fmt: skip
    engine.store(TransferPlan.store(geometry, **given)).wait()
    assert bool((rig.on_host("k", _SLOTS) == 0xA5).all())
    stored = rig.on_host("v", _SLOTS)
    assert torch.equal(stored[[1, 4]], rig.on_device("v", rows)[[1, 4]])
    assert bool((stored[[0, 2, 3, 5]] == 0xA5).all())
    rig.poison()
    images = rig.images()
    at = torch.from_numpy(rows.reshape(-1)).to(DEVICE)
    for layer in (1, 4):
        images["v"][layer, at] = stored[layer]
    engine.load(TransferPlan.load(geometry, **given)).wait()
    rig.check_device(images)


@pytest.mark.parametrize("element_size", [49152, 4100])
def test_checkpoints(make_rig: _Make, element_size: int) -> None:
    """States have slots of their own kind, one row each."""
    plane = Plane(
        name="state",
        num_layers=3,
        element_size=element_size,
        rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )
    rig = make_rig(Geometry(planes=(plane,)), num_rows=9, num_slots=6, kind=SlotKind.STATE)
    _round_trip(rig, {"state": scattered(1, _PAGES, 1, 9)}, {"state": scattered(2, _PAGES, 1, 9)})


def test_more_row_tables_than_a_launch_has(make_rig: _Make) -> None:
    """Seventeen planes with rows of their own are refused before a byte moves; sixteen move."""
    planes = tuple(Plane(name=f"plane_{n}", num_layers=1, element_size=32) for n in range(17))
    rig = make_rig(Geometry(planes=planes), num_rows=_NUM_ROWS, num_slots=6)
    engine = rig.engine()
    rig.fill(1)
    images = rig.images()
    rows = {plane.name: scattered(n, _PAGES, 64, _NUM_ROWS) for n, plane in enumerate(planes)}
    given: dict[str, Any] = {"host_slots": _SLOTS}
    with pytest.raises(PlanError, match="a launch has tables 0 to 15"):
        engine.load(TransferPlan.load(rig.geometry, plane_slots=rows, **given))
    torch.cuda.synchronize()
    rig.check_device(images)
    rows.pop("plane_16")
    some = {**given, "plane_slots": rows, "planes": list(rows)}
    engine.store(TransferPlan.store(rig.geometry, **some)).wait()
    rig.check_stored(_SLOTS, rows)


class _Tensors:
    """A device pool in tensors as an engine has them, with a mirror that says what it holds."""

    def __init__(self, geometry: Geometry, view: PoolView, whole: list[torch.Tensor]) -> None:
        self.geometry, self.view, self.whole = geometry, view, whole

    def elements(self, rows: Rows) -> np.ndarray[Any, Any]:
        """The rows of all layers, read on the host. Shape ``[L, rows, E]``."""
        found = []
        for layer in self.view.layers["latent"]:
            memory = next(
                tensor for tensor in self.whole
                if 0 <= layer.address - tensor.data_ptr() < tensor.nbytes
            )  # fmt: skip
            copy = memory.cpu()
            on_host = moved_view(layer, from_address=memory.data_ptr(), to_address=copy.data_ptr())
            found.append(read_rows(on_host, rows))
        return np.stack(found)


def _separate(geometry: Geometry) -> _Tensors:
    layers = geometry.planes[0].num_layers
    whole = [random_bytes(layer, _NUM_ROWS, 576) for layer in range(layers)]
    return _Tensors(geometry, PoolView.from_tensors(geometry, {"latent": whole}), whole)


def _padded(geometry: Geometry) -> _Tensors:
    """Pages of 64 rows with 3,584 unused bytes behind each, as reported of 576-byte rows."""
    layers, pages = geometry.planes[0].num_layers, _NUM_ROWS // 64
    whole = random_bytes(1, layers, pages, 64 * 576 + 3584)
    rows = whole.as_strided((layers, pages, 64, 576), (*whole.stride()[:2], 576, 1))
    view = PoolView.from_tensors(geometry, {"latent": rows}, slot_dims=(0, 1))
    return _Tensors(geometry, view, [whole])


def _heads_first(geometry: Geometry) -> _Tensors:
    """HND: an element lies in pieces of 72 bytes, a block apart."""
    layers, blocks = geometry.planes[0].num_layers, _NUM_ROWS // 16
    whole = random_bytes(1, layers, blocks, 8, 16, 72)
    view = PoolView.from_tensors(geometry, {"latent": whole}, slot_dims=(0, 2))
    return _Tensors(geometry, view, [whole])


def _token_major(geometry: Geometry) -> _Tensors:
    whole = random_bytes(1, _NUM_ROWS, geometry.planes[0].num_layers, 576)
    view = PoolView.from_tensors(geometry, {"latent": whole}, layer_dim=1)
    return _Tensors(geometry, view, [whole])


def _mixed(geometry: Geometry) -> _Tensors:
    """Some layers in tensors of their own, some in one, at an address that nothing divides."""
    layers = geometry.planes[0].num_layers
    whole = [random_bytes(1, 2, _NUM_ROWS, 576)]
    whole += [random_bytes(layer, 7 + _NUM_ROWS * 576) for layer in range(2, layers)]
    given = [*whole[0], *(one[7:].view(_NUM_ROWS, 576) for one in whole[1:])]
    return _Tensors(geometry, PoolView.from_tensors(geometry, {"latent": given}), whole)


@pytest.mark.parametrize("run", [1, 16])
@pytest.mark.parametrize("make", [_separate, _padded, _heads_first, _token_major, _mixed])
def test_tensors_as_engines_have_them(make: Callable[[Geometry], _Tensors], run: int) -> None:
    """Strides and bases come from each tensor itself; what lies between rows is untouched."""
    geometry = latent()
    source, target = make(geometry), make(geometry)
    for tensor in target.whole:
        tensor.fill_(0xA5)
    sources = scattered(1, _PAGES, 64, _NUM_ROWS, run)
    targets = scattered(2, _PAGES, 64, _NUM_ROWS, run)
    before = [tensor.clone() for tensor in source.whole]
    with owned_pool(geometry, 6) as pool:
        plan = TransferPlan.store(geometry, host_slots=_SLOTS, device_slots=sources)
        with TransferEngine(source.view, pool) as engine:
            engine.store(plan).wait()
        plan = TransferPlan.load(geometry, host_slots=_SLOTS, device_slots=targets)
        with TransferEngine(target.view, pool) as engine:
            handle = engine.load(plan)
            handle.wait()
        assert handle.verified_pages == _PAGES
    torch.cuda.synchronize()
    for tensor, copy in zip(source.whole, before, strict=True):
        assert torch.equal(tensor, copy)
    expected = source.elements(sources.reshape(-1))
    assert np.array_equal(target.elements(targets.reshape(-1)), expected)
    # Nothing else was written: as many bytes differ from poison as those rows have.
    written = sum(int((tensor != 0xA5).sum()) for tensor in target.whole)
    assert written == int((expected != 0xA5).sum())


def test_more_than_a_thousand_tensors() -> None:
    """1,100 layers, each in a tensor of its own, travel in one transfer."""
    geometry = latent(num_layers=1100)
    source, target = _separate(geometry), _separate(geometry)
    for tensor in target.whole:
        tensor.fill_(0xA5)
    rows = scattered(1, 2, 64, _NUM_ROWS)
    with owned_pool(geometry, 3) as pool:
        for view, make in ((source.view, TransferPlan.store), (target.view, TransferPlan.load)):
            plan = make(geometry, host_slots=[2, 0], device_slots=rows)
            with TransferEngine(view, pool) as engine:
                handle = engine.store(plan) if view is source.view else engine.load(plan)
                handle.wait()
                assert handle.verified_pages == 2
    torch.cuda.synchronize()
    at = torch.from_numpy(rows.reshape(-1)).to(DEVICE)
    for layer, (one, other) in enumerate(zip(source.whole, target.whole, strict=True)):
        expected = torch.full_like(other, 0xA5)
        expected[at] = one[at]
        assert torch.equal(other, expected), f"layer {layer}"
