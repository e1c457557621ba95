"""The resolver's constexpr twin answers as Python does, as C++ and as NVRTC compiles it."""

from __future__ import annotations

import itertools
import subprocess
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.kernels.emulator import CSRC, compile_cpp

from kvferry.kernels import (
    UNROLLS,
    CopyDecision,
    CopyPath,
    GroupedConfig,
    RefusalKind,
    resolve_copy,
    resolve_grouped,
)

_HERE = Path(__file__).parent

_PATHS = tuple(CopyPath)
_REFUSALS = (None, *RefusalKind)
_NO_CONFIG = GroupedConfig(0, 0, 0, 0, 0)
_NUM_FIELDS = 11


def _record(decision: CopyDecision) -> tuple[int, ...]:
    """The fields in the order in which copy_config_dump.cpp writes them."""
    assert decision.chosen is not None
    config = decision.grouped.config or _NO_CONFIG
    return (
        _PATHS.index(decision.chosen),
        decision.flat.eligible,
        decision.flat.span_bytes,
        decision.flat.package,
        _REFUSALS.index(decision.grouped.refusal),
        config.unroll,
        config.threads,
        config.bytes_per_thread,
        config.package,
        config.packages_per_thread,
        config.packages_in_flight,
    )


def _same(dump: Path, expected: Iterable[tuple[str, CopyDecision]]) -> int:
    """Compare a dump with Python's answers, record by record; how many there were."""
    found = array("q", dump.read_bytes())
    records = zip(*[iter(found)] * _NUM_FIELDS, strict=True)
    count = 0
    for (case, decision), record in zip(expected, records, strict=True):
        # Not an assert on the two: pytest would take minutes to explain half a million.
        if record != _record(decision):
            pytest.fail(f"{case}: C++ says {record}, Python {_record(decision)}")
        count += 1
    return count


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What the twin answers, compiled through the shim with undefined behaviour trapped."""
    folder = tmp_path_factory.mktemp("twin")
    program, sizes, spans = folder / "dump", folder / "sizes", folder / "spans"
    sanitizer = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
    compile_cpp(_HERE / "copy_config_dump.cpp", program, *sanitizer)
    ran = subprocess.run(
        [program, sizes, spans], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    return sizes, spans


def test_the_twin_agrees_on_every_size_and_unroll(dumps: tuple[Path, Path]) -> None:
    """Sizes 1 to 65,536 with every unroll and none: path, packages and tiling are the same."""

    def expected() -> Iterator[tuple[str, CopyDecision]]:
        for size in range(1, 65537):
            for unroll in (None, *UNROLLS):
                yield f"{size} bytes, unroll {unroll}", resolve_copy(size, unroll=unroll)

    assert _same(dumps[0], expected()) == 65536 * 7


def test_the_twin_agrees_on_spans_and_alignments(dumps: tuple[Path, Path]) -> None:
    """Rows and the alignments of both sides lead to the same path and packages."""
    alignments = (1, 2, 4, 8, 16)

    def expected() -> Iterator[tuple[str, CopyDecision]]:
        for size, rows, unroll, source, destination in itertools.product(
            range(1, 161), (1, 2, 3, 16, 64), (None, 4, 32), alignments, alignments
        ):
            yield (
                f"{size} bytes, {rows} rows, unroll {unroll}, aligned {source}, {destination}",
                resolve_copy(
                    size,
                    rows=rows,
                    unroll=unroll,
                    source_alignment=source,
                    destination_alignment=destination,
                ),
            )
        yield "the largest", resolve_copy(1 << 40, rows=1 << 20)

    assert _same(dumps[1], expected()) == 160 * 5 * 3 * 25 + 1


def test_a_difference_is_seen(dumps: tuple[Path, Path], tmp_path: Path) -> None:
    """One changed number, or one record too few, fails the comparison."""
    decisions = [(f"{size} bytes", resolve_copy(size)) for size in (575, 576)]
    dump = tmp_path / "dump"
    records = array("q", itertools.chain(*(_record(decision) for _, decision in decisions)))
    dump.write_bytes(records.tobytes())
    assert _same(dump, decisions) == 2
    with pytest.raises(ValueError, match="shorter"):
        _same(dump, [*decisions, decisions[0]])
    records[_NUM_FIELDS + 9] += 1
    dump.write_bytes(records.tobytes())
    with pytest.raises(pytest.fail.Exception, match="576 bytes: C"):
        _same(dump, decisions)


def _golden_sizes() -> list[int]:
    lines = (_HERE / "golden_grouped.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line[:1] != "#"]


def _static_asserts() -> str:
    lines = ['#include "copy_config.cuh"', "using namespace kvferry;"]
    for size in _golden_sizes():
        for unroll in (None, *UNROLLS):
            decision = resolve_copy(size, unroll=unroll)
            config = decision.grouped.config
            call = f"resolve_copy({size}, 1, {unroll or 'kDefaultUnroll'})"
            chosen, _, _, flat_package, refusal, *_ = _record(decision)
            told = [
                f"static_cast<int>({call}.chosen) == {chosen}",
                f"{call}.flat_package == {flat_package}",
                f"static_cast<int>({call}.grouped.refusal) == {refusal}",
            ]
            if config is not None:
                told += [
                    f"{call}.grouped.{field} == {getattr(config, field)}"
                    for field in ("threads", "package", "packages_per_thread")
                ]
            lines.append(f'static_assert({" && ".join(told)}, "{size} bytes, unroll {unroll}");')
    # A kernel takes the answer as a constant.
    lines.append(
        'extern "C" __global__ void fill(int *out) {\n'
        "  constexpr GroupedConfig kConfig = resolve_grouped(656);\n"
        "  int held[kConfig.packages_in_flight] = {};\n"
        "  out[threadIdx.x] = held[0] + static_cast<int>(kConfig.packages_in_flight);\n"
        "}"
    )
    return "\n".join(lines) + "\n"


def _compile(source: str) -> tuple[bool, str]:
    """Compile for sm_90 with our headers only; whether it did, and the log."""
    from cuda.bindings import nvrtc

    names = [b"copy_config.cuh", b"shim.cuh"]
    texts = [(CSRC / name.decode()).read_bytes() for name in names]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"t.cu", len(names), texts, names)
    options = [b"--std=c++17", b"-arch=sm_90"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    # The log is written into the bytes object, and Python shares those of one byte.
    log = bytes(bytearray(size + 1))
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    return status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.rstrip(b"\0").decode()


def test_nvrtc_agrees_on_the_golden_table() -> None:
    """NVRTC compiles the twin for sm_90, and static assertions hold it to Python's answers."""
    compiled, log = _compile(_static_asserts())
    assert compiled, log


def test_nvrtc_sees_a_difference() -> None:
    """A false static assertion over the twin fails to compile."""
    source = _static_asserts() + 'static_assert(resolve_grouped(576).threads == 8, "wrong");\n'
    compiled, log = _compile(source)
    assert not compiled
    assert "wrong" in log


def test_python_and_golden_table_cover_both_outcomes() -> None:
    """The sample that NVRTC checks has sizes that tile and sizes that do not."""
    outcomes = {isinstance(resolve_grouped(size), GroupedConfig) for size in _golden_sizes()}
    assert outcomes == {True, False}
