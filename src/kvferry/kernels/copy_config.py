"""Which GPU path carries an element, and how its threads share the work: pure arithmetic.

`resolve_copy` is the one answer for the check before a transfer, the launch and the report. Its
twin for kernels is csrc/copy_config.cuh, with the same names; tests compare the two over every
size up to 65,536. It knows source and destination but no direction, so load and store of the same
pools choose alike.

- **flat** looks at spans, not elements: neighbouring rows that are contiguous on both sides are one
  run of bytes, cut into the widest packages that its length and both alignments allow.
- **realign** takes what flat refuses: odd sizes, and sides that are aligned differently.
- **grouped** shares each element among a few threads, the scheme that engines publish. It may
  refuse, and runs only on request or with an explicit unroll.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection, Mapping
from types import MappingProxyType

from kvferry.errors import ConfigError, GeometryError, PlanError

__all__ = [
    "MAX_ROWS",
    "UNROLLS",
    "CopyDecision",
    "CopyPath",
    "FlatAnswer",
    "GroupedAnswer",
    "GroupedConfig",
    "RealignAnswer",
    "Refusal",
    "RefusalKind",
    "alignment_of",
    "resolve_copy",
    "resolve_grouped",
]

UNROLLS = (1, 2, 4, 8, 16, 32)
"""What `unroll` may be; 32 / unroll threads share an element."""

MAX_ROWS = 1 << 20
"""The most rows that one span may have."""

_MAX_ELEMENT_SIZE = 1 << 40
_WARP_THREADS = 32
_WIDEST_PACKAGE = 16
_ALIGNMENTS = (1, 2, 4, 8, 16)
_GROUPED_PACKAGES = (16, 8, 4)
_GROUPED_TILE = 128
_FEWER_THREADS = (16, 8, 4, 2, 1)
# More loads than this at once cost registers that a thread does not have: they would spill.
_MAX_PACKAGES_IN_FLIGHT = 8
# A word of the digest: a thread weighs what it moves, so it must hold whole words. And 32 threads
# with 4 bytes each ask for so little at once that realign, with 16-byte granules, moves more.
_NARROWEST_FLAT_PACKAGE = 8


class CopyPath(enum.StrEnum):
    """A way to carry elements between two pools, as `handle.path` names it."""

    FLAT = "flat"
    REALIGN = "realign"
    GROUPED = "grouped"


class RefusalKind(enum.StrEnum):
    """Why grouped does not take an element."""

    PACKAGE_TOO_WIDE = "package_too_wide"
    """A multiple of 128 with so few threads that each would need packages wider than 16 bytes."""

    DOES_NOT_TILE = "does_not_tile"
    """The unroll that was asked for leaves each thread a share of no whole 4-byte packages."""

    NO_TILING = "no_tiling"
    """No number of threads tiles this size: it is not a multiple of 4."""

    MISALIGNED = "misaligned"
    """The size tiles, but an element may start where its packages may not."""


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedConfig:
    """How threads share one element. Package i of thread t lies at (i × threads + t) × package."""

    unroll: int
    threads: int
    """Threads that share an element: 32 / unroll."""
    bytes_per_thread: int
    package: int
    """Bytes that a thread moves at once: 4, 8 or 16."""
    packages_per_thread: int

    @property
    def packages_in_flight(self) -> int:
        """How many packages a thread loads before it writes the first: at most 8."""
        return min(self.packages_per_thread, _MAX_PACKAGES_IN_FLIGHT)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Grouped does not take this element. A value: the other paths do."""

    kind: RefusalKind
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class FlatAnswer:
    """Whether flat can carry the spans, and in what packages."""

    eligible: bool
    reason: str
    span_bytes: int
    """Bytes that are contiguous on both sides: the element size times rows."""
    package: int
    """The widest package that tiles every span, 1 to 16 bytes, whether or not it is enough."""


@dataclasses.dataclass(frozen=True, slots=True)
class RealignAnswer:
    """Whether realign can carry the spans: always, unless it is switched off."""

    eligible: bool
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedAnswer:
    """Whether grouped can carry the elements, and how."""

    eligible: bool
    reason: str
    config: GroupedConfig | None
    refusal: RefusalKind | None
    """Set exactly where `config` is None; a path refused from outside keeps its `config`."""


@dataclasses.dataclass(frozen=True, slots=True)
class CopyDecision:
    """Which path carries the elements, and what speaks for and against each."""

    element_size: int
    rows: int
    chosen: CopyPath | None
    """None where the only path to consider is refused, or no path is left."""
    reason: str
    """What spoke for the chosen path, after what spoke against those before it."""
    flat: FlatAnswer
    realign: RealignAnswer
    grouped: GroupedAnswer


def alignment_of(*byte_counts: int) -> int:
    """The largest of 16, 8, 4, 2 and 1 that divides every address, offset and stride given."""
    bits = _WIDEST_PACKAGE
    for count in byte_counts:
        bits |= count
    return bits & -bits


def resolve_grouped(element_size: int, unroll: int | None = None) -> GroupedConfig | Refusal:
    """How grouped shares an element among threads, by its size alone.

    - 32 / unroll threads share an element. By default unroll is 4 up to 512 bytes, 2 up to 1,024,
      and 1 above.
    - A multiple of 128 bytes moves in packages of 128 / threads bytes: 4, 8 or 16, or refused.
    - Any other size moves in the widest of 16, 8 and 4 bytes that divides a thread's share. Where
      none does, fewer threads are tried: 16, 8, 4, 2, 1.
    - An explicit unroll is taken as it is; no other is tried for it.

    The ladder holds only those of 16, 8, 4, 2 and 1 that are fewer than the default's threads. To
    start from 16 every time would give the same, for what n threads cannot tile, 2n cannot either.

    Args:
        element_size: Bytes, 1 to 2^40.
        unroll: One of `UNROLLS`, or None for the default.

    Raises:
        GeometryError: `element_size` is no such number.
        ConfigError: `unroll` is none of `UNROLLS`.
    """
    _check_element_size(element_size)
    _check_unroll(unroll)
    if unroll is not None:
        tiled = _tiled(element_size, _WARP_THREADS // unroll)
        return tiled if tiled is not None else _refused(element_size, unroll)
    threads = _WARP_THREADS // _default_unroll(element_size)
    for count in (threads, *(fewer for fewer in _FEWER_THREADS if fewer < threads)):
        tiled = _tiled(element_size, count)
        if tiled is not None:
            return tiled
    reason = (
        f"no number of threads tiles {_bytes(element_size)} in packages of 4, 8 or 16 bytes, for "
        f"that is no multiple of 4"
    )
    return Refusal(RefusalKind.NO_TILING, reason)


def resolve_copy(
    element_size: int,
    *,
    rows: int = 1,
    unroll: int | None = None,
    path: CopyPath | None = None,
    source_alignment: int = _WIDEST_PACKAGE,
    destination_alignment: int = _WIDEST_PACKAGE,
    refused: Mapping[CopyPath, str] = MappingProxyType({}),
) -> CopyDecision:
    """Which path carries elements between two pools, and why; for every path whether it can.

    flat is first choice, realign second. An explicit `unroll` puts grouped before them; where that
    is refused they stand in, and `reason` says so. `path` allows no other: where it is refused,
    `chosen` is None.

    Args:
        element_size: Bytes, 1 to 2^40.
        rows: Neighbouring rows that are contiguous on both sides, in every span of the call: 1 to
            2^20. A span has ``rows × element_size`` bytes.
        unroll: One of `UNROLLS`, to have grouped in that form.
        path: The only path to consider; None for the order of choice.
        source_alignment: What divides the address of every span's first byte on the reading side,
            as from `alignment_of` over base and strides: 1, 2, 4, 8 or 16. Dense pools with a base
            on 16 bytes may say 16 whatever the size, for the length of a span limits it enough.
        destination_alignment: The same on the writing side.
        refused: Paths that may not be taken, and why.

    Raises:
        GeometryError: `element_size` is no such number.
        PlanError: `rows` or an alignment is no such number.
        ConfigError: `unroll` is none of `UNROLLS`, or comes with another path than grouped.
    """
    _check_element_size(element_size)
    _check_unroll(unroll)
    _check_spans(rows, source_alignment, destination_alignment)
    order = _order(path, unroll)
    flat = _flat(element_size * rows, source_alignment, destination_alignment)
    realign = RealignAnswer(eligible=True, reason="takes any size at any alignment")
    grouped = _grouped(element_size, unroll, source_alignment, destination_alignment)
    if grouped.eligible and CopyPath.GROUPED not in order:
        grouped = dataclasses.replace(grouped, reason=f"{grouped.reason}; only on request")
    if CopyPath.FLAT in refused:
        flat = dataclasses.replace(flat, eligible=False, reason=refused[CopyPath.FLAT])
    if CopyPath.REALIGN in refused:
        realign = RealignAnswer(eligible=False, reason=refused[CopyPath.REALIGN])
    if CopyPath.GROUPED in refused:
        grouped = dataclasses.replace(grouped, eligible=False, reason=refused[CopyPath.GROUPED])
    answers: dict[CopyPath, FlatAnswer | RealignAnswer | GroupedAnswer] = {
        CopyPath.FLAT: flat,
        CopyPath.REALIGN: realign,
        CopyPath.GROUPED: grouped,
    }
    chosen = next((name for name in order if answers[name].eligible), None)
    considered = order[: order.index(chosen) + 1] if chosen else order
    return CopyDecision(
        element_size=element_size,
        rows=rows,
        chosen=chosen,
        reason="; ".join(f"{name}: {answers[name].reason}" for name in considered),
        flat=flat,
        realign=realign,
        grouped=grouped,
    )


def _default_unroll(element_size: int) -> int:
    if element_size <= 512:
        return 4
    return 2 if element_size <= 1024 else 1


def _tiled(element_size: int, threads: int) -> GroupedConfig | None:
    share, left = divmod(element_size, threads)
    if left:
        return None
    if element_size % _GROUPED_TILE == 0:
        wanted = _GROUPED_TILE // threads
        package = wanted if wanted in _GROUPED_PACKAGES else None
    else:
        package = next((size for size in _GROUPED_PACKAGES if share % size == 0), None)
    if package is None:
        return None
    return GroupedConfig(_WARP_THREADS // threads, threads, share, package, share // package)


def _refused(element_size: int, unroll: int) -> Refusal:
    threads = _WARP_THREADS // unroll
    if element_size % _GROUPED_TILE == 0:
        reason = (
            f"with unroll {unroll}, a multiple of 128 bytes needs packages of "
            f"{_GROUPED_TILE // threads} bytes, and 16 is the widest; take unroll 1, 2 or 4"
        )
        return Refusal(RefusalKind.PACKAGE_TOO_WIDE, reason)
    tiling = [other for other in UNROLLS if _tiled(element_size, _WARP_THREADS // other)]
    advice = f"take unroll {_either(tiling)}" if tiling else "no unroll does"
    reason = (
        f"unroll {unroll} does not tile {_bytes(element_size)}: the share of each of {threads} "
        f"thread{'s' * (threads > 1)} is no multiple of 4 bytes; {advice}"
    )
    return Refusal(RefusalKind.DOES_NOT_TILE, reason)


def _flat(span_bytes: int, source_alignment: int, destination_alignment: int) -> FlatAnswer:
    limits = {
        f"the length of {_bytes(span_bytes)}": alignment_of(span_bytes),
        "the source's alignment": source_alignment,
        "the destination's alignment": destination_alignment,
    }
    package = min(limits.values())
    if package >= _NARROWEST_FLAT_PACKAGE:
        reason = f"spans of {_bytes(span_bytes)} move in {package}-byte packages"
        return FlatAnswer(eligible=True, reason=reason, span_bytes=span_bytes, package=package)
    narrow = [what for what, limit in limits.items() if limit == package]
    reason = (
        f"needs packages of {_NARROWEST_FLAT_PACKAGE} bytes or more, "
        f"and {' and '.join(narrow)} allow{'s' * (len(narrow) == 1)} {package}"
    )
    return FlatAnswer(eligible=False, reason=reason, span_bytes=span_bytes, package=package)


def _grouped(
    element_size: int, unroll: int | None, source_alignment: int, destination_alignment: int
) -> GroupedAnswer:
    found = resolve_grouped(element_size, unroll)
    if isinstance(found, Refusal):
        return GroupedAnswer(False, found.reason, config=None, refusal=found.kind)
    # The package divides the element, so where a span starts well, each of its elements does.
    aligned = min(source_alignment, destination_alignment)
    if found.package > aligned:
        reason = (
            f"its packages of {found.package} bytes need both sides aligned to as much, and they "
            f"are aligned to {source_alignment} and {destination_alignment}"
        )
        return GroupedAnswer(False, reason, config=None, refusal=RefusalKind.MISALIGNED)
    many = "threads share" if found.threads > 1 else "thread has"
    reason = (
        f"{found.threads} {many} an element, {_bytes(found.bytes_per_thread)} each in "
        f"{found.package}-byte packages"
    )
    return GroupedAnswer(True, reason, config=found, refusal=None)


def _check_element_size(element_size: int) -> None:
    if not _is_whole(element_size, _MAX_ELEMENT_SIZE):
        raise GeometryError(
            f"element_size must be a whole number of bytes from 1 to {_MAX_ELEMENT_SIZE:,}, "
            f"not {element_size!r}"
        )


def _check_unroll(unroll: int | None) -> None:
    if unroll is not None and (isinstance(unroll, bool) or unroll not in UNROLLS):
        raise ConfigError(
            f"unroll must be {_either(UNROLLS)}, not {unroll!r}; leave it out for the default"
        )


def _order(path: CopyPath | None, unroll: int | None) -> tuple[CopyPath, ...]:
    if path is not None and path not in tuple(CopyPath):
        raise ConfigError(f"path {path!r} is none of {', '.join(CopyPath)}")
    if unroll is not None and path not in (None, CopyPath.GROUPED):
        raise ConfigError(f"unroll {unroll} belongs to path grouped; leave it out for path {path}")
    if path is not None:
        return (CopyPath(path),)
    default = (CopyPath.FLAT, CopyPath.REALIGN)
    return default if unroll is None else (CopyPath.GROUPED, *default)


def _check_spans(rows: int, source_alignment: int, destination_alignment: int) -> None:
    if not _is_whole(rows, MAX_ROWS):
        raise PlanError(f"rows must be a whole number from 1 to {MAX_ROWS:,}, not {rows!r}")
    for side, alignment in (("source", source_alignment), ("destination", destination_alignment)):
        if alignment not in _ALIGNMENTS:
            raise PlanError(
                f"{side}_alignment must be {_either(_ALIGNMENTS)}, not {alignment!r}; "
                f"alignment_of gives it for addresses and strides"
            )


def _is_whole(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _bytes(count: int) -> str:
    return f"{count:,} byte{'s' * (count != 1)}"


def _either(values: Collection[int]) -> str:
    *most, last = (str(value) for value in values)
    return f"{', '.join(most)} or {last}" if most else last
