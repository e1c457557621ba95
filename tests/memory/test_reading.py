"""Reading memory limits from fake trees of /proc and /sys/fs/cgroup, and from the real ones."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from kvferry.errors import HostMemoryError
from kvferry.memory import MemoryReading, read_memory

MIB = 1 << 20
_MEMINFO = """\
MemTotal:       1048576 kB
MemFree:         102400 kB
MemAvailable:    524288 kB
HugePages_Total:      8
HugePages_Free:       5
HugePages_Rsvd:       2
Hugepagesize:      2048 kB
"""
_V1_NO_LIMIT = 9223372036854771712


class _Tree:
    """A fake machine below `root`: write files, then read it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.write("proc/meminfo", _MEMINFO)

    def write(self, path: str, text: str | int) -> None:
        file = self._root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, path: str, limit: int | str, used: int, cache: int = 0) -> None:
        self.write("cgroup/cgroup.controllers", "memory")
        self.write(f"cgroup/{path}/memory.max", limit)
        self.write(f"cgroup/{path}/memory.current", used)
        self.write(f"cgroup/{path}/memory.stat", f"anon 7\ninactive_file {cache}")

    def v1(self, path: str, limit: int, used: int, stat: str = "cache 1") -> None:
        self.write(f"cgroup/memory/{path}/memory.limit_in_bytes", limit)
        self.write(f"cgroup/memory/{path}/memory.usage_in_bytes", used)
        self.write(f"cgroup/memory/{path}/memory.stat", stat)

    def read(self) -> MemoryReading:
        return read_memory(proc_root=self._root / "proc", cgroup_root=self._root / "cgroup")


@pytest.fixture
def tree(tmp_path: Path) -> _Tree:
    """A machine of 1 GiB without cgroups."""
    return _Tree(tmp_path)


def _cgroup(reading: MemoryReading) -> tuple[int | None, int]:
    return reading.cgroup_limit_bytes, reading.cgroup_used_bytes


def test_machine_and_huge_pages(tree: _Tree) -> None:
    """Totals come in bytes; promised huge pages are not free."""
    reading = tree.read()
    assert (reading.total_bytes, reading.available_bytes) == (1024 * MIB, 512 * MIB)
    assert reading.huge_free_bytes == 3 * 2 * MIB
    assert _cgroup(reading) == (None, 0)


def test_v2_inactive_page_cache_is_not_used(tree: _Tree) -> None:
    """Page cache that can be dropped does not make a cgroup look full."""
    tree.write("proc/self/cgroup", "0::/job")
    tree.v2("job", limit=100 * MIB, used=80 * MIB, cache=50 * MIB)
    assert _cgroup(tree.read()) == (100 * MIB, 30 * MIB)


def test_v2_ancestor_with_less_room_is_the_limit(tree: _Tree) -> None:
    """The whole path upwards is looked at, and the level with the least room counts."""
    tree.write("proc/self/cgroup", "0::/pod/job")
    tree.v2("pod/job", limit=100 * MIB, used=10 * MIB)
    tree.v2("pod", limit=200 * MIB, used=190 * MIB)
    assert _cgroup(tree.read()) == (200 * MIB, 190 * MIB)


def test_v2_other_branches_do_not_count(tree: _Tree) -> None:
    """A neighbour's limit is not ours."""
    tree.write("proc/self/cgroup", "0::/pod/job")
    tree.v2("pod/job", limit=100 * MIB, used=10 * MIB)
    tree.v2("pod/other", limit=1 * MIB, used=1 * MIB)
    assert _cgroup(tree.read()) == (100 * MIB, 10 * MIB)


def test_v2_max_is_no_limit(tree: _Tree) -> None:
    """A cgroup that says max limits nothing."""
    tree.write("proc/self/cgroup", "0::/job")
    tree.v2("job", limit="max", used=80 * MIB)
    assert _cgroup(tree.read()) == (None, 0)


def test_v2_high_counts_when_it_is_lower(tree: _Tree) -> None:
    """memory.high throttles, so it bounds what can be committed."""
    tree.write("proc/self/cgroup", "0::/job")
    tree.v2("job", limit="max", used=8 * MIB)
    tree.write("cgroup/job/memory.high", 64 * MIB)
    assert _cgroup(tree.read()) == (64 * MIB, 8 * MIB)


@pytest.mark.parametrize("path", ["/host/only/path", "/../elsewhere", "/"])
def test_v2_path_outside_the_container_falls_to_its_root(tree: _Tree, path: str) -> None:
    """A path that does not exist here means that the mount's root is the container's cgroup."""
    tree.write("proc/self/cgroup", f"0::{path}")
    tree.v2(".", limit=100 * MIB, used=10 * MIB)
    tree.write("elsewhere/memory.max", MIB)  # beside the cgroup tree, so never to be read
    assert _cgroup(tree.read()) == (100 * MIB, 10 * MIB)


def test_v1_limit_use_and_cache(tree: _Tree) -> None:
    """Version 1 names its files differently and counts children's cache in total_inactive_file."""
    tree.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/")
    tree.v1("job", 100 * MIB, 60 * MIB, f"inactive_file 1\ntotal_inactive_file {20 * MIB}")
    tree.v1(".", _V1_NO_LIMIT, 900 * MIB)
    assert _cgroup(tree.read()) == (100 * MIB, 40 * MIB)


def test_v1_huge_number_is_no_limit(tree: _Tree) -> None:
    """The largest number that version 1 knows means no limit."""
    tree.write("proc/self/cgroup", "4:memory:/job")
    tree.v1("job", _V1_NO_LIMIT, 60 * MIB)
    assert _cgroup(tree.read()) == (None, 0)


def test_v1_limit_of_an_ancestor_out_of_sight(tree: _Tree) -> None:
    """hierarchical_memory_limit tells of limits above the container."""
    tree.write("proc/self/cgroup", "4:memory:/job")
    tree.v1("job", _V1_NO_LIMIT, 10 * MIB, f"hierarchical_memory_limit {70 * MIB}")
    assert _cgroup(tree.read()) == (70 * MIB, 10 * MIB)


def test_v2_beside_v1(tree: _Tree) -> None:
    """On a hybrid machine version 2 is mounted at unified, and both are looked at."""
    tree.write("proc/self/cgroup", "4:memory:/job\n0::/slice")
    tree.v1("job", 100 * MIB, 10 * MIB)
    tree.write("cgroup/unified/cgroup.controllers", "memory")
    tree.write("cgroup/unified/slice/memory.max", 50 * MIB)
    tree.write("cgroup/unified/slice/memory.current", 5 * MIB)
    assert _cgroup(tree.read()) == (50 * MIB, 5 * MIB)


@pytest.mark.parametrize(
    ("capabilities", "limit"), [("0000000000000000", 8 * MIB), ("0000000000004000", None)]
)
def test_memlock(
    tree: _Tree, monkeypatch: pytest.MonkeyPatch, capabilities: str, limit: int | None
) -> None:
    """The soft lock limit binds unless the process may ignore it; locked bytes are read too."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 * MIB, 64 * MIB))
    tree.write("proc/self/status", f"Name:\tx\nVmLck:\t     512 kB\nCapEff:\t{capabilities}")
    reading = tree.read()
    assert (reading.memlock_limit_bytes, reading.memlock_used_bytes) == (limit, MIB // 2)


def test_memlock_without_limit(tree: _Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """An infinite soft limit is none."""
    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert tree.read().memlock_limit_bytes is None


@pytest.mark.parametrize("meminfo", [None, "MemTotal: 5 kB", "MemTotal: five\nMemAvailable: 1 kB"])
def test_unreadable_machine_says_what_to_do(tree: _Tree, tmp_path: Path, meminfo: str) -> None:
    """A missing or foreign meminfo is a typed error with the next step."""
    file = tmp_path / "proc/meminfo"
    file.unlink() if meminfo is None else file.write_text(meminfo)
    with pytest.raises(HostMemoryError, match="pass a MemoryReading"):
        tree.read()


def test_this_machine() -> None:
    """The real trees can be read and make sense."""
    reading = read_memory()
    assert 0 < reading.available_bytes <= reading.total_bytes
    assert reading.cgroup_limit_bytes is None or reading.cgroup_limit_bytes > 0
