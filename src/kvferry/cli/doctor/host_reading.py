"""What Linux says of the machine: memory, huge pages, NUMA nodes, links, and the CPU paths."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvferry.errors import KVFerryError
from kvferry.memory import MemoryReading, read_memory

__all__ = ["HostReading", "Slot", "parse_list", "read_host"]

_CHOSEN = re.compile(r"\[(?P<mode>\w+)\]")
_RELEASE = re.compile(r"Kernel Module.*?\s(?P<release>\d+\.\d+(\.\d+)?)\s")
_RATE = re.compile(r"(?P<rate>\d+(\.\d+)?) GT/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """Where a GPU sits. None: the system does not say."""

    node: int | None = None
    """Its NUMA node."""
    gt_s: float | None = None
    """The most that its link could do, in 10^9 transfers a second and lane."""
    lanes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostReading:
    """The machine without its GPUs. None: the system does not say."""

    memory: MemoryReading | None = None
    memory_error: str | None = None
    huge_page_mode: str | None = None
    """``always``, ``madvise`` or ``never``: who gets transparent huge pages."""
    nodes: tuple[int, ...] = ()
    """NUMA nodes of the machine."""
    own_nodes: tuple[int, ...] = ()
    """Nodes whose CPUs this process may run on."""
    own_memory_nodes: tuple[int, ...] = ()
    """Nodes whose memory this process may take."""
    slots: tuple[Slot, ...] = ()
    """In the order in which they were asked for."""
    driver_release: str | None = None
    """The version of the NVIDIA kernel module."""
    cpu_paths: tuple[str, ...] = ()
    """Paths between pools in host memory that work and are not switched off."""
    cpu_paths_error: str | None = None
    has_compiled_path: bool = False
    """Whether the C kernel was built when kvferry was installed."""
    bad_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables with a value that is not accepted, and what is wrong with each."""


def read_host(
    *,
    bus_ids: Sequence[str] = (),
    proc_root: str | Path = "/proc",
    sys_root: str | Path = "/sys",
) -> HostReading:
    """Read the machine as it is now; `bus_ids` are those of its GPUs."""
    from kvferry.kernels import native_library
    from kvferry.transfer import available_cpu_paths

    proc, sys_folder = Path(proc_root), Path(sys_root)
    memory, memory_error = None, None
    try:
        memory = read_memory(proc_root=proc, cgroup_root=sys_folder / "fs" / "cgroup")
    except KVFerryError as bad:
        memory_error = str(bad)
    paths: tuple[str, ...] = ()
    paths_error = None
    try:
        paths = tuple(path.name for path in available_cpu_paths())
    except KVFerryError as bad:
        paths_error = str(bad)
    mode = _CHOSEN.search(_read(sys_folder / "kernel/mm/transparent_hugepage/enabled"))
    release = _RELEASE.search(_read(proc / "driver/nvidia/version"))
    nodes = parse_list(_read(sys_folder / "devices/system/node/online"))
    allowed = os.sched_getaffinity(0)
    cpus = {
        node: parse_list(_read(sys_folder / f"devices/system/node/node{node}/cpulist"))
        for node in nodes
    }
    return HostReading(
        memory=memory,
        memory_error=memory_error,
        huge_page_mode=mode["mode"] if mode else None,
        nodes=nodes,
        own_nodes=tuple(node for node in nodes if allowed.intersection(cpus[node])),
        own_memory_nodes=parse_list(_status_field(proc / "self/status", "Mems_allowed_list")),
        slots=tuple(_slot(sys_folder / "bus/pci/devices" / bus_id) for bus_id in bus_ids),
        driver_release=release["release"] if release else None,
        cpu_paths=paths,
        cpu_paths_error=paths_error,
        has_compiled_path=native_library() is not None,
        bad_variables=_bad_variables(),
    )


def _bad_variables() -> dict[str, str]:
    """Those with names of their own, then the settings of a cache, which a file may give too."""
    from kvferry.config import Config
    from kvferry.transfer import check_environment

    found = check_environment()
    try:
        Config.resolve()
    except KVFerryError as bad:
        found.setdefault("settings", str(bad))
    return found


def parse_list(text: str) -> tuple[int, ...]:
    """The numbers in the kernel's notation for lists: ``0-2,5``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def _slot(folder: Path) -> Slot:
    node = _read(folder / "numa_node").strip()
    rate = _RATE.search(_read(folder / "max_link_speed"))
    lanes = _read(folder / "max_link_width").strip()
    return Slot(
        # -1: the firmware does not say.
        node=int(node) if node.isdecimal() else None,
        gt_s=float(rate["rate"]) if rate else None,
        # 0 and 255 stand for "unknown".
        lanes=int(lanes) if lanes.isdecimal() and 0 < int(lanes) < 255 else None,
    )


def _status_field(path: Path, name: str) -> str:
    for line in _read(path).splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return value
    return ""


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
