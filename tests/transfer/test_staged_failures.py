"""What fails midway through staging is told, vouches for nothing, and leaves the ring in order."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.device_rig import PAGE, DeviceRig, IndexTensor, Rows, latent
from tests.transfer.fake_gpu import CALLER, FakeGpu, Status
from tests.transfer.scene import Scene, staged_bytes

from kvferry.errors import DriverError, TransferFaultError
from kvferry.geometry import Geometry, Plane
from kvferry.testing import assert_bytes_equal
from kvferry.transfer import TransferHandle, TransferPlan, movers
from kvferry.transfer.staging_ring import StagingRing
from kvferry.types import Direction, Mover

_GEOMETRY = Geometry(
    planes=(
        Plane(name="latent", num_layers=3, element_size=96),
        Plane(name="index_key", num_layers=1, element_size=7, layer_ids=(1,)),
    ),
    page_size=2,
)
_COUNT = 9
_ROOM = 5 * 1024  # for two or three pages a piece
_SAID = {
    "cuMemcpy2DAsync": "could not copy rows between host and device",
    "cuMemcpyBatchAsync": "pieces could not be copied",
    "cuLaunchKernel": "kernel .* did not start",
    "cuStreamWaitEvent": "",
    "cuEventRecord": "",
}
_RUNS = {"cuMemcpy2DAsync": 1, "cuMemcpyBatchAsync": -1}


pytestmark = only_staged


@pytest.fixture(autouse=True)
def _short_pieces(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pieces are of one page."""
    monkeypatch.setattr(movers, "SHORT_PIECE_BYTES", 1)


def _slots(function: str) -> Rows:
    """In an order that makes the mover call `function`: one run, or a run a slot."""
    return np.arange(_COUNT)[:: _RUNS.get(function, 1)]


def _calls(gpu: FakeGpu, scene: Scene, is_load: bool, slots: Rows, rows: Rows, what: str) -> int:
    """How often a transfer that goes well calls it."""
    gpu.calls.clear()
    scene.move(is_load, slots, rows).wait()
    return gpu.calls.count(what)


def _pages(scene: Scene, images: dict[str, np.ndarray], at: Rows) -> list[bytes]:
    """All bytes of each page, by its rows. Shape of `at`: ``[N, P]``."""
    return [b"".join(image[:, rows].tobytes() for image in images.values()) for rows in at]


@pytest.mark.parametrize("held", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("function", _SAID)
@pytest.mark.parametrize("direction", list(Direction))
def test_a_call_that_is_refused_at_any_place(
    gpu: FakeGpu, direction: Direction, function: str, held: bool
) -> None:
    """Whichever call of a transfer it is: waiting raises with its name, no page is verified, no
    digest stands over what is half there, and the next transfers through the same ring are right.
    """
    is_load = direction is Direction.LOAD
    scene = Scene(gpu, _GEOMETRY, 5, num_slots=12, staging_bytes=_ROOM)
    slots, rows = _slots(function), scene.rig.rows(_COUNT)
    others, untouched = np.array([10, 9, 11]), scene.rig.rows(3, besides=rows)
    num_calls = _calls(gpu, scene, is_load, slots, rows, function)
    if function == "cuMemcpyBatchAsync" and not gpu.batches:
        assert num_calls == 0  # an old driver has none, so none can fail
        scene.close()
        return
    assert num_calls >= 2
    before, num_refused = None, 0
    for nth in range(num_calls):
        count = itertools.count()
        if held:
            gpu.hold_all()
        handle: TransferHandle | None = None
        # What is whole after it is old or new, never some of both.
        at = scene.host_rows(slots).reshape(_COUNT, -1)
        allowed = [_pages(scene, scene.host, at)]
        with (
            gpu.failing(
                function,
                Status.CUDA_ERROR_LAUNCH_FAILED,
                when=lambda *_, c=count, n=nth: next(c) == n,
            ) as refused,
            contextlib.suppress(DriverError),
        ):
            handle = scene.move(is_load, slots, rows)
        num_refused += len(refused)
        # Beside it, through the same ring: nothing in common.
        beside = [scene.move(way, others, untouched) for way in (is_load, not is_load)]
        if held:
            gpu.interleave(nth)
        gpu.release()
        if handle is not None:
            failed = pytest.raises(TransferFaultError, match=f"{_SAID[function]}.*LAUNCH_FAILED")
            with failed if refused else contextlib.nullcontext():
                handle.wait()
            assert handle.verified_pages == (0 if refused else _COUNT)
        for one in beside:
            one.wait()
            assert one.verified_pages == 3
        # Rows of a load are undefined, as are slots of a store, but what has a digest is whole.
        allowed.append(_pages(scene, scene.rig.images(), rows))
        loaded = scene.rig.load(scene.engine, slots, rows)
        loaded.wait()
        found = _pages(scene, scene.rig.images(), rows)
        for page in set(range(_COUNT)) - set(loaded.bad_pages):
            assert found[page] in [pages[page] for pages in allowed]
        if is_load:
            assert loaded.bad_pages == ()
        scene.device = scene.rig.images()
        for way in (False, True):
            again = scene.move(way, slots, rows)
            again.wait()
            assert again.verified_pages == _COUNT
        scene.check()
        if nth >= 2:
            holds = sum(gpu.device_memory.values()), sum(gpu.pinned_memory.values())
            assert before in (None, holds)
            before = holds
    # How many rooms are in the way differs, and with it how many waits there are.
    assert num_refused >= (num_calls if function != "cuStreamWaitEvent" else num_calls // 2)
    scene.close()


@pytest.mark.parametrize("name", ["kernels", "aside", "copies"])
@pytest.mark.parametrize("direction", list(Direction))
def test_what_failed_midway_ends_when_all_its_streams_do(
    gpu: FakeGpu, direction: Direction, name: str
) -> None:
    """Whichever stream is still at it: the handle is not done, the slots stay leased, and what
    comes next with the same bytes waits."""
    is_load = direction is Direction.LOAD
    # With room for all: else kernels wait for copies to empty it, and are over after them by that.
    scene = Scene(gpu, _GEOMETRY, 8, num_slots=12, staging_bytes=30 * staged_bytes(_GEOMETRY))
    slots, rows = _slots("cuMemcpyBatchAsync"), scene.rig.rows(_COUNT)
    num_launches = _calls(gpu, scene, is_load, slots, rows, "cuLaunchKernel")
    # The last that lays a piece out: there is something of it in each stream by then.
    nth, count = num_launches - 2, itertools.count()
    with gpu.held(getattr(scene.streams(direction), name).handle):
        with gpu.failing(
            "cuLaunchKernel",
            Status.CUDA_ERROR_LAUNCH_FAILED,
            when=lambda *_: next(count) == nth,
        ) as refused:
            handle = scene.rig.load if is_load else scene.rig.store
            failed = handle(scene.engine, slots, rows)
        assert len(refused) == 1
        assert not failed.done
        assert scene.rig.pool.num_leases == 1
        behind = scene.move(not is_load, slots, rows)
        assert not behind.done
    assert failed.error is not None
    behind.wait()
    assert scene.rig.pool.num_leases == 0
    assert failed.verified_pages == 0
    scene.close()


def test_bad_pages_in_many_pieces(gpu: FakeGpu) -> None:
    """A byte of any layer of some pages: those are told, the others are there, and the next
    transfers of other pages and of the same ones find nothing."""
    scene = Scene(gpu, _GEOMETRY, 6, num_slots=12, staging_bytes=_ROOM)
    pool = scene.rig.pool
    slots, rows = scene.rng.permutation(12), scene.rig.rows(12)
    spans = _GEOMETRY.spans()
    bad = {0: spans[0], 4: spans[1], 5: spans[3], 11: spans[2]}
    base = min(pool.view.view(one.plane.name, one.layer).address for one in spans)
    for page, span in bad.items():
        at = pool.view.view(span.plane.name, span.layer).address - base
        pool.slot_view(slots[page])[at + span.num_bytes - 1] ^= 1
    gpu.hold_all()
    loaded = scene.move(True, slots, rows)
    good = np.setdiff1d(np.arange(12), list(bad))
    beside = scene.move(True, slots[good], scene.rig.rows(8, besides=rows))
    gpu.interleave(6)
    gpu.release()
    loaded.wait()
    beside.wait()
    assert loaded.bad_pages == tuple(bad)
    assert loaded.verified_pages == 0
    assert (beside.bad_pages, beside.verified_pages) == ((), 8)
    for name, image in scene.device.items():
        there = scene.rig.tensors[name][:, rows[good].ravel()]
        assert_bytes_equal(there, image[:, rows[good].ravel()], f"plane {name}, good pages")
    scene.device = scene.rig.images()
    for is_load in (False, True):
        again = scene.move(is_load, slots, rows)
        again.wait()
        assert again.bad_pages == ()
        assert again.verified_pages == 12
    scene.check()
    scene.close()


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("page", [0, 4, 11])
def test_a_row_outside_the_pool_in_any_piece(gpu: FakeGpu, direction: Direction, page: int) -> None:
    """The page is named by its number in the plan, whichever piece it is in, and alone is bad."""
    scene = Scene(gpu, _GEOMETRY, 10, num_slots=12, staging_bytes=_ROOM)
    rows = scene.rig.rows(12)
    rows[page, 1] = scene.rig.num_rows
    move = scene.rig.load if direction is Direction.LOAD else scene.rig.store
    handle = move(scene.engine, scene.rng.permutation(12), IndexTensor(rows))
    with pytest.raises(TransferFaultError, match=f"first at page {page}, row 1 of the plan"):
        handle.wait()
    assert handle.route is not None
    assert handle.route.mover is Mover.STAGED
    assert (handle.bad_pages, handle.verified_pages) == ((page,), 0)
    scene.close()


def test_keys_of_pages_in_many_pieces(gpu: FakeGpu) -> None:
    """Each page is vouched for under its own key, in whichever piece it is stored and loaded; under
    the key of another it is bad, and no other is."""
    scene = Scene(gpu, _GEOMETRY, 9, num_slots=12, staging_bytes=_ROOM)
    keys = [b"page %d" % page for page in range(12)]
    slots, rows = scene.rng.permutation(12), scene.rig.rows(12)
    stored = scene.rig.store(scene.engine, slots, rows, page_keys=keys)
    stored.wait()
    assert stored.verified_pages == 12
    order = scene.rng.permutation(12)
    for swapped in ((), (2, 9)):
        given = [keys[page] for page in order]
        for at in swapped:
            given[at] = keys[order[at - 1]]
        loaded = scene.rig.load(scene.engine, slots[order], rows, page_keys=given)
        loaded.wait()
        assert loaded.bad_pages == swapped
    scene.close()


@pytest.mark.parametrize("nth", [0, 1], ids=["the first ring", "the second"])
def test_staging_that_cannot_be_had(gpu: FakeGpu, nth: int) -> None:
    """The engine is refused with the size and what to pass instead, and nothing is left of it."""
    rig = DeviceRig(gpu)
    size = 1_234_567
    count = itertools.count()
    with (
        gpu.failing("cuMemAlloc", when=lambda asked: asked == size and next(count) == nth),
        pytest.raises(DriverError, match="OUT_OF_MEMORY") as full,
    ):
        rig.engine(staging_bytes=size)
    (note,) = full.value.__notes__
    assert "1,234,567 bytes of staging memory" in note
    assert "pass a smaller staging_bytes" in note
    assert (sum(gpu.device_memory.values()), len(gpu.events)) == (0, 0)
    with rig.engine(staging_bytes=size) as engine:
        rig.store(engine, [0, 1], rig.rows(2)).wait()
    rig.host.close()
    assert set(gpu.holdings.values()) == {0}


def test_a_capture_takes_no_room(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph the same engine's transfer is kernels over the host's own pages, in the stream
    that is captured, and a room of the ring is never in it."""
    rig = DeviceRig(gpu, latent(100))
    engine = rig.warm_engine()
    rows = rig.rows(3)
    rig.store(engine, [4, 2, 3], rows).wait()
    expected = rig.on_device(rows)
    rig.poison()
    monkeypatch.setattr(FakeGpu, "_cu_stream_is_capturing", lambda *_: 1)
    monkeypatch.delattr(StagingRing, "take")
    gpu.calls.clear()
    plan = TransferPlan.load(rig.geometry, host_slots=[4, 2, 3], device_slots=rows)
    captured = engine.capture(plan, stream=CALLER)
    assert gpu.stream_of[Direction.LOAD] == CALLER
    assert not {"cuMemcpy2DAsync", "cuMemcpyBatchAsync"} & set(gpu.calls)
    # The fake GPU has carried it out, as a replay would.
    for name, there in rig.on_device(rows).items():
        assert_bytes_equal(there, expected[name], f"plane {name}")
    assert captured.verified_pages == 3
    assert rows.shape == (3, PAGE)
    monkeypatch.undo()
    captured.close()
    engine.close()
    rig.host.close()
