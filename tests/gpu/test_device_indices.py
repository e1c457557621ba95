"""Token slots as tensors on the GPU, and every other container that indices come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, GpuRig, Rows, kernel, latent, random_bytes, scattered

from kvferry import Geometry, Plane, TransferPlan
from kvferry.errors import PlanError, TransferFaultError
from kvferry.types import Layout

pytestmark = pytest.mark.gpu

_PAGES = 5
_NUM_ROWS = 640
_SLOTS = [6, 0, 3, 5, 1]

_Make = Callable[..., GpuRig]
_Given = Callable[[Rows], Any]


def _on_gpu(dtype: torch.dtype) -> _Given:
    return lambda rows: torch.from_numpy(rows).to(DEVICE).to(dtype)


_CONTAINERS: dict[str, _Given] = {
    "list": lambda rows: rows.tolist(),
    "numpy int32": lambda rows: rows.astype(np.int32),
    "numpy int64": lambda rows: rows,
    "cpu int32": lambda rows: torch.from_numpy(rows).to(torch.int32),
    "cpu int64": torch.from_numpy,
    "pinned int32": lambda rows: torch.from_numpy(rows).to(torch.int32).pin_memory(),
    "pinned int64": lambda rows: torch.from_numpy(rows).pin_memory(),
    "gpu int32": _on_gpu(torch.int32),
    "gpu int64": _on_gpu(torch.int64),
    "gpu int32 flat": lambda rows: _on_gpu(torch.int32)(rows).reshape(-1),
    "gpu int64 flat": lambda rows: _on_gpu(torch.int64)(rows).reshape(-1),
}


@pytest.mark.parametrize("path", ["flat", "realign", "grouped"])
@pytest.mark.parametrize("host_layout", [None, *Layout], ids=str)
@pytest.mark.parametrize("container", _CONTAINERS)
def test_indices_in_every_container(
    make_rig: _Make, container: str, host_layout: Layout | None, path: str
) -> None:
    """Wherever indices lie and however wide they are, every layout and path moves the same."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8, host_layout=host_layout)
    engine, given = rig.engine(path=path), _CONTAINERS[container]
    rig.fill(1)
    sources, targets = scattered(1, _PAGES, 64, _NUM_ROWS), scattered(2, _PAGES, 64, _NUM_ROWS)
    stored = engine.store(
        TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=given(sources))
    )
    stored.wait()
    assert kernel(stored) == path
    rig.check_stored(_SLOTS, {"latent": sources})
    rig.poison()
    images = rig.after_load(_SLOTS, {"latent": targets})
    loaded = engine.load(
        TransferPlan.load(rig.geometry, host_slots=_SLOTS, device_slots=given(targets))
    )
    loaded.wait()
    assert loaded.verified_pages == _PAGES
    rig.check_device(images)


@pytest.mark.parametrize("run", [1, 16, 64])
@pytest.mark.parametrize("element_size", [66, 132, 576])
def test_a_promised_run(make_rig: _Make, element_size: int, run: int) -> None:
    """With indices that only the GPU sees, the run that is promised decides the path."""
    rig = make_rig(latent(element_size), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    sources = scattered(1, _PAGES, 64, _NUM_ROWS, run)
    targets = scattered(2, _PAGES, 64, _NUM_ROWS, run)
    on_gpu = _on_gpu(torch.int32)
    given = {"host_slots": _SLOTS, "device_run": run}
    stored = engine.store(TransferPlan.store(rig.geometry, device_slots=on_gpu(sources), **given))
    stored.wait()
    assert kernel(stored) == ("flat" if element_size * run % 8 == 0 else "realign")
    rig.check_stored(_SLOTS, {"latent": sources})
    rig.poison()
    images = rig.after_load(_SLOTS, {"latent": targets})
    loaded = engine.load(TransferPlan.load(rig.geometry, device_slots=on_gpu(targets), **given))
    loaded.wait()
    assert loaded.verified_pages == _PAGES
    rig.check_device(images)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda at: torch.stack([at, at], dim=-1)[..., 0], "not contiguous"),
        (lambda at: at.to(torch.int16), r"must be int32 or int64, not torch\.int16"),
        (lambda at: at.to(torch.float32), r"must be int32 or int64, not torch\.float32"),
        (lambda at: at[:, :63].contiguous(), r"has shape \(5, 63\)"),
    ],
    ids=["strided", "int16", "float32", "short"],
)
def test_index_tensors_that_are_refused(
    make_rig: _Make, change: Callable[[torch.Tensor], torch.Tensor], said: str
) -> None:
    """A tensor that kernels could misread is refused when the plan is made."""
    at = _on_gpu(torch.int64)(scattered(1, _PAGES, 64, _NUM_ROWS))
    with pytest.raises(PlanError, match=said):
        TransferPlan.store(latent(), host_slots=_SLOTS, device_slots=change(at))


def test_host_slots_stay_in_host_memory(make_rig: _Make) -> None:
    """Page slots choose host memory, so the host must see them: a tensor on the GPU is refused."""
    with pytest.raises(PlanError, match="host_slots is no array of indices"):
        TransferPlan.store(
            latent(),
            host_slots=torch.tensor(_SLOTS, device=DEVICE),
            device_slots=scattered(1, _PAGES, 64, _NUM_ROWS),
        )


_BAD = [-1, _NUM_ROWS, _NUM_ROWS + 5, 2**31 - 1, -(2**31)]


@pytest.mark.parametrize("path", ["flat", "realign", "grouped"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("bad", _BAD)
def test_a_row_that_does_not_exist(
    make_rig: _Make, bad: int, dtype: torch.dtype, path: str
) -> None:
    """Its element is left out, its page is bad, the first is named, and all others are exact."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine(path=path)
    rig.fill(1)
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    whole = TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=rows)
    engine.store(whole).wait()
    wrong = rows.copy()
    wrong[2, 5] = wrong[2, 60] = wrong[4, 0] = bad
    given = {"host_slots": _SLOTS, "device_slots": _on_gpu(dtype)(wrong)}

    rig.poison()
    left = rig.after_load(_SLOTS, {"latent": rows})
    left["latent"][:, torch.from_numpy(rows[wrong == bad]).to(DEVICE)] = 0xA5
    _fails(engine.load(TransferPlan.load(rig.geometry, **given)))
    # Bytes of a bad page are undefined, but only in its own rows; those of others are exact.
    bad_rows = torch.from_numpy(np.setdiff1d(rows[[2, 4]], rows[wrong == bad])).to(DEVICE)
    left["latent"][:, bad_rows] = rig.tensor[:, bad_rows]
    rig.check_device(left)

    rig.fill(2)
    _fails(engine.store(TransferPlan.store(rig.geometry, **given)))
    good = [0, 1, 3]
    slots = np.asarray(_SLOTS)
    found = rig.on_host("latent", slots[good])
    assert torch.equal(found, rig.on_device("latent", rows[good]))
    assert bool((rig.slot_memory()[[2, 4, 7]] == 0xA5).all()), "another slot was written"
    # A page that is not whole has no digest, so that no load can take it for good.
    assert not rig.host.digests[slots[[2, 4]]].any()
    assert rig.host.digests[slots[good]].all()

    engine.store(whole).wait()
    again = engine.load(TransferPlan.load(rig.geometry, host_slots=_SLOTS, device_slots=rows))
    again.wait()
    assert again.verified_pages == _PAGES


def _fails(handle: Any) -> None:
    with pytest.raises(TransferFaultError, match=r"plane 'latent' .* at page 2, row 5 of the plan"):
        handle.wait()
    assert handle.bad_pages == (2, 4)
    assert handle.verified_pages == 0
    assert isinstance(handle.error, TransferFaultError)


def _two_planes() -> Geometry:
    return Geometry(
        planes=(
            Plane(name="latent", num_layers=2, element_size=576),
            Plane(name="index_key", num_layers=2, element_size=132, rows_per_page=8),
        )
    )


def test_the_plane_of_a_bad_row_is_named(make_rig: _Make) -> None:
    """Where planes have rows of their own, the error says whose were wrong."""
    rig = make_rig(_two_planes(), num_rows=_NUM_ROWS, num_slots=8)
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    keys = scattered(2, _PAGES, 8, _NUM_ROWS)
    keys[3, 7] = _NUM_ROWS
    plan = TransferPlan.store(
        rig.geometry,
        host_slots=_SLOTS,
        device_slots=_on_gpu(torch.int64)(rows),
        plane_slots={"index_key": _on_gpu(torch.int64)(keys)},
    )
    handle = rig.engine().store(plan)
    with pytest.raises(TransferFaultError, match=r"plane 'index_key' .* at page 3, row 7"):
        handle.wait()
    assert handle.bad_pages == (3,)


def test_one_width_of_index_a_transfer(make_rig: _Make) -> None:
    """int32 for one plane and int64 for another, both on the GPU, is refused whole."""
    rig = make_rig(_two_planes(), num_rows=_NUM_ROWS, num_slots=8)
    engine, images = rig.engine(), rig.images()
    plan = TransferPlan.load(
        rig.geometry,
        host_slots=_SLOTS,
        device_slots=_on_gpu(torch.int64)(scattered(1, _PAGES, 64, _NUM_ROWS)),
        plane_slots={"index_key": _on_gpu(torch.int32)(scattered(2, _PAGES, 8, _NUM_ROWS))},
    )
    with pytest.raises(PlanError, match="int32 for one plane and int64 for another"):
        engine.load(plan)
    torch.cuda.synchronize()
    rig.check_device(images)


def test_indices_on_both_sides(make_rig: _Make) -> None:
    """One plane's rows on the GPU and another's on the host travel in one transfer."""
    rig = make_rig(_two_planes(), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    rows, keys = scattered(1, _PAGES, 64, _NUM_ROWS), scattered(2, _PAGES, 8, _NUM_ROWS)
    for dtype in (torch.int32, torch.int64):
        plan = TransferPlan.store(
            rig.geometry,
            host_slots=_SLOTS,
            device_slots=_on_gpu(dtype)(rows),
            plane_slots={"index_key": keys},
        )
        engine.store(plan).wait()
        rig.check_stored(_SLOTS, {"latent": rows, "index_key": keys})
        rig.slot_memory()[:] = 0xA5


def test_debug_mode_looks_first(make_rig: _Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With KVFERRY_DEBUG=1, rows that do not exist or come twice are refused first."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    given = {"host_slots": _SLOTS, "device_slots": rows}
    engine.store(TransferPlan.store(rig.geometry, **given)).wait()
    images = rig.images()
    monkeypatch.setenv("KVFERRY_DEBUG", "1")
    for bad, said in ((_NUM_ROWS, "there are only 640 rows"), (-1, "rows count from 0"),
                      (int(rows[0, 0]), "twice as a destination")):  # fmt: skip
        wrong = rows.copy()
        wrong[4, 63] = bad
        at = _on_gpu(torch.int64)(wrong)
        with pytest.raises(PlanError, match=said):
            engine.load(TransferPlan.load(rig.geometry, host_slots=_SLOTS, device_slots=at))
    torch.cuda.synchronize()
    rig.check_device(images)
    # Two pages may be stored from the same rows.
    at = _on_gpu(torch.int64)(np.repeat(rows[:1], _PAGES, axis=0))
    engine.store(TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=at)).wait()


def test_an_index_tensor_may_be_dropped(make_rig: _Make, slow: Callable[[Any], None]) -> None:
    """The transfer keeps its index tensor until it is over, whoever else wants the memory."""
    rig = make_rig(latent(), num_rows=_NUM_ROWS, num_slots=8)
    engine = rig.engine()
    rig.fill(1)
    rows = scattered(1, _PAGES, 64, _NUM_ROWS)
    at = _on_gpu(torch.int64)(rows)
    engine.store(TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=at)).wait()
    rig.slot_memory()[:] = 0xA5
    work = torch.cuda.current_stream()
    slow(work)
    plan = TransferPlan.store(rig.geometry, host_slots=_SLOTS, device_slots=at)
    handle = engine.store(plan, work.cuda_stream)
    del at, plan
    # The allocator would hand the same memory out again at once.
    others = [random_bytes(seed, rows.nbytes) for seed in range(20)]
    handle.wait()
    assert handle.verified_pages == _PAGES
    rig.check_stored(_SLOTS, {"latent": rows})
    del others
