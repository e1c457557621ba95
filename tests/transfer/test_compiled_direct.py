"""The driver's calls of a direct transfer from compiled code against the same from Python."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import latent
from tests.transfer.driver_log import DriverLog
from tests.transfer.fake_gpu import FakeGpu, Status
from tests.transfer.scene import Scene

from kvferry.errors import TransferFaultError
from kvferry.geometry import Geometry, Plane
from kvferry.kernels import native_library, submit_direct

pytestmark = [
    pytest.mark.parametrize("gpu", ["direct"], indirect=True),
    pytest.mark.skipif(native_library() is None, reason="kvferry was installed without a compiler"),
]

_MIXED = Geometry(
    planes=(
        Plane(name="latent", num_layers=5, element_size=656),
        Plane(name="index_key", num_layers=2, element_size=131, layer_ids=(1, 4)),
    ),
    page_size=4,
)


def _direct(scene: Scene) -> Any:
    carrier: Any = scene.engine._carrier
    return carrier._direct


@pytest.mark.parametrize(
    "geometry", [latent(576, 4), latent(131, 4), latent(5000, 3), _MIXED], ids=str
)
@pytest.mark.parametrize("registered", [False, True], ids=["own", "registered"])
def test_both_tell_the_driver_the_same(gpu: FakeGpu, geometry: Geometry, registered: bool) -> None:
    """Call for call, in order, with every argument and every field of every launch."""
    scene = Scene(gpu, geometry, 1, registered=registered)
    log, direct, total = DriverLog(gpu), _direct(scene), 0
    compiled = direct._compiled
    assert compiled is not None
    for count, layers in ((24, None), (1, None), (0, None), (13, (1,)), (24, (0, 2)), (24, None)):
        slots, rows = scene.rng.permutation(24)[:count], scene.rig.rows(max(count, 1))[:count]
        for is_load in (False, True):
            move = functools.partial(scene.move, is_load, slots, rows, layers)
            move().wait()  # tables are made, and buffers have their size
            direct._compiled = None
            wanted = log.calls_of(move)
            direct._compiled = compiled
            found = log.calls_of(move)
            for number, (one, other) in enumerate(zip(found, wanted, strict=False)):
                assert one == other, f"call {number} of {count} pages, layers {layers}"
            assert len(found) == len(wanted)
            total += len(found)
    assert total > 60
    scene.check()
    scene.close()


@pytest.mark.parametrize("is_load", [False, True], ids=["store", "load"])
@pytest.mark.parametrize(
    ("function", "words"),
    [("cuLaunchKernel", "kernel .* did not start"), ("cuEventRecord", "record an event")],
)
def test_each_call_that_is_refused_is_named(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, is_load: bool, function: str, words: str
) -> None:
    """Whichever of its calls it is; the handle says so, and the next transfers are exact."""
    scene = Scene(gpu, latent(576, 4), 8)
    slots, num_refused, inside = np.arange(24), 0, [False]

    def only_inside(library: Any, told: Any) -> int:
        inside[0] = True
        try:
            return submit_direct(library, told)
        finally:
            inside[0] = False

    monkeypatch.setattr("kvferry.transfer.compiled_direct.submit_direct", only_inside)
    for nth in range(20):
        left = iter(range(nth))
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
        scene.move(False, slots, scene.rig.rows(24)).wait()
        scene.device, scene.host = scene.rig.images(), scene.rig.on_host(slots)
        scene.move(True, slots, scene.rig.rows(24)).wait()
        scene.check()
    assert num_refused > 1
    gpu.release()
    scene.close()


def test_grouped_is_launched_from_python(gpu: FakeGpu) -> None:
    """And `realign`, which adds up its digests, is told afterwards to move bytes again."""
    scene = Scene(gpu, latent(576, 4), 9)
    slots, rows = np.arange(24), scene.rig.rows(24)
    with scene.rig.engine(path="grouped") as grouped:
        stored = scene.rig.store(grouped, slots, rows)
        stored.wait()
        assert stored.path == "grouped"
    with scene.rig.engine(path="realign") as realign:
        loaded = scene.rig.load(realign, slots, rows)
        loaded.wait()
        assert (loaded.path, loaded.verified_pages) == ("realign", 24)
    scene.close()
