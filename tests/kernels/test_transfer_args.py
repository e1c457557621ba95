"""What kernels are told is laid out as they read it, and says of the pools what is true."""

from __future__ import annotations

import ctypes
import math
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.kernels.emulator import compile_cpp, kernel_emulator

from kvferry.errors import PlanError
from kvferry.geometry import Geometry, LayerView, Plane, Span
from kvferry.kernels import NO_DIGEST, digest_spans, page_seed, resolve_copy, span_seeds
from kvferry.kernels.transfer_args import (
    MAX_ROW_TABLES,
    NO_FAULT,
    DivisorArgs,
    Fault,
    SpanArgs,
    TransferArgs,
    ViewArgs,
    fast_divisor,
    fault_of,
    pages_per_launch,
    span_args,
    span_runs,
)

_STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "FastDivisor": DivisorArgs,
    "View": ViewArgs,
    "Span": SpanArgs,
    "Transfer": TransferArgs,
}
_SCALARS = {ctypes.c_uint32: "uint32_t", ctypes.c_uint64: "uint64_t", ctypes.c_int64: "int64_t"}


@pytest.fixture(scope="module")
def emulator() -> ctypes.CDLL:
    """The kernels' own functions, lane by lane, in this process."""
    return kernel_emulator()


# -------------------------------------------------------------------------------------- layout


def _type_of(kind: Any) -> str:
    if kind in _SCALARS:
        return _SCALARS[kind]
    if issubclass(kind, ctypes.Array):
        return f"{_type_of(kind._type_)}[{kind._length_}]"
    return next(name for name, structure in _STRUCTURES.items() if structure is kind)


def test_structures_are_laid_out_as_kernels_read_them(tmp_path: Path) -> None:
    """Every field has the size, offset and type of its namesake in C++, and none is missing."""
    lines = [
        "#include <stddef.h>",
        "#include <stdio.h>",
        "#include <type_traits>",
        '#include "transfer.cuh"',
        "using namespace kvferry;",
        f"static_assert(kMaxRowTables == {MAX_ROW_TABLES});",
        "int main() {",
    ]
    expected: list[str] = []
    for name, structure in _STRUCTURES.items():
        covered = 0
        for field, kind, *_ in structure._fields_:
            at = getattr(structure, field)
            lines.append(
                f"  static_assert(std::is_same_v<decltype({name}::{field}), {_type_of(kind)}>);"
            )
            where = f"offsetof({name}, {field}), sizeof({name}::{field})"
            lines.append(f'  printf("{name}.{field} %zu %zu\\n", {where});')
            expected.append(f"{name}.{field} {at.offset} {at.size}")
            covered += at.size
        lines.append(f'  printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(structure)}")
        assert covered == ctypes.sizeof(structure), f"{name} has holes that could hide a field"
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}", ""]))
    compile_cpp(source, program)
    ran = subprocess.run([str(program)], capture_output=True, text=True, check=True, timeout=20)
    assert ran.stdout.splitlines() == expected


# ------------------------------------------------------------------------------------ division


def test_division_is_exact_below_two_to_the_31(emulator: ctypes.CDLL) -> None:
    """Small divisors, powers of two and their neighbours, at every edge of a quotient."""
    limit = (1 << 31) - 1
    near = {(1 << bits) + off for bits in range(1, 32) for off in (-1, 0, 1)}
    draws = random.Random(31)
    drawn = {draws.randrange(1, 1 << draws.randrange(1, 32)) for _ in range(2000)}
    divisors = sorted({d for d in near | drawn | set(range(1, 2000)) if 1 <= d <= limit})
    generator = np.random.default_rng(31)
    for divisor in divisors:
        top = limit // divisor
        quotients = np.concatenate(
            [
                np.arange(min(top, 40) + 1),
                top - np.arange(min(top, 40) + 1),
                generator.integers(0, top, 40, endpoint=True),
            ]
        )
        multiples = quotients * divisor
        dividends = np.concatenate([multiples, multiples - 1, multiples + divisor - 1, [limit]])
        kept = dividends[(dividends >= 0) & (dividends <= limit)].astype(np.uint32)
        by = fast_divisor(divisor)
        wrong = emulator.wrong_quotients(
            ctypes.byref(by), ctypes.c_void_p(kept.ctypes.data), ctypes.c_int64(kept.size)
        )
        assert wrong == 0, divisor


@pytest.mark.parametrize("divisor", [0, -3, 1 << 31])
def test_divisors_that_kernels_cannot_take_are_refused(divisor: int) -> None:
    """0, negative numbers and 2^31 have no exact multiplier."""
    with pytest.raises(PlanError, match="divide by 1 to"):
        fast_divisor(divisor)


# ---------------------------------------------------------------------------------------- runs


def _dense(
    element_size: int, num_rows: int, *, address: int = 4096, block_rows: int = 0, gap: int = 0
) -> LayerView:
    rows = block_rows or num_rows
    return LayerView(
        address=address,
        num_rows=num_rows,
        row_stride=element_size,
        block_rows=rows,
        block_stride=rows * element_size + gap,
        num_pieces=1,
        piece_size=element_size,
        piece_stride=element_size,
    )


@pytest.mark.parametrize(
    ("element_size", "run_rows", "device_bytes", "package"),
    [
        (656, 1, 656, 16),
        (584, 1, 584, 8),
        (584, 2, 2 * 584, 16),
        (132, 1, 132, 4),
        (132, 64, 64 * 132, 16),
        (132, 128, 64 * 132, 16),
        (132, 48, 16 * 132, 16),
        (66, 4, 4 * 66, 8),
        (66, 8, 8 * 66, 16),
        (1, 16, 16, 16),
        (7, 3, 7, 1),
    ],
)
def test_runs_of_dense_pools(
    element_size: int, run_rows: int, device_bytes: int, package: int
) -> None:
    """Neighbouring elements are one run, as far as both the promise and the page allow."""
    device = _dense(element_size, 1024)
    host = _dense(element_size, 16 * 64, block_rows=64, gap=64)
    runs = span_runs(device, host, rows_per_page=64, run_rows=run_rows)
    assert (runs.device_bytes, runs.host_bytes, runs.package) == (
        device_bytes,
        64 * element_size,
        package,
    )
    assert runs.rows == device_bytes // element_size


def test_blocks_limit_runs_only_where_they_are_apart() -> None:
    """A run goes on over a block's end exactly where the next block follows it."""
    host = _dense(132, 64)
    together = _dense(132, 256, block_rows=16)
    apart = _dense(132, 256, block_rows=16, gap=4)
    assert span_runs(together, host, rows_per_page=64, run_rows=64).device_bytes == 64 * 132
    runs = span_runs(apart, host, rows_per_page=64, run_rows=64)
    assert runs.device_bytes == 16 * 132
    assert runs.package == 4  # blocks begin on 4 bytes only


def test_a_base_that_is_not_aligned_narrows_packages() -> None:
    """Both sides must allow a package, wherever their pools begin."""
    aligned, shifted = _dense(656, 64), _dense(656, 64, address=4096 + 8)
    assert span_runs(aligned, shifted, rows_per_page=64, run_rows=1).package == 8
    assert span_runs(shifted, aligned, rows_per_page=64, run_rows=1).package == 8


def _random_view(
    draws: random.Random, element_size: int, num_rows: int, block_rows: int
) -> LayerView:
    """Dense, padded, blocked or permuted, on a random alignment."""
    unit = draws.choice([1, 2, 4, 8, 16, 128])

    def gap() -> int:
        return draws.choice([0, 0, unit, 3 * unit])

    pieces = draws.choice([p for p in (1, 1, 1, 2, 4) if element_size % p == 0])
    size = element_size // pieces
    if pieces > 1 and draws.random() < 0.5:
        row_stride = size + gap()
        piece_stride = block_rows * row_stride + gap()
        covered = pieces * piece_stride
    else:
        piece_stride = size + (gap() if pieces > 1 else 0)
        row_stride = pieces * piece_stride + gap()
        covered = block_rows * row_stride
    return LayerView(
        address=draws.randrange(256, 512) * max(unit, 16) + gap(),
        num_rows=num_rows,
        row_stride=row_stride,
        block_rows=block_rows,
        block_stride=covered + gap(),
        num_pieces=pieces,
        piece_size=size,
        piece_stride=piece_stride,
    )


def _byte_address(view: LayerView, row: int, byte: int) -> int:
    piece, within = divmod(byte, view.piece_size)
    return view.row_address(row) + piece * view.piece_stride + within


def _cases(count: int) -> Iterator[tuple[random.Random, int, int, int, LayerView, LayerView]]:
    for seed in range(count):
        draws = random.Random(seed)
        size = draws.choice([1, 2, 3, 7, 16, 24, 66, 100, 128, 132, 160, 512, 584, 656])
        rows, run_rows = draws.choice([1, 3, 4, 6, 8]), draws.choice([1, 2, 3, 4, 8, 16])
        block = draws.choice([1, 2, 4, 8, 48])
        device = _random_view(draws, size, 48, block)
        host_block = draws.choice([rows, 4 * rows, *[d for d in (1, 2, 3) if rows % d == 0]])
        host = _random_view(draws, size, 4 * rows, host_block)
        yield draws, rows, run_rows, size, device, host


def test_runs_and_packages_hold_for_every_page_that_keeps_the_promise() -> None:
    """Over random pools no run is broken and no package is misaligned, whatever rows are taken."""
    seen = set()
    for draws, rows, run_rows, size, device, host in _cases(1500):
        runs = span_runs(device, host, rows_per_page=rows, run_rows=run_rows)
        promised = math.gcd(run_rows, rows)
        starts = [draws.randrange(48 // promised) * promised for _ in range(rows // promised)]
        on_device = [start + i for start in starts for i in range(promised)]
        slot = draws.randrange(4)
        on_host = [slot * rows + i for i in range(rows)]
        for view, indices, run_bytes in (
            (device, on_device, runs.device_bytes),
            (host, on_host, runs.host_bytes),
        ):
            at = [_byte_address(view, row, byte) for row in indices for byte in range(size)]
            assert len(at) % run_bytes == 0
            for begin in range(0, len(at), run_bytes):
                assert at[begin : begin + run_bytes] == [at[begin] + i for i in range(run_bytes)]
                assert at[begin] % runs.package == 0
            assert run_bytes % runs.package == 0
        seen.add((runs.package, runs.rows > 1))
    assert len(seen) >= 8


def test_resolver_and_arguments_agree() -> None:
    """The resolver, asked with a span's runs, takes flat in the very package the kernel is told."""
    seen = set()
    for _, rows, run_rows, size, device, host in _cases(600):
        runs = span_runs(device, host, rows_per_page=rows, run_rows=run_rows)
        decision = resolve_copy(
            size,
            rows=runs.rows,
            source_alignment=runs.device_alignment,
            destination_alignment=runs.host_alignment,
        )
        args = _span_args(_span(size, rows), device, host, run_rows=run_rows)
        assert decision.flat.package == runs.package
        assert args.flat_package == (runs.package if decision.flat.eligible else 0)
        seen.add(args.flat_package)
    assert seen == {0, 8, 16}


def test_lines_reach_the_end_of_every_run() -> None:
    """Flat's lines begin on 128 bytes of the host and hold a run wherever it begins."""
    seen = set()
    for _, rows, run_rows, size, device, host in _cases(1500):
        args = _span_args(_span(size, rows), device, host, run_rows=run_rows)
        if not args.flat_package:
            continue
        run_bytes, lines = args.host.run_bytes, args.run_lines.divisor
        runs = size * rows // run_bytes
        assert args.page_lines.divisor == runs * lines
        for slot in range(4):
            for run in range(runs):
                row, byte = divmod(run * run_bytes, size)
                begin = _byte_address(host, slot * rows + row, byte)
                assert args.line_mask == 127 or begin % 128 == 0
                assert begin % 128 + run_bytes <= lines * 32 * args.flat_package
        seen.add((args.line_mask, lines > 1, args.flat_package))
    assert len(seen) >= 6


# --------------------------------------------------------------------------------------- spans


def _span(element_size: int, rows: int) -> Span:
    plane = Plane(name="k", num_layers=1, element_size=element_size, rows_per_page=rows)
    return Geometry(planes=(plane,)).spans()[0]


def _span_args(span: Span, device: LayerView, host: LayerView, **given: Any) -> SpanArgs:
    told = {"run_rows": 1, "digest_address": 0, "digest_stride": 8, "rows_table": 0, **given}
    return span_args(span, device, host, **told)


def test_rows_after_the_last_whole_run_are_out_of_range() -> None:
    """No run may begin inside a pool and end outside, for kernels look at its first row only."""
    device, host = _dense(16, 100), _dense(16, 128)
    assert _span_args(_span(16, 64), device, host).device.num_rows == 100
    assert _span_args(_span(16, 64), device, host, run_rows=32).device.num_rows == 96
    with pytest.raises(PlanError, match="promise a shorter run"):
        _span_args(_span(16, 64), _dense(16, 48), host, run_rows=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows_table": MAX_ROW_TABLES}, "a launch has tables 0 to"),
        ({"rows_table": -1}, "a launch has tables 0 to"),
        ({"digest_address": 4}, "multiples of 8"),
        ({"digest_stride": 12}, "multiples of 8"),
        ({"run_rows": 0}, "run_rows must be a positive number"),
        ({"host": _dense(16, 65)}, "no whole pages of 64"),
        ({"host": _dense(8, 64)}, "pass the views of this plane"),
        ({"host": _dense(16, 1 << 31)}, "make the pool smaller"),
        ({"device": _dense(32, 64)}, "pass the views of this plane"),
    ],
)
def test_spans_that_kernels_cannot_take_are_refused(given: dict[str, Any], message: str) -> None:
    """Bad tables, digests, promises and views are named before anything is launched."""
    told = {"device": _dense(16, 64), "host": _dense(16, 64), **given}
    with pytest.raises(PlanError, match=message):
        _span_args(_span(16, 64), **told)


def test_spans_of_2_gib_are_refused() -> None:
    """Kernels count a span's bytes in 31 bits."""
    size = 1 << 25
    pool = _dense(size, 64)
    assert _span_args(_span(size - 16, 64), _dense(size - 16, 64), _dense(size - 16, 64)).num_bytes
    with pytest.raises(PlanError, match="choose a smaller page_size"):
        _span_args(_span(size, 64), pool, pool)


def test_a_launch_has_fewer_than_2_to_the_31_parts_and_digests() -> None:
    """Pages over the limit of the span with the most parts, or over that of all spans, wait."""
    word = _span_args(_span(8, 1), _dense(8, 64), _dense(8, 64))
    small = _span_args(_span(1, 64), _dense(1, 64), _dense(1, 64))
    large = _span_args(_span(1 << 20, 64), _dense(1 << 20, 64), _dense(1 << 20, 64))
    assert pages_per_launch([word]) == (1 << 31) - 1
    assert pages_per_launch([word] * 3) == ((1 << 31) - 1) // 3
    assert pages_per_launch([word, small]) == ((1 << 31) - 1) // 64
    assert pages_per_launch([small, large]) == ((1 << 31) - 1) // (1 << 23)
    with pytest.raises(PlanError, match="at least one span"):
        pages_per_launch([])


def test_fault_codes_name_page_row_and_table() -> None:
    """A code reads back as what was out of range; all ones is none."""
    assert fault_of(NO_FAULT) is None
    assert fault_of(7 << 32 | 63 << 4 | 15) == Fault(page=7, row=63, rows_table=15)
    assert fault_of(0) == Fault(page=0, row=0, rows_table=0)


# ---------------------------------------------------------------------------------- end to end

_PAGES, _SLOTS, _ROWS = 5, 7, 16


class _World:
    """A geometry's host pool, device pools and the arrays of one launch, in this process."""

    def __init__(self, run_rows: int, *, is_load: bool, index: type[np.signedinteger[Any]]) -> None:
        generator = np.random.default_rng(run_rows)
        planes = tuple(
            Plane(name=f"p{size}", num_layers=2, element_size=size) for size in (656, 584, 132, 7)
        )
        self.geometry = Geometry(planes=planes, page_size=_ROWS)
        self.spans = self.geometry.spans()
        slot_bytes = self.geometry.slot_bytes()
        room = generator.integers(0, 256, _SLOTS * slot_bytes + 4096, dtype=np.uint8)
        begin = -room.ctypes.data % 4096
        self.host = room[begin : begin + _SLOTS * slot_bytes].reshape(_SLOTS, slot_bytes)
        self.digests = np.full((_SLOTS, len(self.spans)), NO_DIGEST, dtype=np.uint64)
        self.slots = generator.permutation(_SLOTS)[:_PAGES].astype(np.int64)
        self.seeds = np.array([page_seed(b"%d" % page) for page in range(_PAGES)], dtype=np.uint64)
        num_rows = 2 * _PAGES * _ROWS
        starts = generator.permutation(num_rows // run_rows)[: _PAGES * _ROWS // run_rows]
        rows = (starts[:, None] * run_rows + np.arange(run_rows)).reshape(_PAGES, _ROWS)
        self.rows = np.ascontiguousarray(rows, dtype=index)
        self.pools = [
            generator.integers(0, 256, (num_rows, span.plane.element_size), dtype=np.uint8)
            for span in self.spans
        ]
        self.sums = np.zeros((len(self.spans), _PAGES), dtype=np.uint64)
        self.bad_pages = np.zeros(_PAGES, dtype=np.uint8)
        self.fault = np.full(1, NO_FAULT, dtype=np.uint64)
        self.args = (SpanArgs * len(self.spans))(
            *(
                span_args(
                    span,
                    LayerView.from_tensor(pool),
                    _dense(
                        span.plane.element_size,
                        _SLOTS * _ROWS,
                        address=self.host.ctypes.data + span.offset,
                        block_rows=_ROWS,
                        gap=slot_bytes - span.num_bytes,
                    ),
                    run_rows=run_rows,
                    digest_address=self.digests.ctypes.data + span.index * 8,
                    digest_stride=self.digests.strides[0],
                    rows_table=3,
                )
                for span, pool in zip(self.spans, self.pools, strict=True)
            )
        )
        self.transfer = TransferArgs(
            spans=ctypes.addressof(self.args),
            host_slots=self.slots.ctypes.data,
            page_seeds=self.seeds.ctypes.data,
            sums=self.sums.ctypes.data,
            bad_pages=self.bad_pages.ctypes.data,
            fault=self.fault.ctypes.data,
            num_pages=_PAGES,
            sums_stride=_PAGES,
            index_bytes=self.rows.itemsize,
            is_load=is_load,
            verify=True,
        )
        self.transfer.rows[3] = self.rows.ctypes.data

    def on_host(self, span: Span) -> NDArray[np.uint8]:
        """The span's bytes of the plan's pages. Shape: ``[pages, num_bytes]``."""
        taken = self.host[self.slots, span.offset : span.offset + span.num_bytes]
        return np.ascontiguousarray(taken)

    def on_device(self, span: Span) -> NDArray[np.uint8]:
        """The same on the device."""
        return self.pools[span.index][self.rows].reshape(_PAGES, span.num_bytes)

    def expected_digests(self, span: Span, pages: NDArray[np.uint8]) -> NDArray[np.uint64]:
        """What the CPU path keeps beside these pages. Shape: ``[pages]``."""
        seeds = span_seeds(
            self.seeds, plane_index=span.plane_index, layer=span.layer, num_bytes=span.num_bytes
        )
        return digest_spans(pages, seeds)

    def run(self, emulator: ctypes.CDLL) -> set[str]:
        """Each span by flat where it can, else by realign; then finish. Which were used."""
        used = set()
        self.transfer.num_spans = 1
        for index, args in enumerate(self.args):
            self.transfer.first_span = index
            if args.flat_package:
                emulator.emulate_flat(ctypes.byref(self.transfer))
            else:
                emulator.emulate_realign(ctypes.byref(self.transfer), 0)
            used.add("flat" if args.flat_package else "realign")
        self.transfer.first_span, self.transfer.num_spans = 0, len(self.spans)
        emulator.emulate_finish(ctypes.byref(self.transfer))
        return used


@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("run_rows", [1, 2, 16])
def test_a_store_leaves_what_the_cpu_path_would(
    emulator: ctypes.CDLL, run_rows: int, index: type[np.signedinteger[Any]]
) -> None:
    """Bytes and digests of a store told by these arguments are those of the CPU's definition."""
    world = _World(run_rows, is_load=False, index=index)
    before = world.host.copy()
    expected = [world.on_device(span) for span in world.spans]
    # 7 bytes are for flat only where 16 of them are one run.
    assert world.run(emulator) == ({"flat"} if run_rows == 16 else {"flat", "realign"})
    for span, pages in zip(world.spans, expected, strict=True):
        np.testing.assert_array_equal(world.on_host(span), pages)
        kept = world.digests[world.slots, span.index]
        np.testing.assert_array_equal(kept, world.expected_digests(span, pages))
        before[world.slots, span.offset : span.offset + span.num_bytes] = pages
    np.testing.assert_array_equal(world.host, before)
    assert not world.bad_pages.any()
    assert fault_of(int(world.fault[0])) is None


@pytest.mark.parametrize("run_rows", [1, 2, 16])
def test_a_load_checks_what_the_cpu_path_stored(emulator: ctypes.CDLL, run_rows: int) -> None:
    """A load brings the bytes, believes the CPU's digests and finds the one flipped bit."""
    world = _World(run_rows, is_load=True, index=np.int64)
    for span in world.spans:
        digests = world.expected_digests(span, world.on_host(span))
        world.digests[world.slots, span.index] = digests
    flipped = world.spans[4]
    world.host[world.slots[2], flipped.offset + 1000] ^= 4
    untouched = [pool.copy() for pool in world.pools]
    world.run(emulator)
    for span, pool in zip(world.spans, untouched, strict=True):
        pages = world.on_host(span)
        np.testing.assert_array_equal(world.on_device(span), pages)
        pool[world.rows.ravel()] = pages.reshape(-1, span.plane.element_size)
        np.testing.assert_array_equal(world.pools[span.index], pool)
    assert world.bad_pages.tolist() == [0, 0, 1, 0, 0]


def test_a_row_out_of_range_is_named(emulator: ctypes.CDLL) -> None:
    """The fault reads back as the page, row and table of the first index that was wrong."""
    world = _World(1, is_load=False, index=np.int64)
    world.rows[3, 5] = len(world.pools[0])
    world.rows[4, 0] = -1
    world.run(emulator)
    assert fault_of(int(world.fault[0])) == Fault(page=3, row=5, rows_table=3)
    assert world.bad_pages.tolist() == [0, 0, 0, 1, 1]
    assert not world.digests[world.slots[3:]].any()
    assert world.digests[world.slots[:3]].all()
