"""What a mapping's pages are: what was asked for, what was got, and why the two differ."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from kvferry.errors import ConfigError
from kvferry.memory.budget import format_bytes

__all__ = [
    "HUGE_PAGE_BYTES",
    "Backing",
    "HugePages",
    "PageKind",
    "bytes_by_node",
    "check_huge_pages",
    "huge_bytes_in",
    "is_wasteful",
    "transparent_mode",
    "whole_pages",
]

HUGE_PAGE_BYTES = 2 << 20

HugePages = Literal["auto", "always", "transparent", "never"]
"""``always``: reserved huge pages or an error. ``auto``: those if they suffice and waste at most
1 %, else transparent ones, else ordinary pages. ``transparent``: as ``auto``, without reserved
ones. ``never``: the system is not asked for any."""

_MAX_WASTE = 0.01
_TRANSPARENT = "kernel/mm/transparent_hugepage"
_CHOSEN = re.compile(r"\[(?P<mode>\w+)\]")
_HUGE_FIELDS = frozenset(
    ("AnonHugePages", "ShmemPmdMapped", "FilePmdMapped", "Private_Hugetlb", "Shared_Hugetlb")
)


class PageKind(enum.StrEnum):
    """What kind of pages a mapping was given."""

    RESERVED = "reserved"
    """Huge pages that were set aside for this (vm.nr_hugepages)."""

    TRANSPARENT = "transparent"
    """Ordinary memory that the kernel was asked to keep in huge pages; in part at least it does."""

    ORDINARY = "ordinary"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backing:
    """What a mapping was given."""

    pages: PageKind
    num_bytes: int
    """What was taken: the size that was asked for, in whole pages of this kind."""

    huge_bytes: int
    """How much of it lay in huge pages when it was made."""

    shared: bool
    """Whether other processes can map it too."""

    node: int | None
    """The NUMA node that its pages were to come from. None: not bound to any."""

    node_bytes: int | None
    """How much of it lay on that node when it was made. None: not bound, or not told."""

    commit_method: str
    """How pages were made present: ``populate_write``, ``touch``, or ``attach`` if they were."""

    threads: int
    """How many threads did that."""

    notes: tuple[str, ...] = ()
    """What was asked for and not had, and why."""

    def __str__(self) -> str:
        return "; ".join([self.summary, *self.notes])

    @property
    def summary(self) -> str:
        """What was got, in a few words: ``reserved huge pages, shared, node 1 for all of it``."""
        words = [f"{self.pages.value} pages"]
        if self.pages is PageKind.TRANSPARENT:
            words[0] = f"transparent huge pages for {_share(self.huge_bytes, self.num_bytes)}"
        elif self.pages is PageKind.RESERVED:
            words[0] = "reserved huge pages"
        if self.shared:
            words.append("shared")
        if self.node is not None and self.node_bytes is None:
            words.append(f"node {self.node}")
        elif self.node is not None:
            words.append(f"node {self.node} for {_share(self.node_bytes or 0, self.num_bytes)}")
        return ", ".join(words)


def check_huge_pages(asked: str) -> None:
    """Raise ConfigError for what is none of `HugePages`."""
    if asked not in get_args(HugePages):
        raise ConfigError(f"huge_pages={asked!r}: give one of {', '.join(get_args(HugePages))}")


def whole_pages(num_bytes: int, page_bytes: int) -> int:
    """`num_bytes`, rounded up to whole pages."""
    return -(-num_bytes // page_bytes) * page_bytes


def is_wasteful(num_bytes: int, page_bytes: int) -> bool:
    """Whether whole pages of that size would take more than 1 % beside what was asked for."""
    return whole_pages(num_bytes, page_bytes) - num_bytes > _MAX_WASTE * num_bytes


def transparent_mode(*, shared: bool, sys_root: str | Path = "/sys") -> str:
    """The kernel's mode for transparent huge pages, such as ``madvise``; empty if it has none."""
    name = "shmem_enabled" if shared else "enabled"
    found = _CHOSEN.search(_read(Path(sys_root, _TRANSPARENT, name)))
    return found["mode"] if found else ""


def huge_bytes_in(start: int, stop: int, *, proc_root: str | Path = "/proc") -> int:
    """Bytes in huge pages within addresses `start` to `stop` of this process; 0 if not told."""
    inside, found = False, 0
    for line in _lines(Path(proc_root, "self", "smaps")):
        head, _, rest = line.partition(" ")
        if "-" in head:
            low, _, high = head.partition("-")
            inside = int(low, 16) < stop and int(high, 16) > start
        elif inside and head.rstrip(":") in _HUGE_FIELDS:
            found += int(rest.split()[0]) * 1024
    return found


def bytes_by_node(
    start: int, stop: int, *, proc_root: str | Path = "/proc"
) -> dict[int, int] | None:
    """Bytes on each NUMA node of what is mapped from `start` to `stop`; None if not told."""
    found: dict[int, int] = {}
    is_told = False
    for line in _lines(Path(proc_root, "self", "numa_maps")):
        head, *fields = line.split()
        if start <= int(head, 16) < stop:
            is_told = True
            pairs = dict(field.partition("=")[::2] for field in fields)
            page_bytes = int(pairs.get("kernelpagesize_kB", "4")) * 1024
            for name, count in pairs.items():
                if name[:1] == "N" and name[1:].isdecimal():
                    found[int(name[1:])] = found.get(int(name[1:]), 0) + int(count) * page_bytes
    return found if is_told else None


def _share(part: int, whole: int) -> str:
    if part >= whole:
        return "all of it"
    return f"{100 * part // whole} % of {format_bytes(whole)}"


def _read(path: Path) -> str:
    """The text of a file of the kernel's; empty where there is none, or it may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _lines(path: Path) -> Iterator[str]:
    return iter(_read(path).splitlines())
