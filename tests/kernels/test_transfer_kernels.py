"""The transfer kernels' functions under AddressSanitizer and UBSan, where there is no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.kernels.emulator import compile_cpp

_HERE = Path(__file__).parent
_NUM_CASES = 1500


def _run(source: str, folder: Path, *arguments: str) -> str:
    """What a program says that is compiled with sanitizers and ends well."""
    program = folder / "program"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    compile_cpp(_HERE / source, program, "-g", *sanitizers)
    ran = subprocess.run(
        [str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={"ASAN_OPTIONS": "detect_leaks=0"},  # leak detection needs ptrace, often forbidden
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_random_transfers_under_sanitizers(tmp_path: Path) -> None:
    """Any size, stride, alignment and index is exact, and no byte outside is read or written."""
    told = _run("transfer_harness.cpp", tmp_path, str(_NUM_CASES))
    counts = [int(count) for count in re.findall(r"\d+", told)]
    assert counts[0] == _NUM_CASES
    # Every path has been taken, and not by chance once.
    assert len(counts) == 5
    assert min(counts) > _NUM_CASES // 10, told


def test_edges_under_sanitizers(tmp_path: Path) -> None:
    """Far sums and digests are found, every item is dealt once, and 0 is never a digest."""
    assert _run("transfer_edges.cpp", tmp_path) == "all edges\n"
