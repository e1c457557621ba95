"""What Linux says about host memory: the machine, the cgroup (v1 and v2), the lock limit.

A reading pickles, so one process can read and all processes of a host can judge by the same
numbers, whatever the order in which they start.
"""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from kvferry.errors import HostMemoryError

__all__ = ["MemoryReading", "read_memory"]

# cgroup v1 says "no limit" as the largest multiple of the page size below 2^63.
_NO_LIMIT_BYTES = 1 << 62
_CAP_IPC_LOCK = 14


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReading:
    """Host memory at one moment, in bytes. None: there is no such limit."""

    total_bytes: int
    available_bytes: int
    """What can be taken without swapping; page cache that can be dropped counts as available."""

    cgroup_limit_bytes: int | None = None
    """The limit of the cgroup, the process's own or one above it, with the least room left."""

    cgroup_used_bytes: int = 0
    """What that cgroup uses, inactive page cache not counted."""

    memlock_limit_bytes: int | None = None
    """The soft limit on locked memory; None also for a process that may lock without limit."""

    memlock_used_bytes: int = 0
    """What this process has locked already."""

    huge_free_bytes: int = 0
    """Huge pages of the default size that are neither used nor promised."""

    huge_page_bytes: int = 2 << 20
    """That size."""


def read_memory(
    *, proc_root: str | Path = "/proc", cgroup_root: str | Path = "/sys/fs/cgroup"
) -> MemoryReading:
    """Read every limit as it is now.

    Raises HostMemoryError when ``meminfo`` cannot be read or is not Linux's.
    """
    proc = Path(proc_root)
    try:
        meminfo = _read_fields(proc / "meminfo")
        total, available = (_sized(meminfo[name]) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError) as bad:
        raise HostMemoryError(
            f"cannot read the machine's memory from {proc / 'meminfo'} ({bad!r}): pass a "
            f"MemoryReading with numbers of your own"
        ) from bad
    status = _read_fields(proc / "self" / "status")
    room = min(
        _cgroup_levels(proc / "self" / "cgroup", Path(cgroup_root)),
        key=lambda level: level[0] - level[1],
        default=(None, 0),
    )
    huge_pages = int(meminfo.get("HugePages_Free", "0")) - int(meminfo.get("HugePages_Rsvd", "0"))
    huge_page_bytes = _sized(meminfo.get("Hugepagesize", "0"))
    return MemoryReading(
        total_bytes=total,
        available_bytes=available,
        cgroup_limit_bytes=room[0],
        cgroup_used_bytes=room[1],
        memlock_limit_bytes=_memlock_limit(status),
        memlock_used_bytes=_sized(status.get("VmLck", "0")),
        huge_free_bytes=max(huge_pages, 0) * huge_page_bytes,
        # Without a word on huge pages there are none, whatever their size.
        huge_page_bytes=huge_page_bytes or 2 << 20,
    )


def _cgroup_levels(membership: Path, root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each cgroup with a memory limit that the process is in."""
    for line in membership.read_text().splitlines() if membership.exists() else ():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            # Version 2; beside version 1 it is mounted at "unified".
            for base in (root, root / "unified"):
                if (base / "cgroup.controllers").exists():
                    for folder in _folders_upwards(base, path):
                        yield from _level_v2(folder)
        elif "memory" in controllers.split(","):
            for folder in _folders_upwards(root / "memory", path):
                yield from _level_v1(folder)


def _folders_upwards(base: Path, path: str) -> Iterator[Path]:
    # In a container the path may be the host's, so its lower folders do not exist here and `base`
    # is the container's own cgroup. Outside the namespace's root it starts with "..".
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        folder = base.joinpath(*parts[:depth])
        if folder.is_dir():
            yield folder


def _level_v2(folder: Path) -> Iterator[tuple[int, int]]:
    # Above memory.high the kernel slows every allocation down to a crawl: a limit like the other.
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    used = _number(folder / "memory.current")
    stat = _read_counters(folder / "memory.stat")
    yield from _level(limits, used, stat.get("inactive_file", 0))


def _level_v1(folder: Path) -> Iterator[tuple[int, int]]:
    stat = _read_counters(folder / "memory.stat")
    # The second also knows of ancestors that cannot be seen from inside a container.
    limits = [_number(folder / "memory.limit_in_bytes"), stat.get("hierarchical_memory_limit")]
    used = _number(folder / "memory.usage_in_bytes")
    yield from _level(limits, used, stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _level(limits: list[int | None], used: int | None, cache: int) -> Iterator[tuple[int, int]]:
    known = [limit for limit in limits if limit is not None and limit < _NO_LIMIT_BYTES]
    if known:
        yield min(known), max((used or 0) - cache, 0)


def _memlock_limit(status: dict[str, str]) -> int | None:
    if int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: Path) -> int | None:
    """The number in `path`; None when there is no such file or it says "max"."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _read_counters(path: Path) -> dict[str, int]:
    """Lines of ``name number``, as in memory.stat."""
    if not path.exists():
        return {}
    pairs = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number in pairs}


def _read_fields(path: Path) -> dict[str, str]:
    """Lines of ``name: value``, as in meminfo and status."""
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _sized(value: str) -> int:
    number, _, unit = value.partition(" ")
    return int(number) * (1024 if unit == "kB" else 1)
