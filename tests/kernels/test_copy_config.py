"""The resolver: the published tilings, when each path can, which is chosen, and bad input."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import ConfigError, GeometryError, KVFerryError, PlanError
from kvferry.kernels import (
    UNROLLS,
    CopyPath,
    GroupedConfig,
    Refusal,
    RefusalKind,
    alignment_of,
    resolve_copy,
    resolve_grouped,
)

_GOLDEN = Path(__file__).with_name("golden_grouped.txt")


def _golden() -> dict[int, GroupedConfig | None]:
    rows = [line.split() for line in _GOLDEN.read_text().splitlines() if line[:1] != "#"]
    return {
        int(size): None if rest == ["refused"] else GroupedConfig(*map(int, rest))
        for size, *rest in rows
    }


def _config(element_size: int, unroll: int | None = None) -> GroupedConfig:
    found = resolve_grouped(element_size, unroll)
    assert isinstance(found, GroupedConfig), found
    return found


def _refusal(element_size: int, unroll: int | None = None) -> Refusal:
    found = resolve_grouped(element_size, unroll)
    assert isinstance(found, Refusal), found
    return found


def test_the_golden_table_is_whole() -> None:
    """It has the multiples of 128 up to 16 KiB and the sizes of the field, and no other."""
    multiples = set(range(128, 16 * 1024 + 1, 128))
    assert set(_golden()) == multiples | {576, 656, 528, 160, 192, 288, 584, 132, 66}


@pytest.mark.parametrize(("element_size", "expected"), _golden().items())
def test_grouped_keeps_the_published_table(
    element_size: int, expected: GroupedConfig | None
) -> None:
    """Each size of the golden table resolves to what it says there."""
    found = resolve_grouped(element_size)
    if expected is None:
        assert isinstance(found, Refusal)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("element_size", "unroll", "expected"),
    [
        (576, None, (2, 16, 36, 4, 9)),
        (656, None, (8, 4, 164, 4, 41)),
        (1024, None, (2, 16, 64, 8, 8)),
        (512, None, (4, 8, 64, 16, 4)),
        (513 * 4, None, (32, 1, 2052, 4, 513)),
        (1024, 1, (1, 32, 32, 4, 8)),
        (1024, 4, (4, 8, 128, 16, 8)),
        (576, 4, (4, 8, 72, 8, 9)),
        (576, 32, (32, 1, 576, 16, 36)),
        (4, 32, (32, 1, 4, 4, 1)),
        (1 << 40, None, (1, 32, 1 << 35, 4, 1 << 33)),
    ],
)
def test_grouped_by_hand(element_size: int, unroll: int | None, expected: tuple[int, ...]) -> None:
    """Tilings worked out by hand, by default and with an explicit unroll."""
    assert _config(element_size, unroll) == GroupedConfig(*expected)


@pytest.mark.parametrize(("unroll", "package"), [(1, 4), (2, 8), (4, 16)])
def test_multiples_of_128_keep_their_packages(unroll: int, package: int) -> None:
    """An explicit unroll gives a multiple of 128 packages of 128 / threads bytes, at any size."""
    for element_size in range(128, 16 * 1024 + 1, 128):
        config = _config(element_size, unroll)
        assert (config.package, config.packages_per_thread) == (package, element_size // 128)


@pytest.mark.parametrize("unroll", [8, 16, 32])
def test_multiples_of_128_refuse_wider_packages(unroll: int) -> None:
    """Where a multiple of 128 would need packages over 16 bytes it is refused, as it always was."""
    for element_size in (128, 1024, 16 * 1024):
        refusal = _refusal(element_size, unroll)
        assert refusal.kind is RefusalKind.PACKAGE_TOO_WIDE
        assert f"packages of {4 * unroll} bytes" in refusal.reason
        assert "take unroll 1, 2 or 4" in refusal.reason


def test_an_explicit_unroll_is_never_replaced() -> None:
    """An unroll that does not tile is refused, and the reason names those that would."""
    for element_size, unroll in itertools.product(range(1, 2049), UNROLLS):
        found = resolve_grouped(element_size, unroll)
        if isinstance(found, GroupedConfig):
            assert found.unroll == unroll
        elif element_size % 128:
            assert found.kind is RefusalKind.DOES_NOT_TILE
            assert element_size % (4 * 32 // unroll)
    assert "take unroll 2, 4, 8, 16 or 32" in _refusal(576, 1).reason
    assert "of each of 32 threads is" in _refusal(576, 1).reason
    assert "of each of 1 thread is" in _refusal(66, 32).reason
    assert "no unroll does" in _refusal(66, 32).reason


def test_the_ladder_ends_at_sizes_that_are_no_multiple_of_4() -> None:
    """By default every multiple of 4 tiles, with the most threads that can, and nothing else."""
    for element_size in range(1, 4097):
        found = resolve_grouped(element_size)
        if element_size % 4:
            assert isinstance(found, Refusal)
            assert found.kind is RefusalKind.NO_TILING
            continue
        assert isinstance(found, GroupedConfig)
        most = 8 if element_size <= 512 else 16 if element_size <= 1024 else 32
        tiling = [count for count in (1, 2, 4, 8, 16, 32) if element_size % (4 * count) == 0]
        assert found.threads == max(count for count in tiling if count <= most)


def test_a_tiling_covers_the_element_once() -> None:
    """Threads × packages × package bytes is the element, and starts stay on their package."""
    for element_size, unroll in itertools.product(range(1, 2049), (None, *UNROLLS)):
        found = resolve_grouped(element_size, unroll)
        if isinstance(found, Refusal):
            continue
        assert found.threads * found.unroll == 32
        assert found.threads * found.bytes_per_thread == element_size
        assert found.package in (4, 8, 16)
        assert found.packages_per_thread * found.package == found.bytes_per_thread
        assert element_size % found.package == 0


def test_packages_in_flight_are_at_most_8() -> None:
    """A thread never holds more than 8 packages, and never more than it has."""
    assert _config(576).packages_in_flight == 8
    assert _config(512).packages_in_flight == 4
    assert _config(1024).packages_in_flight == 8


@pytest.mark.parametrize(
    ("byte_counts", "expected"),
    [
        ((), 16),
        ((0,), 16),
        ((4096, 656), 16),
        ((8, 132), 4),
        ((16, -24), 8),
        ((6,), 2),
        ((7, 8), 1),
    ],
)
def test_alignment_of(byte_counts: tuple[int, ...], expected: int) -> None:
    """The widest package that divides every count; zero and negative strides count as well."""
    assert alignment_of(*byte_counts) == expected


@pytest.mark.parametrize(
    ("element_size", "rows", "package"),
    [(656, 1, 16), (584, 1, 8), (132, 2, 8), (132, 64, 16), (66, 4, 8), (66, 64, 16), (1, 16, 16)],
)
def test_flat_looks_at_spans(element_size: int, rows: int, package: int) -> None:
    """Packages are as wide as the span allows, whatever the element."""
    decision = resolve_copy(element_size, rows=rows)
    assert decision.chosen is CopyPath.FLAT
    assert (decision.flat.span_bytes, decision.flat.package) == (element_size * rows, package)
    assert f"{package}-byte packages" in decision.flat.reason


@pytest.mark.parametrize(
    ("element_size", "rows", "package", "named"),
    [
        (66, 1, 2, "the length of 66 bytes allows 2"),
        (132, 1, 4, "the length of 132 bytes allows 4"),
        (131, 64, 16, None),
        (131, 2, 2, "the length of 262 bytes allows 2"),
        (1, 1, 1, "the length of 1 byte allows 1"),
    ],
)
def test_narrow_spans_go_to_realign(
    element_size: int, rows: int, package: int, named: str | None
) -> None:
    """Lengths that allow packages under 8 bytes only are realign's; the reason says so."""
    decision = resolve_copy(element_size, rows=rows)
    assert decision.flat.package == package
    assert decision.flat.eligible is (named is None)
    assert decision.chosen is (CopyPath.FLAT if named is None else CopyPath.REALIGN)
    if named is not None:
        assert named in decision.flat.reason
        assert named in decision.reason


@pytest.mark.parametrize(
    ("source", "destination", "named"),
    [
        (4, 16, "the source's alignment allows 4"),
        (16, 1, "the destination's alignment allows 1"),
        (2, 2, "the source's alignment and the destination's alignment allow 2"),
    ],
)
def test_misaligned_sides_go_to_realign(source: int, destination: int, named: str) -> None:
    """A side that is aligned to less than 8 bytes makes it realign's, and is named."""
    decision = resolve_copy(656, source_alignment=source, destination_alignment=destination)
    assert decision.chosen is CopyPath.REALIGN
    assert named in decision.flat.reason


def test_flat_packages_divide_whatever_they_touch() -> None:
    """The package divides the span and both alignments, and twice as much would not."""
    alignments = (1, 2, 4, 8, 16)
    for size, rows, source, destination in itertools.product(
        range(1, 200), (1, 2, 3, 16), alignments, alignments
    ):
        flat = resolve_copy(
            size, rows=rows, source_alignment=source, destination_alignment=destination
        ).flat
        limits = (size * rows, source, destination)
        assert all(limit % flat.package == 0 for limit in limits)
        assert flat.package == 16 or any(limit % (2 * flat.package) for limit in limits)
        assert flat.eligible is (flat.package >= 8)


def test_load_and_store_choose_alike() -> None:
    """Exchanging source and destination changes neither the path nor any package."""
    for size, unroll, (one, other) in itertools.product(
        (1, 66, 132, 512, 576, 656),
        (None, 2, 8),
        itertools.combinations((1, 2, 4, 8, 16), 2),
    ):
        load = resolve_copy(size, unroll=unroll, source_alignment=one, destination_alignment=other)
        store = resolve_copy(size, unroll=unroll, source_alignment=other, destination_alignment=one)
        assert load.chosen is store.chosen
        assert load.flat.package == store.flat.package
        assert load.grouped.config == store.grouped.config


def test_every_size_has_a_path() -> None:
    """Whatever the size, the rows, the unroll and the alignment, a path is chosen and can."""
    for size, rows, unroll, alignment in itertools.product(
        (*range(1, 300), 576, 656, 9216, 1 << 40), (1, 64), (None, *UNROLLS), (1, 4, 16)
    ):
        decision = resolve_copy(size, rows=rows, unroll=unroll, source_alignment=alignment)
        assert decision.chosen is not None
        assert getattr(decision, decision.chosen).eligible


def test_grouped_is_not_chosen_unasked() -> None:
    """Without an unroll or a request grouped is reported, and never taken."""
    decision = resolve_copy(512)
    assert decision.chosen is CopyPath.FLAT
    assert decision.grouped.eligible
    assert decision.grouped.config == _config(512)
    assert "only on request" in decision.grouped.reason


@pytest.mark.parametrize("asked", [{"unroll": 2}, {"path": CopyPath.GROUPED}])
def test_grouped_on_request(asked: dict[str, Any]) -> None:
    """An explicit unroll or the path's name takes grouped where it can."""
    decision = resolve_copy(576, **asked)
    assert decision.chosen is CopyPath.GROUPED
    assert decision.flat.eligible
    assert "only on request" not in decision.grouped.reason
    assert decision.reason.startswith("grouped: 16 threads share an element, 36 bytes each")


def test_a_refused_unroll_is_carried_and_told() -> None:
    """Where an explicit unroll is refused, flat or realign stands in, and the reason says so."""
    decision = resolve_copy(1024, unroll=8)
    assert decision.chosen is CopyPath.FLAT
    assert not decision.grouped.eligible
    assert decision.grouped.config is None
    assert decision.grouped.refusal is RefusalKind.PACKAGE_TOO_WIDE
    assert decision.reason == (f"grouped: {decision.grouped.reason}; flat: {decision.flat.reason}")
    assert resolve_copy(66, unroll=8).chosen is CopyPath.REALIGN


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (CopyPath.GROUPED, {"element_size": 66}),
        (CopyPath.GROUPED, {"element_size": 1024, "unroll": 8}),
        (CopyPath.FLAT, {"element_size": 66}),
    ],
)
def test_a_path_by_name_allows_no_other(path: CopyPath, asked: dict[str, Any]) -> None:
    """A path that was demanded and is refused leaves no choice."""
    decision = resolve_copy(path=path, **asked)
    assert decision.chosen is None
    assert decision.reason == f"{path}: {getattr(decision, path).reason}"


def test_realign_by_name() -> None:
    """realign can be demanded where flat would be chosen."""
    assert resolve_copy(656, path=CopyPath.REALIGN).chosen is CopyPath.REALIGN


def test_grouped_needs_its_alignment() -> None:
    """Packages wider than a side's alignment are refused, not rounded down to other ones."""
    decision = resolve_copy(512, unroll=4, source_alignment=8)
    assert decision.chosen is CopyPath.FLAT
    assert decision.grouped.refusal is RefusalKind.MISALIGNED
    assert "packages of 16 bytes" in decision.grouped.reason
    assert "aligned to 8 and 16" in decision.grouped.reason
    aligned = resolve_copy(576, unroll=2, source_alignment=4, destination_alignment=4)
    assert aligned.chosen is CopyPath.GROUPED


def test_paths_can_be_switched_off() -> None:
    """A path that is off is passed over, says so, and with all off there is none."""
    flat_off = resolve_copy(576, refused={CopyPath.FLAT: "switched off"})
    assert flat_off.chosen is CopyPath.REALIGN
    assert flat_off.flat.reason == "switched off"
    grouped_off = resolve_copy(576, unroll=2, refused={CopyPath.GROUPED: "switched off"})
    assert grouped_off.chosen is CopyPath.FLAT
    assert grouped_off.reason.startswith("grouped: switched off; flat: ")
    none_left = resolve_copy(
        576, refused=dict.fromkeys((CopyPath.FLAT, CopyPath.REALIGN), "switched off")
    )
    assert none_left.chosen is None
    assert none_left.reason == "flat: switched off; realign: switched off"


@pytest.mark.parametrize("element_size", [0, -1, (1 << 40) + 1, 1.5, "576", True, None])
def test_sizes_that_are_none(element_size: Any) -> None:
    """Anything but a whole number from 1 to 2^40 is refused with the number and the limit."""
    for resolve in (resolve_grouped, resolve_copy):
        with pytest.raises(GeometryError, match=r"from 1 to 1,099,511,627,776, not "):
            resolve(element_size)


@pytest.mark.parametrize("unroll", [0, -1, 3, 64, True, "2"])
def test_unrolls_that_are_none(unroll: Any) -> None:
    """An unroll outside the set is refused with the set."""
    for resolve in (resolve_grouped, resolve_copy):
        with pytest.raises(ConfigError, match="unroll must be 1, 2, 4, 8, 16 or 32"):
            resolve(576, unroll=unroll)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"rows": 0}, PlanError, "rows must be"),
        ({"rows": (1 << 20) + 1}, PlanError, "from 1 to 1,048,576"),
        ({"rows": True}, PlanError, "rows must be"),
        ({"source_alignment": 3}, PlanError, "source_alignment must be 1, 2, 4, 8 or 16"),
        ({"destination_alignment": 32}, PlanError, "destination_alignment must be"),
        ({"path": "direct"}, ConfigError, "'direct' is none of flat, realign, grouped"),
        ({"path": CopyPath.FLAT, "unroll": 2}, ConfigError, "leave it out for path flat"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[KVFerryError], named: str) -> None:
    """Bad rows, alignments and contradictory requests are refused by name."""
    with pytest.raises(error, match=named):
        resolve_copy(576, **options)
