"""Huge pages: which ones are asked for, which ones came, and that a fallback is seen."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest

from kvferry.errors import BudgetError, ConfigError
from kvferry.geometry import Geometry, Plane
from kvferry.memory import (
    BudgetSource,
    HostMapping,
    HostPool,
    HugePages,
    MemoryReading,
    PageKind,
    backing,
    linux_calls,
    mapping,
)

MIB = 1 << 20
HUGE = 2 * MIB
GIB = 1 << 30


class _Kernel:
    """A kernel with `free` reserved huge pages of 2 MiB, made of ordinary ones."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.asked: list[tuple[str, int]] = []
        self._shared_memory = linux_calls.shared_memory

    def map_huge(self, num_bytes: int, huge_page_bytes: int) -> mmap.mmap:
        self._take("private", num_bytes, huge_page_bytes)
        # Its addresses are multiples of a huge page; the alignment beyond that is not used.
        return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def shared_memory(self, name: str, num_bytes: int, *, huge_page_bytes: int = 0) -> int:
        if huge_page_bytes:
            self._take("shared", num_bytes, huge_page_bytes)
        return self._shared_memory(name, num_bytes)

    def _take(self, what: str, num_bytes: int, huge_page_bytes: int) -> None:
        self.asked.append((what, num_bytes))
        assert huge_page_bytes == HUGE
        assert num_bytes % HUGE == 0
        if num_bytes > self.free * HUGE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        self.free -= num_bytes // HUGE


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> _Kernel:
    """A kernel with 100 reserved huge pages, and transparent ones for those who ask."""
    fake = _Kernel(100)
    monkeypatch.setattr(linux_calls, "map_huge", fake.map_huge)
    monkeypatch.setattr(linux_calls, "shared_memory", fake.shared_memory)
    _give_transparent(monkeypatch, "madvise", 1.0)
    return fake


def _give_transparent(monkeypatch: pytest.MonkeyPatch, mode: str, share: float) -> list[int]:
    """Transparent huge pages in `mode` for `share` of what asks; the sizes that were advised."""
    advised: list[int] = []
    advise = linux_calls.advise

    def told(address: int, num_bytes: int, advice: int) -> None:
        if advice == linux_calls.MADV_HUGEPAGE:
            assert address % HUGE == num_bytes % HUGE == 0
            advised.append(num_bytes)
        else:
            advise(address, num_bytes, advice)

    monkeypatch.setattr(linux_calls, "advise", told)
    monkeypatch.setattr(mapping, "transparent_mode", lambda **_: mode)
    monkeypatch.setattr(
        mapping, "huge_bytes_in", lambda *_: int(sum(advised) * share) // HUGE * HUGE
    )
    return advised


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("asked", ["auto", "always"])
def test_reserved_huge_pages_that_suffice_are_taken(
    kernel: _Kernel, shared: bool, asked: HugePages
) -> None:
    """Whole huge pages, all of them committed, and the backing says what they are."""
    with HostMapping(181 * MIB + 5, huge_pages=asked, shared=shared) as made:
        assert kernel.asked == [("shared" if shared else "private", 182 * MIB)]
        assert made.backing.pages is PageKind.RESERVED
        assert made.backing.num_bytes == made.backing.huge_bytes == 182 * MIB
        assert made.backing.notes == ()
        assert made.num_bytes == len(made.view) == 181 * MIB + 5
        assert "reserved huge pages" in str(made.backing)


@pytest.mark.parametrize("shared", [False, True])
def test_too_few_reserved_huge_pages(kernel: _Kernel, shared: bool) -> None:
    """`always` is refused with the numbers; `auto` takes transparent ones and says why."""
    with pytest.raises(BudgetError, match=rf"{220 * MIB} bytes in huge pages .*nr_hugepages"):
        HostMapping(220 * MIB, huge_pages="always", shared=shared)
    with HostMapping(220 * MIB, huge_pages="auto", shared=shared) as made:
        assert made.backing.pages is PageKind.TRANSPARENT
        assert made.backing.num_bytes == made.backing.huge_bytes == 220 * MIB
        assert made.backing.notes == ("no reserved huge pages (Cannot allocate memory)",)
        assert made.address % HUGE == 0


def test_huge_pages_that_would_waste_more_than_a_hundredth(kernel: _Kernel) -> None:
    """A size that whole huge pages would exceed by more is left to transparent ones."""
    with HostMapping(11 * MIB, huge_pages="auto") as made:
        assert made.backing.pages is PageKind.TRANSPARENT
        assert made.backing.num_bytes == 11 * MIB
    assert kernel.asked == []
    with HostMapping(11 * MIB, huge_pages="always") as made:
        assert made.backing.num_bytes == 12 * MIB


def test_an_alignment_that_huge_pages_do_not_have(kernel: _Kernel) -> None:
    """More than that of a huge page would waste some: told, and not given."""
    with HostMapping(180 * MIB, huge_pages="auto", alignment=8 * MIB) as made:
        assert made.address % (8 * MIB) == 0
        assert "an alignment of 8388608 bytes" in made.backing.notes[0]
    assert kernel.asked == []


def test_never_asks_for_no_huge_page(kernel: _Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kind is asked for, and there is nothing to say."""
    advised = _give_transparent(monkeypatch, "always", 1.0)
    with HostMapping(64 * MIB) as made:
        assert made.backing.pages is PageKind.ORDINARY
        assert made.backing.notes == ()
    assert (kernel.asked, advised) == ([], [])


@pytest.mark.parametrize(
    ("mode", "share", "size", "note"),
    [
        ("never", 1.0, 64 * MIB, "the kernel's mode is never"),
        ("", 1.0, 64 * MIB, "the kernel's mode is none"),
        ("madvise", 0.0, 64 * MIB, "the kernel found none"),
        ("madvise", 1.0, HUGE - 1, "smaller than one"),
    ],
)
def test_without_transparent_huge_pages_it_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, mode: str, share: float, size: int, note: str
) -> None:
    """And a note says why."""
    _give_transparent(monkeypatch, mode, share)
    with HostMapping(size, huge_pages="transparent") as made:
        assert made.backing.pages is PageKind.ORDINARY
        assert made.backing.huge_bytes == 0
        assert any(note in one for one in made.backing.notes)


def test_transparent_huge_pages_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only whole huge pages are advised, and how much came is told."""
    advised = _give_transparent(monkeypatch, "always", 0.5)
    with HostMapping(65 * MIB, huge_pages="transparent") as made:
        assert advised == [64 * MIB]
        assert made.backing.pages is PageKind.TRANSPARENT
        assert made.backing.huge_bytes == 32 * MIB
        assert "transparent huge pages for 49 % of 65.00 MiB" in str(made.backing)


def test_a_kernel_that_does_not_know_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built without transparent huge pages: ordinary ones, with the system's word for it."""

    def refuse(_address: int, _num_bytes: int, advice: int) -> None:
        if advice == linux_calls.MADV_HUGEPAGE:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mapping, "transparent_mode", lambda **_: "always")
    monkeypatch.setattr(linux_calls, "advise", refuse)
    with HostMapping(HUGE, huge_pages="transparent") as made:
        assert made.backing.notes == ("no transparent huge pages (Invalid argument)",)


@pytest.mark.parametrize("wrong", ["", "yes", None, True])
def test_other_words_for_huge_pages(wrong: HugePages) -> None:
    """Refused with those that there are, by mappings and pools."""
    with pytest.raises(ConfigError, match="auto, always, transparent, never"):
        HostMapping(1, huge_pages=wrong)
    with pytest.raises(ConfigError, match="auto, always, transparent, never"):
        HostPool(_geometry(), num_slots=1, huge_pages=wrong)


def test_transparent_mode_is_the_one_in_brackets(tmp_path: Path) -> None:
    """Private and shared memory have modes of their own; no file is no mode."""
    folder = tmp_path / "kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "enabled").write_text("always [madvise] never\n")
    (folder / "shmem_enabled").write_text("always within_size advise never [deny] force\n")
    assert backing.transparent_mode(shared=False, sys_root=tmp_path) == "madvise"
    assert backing.transparent_mode(shared=True, sys_root=tmp_path) == "deny"
    assert backing.transparent_mode(shared=True, sys_root=tmp_path / "none") == ""


def test_bytes_in_huge_pages_are_counted_by_address(tmp_path: Path) -> None:
    """All kinds count, in the mappings of the range alone."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/smaps").write_text(
        "1000-200000 rw-p 00000000 00:00 0 [heap]\nAnonHugePages:   8192 kB\n"
        "200000-600000 rw-p 00000000 00:00 0\nRss: 4096 kB\nAnonHugePages:   2048 kB\n"
        "VmFlags: rd wr\n"
        "600000-a00000 rw-s 00000000 00:01 7 /memfd:kvferry (deleted)\nShmemPmdMapped: 2048 kB\n"
        "Shared_Hugetlb:  4096 kB\nPrivate_Hugetlb: 2048 kB\nFilePmdMapped: 0 kB\n"
        "a00000-e00000 rw-p 00000000 00:00 0\nAnonHugePages:   4096 kB\n"
    )
    assert backing.huge_bytes_in(0x200000, 0xA00000, proc_root=tmp_path) == 10 * MIB
    assert backing.huge_bytes_in(0x200000, 0x600000, proc_root=tmp_path) == 2 * MIB
    assert backing.huge_bytes_in(0, 1 << 40, proc_root=tmp_path / "none") == 0


def _geometry() -> Geometry:
    return Geometry(planes=(Plane(name="k", num_layers=1, element_size=1 << 14),), page_size=64)


def _reading(*, free: int, huge: int) -> MemoryReading:
    return MemoryReading(total_bytes=64 * GIB, available_bytes=free, huge_free_bytes=huge)


@pytest.mark.parametrize("asked", ["auto", "always"])
def test_a_pool_starts_when_huge_pages_suffice(kernel: _Kernel, asked: HugePages) -> None:
    """Though ordinary memory would not: reserved huge pages are not part of it."""
    reading = _reading(free=MIB, huge=200 * MIB)
    with HostPool(_geometry(), num_slots=181, reading=reading, huge_pages=asked) as pool:
        assert pool.budget.limited_by is BudgetSource.HUGE_PAGES
        assert pool.budget.asked_bytes == pool.backing.num_bytes == 182 * MIB
        assert pool.backing.pages is PageKind.RESERVED
        assert "reserved huge pages" in repr(pool)
    with pytest.raises(BudgetError, match="the machine has"):
        HostPool(_geometry(), num_slots=181, reading=reading, huge_pages="never")
    assert kernel.asked == [("private", 182 * MIB)]


def test_a_pool_without_enough_huge_pages(kernel: _Kernel) -> None:
    """`always` is refused by the budget, `auto` is judged by ordinary memory and says so."""
    reading = _reading(free=4 * GIB, huge=100 * MIB)
    with pytest.raises(BudgetError, match=rf"the huge pages has .*\({100 * MIB} B\) free"):
        HostPool(_geometry(), num_slots=181, reading=reading, huge_pages="always")
    with HostPool(_geometry(), num_slots=181, reading=reading, reserve_bytes=0) as pool:
        assert pool.budget.limited_by is BudgetSource.MACHINE
        assert pool.backing.pages is PageKind.TRANSPARENT
        assert "100.00 MiB" in pool.backing.notes[0]
        assert "no reserved huge pages" in str(pool.backing)
        assert (
            "transparent huge pages for 99 % of 181.00 MiB (189793704 B), 1 note in backing"
            in repr(pool)
        )
    assert kernel.asked == []
    with pytest.raises(BudgetError, match=r"the machine has .*; no reserved huge pages: 100"):
        HostPool(_geometry(), num_slots=181, reading=_reading(free=MIB, huge=100 * MIB))


def test_huge_pages_that_are_gone_since_they_were_counted(kernel: _Kernel) -> None:
    """Another process was faster: `auto` goes on with ordinary memory if that suffices."""
    kernel.free = 10
    reading = _reading(free=4 * GIB, huge=GIB)
    with HostPool(_geometry(), num_slots=181, reading=reading, reserve_bytes=0) as pool:
        assert pool.budget.limited_by is BudgetSource.MACHINE
        assert "Cannot allocate memory" in pool.backing.notes[0]
    with pytest.raises(BudgetError, match="the machine"):
        HostPool(_geometry(), num_slots=181, reading=_reading(free=MIB, huge=GIB))


def test_processes_share_the_huge_pages(kernel: _Kernel) -> None:
    """Four that need 182 MiB each do not get by with 400 MiB, and all four see it."""
    reading = _reading(free=8 * GIB, huge=400 * MIB)
    with HostPool(_geometry(), num_slots=181, reading=reading, processes=4) as pool:
        assert pool.backing.pages is PageKind.TRANSPARENT
    assert kernel.asked == []


def test_a_pool_smaller_than_a_huge_page() -> None:
    """It works, in ordinary pages."""
    plane = Plane(name="k", num_layers=1, element_size=16)
    with HostPool(Geometry(planes=(plane,), page_size=4), num_slots=3) as pool:
        assert pool.backing.pages is PageKind.ORDINARY
        assert pool.backing.num_bytes == pool.num_bytes
