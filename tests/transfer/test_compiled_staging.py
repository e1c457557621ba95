"""The driver's calls of a staged transfer from compiled code against the same from Python."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.transfer.conftest import only_staged
from tests.transfer.device_rig import DeviceRig, latent
from tests.transfer.driver_log import DriverLog
from tests.transfer.fake_gpu import FakeGpu, Status
from tests.transfer.scene import Scene, context_of, staged_bytes

from kvferry.errors import ConfigError, DriverTooOldError, PinError, TransferFaultError
from kvferry.geometry import Geometry, Plane
from kvferry.kernels import native, native_library, submit_staged
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.transfer import TransferHandle, movers
from kvferry.transfer.staging_ring import MAX_ROOMS
from kvferry.types import Direction

pytestmark = [
    only_staged,
    pytest.mark.skipif(native_library() is None, reason="kvferry was installed without a compiler"),
]

_MIXED = Geometry(
    planes=(
        Plane(name="latent", num_layers=5, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(1, 4)),
    ),
    page_size=4,
)


class _Log(DriverLog):
    """What the driver is told, from the same state of staging each time."""

    def __init__(self, gpu: FakeGpu, scene: Scene) -> None:
        carrier: Any = scene.engine._carrier
        self.staged = carrier._staged
        # Which of the spare events marks a layer is chance; those of staging have their places.
        events = [one for ring in self.staged._rings.values() for one in ring._events]
        super().__init__(gpu, {one.handle for one in (*events, *self.staged._begun.values())})

    def of(self, move: Callable[[], TransferHandle], compiled: object) -> list[Any]:
        """The calls of one transfer, by compiled code or None; then staging is as it was before."""
        self.staged._compiled = compiled
        rings = self.staged._rings.values()
        states = [(bytes(ring.args), bytes(ring._rooms)) for ring in rings]
        found = self.calls_of(move)
        self.after = [(bytes(ring.args), bytes(ring._rooms)) for ring in rings]
        for ring, (args, rooms) in zip(rings, states, strict=True):
            ctypes.memmove(ctypes.addressof(ring.args), args, len(args))
            ctypes.memmove(ctypes.addressof(ring._rooms), rooms, len(rooms))
        return found

    def go_on(self) -> None:
        """Leave staging as the last transfer did."""
        for ring, (args, rooms) in zip(self.staged._rings.values(), self.after, strict=True):
            ctypes.memmove(ctypes.addressof(ring.args), args, len(args))
            ctypes.memmove(ctypes.addressof(ring._rooms), rooms, len(rooms))


def _in_chunks(rig: Any, chunk_bytes: int, **given: bool) -> None:
    context = context_of(rig.gpu)
    with context.current():
        rig.host.pin(ContextPinDriver(context), chunk_bytes=chunk_bytes, **given)


def _scenes() -> Iterator[tuple[str, Callable[[FakeGpu], Scene]]]:
    for size in (576, 131):
        yield f"latent {size}", functools.partial(Scene, geometry=latent(size, 4), seed=1)
    yield "mixed", lambda gpu: Scene(gpu, _MIXED, 2)
    yield "registered", lambda gpu: Scene(gpu, _MIXED, 3, registered=True)
    yield (
        "little staging",
        lambda gpu: Scene(gpu, _MIXED, 4, staging_bytes=5 * staged_bytes(_MIXED)),
    )
    whole = Geometry(planes=(Plane(name="latent", num_layers=4, element_size=512),), page_size=4)
    yield (
        "chunks",
        lambda gpu: Scene(
            gpu,
            whole,
            5,
            staging_bytes=9 * staged_bytes(whole),
            prepare=functools.partial(_in_chunks, chunk_bytes=2 * whole.slot_bytes()),
        ),
    )
    yield (
        "chunks inside slots",
        lambda gpu: Scene(
            gpu,
            _MIXED,
            6,
            staging_bytes=9 * staged_bytes(_MIXED),
            registered=True,
            prepare=functools.partial(_in_chunks, chunk_bytes=4096, pin_tensors=True),
        ),
    )


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in _scenes()])
@pytest.mark.parametrize("smallest", [1, 4 << 20])
def test_both_tell_the_driver_the_same(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, make: Callable[[FakeGpu], Scene], smallest: int
) -> None:
    """Call for call, in order, with every argument and every field of every launch."""
    monkeypatch.setattr(movers, "SHORT_PIECE_BYTES", smallest)
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    scene = make(gpu)
    log = _Log(gpu, scene)
    compiled, total = log.staged._compiled, 0
    for count, run in ((24, 24), (1, 1), (24, 1), (0, 1), (13, 3), (24, 8), (7, 7), (24, 2)) * 2:
        begins = scene.rng.permutation(np.arange(0, 24, run))
        slots = np.concatenate([np.arange(at, min(at + run, 24)) for at in begins])[:count]
        rows = scene.rig.rows(max(count, 1))[:count]
        for is_load in (False, True):
            move = functools.partial(scene.move, is_load, slots, rows)
            move().wait()  # tables are made, and buffers have their size
            wanted, state = log.of(move, None), log.after
            found = log.of(move, compiled)
            for number, (one, other) in enumerate(zip(found, wanted, strict=False)):
                assert one == other, f"call {number} of {count} pages in runs of {run}"
            assert len(found) == len(wanted)
            assert log.after == state
            log.go_on()
            total += len(found)
    assert total > 500
    scene.check()
    scene.close()


def test_more_rooms_than_the_ring_notes(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small transfers while the GPU stands still: no event is recorded anew that is waited for."""
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    scene = Scene(gpu, latent(16, 2), 7, staging_bytes=1 << 20)
    handles = []
    with gpu.held(*(one.handle for one in scene.streams(Direction.LOAD))):
        for number in range(2 * MAX_ROOMS):
            handles.append(scene.move(True, [number % 24], scene.rig.rows(1)))
        assert not handles[0].done
    for handle in handles:
        handle.wait()
        assert handle.verified_pages == 1
    scene.check()
    scene.close()


@pytest.mark.parametrize("is_load", [False, True], ids=["store", "load"])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("cuLaunchKernel", "kernel .* did not start"),
        ("cuEventRecord", "record an event"),
        ("cuStreamWaitEvent", "wait for an event"),
        ("cuMemcpy2DAsync", "copy rows"),
        ("cuMemcpyBatchAsync", "pieces could not be copied"),
    ],
)
def test_each_call_that_is_refused_is_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, is_load: bool, function: str, words: str
) -> None:
    """Whichever of its calls it is; the handle says so, and the next transfers are exact."""
    if function == "cuMemcpyBatchAsync" and not gpu.batches:
        pytest.skip("this driver has no such call")
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    scene = Scene(gpu, latent(576, 4), 8)
    slots = np.arange(24) if function == "cuMemcpy2DAsync" else np.arange(24)[::-1].copy()
    compiled = scene.engine._carrier._staged._compiled  # type: ignore[attr-defined]
    num_refused = 0
    for nth in range(40):
        left = iter(range(nth))
        inside = [False]

        def only_inside(library: Any, told: Any, inside: list[bool] = inside) -> int:
            inside[0] = True
            try:
                return submit_staged(library, told)
            finally:
                inside[0] = False

        monkeypatch.setattr("kvferry.transfer.compiled_staging.submit_staged", only_inside)
        rows = scene.rig.rows(24)
        with gpu.failing(
            function,
            Status.CUDA_ERROR_LAUNCH_FAILED,
            when=lambda *_: inside[0] and next(left, None) is None,  # noqa: B023
        ) as found:
            handle = (scene.rig.load if is_load else scene.rig.store)(scene.engine, slots, rows)
        if not found:
            break
        num_refused += 1
        with pytest.raises(TransferFaultError, match=words):
            handle.wait()
        # What it did to its own pages is undefined: all of them are written anew.
        scene.move(False, np.arange(24), scene.rig.rows(24)).wait()
        scene.device = scene.rig.images()
        scene.host = scene.rig.on_host(np.arange(24))
        scene.move(True, slots, scene.rig.rows(24)).wait()
        scene.check()
    assert num_refused > 1
    assert compiled is not None
    gpu.release()
    scene.close()


def test_a_page_that_is_not_pinned(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in no registration is refused before it is copied."""
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    scene = Scene(gpu, latent(576, 4), 9)
    compiled: Any = scene.engine._carrier._staged._compiled  # type: ignore[attr-defined]
    end = compiled._chunks[0].end
    compiled._chunks[0].end = compiled._chunks[0].begin + 1

    def refuse(address: int) -> None:
        raise PinError(f"{address:#x} is in no registration")

    monkeypatch.setattr(compiled._pinned, "chunk_of", refuse)
    with pytest.raises(PinError, match="is in no registration"):
        scene.rig.load(scene.engine, np.arange(24), scene.rig.rows(24))
    monkeypatch.undo()
    compiled._chunks[0].end = end
    gpu.release()


def test_code_of_another_version_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's word for what it is handed does not fit: said with both."""
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    monkeypatch.setitem(native._ABI, "kvferry_staged_abi", 7)
    native_library.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"0x7.*KVFERRY_DISABLE_PATHS=cpu"):
            DeviceRig(gpu).engine()
    finally:
        native_library.cache_clear()


def test_a_driver_that_lacks_a_function_is_refused(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named when the engine is made; nobody calls address 0."""
    monkeypatch.delenv("KVFERRY_DISABLE_PATHS", raising=False)
    found = gpu._cu_get_proc_address

    def lacking(name: bytes, *given: int) -> tuple[int, int]:
        return (0, 0) if name == b"cuStreamWaitEvent" else found(name, *given)

    monkeypatch.setattr(gpu, "_cu_get_proc_address", lacking)
    with pytest.raises(DriverTooOldError, match="no cuStreamWaitEvent; update it"):
        DeviceRig(gpu).engine()
