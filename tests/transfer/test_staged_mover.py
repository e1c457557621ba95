"""The staged mover over a fake GPU whose streams go on in any order: every byte, and no other."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.device_rig import PAGE, DeviceRig, Rows, latent
from tests.transfer.fake_gpu import CALLER, FakeGpu
from tests.transfer.scene import Scene, context_of, staged_bytes

from kvferry.geometry import Geometry, Plane
from kvferry.memory import HostPool
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.testing import assert_bytes_equal
from kvferry.transfer import TransferHandle, TransferPlan, movers
from kvferry.transfer.host_copies import PlanCopies
from kvferry.transfer.movers import StagedMover
from kvferry.transfer.route import Route
from kvferry.transfer.router import Router
from kvferry.transfer.staging import Piece
from kvferry.types import Direction, Layout, Mover

_TWO_KINDS = Geometry(
    planes=(
        Plane(name="latent", num_layers=5, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(1, 4)),
    ),
    page_size=PAGE,
)
_COPIES = ("cuMemcpy2DAsync", "cuMemcpyBatchAsync")


pytestmark = only_staged


@pytest.fixture(autouse=True)
def _short_pieces(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pieces are of one page."""
    monkeypatch.setattr(movers, "SHORT_PIECE_BYTES", 1)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[list[Piece]]:
    """How each transfer was cut."""
    cuts: list[list[Piece]] = []
    cut = StagedMover._pieces

    def noted(self: StagedMover, *given: object) -> list[Piece]:
        cuts.append(cut(self, *given))  # type: ignore[arg-type]
        return cuts[-1]

    monkeypatch.setattr(StagedMover, "_pieces", noted)
    return cuts


def _keys_and_values(element_size: int, page_size: int) -> Geometry:
    names = ("keys", "values")
    planes = tuple(Plane(name=name, num_layers=3, element_size=element_size) for name in names)
    return Geometry(planes=planes, page_size=page_size)


def _in_runs(rng: np.random.Generator, num_slots: int, run: int) -> Rows:
    """All slots, in runs of so many in a random order."""
    begins = rng.permutation(np.arange(0, num_slots, run))
    return np.concatenate([np.arange(one, min(one + run, num_slots)) for one in begins])


# ------------------------------------------------------------------------------- bytes and sizes


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize(
    "element_size", [1, 2, 3, 7, 66, 100, 131, 132, 576, 584, 656, 4100], ids=str
)
def test_every_size_in_every_order_of_slots(
    gpu: FakeGpu, element_size: int, page_size: int
) -> None:
    """K and V; stores and loads of runs of one slot, two, seven and all, at once."""
    num_slots = 21
    scene = Scene(gpu, _keys_and_values(element_size, page_size), element_size, num_slots=num_slots)
    gpu.hold_all()
    handles = []
    for run in (1, 2, 7, num_slots):
        for is_load in (False, True):
            slots = _in_runs(scene.rng, num_slots, run)[: num_slots - run % 2]
            handles.append(scene.move(is_load, slots, scene.rig.rows(len(slots))))
            assert len(handles[-1].plan.host_runs) <= -(-num_slots // run)
    gpu.interleave(element_size)
    for handle in handles:
        handle.wait()
        assert handle.route is not None
        assert handle.route.mover is Mover.STAGED
        assert handle.verified_pages == handle.plan.num_pages
    scene.check()
    scene.close()


@pytest.mark.parametrize("layout", [None, Layout.LAYER_FIRST, Layout.PAGE_MAJOR])
@pytest.mark.parametrize("seed", range(12))
def test_some_layers_by_either_mover(
    gpu: FakeGpu, layout: Layout | None, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planes of 656 and of 131 bytes, subsets of layers, movers in turn, slots and rows that many
    transfers have in common: as if one came after another."""
    scene = Scene(
        gpu, _TWO_KINDS, seed, registered=layout is not None, layout=layout or Layout.LAYER_FIRST
    )
    planned, turns = Router.route, itertools.cycle((False, True, False, False))

    def route(self: Router, plan: object) -> Route:
        chosen = self.direct if next(turns) else functools.partial(planned, self)
        return chosen(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Router, "route", route)
    gpu.hold_all()
    handles: list[TransferHandle] = []
    for _ in range(8):
        count = int(scene.rng.integers(1, 16))
        slots = _in_runs(scene.rng, scene.num_slots, int(scene.rng.integers(1, 8)))[:count]
        some = [layer for layer in range(5) if scene.rng.integers(2)] or None
        is_load = bool(scene.rng.integers(2))
        handles.append(scene.move(is_load, slots, scene.rig.rows(count), some))
    gpu.interleave(seed)
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == handle.plan.num_pages
    assert {handle.route.mover for handle in handles if handle.route} == set(Mover)
    scene.check()
    scene.close()


def test_routes_know_what_the_driver_can(gpu: FakeGpu) -> None:
    """Where each run is a call of its own, many runs are estimated so."""
    rig = DeviceRig(gpu)
    with rig.engine() as engine:
        slots = np.arange(0, 12, 2)
        plan = TransferPlan.load(rig.geometry, host_slots=slots, device_slots=rig.rows(6))
        found = engine.route(plan)
        assert found is not None
        engine._carrier._router.batched = not gpu.batches  # type: ignore[attr-defined]
        engine._carrier._router._routes.clear()  # type: ignore[attr-defined]
        other = engine.route(plan)
        assert other is not None
        took = [one.seconds["staged by layers"] for one in (found, other)]
        assert took == sorted(took, reverse=not gpu.batches)
        assert took[0] != took[1]
    rig.host.close()


@pytest.mark.parametrize("num_layers", [61, 78])
def test_many_pages_then_one_then_none(
    gpu: FakeGpu, pieces: list[list[Piece]], num_layers: int
) -> None:
    """Staging for seven pages: 200 through it, then 1, then 0, again and again, both ways."""
    geometry = Geometry(
        planes=(Plane(name="latent", num_layers=num_layers, element_size=576),), page_size=1
    )
    scene = Scene(gpu, geometry, num_layers, num_slots=200, staging_bytes=7 * geometry.slot_bytes())
    held = None
    for number in range(3):
        for count in (200, 1, 0):
            for is_load in (False, True):
                pieces.clear()
                gpu.hold_all()
                handle, _ = scene.submit(is_load, count)
                gpu.interleave(number)
                gpu.release()
                handle.wait()
                assert handle.verified_pages == count
                assert handle.route is not None
                groups = handle.route.groups
                moved = [piece.num_pages * groups[piece.group].pitch for piece in pieces[0]]
                assert max(moved, default=0) <= 7 * geometry.slot_bytes() // 2
                assert sum(moved) >= count * geometry.page_bytes
            scene.check()
        holds = sum(gpu.device_memory.values()), sum(gpu.pinned_memory.values())
        assert held in (None, holds)
        held = holds
    scene.close()


@pytest.mark.parametrize("direction", list(Direction))
def test_layers_of_no_pages_are_reached(gpu: FakeGpu, direction: Direction) -> None:
    """Who waits for a layer need not know that there is nothing: it comes behind what is before."""
    is_load = direction is Direction.LOAD
    scene = Scene(gpu, _TWO_KINDS, 4)
    seen: list[int] = []
    with gpu.held(scene.streams(direction).kernels.handle):
        handle = scene.move(is_load, np.arange(0), scene.rig.rows(0))
        for layer in range(5):
            handle.wait_layer(layer, stream=CALLER)
        gpu.enqueue(CALLER, lambda: seen.append(1))
        assert seen == []
        assert not handle.done
    assert seen == [1]
    handle.wait()
    assert handle.verified_pages == 0
    scene.check()
    scene.close()


@pytest.mark.parametrize("store_first", [True, False])
def test_a_load_and_a_store_in_the_same_steps(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, store_first: bool
) -> None:
    """A load is staged with the padding between layers and a store without: neither finds its
    bytes where the other has them."""
    geometry = Geometry(planes=(Plane(name="latent", num_layers=3, element_size=132),), page_size=1)
    scene = Scene(gpu, geometry, 1, staging_bytes=8 * staged_bytes(geometry))
    # Of two layers, so that nothing is kept of the scene's own store.
    sizes = (2,)
    monkeypatch.setattr("kvferry.transfer.route.growing_steps", lambda *_: sizes)
    for is_load in (not store_first, store_first):
        slots, rows = np.arange(0, 24, 2), scene.rig.rows(12)
        handle = scene.move(is_load, slots, rows, layers=[0, 1])
        handle.wait()
        assert handle.route is not None
        assert handle.route.sizes == sizes
        scene.check()
    scene.close()


# ----------------------------------------------------------------------------- moments and streams


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("geometry", [latent(576, 7), _TWO_KINDS], ids=["one plane", "two kinds"])
def test_a_transfer_that_is_done_is_there(gpu: FakeGpu, geometry: Geometry, seed: int) -> None:
    """Looked at after every step of any stream: no handle is done before its last byte."""
    scene = Scene(gpu, geometry, seed)
    slots = scene.rng.permutation(scene.num_slots)
    rows = scene.rig.rows(scene.num_slots)
    gpu.hold_all()
    # Nothing in common, so each is as it is in the end once it is done.
    parts = [slice(0, 9), slice(9, 17), slice(17, 23)]
    running = {}
    for number, part in enumerate(parts):
        is_load = number % 2 == seed % 2
        handle = scene.move(is_load, slots[part], rows[part])
        running[handle] = (is_load, slots[part], rows[part])
    ended = []

    def look() -> None:
        for handle in [one for one in running if one.done]:
            is_load, where, those = running.pop(handle)
            there = scene.rig.on_device(those) if is_load else scene.rig.on_host(where)
            at = those.ravel() if is_load else scene.host_rows(where)
            for name, image in scene.images[0 if is_load else 1].items():
                assert_bytes_equal(there[name], image[:, at], f"plane {name} when it was done")
            assert handle.verified_pages == len(where)
            ended.append(handle)

    gpu.interleave(seed, look)
    assert len(ended) == 3
    scene.check()
    scene.close()


@pytest.mark.parametrize("name", ["kernels", "aside", "copies", "reports"])
@pytest.mark.parametrize("direction", list(Direction))
def test_each_stream_stands_still_in_turn(gpu: FakeGpu, direction: Direction, name: str) -> None:
    """Whichever it is the transfer is not done, and who waited for the bytes finds them all."""
    is_load = direction is Direction.LOAD
    scene = Scene(gpu, _TWO_KINDS, 3)
    slots, rows = scene.rng.permutation(scene.num_slots)[:13], scene.rig.rows(13)
    seen: list[bool] = []
    stuck = getattr(scene.streams(direction), name).handle
    with gpu.held(stuck):
        handle = scene.move(is_load, slots, rows)
        expected = {
            plane: image[:, rows.ravel() if is_load else scene.host_rows(slots)].copy()
            for plane, image in scene.images[0 if is_load else 1].items()
        }
        handle.wait_all(CALLER)

        def look() -> None:
            there = scene.rig.on_device(rows) if is_load else scene.rig.on_host(slots)
            seen.extend(np.array_equal(there[plane], expected[plane]) for plane in expected)

        gpu.enqueue(CALLER, look)
        assert not handle.done
        assert gpu.num_pending(stuck)
        # Digests are nothing that the caller's stream waits for.
        assert seen == ([True] * 2 if name == "reports" else [])
        # What overlaps with it comes behind it, whichever way it goes.
        behind = [scene.move(way, slots[::-1], rows) for way in (not is_load, is_load)]
        assert not any(one.done for one in behind)
    assert seen == [True] * 2
    for one in (handle, *behind):
        one.wait()
        assert one.verified_pages == 13
    scene.check()
    scene.close()


# ------------------------------------------------------------------------ registrations and padding


def _in_chunks(rig: DeviceRig, chunk_bytes: int, **given: bool) -> None:
    """Pin the host pool in registrations of so many bytes."""
    context = context_of(rig.gpu)
    with context.current():
        pinned = rig.host.pin(ContextPinDriver(context), chunk_bytes=chunk_bytes, **given)
    assert len(pinned.chunks) > 5


def _chunked(gpu: FakeGpu, registered: bool, seed: int) -> Scene:
    """A pool of kvferry's in chunks of two slots; or layers of an engine's, cut inside of slots."""
    if registered:
        pin = functools.partial(_in_chunks, chunk_bytes=4096, pin_tensors=True)
        geometry = _keys_and_values(131, 3)
    else:
        geometry = Geometry(
            planes=(Plane(name="latent", num_layers=4, element_size=512),), page_size=4
        )
        pin = functools.partial(_in_chunks, chunk_bytes=2 * geometry.slot_bytes())
    room = 9 * staged_bytes(geometry)  # a piece is of four pages or more
    return Scene(gpu, geometry, seed, staging_bytes=room, registered=registered, prepare=pin)


@pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])
@pytest.mark.parametrize("run", [1, 5, 24])
def test_no_copy_leaves_its_registration(gpu: FakeGpu, registered: bool, run: int) -> None:
    """A host pool that was pinned in chunks, whatever runs its slots are in: all bytes, and the
    fake GPU saw no copy over a border."""
    scene = _chunked(gpu, registered, run)
    gpu.calls.clear()
    handles = [
        scene.move(is_load, _in_runs(scene.rng, 24, run), scene.rig.rows(24))
        for is_load in (False, True, False)
    ]
    pieces_at_once = gpu.batches and run < 24
    assert (_COPIES[1] in gpu.calls) == pieces_at_once
    assert _COPIES[0] in gpu.calls or pieces_at_once
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == 24
    scene.check()
    scene.close()


# Pages one by one in a pool of kvferry's own: no slot lies on a border, so there is nothing to cut.
@pytest.mark.parametrize(("registered", "run"), [(False, 24), (True, 1), (True, 24)])
def test_a_copy_that_is_not_cut_is_seen(
    gpu: FakeGpu, registered: bool, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with borders that nobody looks at the fake GPU has something to complain of."""
    scene = _chunked(gpu, registered, run)
    monkeypatch.setattr(PlanCopies, "_end_of_chunk", lambda *_: 1 << 62)
    compiled = scene.engine._carrier._staged._compiled  # type: ignore[attr-defined]
    if compiled is not None:
        compiled._chunks[0].begin, compiled._chunks[0].end = 0, 1 << 62
        for told in compiled._told.values():
            told.num_chunks = 1
    scene.move(True, _in_runs(scene.rng, 24, run), scene.rig.rows(24)).wait()
    assert any("is not in one piece" in fault for fault in gpu.faults)
    gpu.faults.clear()
    scene.close()


@pytest.mark.parametrize("alignment", [64, 256, 512])
@pytest.mark.parametrize("seed", range(4))
def test_padding_on_the_host_is_nobody_s(gpu: FakeGpu, alignment: int, seed: int) -> None:
    """Whatever is stored and loaded, the bytes between spans and all of other slots stay."""
    geometry = Geometry(
        planes=(
            Plane(name="latent", num_layers=4, element_size=100),
            Plane(name="index_key", num_layers=2, element_size=33, layer_ids=(0, 3)),
        ),
        page_size=3,
        span_alignment=alignment,
    )
    scene = Scene(gpu, geometry, seed)
    pool = scene.rig.host
    assert isinstance(pool, HostPool)
    view = pool.view
    ours = np.zeros(geometry.slot_bytes(), dtype=bool)
    base = min(view.view(span.plane.name, span.layer).address for span in geometry.spans())
    for span in geometry.spans():
        at = view.view(span.plane.name, span.layer).address - base
        ours[at : at + span.num_bytes] = True
    assert np.count_nonzero(~ours) > 50
    canaries = scene.rng.integers(0, 256, (scene.num_slots, np.count_nonzero(~ours)), np.uint8)
    for slot, canary in enumerate(canaries):
        np.asarray(pool.slot_view(slot))[~ours] = canary
    gpu.hold_all()
    handles = []
    for is_load in (False, True, False, True):
        slots = _in_runs(scene.rng, scene.num_slots, 1 + seed)[:17]
        some = None if is_load else [layer for layer in range(4) if layer != seed]
        handles.append(scene.move(is_load, slots, scene.rig.rows(17), some))
    gpu.interleave(seed)
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == 17
    scene.check()
    for slot, canary in enumerate(canaries):
        found = np.asarray(pool.slot_view(slot))[~ours]
        assert_bytes_equal(found, canary, f"padding of slot {slot}")
    scene.close()
