"""What compiling and launching cost on this GPU.

    python3 benchmarks/jit.py --json benchmarks/results/jit.json

- cold: every kernel of transfers, compiled into an empty folder; warm: the same from that folder in
  a fresh process state. Imports, and starting the driver, are counted apart.
- launch: a prepared launch against a raw cuLaunchKernel of the same kernel, in turns, per call.
- submit: the CPU's time for one `load` of 61 layers, from the call to its return.

Figures are medians over rounds in this one run; seconds, milliseconds or microseconds as named.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

_LAYERS = 61
_ELEMENT_SIZE = 576
_PAGE_SIZE = 64
_ROUNDS = 15
_LAUNCHES = 200

_NOTHING = """
struct Transfer { unsigned long long words[32]; };
extern "C" __global__ void nothing(const __grid_constant__ Transfer transfer, unsigned int more) {}
"""


class _Words(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 32),)


class _Parameters(ctypes.Structure):
    _fields_ = (("transfer", _Words), ("more", ctypes.c_uint32))


def main() -> int:
    """Print the figures; with --json write them as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    from kvferry.kernels.jit import Driver

    driver = Driver.open()
    context = driver.context(0)
    context.make_current()
    driver.call("cuCtxSynchronize")
    told: dict[str, Any] = {"start_secs": round(time.perf_counter() - began, 3)}
    told.update(_build(driver))
    told.update(_launch(driver))
    told.update(_submit())
    for name, value in told.items():
        print(f"{name:<24} {value}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), **told}, indent=1) + "\n")
    return 0


def _build(driver: Any) -> dict[str, Any]:
    """Every kernel, cold and then warm."""
    from kvferry.kernels import CopyPath, MoveKernels
    from kvferry.kernels.jit import CubinCache, KernelLoader, installed_compiler

    installed_compiler()  # reads package metadata, once a process
    warm = []
    with tempfile.TemporaryDirectory() as folder:
        cold, counts = _timed_load(driver, folder)
        assert (counts.hits, counts.misses) == (0, 4), counts
        for _ in range(5):
            seconds, counts = _timed_load(driver, folder)
            assert (counts.hits, counts.misses) == (4, 0), counts
            warm.append(seconds)
        # What one geometry needs: one path to move, and the digests' end.
        with tempfile.TemporaryDirectory() as other:
            loader = KernelLoader(driver, CubinCache(pathlib.Path(other)))
            began = time.perf_counter()
            MoveKernels(loader, 0).load(CopyPath.FLAT, CopyPath.REALIGN)
            geometry = time.perf_counter() - began
            loader.close()
    return {
        "cold_all_kernels_secs": round(cold, 3),
        "cold_flat_realign_secs": round(geometry, 3),
        "warm_all_kernels_ms": round(statistics.median(warm) * 1e3, 2),
        "warm_first_ms": round(warm[0] * 1e3, 2),
    }


def _timed_load(driver: Any, folder: str) -> tuple[float, Any]:
    from kvferry.kernels import CopyPath, MoveKernels
    from kvferry.kernels.jit import CubinCache, KernelLoader

    began = time.perf_counter()
    cache = CubinCache(pathlib.Path(folder))
    loader = KernelLoader(driver, cache)
    MoveKernels(loader, 0).load(*CopyPath)
    seconds = time.perf_counter() - began
    loader.close()
    return seconds, cache.counts


def _launch(driver: Any) -> dict[str, Any]:
    """A prepared launch and a raw one of a kernel that does nothing, in turns."""
    from kvferry.kernels.jit import CubinCache, KernelLoader, KernelSource, PreparedLaunch, Stream

    with tempfile.TemporaryDirectory() as folder:
        loader = KernelLoader(driver, CubinCache(pathlib.Path(folder)))
        function = loader.load(KernelSource(name="nothing.cu", text=_NOTHING), 0).function(
            "nothing"
        )
    parameters = _Parameters()
    prepared = PreparedLaunch(function, parameters, grid=(16, 1, 1), block=(512, 1, 1))
    stream = Stream(driver.context(0)).handle
    array = (ctypes.c_void_p * 2)(
        ctypes.addressof(parameters), ctypes.addressof(parameters) + _Parameters.more.offset
    )
    call, handle, address = (
        driver.bindings.cuLaunchKernel, function.handle, ctypes.addressof(array),
    )  # fmt: skip

    def raw() -> None:
        call(handle, 16, 1, 1, 512, 1, 1, 0, stream, address, 0)

    def ours() -> None:
        prepared.launch(stream)

    def drain() -> None:
        driver.call("cuStreamSynchronize", stream)

    times: dict[str, list[float]] = {"raw": [], "prepared": []}
    for _ in range(_ROUNDS):
        for name, work in (("raw", raw), ("prepared", ours)):
            times[name].append(_per_call(work, _LAUNCHES, drain) * 1e6)
    raw_us, ours_us = (statistics.median(times[name]) for name in ("raw", "prepared"))
    loader.close()
    return {
        "raw_launch_us": round(raw_us, 2),
        "prepared_launch_us": round(ours_us, 2),
        "prepared_over_raw": round(ours_us / raw_us, 3),
    }


def _per_call(work: Callable[[], None], count: int, drain: Callable[[], None]) -> float:
    drain()
    began = time.perf_counter()
    for _ in range(count):
        work()
    seconds = time.perf_counter() - began
    drain()
    return seconds / count


def _submit() -> dict[str, Any]:
    """The CPU's time to submit a load of 61 layers, and with the plan made anew."""
    import numpy as np

    from kvferry import Geometry, HostPool, Plane, PoolView, TransferEngine, TransferPlan
    from kvferry.memory import SlotOwner
    from kvferry.testing import DeviceLayout, place_device_layers
    from kvferry.testing.device_memory import GuardedDeviceBuffer

    plane = Plane(name="latent", num_layers=_LAYERS, element_size=_ELEMENT_SIZE)
    geometry = Geometry(planes=(plane,), page_size=_PAGE_SIZE)
    pages = 4
    num_rows = pages * _PAGE_SIZE
    memory = GuardedDeviceBuffer(_LAYERS * num_rows * _ELEMENT_SIZE)
    layers = place_device_layers(
        DeviceLayout.FLAT,
        plane,
        num_rows=num_rows,
        block_rows=num_rows,
        base=memory.address,
        device=memory.device,
    )
    rows = np.random.default_rng(1).permutation(num_rows).reshape(pages, _PAGE_SIZE)
    given: dict[str, Any] = {"host_slots": np.arange(pages), "device_slots": rows}
    submits, plans = [], []
    with (
        HostPool(geometry, num_slots=pages) as pool,
        TransferEngine(PoolView(geometry, {"latent": layers}), pool) as engine,
    ):
        pool.allocate(pages, SlotOwner.INDEX)
        engine.store(TransferPlan.store(geometry, **given)).wait()
        for _ in range(50):
            began = time.perf_counter()
            plan = TransferPlan.load(geometry, **given)
            planned = time.perf_counter()
            handle = engine.load(plan)
            submitted = time.perf_counter()
            handle.wait()
            assert handle.verified_pages == pages, handle.bad_pages
            plans.append((planned - began) * 1e6)
            submits.append((submitted - planned) * 1e6)
    return {
        "submit_61_layers_us": round(statistics.median(submits), 1),
        "submit_61_layers_worst_us": round(max(submits[5:]), 1),
        "plan_us": round(statistics.median(plans), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
