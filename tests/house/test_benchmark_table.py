"""The tables of docs/performance.md: what `make gpu` wrote, and nothing by hand."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.transfer.span_launcher import DEFAULT_BLOCKS

_ROOT = Path(__file__).parents[2]
_SCRIPT = _ROOT / "benchmarks" / "table.py"


_MACHINE = {
    "gpu": "NVIDIA H999", "driver": "999.1", "python": "3.12.3", "date": "2026-11-30 10:00",
    "commit": "0123456789abcdef", "packages": {"torch": "2.11.0"},
}  # fmt: skip
_LINK = {"h2d": 50.0, "d2h": 50.0}


def _row(what: str, h2d: float, d2h: float, size: int = 576, **more: Any) -> dict[str, Any]:
    return {
        "element_size": size, "device_run": 1, "host_layout": "layer_first", "what": what,
        "num_bytes": 500_000_000, "host_run": 8, "asked": "direct", "mover": "direct",
        "h2d": h2d * 50, "d2h": d2h * 50, "h2d_over_m": h2d, "d2h_over_m": d2h, **more,
    }  # fmt: skip


def _staged(size: int, run: int, h2d: float, d2h: float, **more: Any) -> dict[str, Any]:
    told = {"host_layout": "page_major", "asked": "staged", "mover": "staged", "device_run": run}
    return _row("staged flat", h2d, d2h, size, **{**told, **more})


def _beside(mover: str, compute: str, direction: str, **more: Any) -> dict[str, Any]:
    return {
        "mover": mover, "compute": compute, "direction": direction, "gb_per_sec": 40.0,
        "over_m": 0.8, "over_memcpy": 0.91, **more,
    }  # fmt: skip


_SLOWED = {"alone_ms": 1.5, "beside_ms": 1.6, "slowdown": 0.067, "extra_ms_per_gb": 1.2}

_RESULTS = {
    "machine": _MACHINE,
    "steps": {
        "pytest": {
            "result": None, "status": "passed", "seconds": 61.2,
            "output": "...\n750 passed, 77 deselected in 60.48s\n",
        },
        "racecheck": {
            "result": None, "status": "failed", "seconds": 5.0, "output": "3 hazards displayed (3",
        },
        "direct_layer_first": {
            "result": {
                "command": "benchmarks/gpu/throughput.py --layouts layer_first",
                "link": _LINK,
                "rows": [
                    _row("flat", 0.9, 0.8),
                    _row("grouped", 0.5, 0.4),
                    _row("torch index+copy", 0.3, 0.2, mover="torch"),
                    _row("memcpy batch", 0.7, 0.6, mover="batch"),
                    _row("realign", 0.55, 0.1, size=132),
                ],
            }
        },
        "staged_elements": {
            "result": {
                "command": "benchmarks/gpu/throughput.py --mover staged",
                "link": _LINK,
                "rows": [
                    _staged(656, 1, 0.98, 0.96),
                    _staged(656, 64, 0.96, 0.97),
                    _staged(576, 64, 0.99, 0.99, num_exposed=2),
                    _staged(656, 1, 0.5, 0.5, host_run=1),
                    _staged(656, 1, 0.4, 0.4, digests=False),
                    _staged(132, 1, 0.99, 0.89),
                    _staged(656, 1, 0.86, 0.84, host_run=1, asked="best"),
                ],
            }
        },
        "beside": {
            "result": {
                "command": "benchmarks/gpu/beside.py --json /tmp/a.json",
                "link": _LINK,
                "rows": [
                    _beside("memcpy", "gemm", "h2d", **_SLOWED),
                    _beside("staged", "gemm", "h2d", **_SLOWED),
                    _beside("staged", "gemv", "d2h", **_SLOWED),
                    _beside("staged", "none", "both"),
                ],
            }
        },
        "latency": {
            "result": {
                "command": "benchmarks/gpu/latency.py",
                "link": _LINK,
                "rows": [
                    {
                        "case": "one_page", "mover": "best", "path": "flat", "us": 90.0,
                        "p95_us": 99.0, "usable_us": 85.0, "memcpy_us": 60.0, "over_memcpy": 1.5,
                    },
                    {
                        "case": "first_layer", "mover": "best", "us": 400.0, "gpu_us": 200.0,
                        "layer_us": 150.0, "most_us": 375.0, "layers_per_step": [1, 1, 2],
                    },
                    {
                        "case": "submit", "mover": "staged", "num_runs": 1, "copies": 10,
                        "pieces": 0, "steps": 4, "us": 240.0,
                    },
                    {"case": "further_copy", "mover": "staged", "us": 2.5},
                    {
                        "case": "digests", "mover": "staged", "direction": "h2d", "on": 50.0,
                        "off": 50.5, "cost": 0.01,
                    },
                ],
            }
        },
        "cache_bench": {
            "result": {
                "command": "benchmarks/gpu/cache.py --json /tmp/a.json",
                "link": _LINK,
                "rows": [
                    {
                        "case": "engine", "what": "load", "path": "staged flat",
                        "direction": "h2d", "gb_per_sec": 49.0, "over_m": 0.98, "num_exposed": 0,
                    },
                    {
                        "case": "host", "what": "match and load", "path": "staged flat",
                        "direction": "h2d", "gb_per_sec": 47.0, "over_m": 0.94, "num_exposed": 1,
                        "over_engine": 0.96, "ms": 10.51,
                    },
                    {
                        "case": "metrics", "what": "store", "direction": "d2h", "off": 48.0,
                        "on": 47.9, "cost": 0.002, "call_us": 31.0,
                    },
                    {"case": "disk", "what": "prefetch", "workers": 4, "ms": 120.5,
                     "gb_per_sec": 4.08},
                    {"case": "disk", "what": "nothing", "skipped": "xxhash is not installed"},
                    {"case": "cpu", "what": "match, all there", "us": 210.5},
                    {"case": "idle", "what": "poll", "us": 25.0},
                    {"case": "idle", "what": "nobody calls, 4 threads", "ms_per_sec": 0.11},
                ],
            }
        },
        "engine": {
            "result": {
                "command": "benchmarks/gpu/toy_engine.py --json /tmp/a.json",
                "link": _LINK,
                "rows": [
                    {
                        "case": "idle", "what": "off", "tokens_per_sec": 2000.4, "rounds": 15,
                        "spread": 0.021,
                    },
                    {
                        "case": "idle", "what": "idle", "tokens_per_sec": 1960.0, "rounds": 15,
                        "spread": 0.02, "low": 0.009, "cost": 0.015, "high": 0.021,
                        "in_calls": 0.0031, "us_per_step": 26.4,
                    },
                    {
                        "case": "repeats", "what": "bfloat16", "prompt": "the same bits",
                        "step": "other bits from layer 3 on",
                    },
                    {
                        "case": "tokens", "what": "off", "tokens_per_sec": 2000.4,
                        "over_off": 1.0, "spread": 0.021, "model_mb": 512,
                    },
                    {
                        "case": "tokens", "what": "hits", "tokens_per_sec": 2400.0,
                        "over_off": 1.2, "spread": 0.02, "hit_tokens": 32768,
                    },
                    {"case": "answers", "what": "idle", "of": 8, "differing": 0},
                    {"case": "answers", "what": "hits", "of": 8, "differing": 2},
                    {
                        "case": "first_token", "what": "computed", "tokens": 16386, "ms": 200.0,
                        "hit_tokens": 0, "mb": 0,
                    },
                    {
                        "case": "first_token", "what": "from the host", "tokens": 16386,
                        "ms": 20.0, "hit_tokens": 16384, "mb": 537,
                    },
                    {
                        "case": "first_token", "what": "from files",
                        "skipped": "xxhash is not installed",
                    },
                ],
            }
        },
        "first_token": {
            "result": {
                "command": "benchmarks/gpu/first_token.py --json /tmp/a.json",
                "link": _LINK,
                "rows": [
                    {
                        "case": "MLA-shaped", "what": "computed", "tokens": 16386,
                        "hit_tokens": 0, "ms": 800.0, "least_ms": 790.0, "most_ms": 820.0,
                    },
                    {
                        "case": "MLA-shaped", "what": "from the host", "tokens": 16386,
                        "hit_tokens": 16384, "ms": 160.0, "least_ms": 150.0, "most_ms": 170.0,
                    },
                    {
                        "case": "MLA-shaped", "what": "from files", "tokens": 16386,
                        "hit_tokens": 16384, "ms": 400.0, "least_ms": 390.0, "most_ms": 410.0,
                        "in_memory": 0.25,
                    },
                    {
                        "case": "8B-shaped GQA", "what": "from files",
                        "skipped": "xxhash is not installed",
                    },
                ],
            }
        },
        "long_contexts": {
            "status": "passed", "seconds": 301.0, "output": "",
            "result": {
                "command": "benchmarks/gpu/long_contexts.py",
                "rows": [
                    {
                        "planes": [["latent", 78, 576]], "sequences": 8, "tokens": 131072,
                        "sequence_bytes": 5.9e9, "pool_bytes": 28e9, "stores": 9, "loads": 8,
                        "evictions": 7, "compared": 32, "bad_pages": 0, "flat": False,
                        "device_growth_mib": 0, "resident_growth_mib": 900,
                    }
                ],
            }
        },
    },
}  # fmt: skip


def _run(
    tmp_path: Path, *arguments: str, results: dict[str, Any] = _RESULTS
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(results))
    return subprocess.run(
        [sys.executable, str(_SCRIPT), str(file), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_what_was_shown_right_comes_first(tmp_path: Path) -> None:
    """Each step with what it says, and a failed one stands out; others have no row."""
    told = _run(tmp_path).stdout.splitlines()
    rows = [line for line in told if line.startswith(("| tests on", "| compute-sanitizer"))]
    assert rows == [
        "| tests on the GPU | passed | 750 passed, 77 deselected in 60.48s | 61 |",
        "| compute-sanitizer, racecheck | **failed** | 3 hazards displayed | 5 |",
    ]


def test_the_table_has_figures_targets_and_what_misses_them(tmp_path: Path) -> None:
    """Each case is a row with its target beside it, and a share below that stands out."""
    ran = _run(tmp_path)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("NVIDIA H999, driver 999.1, torch 2.11.0")
    assert "M is 50.0 GB/s H2D and 50.0 D2H" in ran.stdout
    assert (
        "| layer_first | 8 | 576 | 1 | flat | 45.0 / 40.0 | 0.90 / **0.80** | 0.87 / 0.87 | "
        "0.50 / 0.40 | 0.30 / 0.20 | 0.70 / 0.60 |"
    ) in lines
    assert (
        "| layer_first | 8 | 132 | 1 | realign | 27.5 / 5.0 | 0.55 / 0.10 | 0.50 / - | - | - | - |"
    ) in lines
    assert (
        "| page_major | 8 | 656 | 64 | staged flat | 48.0 / 48.5 | **0.96** / 0.97 | "
        "0.97 / 0.95 | - | - | - |"
    ) in lines
    assert any("| staged flat, with the CPU's time |" in line for line in lines)
    # One that the engine chose stands beside one that was asked for, though both went one way.
    assert (
        "| page_major | 1 | 656 | 1 | chosen: staged flat | 43.0 / 42.0 | 0.86 / **0.84** | "
        "0.85 / 0.85 | - | - | - |"
    ) in lines


@pytest.mark.parametrize(
    "line",
    [
        (
            "| direct, layer_first, run 1, 576 B, D2H | ≥ 0.870 M | **0.800 M** | "
            "576 B, run 1, 500 MB, flat | 1 | **-0.070 M** | **no** |"
        ),
        (
            "| staged, elements of 512 B and more, H2D | ≥ 0.970 M | **0.960 M** | "
            "656 B, run 64, 500 MB, staged flat | 3 | **-0.010 M** | **no** |"
        ),
        (
            "| staged, elements of 512 B and more, D2H | ≥ 0.950 M | 0.960 M | "
            "656 B, run 1, 500 MB, staged flat | 3 | +0.010 M | yes |"
        ),
        (
            "| staged, elements below 512 B, D2H | ≥ 0.900 M | **0.890 M** | "
            "132 B, run 1, 500 MB, staged flat | 1 | **-0.010 M** | **no** |"
        ),
        (
            "| host runs of one page, the faster mover, H2D | ≥ 0.850 M | 0.860 M | "
            "656 B, run 1, 500 MB, staged flat | 1 | +0.010 M | yes |"
        ),
        "| staged beside the GEMM, H2D | ≥ 0.700 M | 0.800 M | - | 1 | +0.100 M | yes |",
        (
            "| staged beside the GEMM: time it loses | ≤ 1.00 ms/GB | **1.20 ms/GB** | H2D | 1 | "
            "**-0.20 ms/GB** | **no** |"
        ),
        (
            "| staged beside the GEMV: slower, D2H | ≤ 6.0 % | **6.7 %** | - | 1 | **-0.7 %** | "
            "**no** |"
        ),
        (
            "| staged, both directions at once | ≥ 0.920 of two memcpys | "
            "**0.910 of two memcpys** | all | 1 | **-0.010 of two memcpys** | **no** |"
        ),
        "| a load of one page | ≤ 1.60 times | 1.50 times | flat | 1 | +0.10 times | yes |",
        (
            "| the first layer of a load | ≤ 375 µs | **400 µs** | best | 1 | **-25.00 µs** | "
            "**no** |"
        ),
        (
            "| submitting a load of 61 layers, one host run | ≤ 250 µs | 240 µs | staged | 1 | "
            "+10.00 µs | yes |"
        ),
        "| each further copy call | ≤ 3.00 µs | 2.50 µs | staged | 1 | +0.50 µs | yes |",
        (
            "| match and load through a cache, over its engine alone | ≥ 0.97 times | "
            "**0.96 times** | staged flat | 1 | **-0.01 times** | **no** |"
        ),
        "| transfers timed against not timed | ≤ 2.0 % | 0.2 % | store | 1 | +1.8 % | yes |",
        "| a poll of an idle cache | ≤ 20.00 µs | **25.00 µs** | - | 1 | **-5.00 µs** | **no** |",
        "| digests on against off | ≤ 2.0 % | 1.0 % | staged, H2D | 1 | +1.0 % | yes |",
        (
            "| an idle cache, of an engine's time | ≤ 1.0 % | **2.1 %** | 1.50 %; with 95 % at "
            "most | 1 | **-1.1 %** | **no** |"
        ),
        (
            "| an idle cache, in its calls | ≤ 1.0 % | 0.3 % | its calls, counted one by one | 1 | "
            "+0.7 % | yes |"
        ),
    ],
)
def test_each_target_has_its_worst_cell(tmp_path: Path, line: str) -> None:
    """One row a target, with the cell that is worst of it; one that misses stands out."""
    lines = _run(tmp_path).stdout.splitlines()
    assert line in lines
    target = line.split("|")[1]
    assert sum(other.startswith(f"|{target}|") for other in lines) == 1


def test_the_other_benchmarks_have_tables(tmp_path: Path) -> None:
    """What is measured beside compute, of latencies and over minutes is told whole."""
    lines = _run(tmp_path).stdout.splitlines()
    assert "`benchmarks/gpu/beside.py`" in lines
    for line in (
        "| engine | load | - | 49.0 | 0.98 | staged flat |",
        (
            "| host | match and load | 10.51 | 47.0 | 0.94 | staged flat; 0.96 of the engine "
            "alone; with the CPU's time |"
        ),
        ("| metrics | store | - | - | - | 47.9 GB/s timed, 48.0 not; a call takes 31.0 µs more |"),
        "| disk | prefetch | 120.5 | 4.1 | - | 4 threads |",
        "| disk | nothing | - | - | - | **skipped**: xxhash is not installed |",
        ("| tokens | off | 2,000 tokens/s | 1.000 | 2.1 % between rounds; a model of 512 MB |"),
        (
            "| idle | idle | 1,960 tokens/s | 0.985 | 2.0 % between rounds; 1.50 % slower, 0.90 to "
            "2.10 with 95 %; 15 rounds in lockstep; calls of the cache take 0.31 % of its time, "
            "26 µs a step |"
        ),
        (
            "| computed twice | bfloat16 | - | - | a prompt: the same bits; a step of all: other "
            "bits from layer 3 on |"
        ),
        (
            "| tokens | hits | 2,400 tokens/s | 1.200 | 2.0 % between rounds; 32,768 tokens of a "
            "round were loaded |"
        ),
        ("| answers, float32 | idle | - | - | 0 of 8 answers differ |"),
        ("| answers, float32 | hits | - | - | **2 of 8 answers differ** |"),
        (
            "| MLA-shaped | from the host | 160.0 | 0.200 | 150.0 to 170.0 ms; 16,386 tokens, "
            "16,384 of them loaded |"
        ),
        (
            "| MLA-shaped | from files | 400.0 | 0.500 | 390.0 to 410.0 ms; 16,386 tokens, 16,384 "
            "of them loaded; 25 % of the files were in the system's memory |"
        ),
        "| 8B-shaped GQA | from files | - | - | **skipped**: xxhash is not installed |",
        "| first token | computed | 200.0 ms | 1.000 | 16,386 tokens, 0 of them loaded |",
        (
            "| first token | from the host | 20.0 ms | 0.100 | 16,386 tokens, 16,384 of them "
            "loaded; 537 MB |"
        ),
        "| first token | from files | - | - | **skipped**: xxhash is not installed |",
        "| cpu | match, all there | - | - | - | 210.5 µs |",
        "| idle | nobody calls, 4 threads | - | - | - | 0.11 ms of CPU a second |",
        "| memcpy | gemm | h2d | 40.0 | 0.80 | 0.91 | 1.500, 1.600 ms | 6.7 % | 1.20 ms/GB |",
        "| staged | - | both | 40.0 | 0.80 | 0.91 | - | - | - |",
        (
            "| first layer | best | 400.0 | 200.0 µs of the GPU; one layer takes 150.0 µs at M; "
            "layers a step: 1, 1, 2 |"
        ),
        "| digests | staged | - | H2D: 50.0 GB/s with, 50.5 without: 1.0 % longer |",
        (
            "| 78 layers of 576 B | 8 of 131,072 tokens, 5.9 GB each | 28.0 GB | 9, 8, 7 | 32 | "
            "0 | **0, 900 MiB** |"
        ),
    ):
        assert line in lines


def test_steps_of_several_files_are_taken_together(tmp_path: Path) -> None:
    """A step of a later file stands for that of an earlier one, and the others stay."""
    later = tmp_path / "later.json"
    step = {
        "result": {
            "command": "later", "link": _LINK, "rows": [_beside("staged", "none", "both")],
        }
    }  # fmt: skip
    later.write_text(json.dumps({"machine": _MACHINE, "steps": {"beside": step}}))
    ran = _run(tmp_path, str(later))
    assert ran.returncode == 0, ran.stderr
    assert "`later`" in ran.stdout
    assert "beside the GEMM" not in ran.stdout
    assert "| page_major | 8 | 656 | 64 | staged flat |" in ran.stdout


def test_a_document_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    """What stood there is replaced, the rest stays, and a second run changes nothing."""
    document = tmp_path / "a.md"
    document.write_text("before\n<!-- tables: begin -->\nold\n<!-- tables: end -->\nafter\n")
    assert _run(tmp_path, "--write", str(document)).returncode == 0
    first = document.read_text()
    assert first.startswith("before\n")
    assert first.endswith("after\n")
    assert "NVIDIA H999" in first
    assert "\nold\n" not in first
    assert _run(tmp_path, "--write", str(document)).returncode == 0
    assert document.read_text() == first


@pytest.mark.parametrize("text", ["", "<!-- tables: begin -->", "<!-- tables: end -->"])
def test_a_document_without_marks_is_left_alone(tmp_path: Path, text: str) -> None:
    """Where the marks are missing nothing is written, and the status is not 0."""
    document = tmp_path / "a.md"
    document.write_text(text)
    ran = _run(tmp_path, "--write", str(document))
    assert ran.returncode == 2
    assert "has no <!-- tables: begin -->" in ran.stderr
    assert document.read_text() == text


def test_the_document_has_the_marks() -> None:
    """docs/performance.md can be written."""
    text = (_ROOT / "docs" / "performance.md").read_text()
    assert 0 < text.find("<!-- tables: begin -->") < text.find("<!-- tables: end -->")


def test_the_document_has_the_default_blocks() -> None:
    """The quotas it names are those that launches get."""
    text = (_ROOT / "docs" / "performance.md").read_text()
    named = re.findall(r"^\| `(\w+)` \| (\d+) \|$", text, re.MULTILINE)
    assert dict(named) == {path.value: str(blocks) for path, blocks in DEFAULT_BLOCKS.items()}
