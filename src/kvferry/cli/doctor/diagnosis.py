"""From readings to checks: a status, what was found, and what to do. Looks at nothing itself."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvferry.cli.doctor.gpu_report import GpuReading, GpuReport
from kvferry.cli.doctor.host_reading import HostReading, Slot
from kvferry.kernels.jit import install_line
from kvferry.memory import check_budget, format_bytes

__all__ = ["Check", "Diagnosis", "Status", "diagnose"]

_OLDEST_CAPABILITY = (8, 0)
_SAMPLE_POOL_BYTES = 1 << 30
# A slower slot, or one with fewer lanes than the GPU has, moves half of this at most.
_WORST_LINK_SHARE = 0.5
# 128 of 130 bits are payload from 8 GT/s on, 8 of 10 before that.
_DENSE_CODE_GT_S = 8.0
_BROKEN_PROBE = (
    "run nvidia-smi, look at dmesg for the driver's messages, and reboot if it hangs too; until "
    "then keep to the CPU paths"
)


class Status(enum.StrEnum):
    """How a check came out."""

    OK = "ok"
    WARN = "warn"
    """Works without it, or slower."""
    FAIL = "fail"
    """Should work here and does not."""


class Check(NamedTuple):
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""


class Diagnosis(NamedTuple):
    """All checks, in the order in which they build on one another."""

    checks: tuple[Check, ...]
    some_path_works: bool
    """Whether anything can be transferred here at all."""


def diagnose(host: HostReading, gpus: GpuReport) -> Diagnosis:
    """Judge what was read."""
    checks = (
        _environment(host),
        _driver(host, gpus),
        *_gpus(gpus),
        _compiler(gpus),
        _kernel_cache(gpus),
        *(_link(gpu, slot) for gpu, slot in zip(gpus.gpus, _slots(host, gpus), strict=True)),
        *map(_profile, gpus.gpus),
        _numa(host, gpus),
        _host_memory(host),
        _memlock(host),
        _huge_pages(host),
        _cpu_paths(host, gpus),
        _gpu_paths(gpus),
    )
    return Diagnosis(checks, bool(host.cpu_paths) or _gpu_path_works(gpus))


def _slots(host: HostReading, gpus: GpuReport) -> list[Slot]:
    missing = len(gpus.gpus) - len(host.slots)
    return [*host.slots, *[Slot()] * missing][: len(gpus.gpus)]


def _environment(host: HostReading) -> Check:
    if host.bad_variables:
        return Check(
            "environment",
            Status.FAIL,
            f"{', '.join(host.bad_variables)}: not accepted",
            "; ".join(dict.fromkeys(host.bad_variables.values())),
        )
    return Check("environment", Status.OK, "no KVFERRY_ variable has a bad value")


def _driver(host: HostReading, gpus: GpuReport) -> Check:
    release = f"NVIDIA driver {host.driver_release}, " if host.driver_release else ""
    if gpus.ended is not None:
        return Check(
            "driver",
            Status.FAIL,
            f"{release}while {gpus.step}, the process that tries the GPUs failed: {gpus.ended}",
            _BROKEN_PROBE,
        )
    if gpus.driver is None:
        return Check(
            "driver",
            # A kernel module without its library is a half of an installation.
            Status.FAIL if host.driver_release else Status.WARN,
            f"{release}no libcuda.so.1",
            "GPU paths need an NVIDIA driver, in a container passed through (docker run --gpus "
            "all); without a GPU the CPU paths are all there is",
        )
    found = f"{release}CUDA {gpus.driver[0]}.{gpus.driver[1]}"
    if gpus.driver_error is not None:
        return Check("driver", Status.FAIL, found, gpus.driver_error)
    return Check("driver", Status.OK, found)


def _gpus(gpus: GpuReport) -> Iterator[Check]:
    if not (gpus.gpus or gpus.driver is None or gpus.driver_error or gpus.ended):
        yield Check(
            "gpus",
            Status.WARN,
            "the driver shows none to this process",
            "check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    for gpu in gpus.gpus:
        major, minor = gpu.capability
        found = (
            f"{gpu.name}, compute capability {major}.{minor}, {format_bytes(gpu.total_bytes)}, "
            f"at {gpu.bus_id}"
        )
        advice = ""
        if gpu.capability < _OLDEST_CAPABILITY:
            oldest = ".".join(map(str, _OLDEST_CAPABILITY))
            advice = f"kvferry's kernels need {oldest} (Ampere) or newer: use the CPU paths"
        elif gpu.error is not None:
            advice = f"it cannot be used: {gpu.error}"
        yield Check(f"gpu {gpu.index}", Status.FAIL if advice else Status.OK, found, advice)


def _compiler(gpus: GpuReport) -> Check:
    # Without a driver nobody needs a compiler.
    bad = Status.WARN if gpus.driver is None else Status.FAIL
    if gpus.compiler_error is not None:
        return Check("compiler", bad, gpus.compiler or "none", gpus.compiler_error)
    if gpus.compiler is None:
        return Check("compiler", bad, "not reached", "see to the driver first")
    major = int(gpus.compiler.rpartition(" ")[2].partition(".")[0])
    if gpus.driver is not None and major > gpus.driver[0]:
        return Check(
            "compiler",
            Status.FAIL,
            f"{gpus.compiler}, newer than the driver's CUDA {gpus.driver[0]}",
            f"update the driver, or {install_line(gpus.driver[0])}",
        )
    return Check("compiler", Status.OK, gpus.compiler)


def _kernel_cache(gpus: GpuReport) -> Check:
    if gpus.cache_error is not None:
        return Check("kernel_cache", Status.FAIL, "none", gpus.cache_error)
    if gpus.cache_reason is not None:
        return Check(
            "kernel_cache",
            Status.WARN,
            f"{gpus.cache_folder or 'memory only'}, since {gpus.cache_reason}",
            "let KVFERRY_CACHE_DIR name a folder that this user can write and that lasts; without "
            "one, kernels are compiled again (under a second) after each restart",
        )
    if gpus.cache_folder is None:
        return Check("kernel_cache", Status.WARN, "not reached", "see to the driver first")
    return Check("kernel_cache", Status.OK, gpus.cache_folder)


def _link(gpu: GpuReading, slot: Slot) -> Check:
    name = f"link {gpu.index}"
    if gpu.link_skipped is not None:
        return Check(name, Status.WARN, "not measured", gpu.link_skipped)
    if gpu.link_error is not None:
        return Check(name, Status.FAIL, "copies of pinned memory do not work", gpu.link_error)
    if gpu.h2d_gb_s is None or gpu.d2h_gb_s is None:
        return Check(name, Status.FAIL, "not reached", "see to the GPU first")
    found = f"{gpu.h2d_gb_s:.1f} GB/s to the GPU, {gpu.d2h_gb_s:.1f} GB/s from it"
    if slot.gt_s is None or slot.lanes is None:
        return Check(name, Status.OK, found)
    code = 128 / 130 if slot.gt_s >= _DENSE_CODE_GT_S else 8 / 10
    most = slot.gt_s * slot.lanes * code / 8
    found += f"; its PCIe {slot.gt_s:g} GT/s x{slot.lanes} carries at most {most:.1f}"
    if min(gpu.h2d_gb_s, gpu.d2h_gb_s) < _WORST_LINK_SHARE * most:
        return Check(
            name,
            Status.WARN,
            found,
            "less than half of what the GPU could do: the slot may be slower or narrower (lspci "
            "-vv, LnkSta), other GPUs may share it, or this process runs on another NUMA node",
        )
    return Check(name, Status.OK, found)


def _profile(gpu: GpuReading) -> Check:
    name = f"profile {gpu.index}"
    calibrate = f"kvferry calibrate --device {gpu.index}"
    if gpu.profile_error is not None:
        return Check(name, Status.FAIL, "unknown", gpu.profile_error)
    if gpu.profile is None:
        return Check(name, Status.WARN, "not reached", "see to the GPU first")
    if gpu.profile_file is None:
        why = f"; another was passed over: {gpu.profile_reason}" if gpu.profile_reason else ""
        return Check(
            name,
            Status.WARN,
            f"{gpu.profile}{why}",
            f"run {calibrate}: three seconds on an idle GPU, and transfers are planned by what its "
            f"own link can do",
        )
    found = f"{gpu.profile}, {gpu.profile_file}, {_age(gpu.profile_age_secs or 0.0)}"
    if gpu.unmeasured:
        return Check(
            name,
            Status.WARN,
            f"{found}; time was up before {', '.join(gpu.unmeasured)}",
            f"run {calibrate} again on an idle GPU",
        )
    return Check(name, Status.OK, found)


def _age(seconds: float) -> str:
    for unit, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' * (count != 1)} old"
    return "less than a minute old"


def _numa(host: HostReading, gpus: GpuReport) -> Check:
    if len(host.nodes) < 2:
        return Check("numa", Status.OK, "1 node" if host.nodes else "the system names no nodes")
    slots = _slots(host, gpus)
    places = [
        f"GPU {gpu.index} on node {'unknown' if slot.node is None else slot.node}"
        for gpu, slot in zip(gpus.gpus, slots, strict=True)
    ]
    found = "; ".join([f"{len(host.nodes)} nodes", *places])
    far = sorted(
        {
            slot.node
            for slot in slots
            if slot.node is not None
            and (slot.node not in host.own_nodes or slot.node not in host.own_memory_nodes)
        }
    )
    if far:
        return Check(
            "numa",
            Status.WARN,
            f"{found}; this process has no CPUs or no memory of node {_listed(far)}",
            f"start it with numactl --cpunodebind={far[0]} --membind={far[0]} (in a container: "
            f"--cpuset-cpus, --cpuset-mems), one process a node",
        )
    several = {slot.node for slot in slots} - {None}
    if gpus.gpus and len(host.own_nodes) > 1:
        node = min((node for node in several if node is not None), default=None)
        bind = "the GPU's node" if node is None else str(node)
        return Check(
            "numa",
            Status.WARN,
            f"{found}; this process may run on {_listed(host.own_nodes)}",
            f"memory lies where the thread runs that makes the pool: start the process with "
            f"numactl --cpunodebind={bind} --membind={bind}, or copies may lose a third",
        )
    return Check("numa", Status.OK, found)


def _host_memory(host: HostReading) -> Check:
    if host.memory is None:
        return Check("host_memory", Status.FAIL, "unknown", host.memory_error or "")
    verdict = check_budget(_SAMPLE_POOL_BYTES, host.memory)
    found = (
        f"pools may take {format_bytes(verdict.limit_bytes)} in all, limited by "
        f"{verdict.limited_by.value.replace('_', ' ')}; {format_bytes(verdict.reserve_bytes)} of "
        f"{format_bytes(verdict.free_bytes)} free stay in reserve"
    )
    if verdict.allowed:
        return Check("host_memory", Status.OK, found)
    return Check("host_memory", Status.WARN, found, f"that is little. {verdict.message}")


def _memlock(host: HostReading) -> Check:
    if host.memory is None:
        return Check("memlock", Status.WARN, "unknown", host.memory_error or "")
    limit = host.memory.memlock_limit_bytes
    if limit is None:
        return Check("memlock", Status.OK, "this process may lock any amount of memory")
    used = host.memory.memlock_used_bytes
    return Check(
        "memlock",
        Status.WARN,
        f"this process may lock {format_bytes(limit)} and has locked {format_bytes(used)}",
        "pools made with locked=True must fit in there: raise it with ulimit -l, or grant "
        "CAP_IPC_LOCK. Memory that is pinned for a GPU is not counted",
    )


def _huge_pages(host: HostReading) -> Check:
    mode = host.huge_page_mode
    free = 0 if host.memory is None else host.memory.huge_free_bytes
    found = f"transparent: {mode or 'unknown'}; {format_bytes(free)} in free reserved ones"
    if mode == "never":
        return Check(
            "huge_pages",
            Status.WARN,
            found,
            "making and pinning large pools takes longer without: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled, as root",
        )
    return Check("huge_pages", Status.OK, found)


def _cpu_paths(host: HostReading, gpus: GpuReport) -> Check:
    if host.cpu_paths_error is not None:
        return Check("cpu_paths", Status.FAIL, "none can be chosen", host.cpu_paths_error)
    if not host.cpu_paths:
        return Check(
            "cpu_paths",
            Status.WARN if _gpu_path_works(gpus) else Status.FAIL,
            "none: KVFERRY_DISABLE_PATHS switches them off",
            "take one of its names out for pools in host memory",
        )
    found = ", ".join(host.cpu_paths)
    if not host.has_compiled_path:
        return Check(
            "cpu_paths",
            Status.WARN,
            found,
            "the faster path, cpu, was not built: install a C compiler, then kvferry again",
        )
    return Check("cpu_paths", Status.OK, found)


def _gpu_paths(gpus: GpuReport) -> Check:
    if gpus.paths_error is not None:
        return Check("gpu_paths", Status.FAIL, "none can be chosen", gpus.paths_error)
    if gpus.ended is not None and not gpus.paths:
        return Check("gpu_paths", Status.FAIL, "none: not reached", "see driver, above")
    if not gpus.gpus:
        return Check("gpu_paths", Status.WARN, "none: there is no GPU to use", "see driver, above")
    if not gpus.paths:
        return Check(
            "gpu_paths",
            Status.WARN,
            "none: KVFERRY_DISABLE_PATHS switches them off",
            "take one of its names out for pools on a GPU",
        )
    carried: dict[tuple[str, ...], list[int]] = {}
    for gpu in gpus.gpus:
        if right := _right_paths(gpu, gpus):
            carried.setdefault(right, []).append(gpu.index)
    found = "; ".join(
        f"{', '.join(paths)} on GPU {_listed(indices)}" for paths, indices in carried.items()
    )
    if not carried:
        found = "none: no GPU carries a transfer, right to the last bit"
    broken = [gpu for gpu in gpus.gpus if _right_paths(gpu, gpus) != gpus.paths]
    if broken:
        advice = f"GPU {broken[0].index}: {_fault(broken[0], gpus)}"
        return Check("gpu_paths", Status.WARN if carried else Status.FAIL, found, advice)
    return Check("gpu_paths", Status.OK, found)


def _right_paths(gpu: GpuReading, gpus: GpuReport) -> tuple[str, ...]:
    """The paths that were tried on `gpu` and did all that they should."""
    if gpu.kernel_error is not None or gpu.link_error is not None:
        return ()
    return tuple(path for path in gpus.paths if gpu.tried_paths.get(path) == "")


def _fault(gpu: GpuReading, gpus: GpuReport) -> str:
    """Why a path does not work on `gpu`: the first reason, as others may follow from it."""
    told = gpu.error or gpu.link_error or gpu.kernel_error
    if told:
        return told
    tried = {path: gpu.tried_paths.get(path, "it was not reached") for path in gpus.paths}
    return next(f"{path}: {why}" for path, why in tried.items() if why)


def _gpu_path_works(gpus: GpuReport) -> bool:
    return any(_right_paths(gpu, gpus) for gpu in gpus.gpus)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
