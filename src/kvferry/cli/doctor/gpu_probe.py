"""Runs in a process of its own: uses driver, compiler and GPUs, and writes a line after each step.

Each line is a whole `GpuReport` as JSON, so that the last one tells all that was known.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence

from kvferry.cli.doctor.gpu_report import GpuReading, GpuReport
from kvferry.cli.doctor.transfer_probe import transfer_error
from kvferry.errors import CubinCacheError, KVFerryError, TransferFaultError
from kvferry.kernels import CopyPath
from kvferry.kernels.jit import (
    Context,
    CubinCache,
    DeviceBuffer,
    Driver,
    KernelSource,
    PreparedLaunch,
    architecture,
    compile_cubin,
    driver_version,
    installed_compiler,
)
from kvferry.memory import ContextPinDriver, HostMapping, register
from kvferry.transfer import disabled_gpu_paths, find_profile

__all__ = ["main"]

_COPY_BYTES = 64 << 20
# A GPU that an engine has filled is left alone.
_NEEDED_BYTES = 4 * _COPY_BYTES
_NUM_COPIES = 4
_NUM_WORDS = 32
# What a kernel makes of a word, so that no old contents can pass for its work.
_FLIP = 0x5A5A5A5A
# Where there is no GPU, a target to see whether the compiler works.
_ANY_CAPABILITY = (9, 0)

_PROBE = KernelSource(
    name="probe.cu",
    text=(
        'extern "C" __global__ void probe(const unsigned* from, unsigned* to) {\n'
        f"  to[threadIdx.x] = from[threadIdx.x] ^ {_FLIP:#x}u;\n"
        "}\n"
    ),
)


class _Parameters(ctypes.Structure):
    _fields_ = (("source", ctypes.c_uint64), ("target", ctypes.c_uint64))


def main() -> None:
    """Print a report after each step."""
    for report in _reports():
        print(json.dumps(dataclasses.asdict(report)), flush=True)


def _reports() -> Iterator[GpuReport]:
    report = GpuReport(step="opening the kernel cache")
    yield report
    try:
        cache = CubinCache.from_environment()
        _try_cache(cache)
        folder = None if cache.location is None else str(cache.location)
        report = dataclasses.replace(report, cache_folder=folder, cache_reason=cache.reason)
    except KVFerryError as bad:
        report = dataclasses.replace(report, cache_error=str(bad))

    report = dataclasses.replace(report, step="asking for the driver's version")
    yield report
    report = dataclasses.replace(report, driver=driver_version(), step="compiling a kernel")
    yield report
    try:
        report = dataclasses.replace(report, compiler=installed_compiler().identity)
        compile_cubin(_PROBE, architecture(_ANY_CAPABILITY))
    except KVFerryError as bad:
        report = dataclasses.replace(report, compiler_error=str(bad))

    report = dataclasses.replace(report, step="starting the driver")
    yield report
    try:
        driver = Driver.open()
        num_devices = driver.num_devices
    except KVFerryError as bad:
        yield dataclasses.replace(report, driver_error=str(bad), step="ending")
        return
    paths: tuple[CopyPath, ...] = ()
    try:
        off = disabled_gpu_paths()
        paths = tuple(path for path in CopyPath if path not in off)
        report = dataclasses.replace(report, paths=tuple(path.value for path in paths))
    except KVFerryError as bad:
        report = dataclasses.replace(report, paths_error=str(bad))
    for index in range(num_devices):
        others = report.gpus
        for step, gpu in _readings(driver, index, paths):
            report = dataclasses.replace(report, gpus=(*others, gpu), step=f"{step} on GPU {index}")
            yield report
    yield dataclasses.replace(report, step="ending")


def _try_cache(cache: CubinCache) -> None:
    """Keep something, find it again and remove it.

    Raises:
        CubinCacheError: What was kept is not found again, or cannot be removed.
    """
    key, data = secrets.token_hex(32), secrets.token_bytes(64)
    path = cache.put(key, data)
    if path is None:
        return  # `reason` says why
    found = cache.get(key)
    try:
        path.unlink()
    except OSError as bad:
        raise CubinCacheError(
            f"{path} was written and cannot be removed ({bad.strerror or bad}): let "
            f"KVFERRY_CACHE_DIR name a folder where this user may"
        ) from bad
    if found != data:
        raise CubinCacheError(
            f"what was written to {path} was not there when it was read: let KVFERRY_CACHE_DIR "
            f"name a folder on another disk"
        )


def _readings(
    driver: Driver, index: int, paths: Sequence[CopyPath]
) -> Iterator[tuple[str, GpuReading]]:
    """GPU `index`, known better each time, and what is done next."""
    device = driver.call("cuDeviceGet", index)
    attribute = driver.bindings.CUdevice_attribute
    major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
    gpu = GpuReading(
        index=index,
        name=_text(driver.call("cuDeviceGetName", 256, device)),
        capability=(
            int(driver.call("cuDeviceGetAttribute", major, device)),
            int(driver.call("cuDeviceGetAttribute", minor, device)),
        ),
        total_bytes=int(driver.call("cuDeviceTotalMem", device)),
        bus_id=_text(driver.call("cuDeviceGetPCIBusId", 16, device)).lower(),
    )
    yield "copying", gpu
    try:
        context = driver.context(index)
    except KVFerryError as bad:
        yield "ending", dataclasses.replace(gpu, error=str(bad))
        return
    try:
        with context.current():
            free_bytes = int(driver.call("cuMemGetInfo")[0])
        if free_bytes < _NEEDED_BYTES:
            skipped = f"only {free_bytes} bytes are free on it, and {_NEEDED_BYTES} are needed"
            gpu = dataclasses.replace(gpu, link_skipped=skipped)
        else:
            to_gpu, from_gpu = _link_speed(context)
            gpu = dataclasses.replace(gpu, h2d_gb_s=to_gpu, d2h_gb_s=from_gpu)
    except KVFerryError as bad:
        gpu = dataclasses.replace(gpu, link_error=str(bad))
    yield "looking for its profile", gpu
    gpu = _with_profile(context, gpu)
    yield "running a kernel", gpu
    try:
        _run_kernel(context)
    except KVFerryError as bad:
        gpu = dataclasses.replace(gpu, kernel_error=str(bad))
    for path in paths:
        yield f"transferring with {path.value}", gpu
        tried = {**gpu.tried_paths, path.value: transfer_error(path, index)}
        gpu = dataclasses.replace(gpu, tried_paths=tried)
    yield "ending", gpu


def _with_profile(context: Context, gpu: GpuReading) -> GpuReading:
    try:
        found = find_profile(context)
    except KVFerryError as bad:
        return dataclasses.replace(gpu, profile_error=str(bad))
    return dataclasses.replace(
        gpu,
        profile=found.profile.source,
        profile_file=None if found.path is None else str(found.path),
        profile_age_secs=found.age_seconds,
        profile_reason=found.reason,
        unmeasured=found.profile.unmeasured,
    )


def _link_speed(context: Context) -> tuple[float, float]:
    """10^9 bytes a second to the GPU and back, of one copy at a time from pinned memory.

    Raises:
        KVFerryError: Memory could not be had or pinned, a copy failed, or its bytes differ.
    """
    driver = context.driver
    with HostMapping(2 * _COPY_BYTES) as memory:
        memory.view[:_COPY_BYTES] = os.urandom(1 << 20) * (_COPY_BYTES >> 20)
        there, back = memory.address, memory.address + _COPY_BYTES
        with (
            register(memory.address, memory.num_bytes, ContextPinDriver(context)),
            context.current(),
        ):
            buffer = DeviceBuffer(context, _COPY_BYTES)
            try:
                to_gpu = _rate(driver, "cuMemcpyHtoDAsync", buffer.address, there)
                from_gpu = _rate(driver, "cuMemcpyDtoHAsync", back, buffer.address)
            finally:
                buffer.close()
        if ctypes.string_at(there, _COPY_BYTES) != ctypes.string_at(back, _COPY_BYTES):
            raise TransferFaultError(
                f"{_COPY_BYTES} bytes came back from the GPU changed: do not use this machine "
                f"before its memory and its link are tested"
            )
    return to_gpu, from_gpu


def _rate(driver: Driver, copy: str, target: int, source: int) -> float:
    best = math.inf
    for _ in range(1 + _NUM_COPIES):
        begin = time.perf_counter()
        driver.call(copy, target, source, _COPY_BYTES, 0)
        driver.call("cuStreamSynchronize", 0)
        best = min(best, time.perf_counter() - begin)
    return _COPY_BYTES / best / 1e9


def _run_kernel(context: Context) -> None:
    """Build a kernel for the GPU, and let it read and write pinned host memory.

    Raises:
        KVFerryError: Something of that did not work.
    """
    image = compile_cubin(_PROBE, architecture(context.capability))
    module = context.load(image, installed_compiler().release[0])
    words = ctypes.c_uint32 * _NUM_WORDS
    size = ctypes.sizeof(words)
    try:
        with HostMapping(2 * size) as memory:
            given = words.from_buffer(memory.view)
            found = words.from_buffer(memory.view, size)
            for place in range(_NUM_WORDS):
                given[place] = place + 1
            with register(memory.address, 2 * size, ContextPinDriver(context)) as registration:
                parameters = _Parameters(
                    registration.device_address(memory.address, size),
                    registration.device_address(memory.address + size, size),
                )
                launch = PreparedLaunch(
                    module.function("probe"), parameters, grid=(1, 1, 1), block=(_NUM_WORDS, 1, 1)
                )
                with context.current():
                    launch.launch(0)
                    context.driver.call("cuCtxSynchronize")
            right = [word ^ _FLIP for word in given] == list(found)
            del given, found  # they would keep the memory from being unmapped
        if not right:
            raise TransferFaultError(
                "a kernel ran, but what it wrote to pinned host memory did not arrive: report "
                "this with the output of kvferry doctor --json"
            )
    finally:
        module.unload()


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode(errors="replace")
