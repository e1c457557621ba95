"""The benchmarks that need a GPU, as far as they can be tested without one."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import first_token
from cache import cpu_row, line_of
from latency import further_copy_us
from long_contexts import Sample, growth_mib, thinned
from overlap import Loss, inside, lost, moved_until, rate, rates_of_both
from rig import PAGE_SIZE, device_slots, in_runs, pages_of
from sharded import row_of
from toy_engine import Serving, arguments

_ROOT = Path(__file__).parents[2]
_FOLDER = _ROOT / "benchmarks" / "gpu"
_SCRIPTS = (
    "throughput",
    "beside",
    "latency",
    "cache",
    "toy_engine",
    "first_token",
    "long_contexts",
    "sharded",
)


def _steps() -> list[Any]:
    found = runpy.run_path(str(_ROOT / "scripts" / "gpu.py"), run_name="gpu_steps")
    return list(found["_steps"](quick=False))


@pytest.mark.parametrize("name", _SCRIPTS)
def test_help_needs_neither_a_gpu_nor_torch(name: str) -> None:
    """The options are told where torch cannot even be imported."""
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.modules['cuda'] = None; "
        "sys.path.insert(0, sys.argv.pop(1)); runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    script = _FOLDER / f"{name}.py"
    code = code.replace("sys.argv[0]", repr(str(script)))
    ran = subprocess.run(
        [sys.executable, "-c", code, str(_FOLDER), "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={"PYTHONPATH": str(_ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
    assert "--json FILE" in ran.stdout


@pytest.mark.parametrize("step", [step for step in _steps() if "benchmarks/" in step.command[1]],
                         ids=lambda step: step.name)  # fmt: skip
def test_the_steps_of_make_gpu_can_be_read(step: Any) -> None:
    """Each names a script that is there, with arguments that it takes."""
    script = _ROOT / step.command[1]
    assert script.is_file()
    if script.parent == _FOLDER:
        arguments = importlib.import_module(script.stem).arguments()
        given = arguments.parse_args(list(step.command[2:]))
        assert str(given.json) == "{json}"


def test_groups_and_soaks_of_make_gpu() -> None:
    """`--only staged` are the staged steps; what takes minutes runs only where it is asked for."""
    script = runpy.run_path(str(_ROOT / "scripts" / "gpu.py"), run_name="gpu_steps")
    known = [step.name for step in _steps()]

    def chosen(only: str | None) -> set[str]:
        found: set[str] = script["_chosen"](None, known, only, "")
        return found

    assert {"long_contexts", "long_write_backs"} <= set(known)
    assert not {"long_contexts", "long_write_backs"} & chosen(None)
    assert {"beside", "latency", "jit"} <= chosen(None)
    assert chosen("long_contexts,latency") == {"long_contexts", "latency"}
    staged = chosen("staged")
    assert len(staged) >= 3
    assert all(name.startswith("staged_") for name in staged)
    assert {"direct_layer_first", "direct_token_major"} <= chosen("direct")


def test_pages_come_in_runs() -> None:
    """All numbers once, neighbours within a run, and runs in another order."""
    order = in_runs(np.random.default_rng(1), 64, 8)
    assert sorted(order) == list(range(64))
    assert order.tolist() != list(range(64))
    assert (np.diff(order.reshape(8, 8)) == 1).all()
    assert sorted(in_runs(np.random.default_rng(1), 13, 8)) == list(range(13))
    slots = device_slots(np.random.default_rng(1), 3, 16)
    assert slots.shape == (3, PAGE_SIZE)
    assert (np.diff(slots.reshape(-1, 16)) == 1).all()


def test_the_payload_is_a_whole_number_of_host_runs() -> None:
    """As close to what was asked for as pages allow, and never nothing."""
    assert pages_of(512e6, 589_824, 8) == 872
    assert pages_of(512e6, 38_338_560, 8) == 16
    assert pages_of(1, 38_338_560, 8) == 8


def test_steps_inside_a_window_count() -> None:
    """A step that begins before, or ends after, was only partly beside a transfer."""
    assert inside([0, 1, 3, 6, 10], 1, 6) == [2, 3]
    assert inside([0, 1, 3, 6, 10], 1.5, 5.9) == []


def test_what_transfers_cost_compute() -> None:
    """The same steps alone, and the time that is lost for what was moved."""
    alone = [[0.0, 9.0, 11.0, 13.0, 15.0, 17.0], [0.0, 1.0, 3.0, 5.0, 7.0, 9.0]]
    beside = [0.0, 2.0, 4.5, 7.0, 9.5, 12.0]
    loss = lost(alone, beside, [(2.0, 4.0), (4.0, 7.5)])
    assert loss == Loss(alone_ms=2.0, beside_ms=2.5, window_ms=5.5)
    assert loss.slowdown == pytest.approx(0.25)
    # A fifth of 5.5 ms, for 2 GB.
    assert loss.extra_ms_per_gb(2_000_000_000) == pytest.approx(0.55)


def test_compute_that_ends_first_tells_nothing() -> None:
    """Then some of the transfers had the GPU to themselves."""
    marks = [0.0, 1.0, 2.0, 3.0]
    assert lost([marks], marks, [(0.5, 3.5)]) is None
    assert lost([marks], marks, [(1.2, 1.9)]) is None


def test_rates_of_both_directions_are_of_the_time_in_which_both_run() -> None:
    """The slower one has the link to itself at the end, which does not count."""
    spans = {"h2d": [(0.0, 10.0), (10.0, 20.0)], "d2h": [(0.0, 16.0), (16.0, 32.0)]}
    assert moved_until(spans["d2h"], 20.0) == pytest.approx(1.25)
    rates = rates_of_both(spans, 1_000_000_000)
    assert rates["h2d"] == pytest.approx(100)
    assert rates["d2h"] == pytest.approx(62.5)
    assert rate(spans["d2h"], 1_000_000_000) == pytest.approx(62.5)


def test_the_cost_of_a_further_copy() -> None:
    """Loads are compared that differ in their copies alone."""
    rows: list[dict[str, Any]] = [
        {"steps": 7, "copies": 10, "pieces": 0, "us": 200.0},
        {"steps": 7, "copies": 110, "pieces": 0, "us": 450.0},
        {"steps": 7, "copies": 220, "pieces": 900, "us": 460.0},
        {"steps": 5, "copies": 200, "pieces": 0, "us": 500.0},
        {"steps": 5, "copies": 210, "pieces": 0, "us": 900.0},
    ]
    assert further_copy_us(rows) == pytest.approx(2.5)
    assert further_copy_us(rows[:1]) is None
    assert further_copy_us([]) is None


def test_a_load_of_several_ranks_is_as_slow_as_its_slowest() -> None:
    """By repeat; the median of those, for what each rank has and for all together."""
    row = row_of("sharded", 2, 1_000_000_000, [[0.1, 0.4, 0.2], [0.3, 0.1, 0.2]])
    assert row == {
        "way": "sharded",
        "ranks": 2,
        "ms": 300.0,
        "gb_per_sec_each": pytest.approx(3.33),
        "gb_per_sec_all": pytest.approx(6.67),
    }


def test_rows_of_the_cache_are_printed_whole() -> None:
    """Every figure has its name and value; a call is told in microseconds, by its median."""
    row = cpu_row("match", [3e-6, 2e-6, 40e-6])
    assert row == {"case": "cpu", "what": "match", "us": 3.0}
    assert cpu_row("poll", [1e-6], "idle")["case"] == "idle"
    assert " ".join(line_of({**row, "over_m": 0.9}).split()) == "cpu match us 3.0 over m 0.9"


def test_the_engine_is_served_in_every_way() -> None:
    """All rows on the CPU with a tiny model; hits are what they should be, and outputs equal."""
    pytest.importorskip("torch")
    told = (
        "--layers 2 --width 128 --words 300 --requests 3 --prompt 140 --new 3 --long 270 "
        "--chunk 64 --rounds 6 --turns 1"
    )
    rows = list(Serving(arguments().parse_args(told.split()), "cpu").rows())
    assert [(row["case"], row["what"]) for row in rows] == [
        *(("idle", way) for way in ("off", "idle", "off again")),
        ("repeats", "bfloat16"),
        *(("tokens", way) for way in ("off", "stores", "hits")),
        *(("first_token", how) for how in ("computed", "from the host", "from files")),
        ("repeats", "float32"),
        *(("answers", way) for way in ("off again", "idle", "stores", "hits")),
    ]
    idle = rows[1]
    assert idle["low"] <= idle["cost"] <= idle["high"]
    assert 0 < idle["in_calls"] < 1
    assert idle["us_per_step"] > 0
    assert [row["rounds"] for row in rows[:3]] == [5] * 3  # and one that counts
    assert {
        row[name] for row in rows if row["case"] == "repeats" for name in ("prompt", "step")
    } == {"the same bits"}
    assert [row["hit_tokens"] for row in rows[6:10]] == [3 * 128, 0, 256, 256]
    assert [(row["of"], row["differing"]) for row in rows[-4:]] == [(3, 0)] * 4


def test_a_model_that_does_not_repeat_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a layer gives other bits the second time, the first such layer is named."""
    torch = pytest.importorskip("torch")
    told = "--layers 3 --width 128 --words 300 --prompt 70 --new 2 --long 80"
    serving = Serving(arguments().parse_args(told.split()), "cpu")
    forward, calls = serving.model.forward, []

    def unsteady(pool: Any, *given: Any) -> Any:
        tokens = forward(pool, *given)
        calls.append(given)
        if len(calls) == 2:
            pool[1, 5] += 1
        return torch.full_like(tokens, len(calls)) if len(calls) == 4 else tokens

    monkeypatch.setattr(serving.model, "forward", unsteady)
    row = serving._repeats()
    assert row["prompt"] == "other bits from layer 1 on"
    assert row["step"] == "other bits behind the layers"


def test_first_tokens_of_models_of_transformers() -> None:
    """All rows with tiny models; hits are what they should be, and answers are compared."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    args = first_token.arguments().parse_args(["--tiny", "--tokens", "64", "--rounds", "1"])
    rows = list(first_token.rows_of_all(args, "cpu"))
    hits = {"computed": 0, "kept": 0, "from the host": 64, "from files": 64}
    assert [(row["case"], row["what"], row["hit_tokens"]) for row in rows] == [
        (case, what, count)
        for case in ("8B-shaped GQA", "MLA-shaped")
        for what, count in hits.items()
    ]
    assert all(row["least_ms"] <= row["ms"] <= row["most_ms"] for row in rows)


@pytest.mark.parametrize("wrong", ["tokens", "logits", "hits"])
def test_no_first_token_is_told_of_another_answer(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit, one token or one page that differs ends the benchmark."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    kept = first_token.Measured.kept

    def spoiled(self: Any, *given: Any) -> Any:
        found = kept(self, *given)
        if wrong == "hits":
            return found._replace(hits=found.hits + 16)
        changed = getattr(found, wrong).clone()
        changed.view(-1)[-1] += 1
        return found._replace(**{wrong: changed})

    monkeypatch.setattr(first_token.Measured, "kept", spoiled)
    args = first_token.arguments().parse_args(["--tiny", "--tokens", "64", "--rounds", "1"])
    with pytest.raises(AssertionError, match="not 0" if wrong == "hits" else "another answer"):
        list(first_token.rows_of_all(args, "cpu"))


def test_memory_that_grows_is_seen() -> None:
    """What the first quarter takes is no growth; what comes after is."""
    flat = [Sample(turn, 100 if turn < 3 else 500, 900) for turn in range(40)]
    assert growth_mib(flat) == (0, 0)
    leaks = [Sample(turn, 500, 900 + 10 * turn) for turn in range(40)]
    assert growth_mib(leaks) == (0, 200)
    assert growth_mib(flat[:1]) == (0, 0)


def test_samples_are_thinned_evenly() -> None:
    """The last one stays."""
    samples = [Sample(turn, 0, 0) for turn in range(1001)]
    kept = thinned(samples, 100)
    assert len(kept) <= 100
    assert kept[-1] == samples[-1]
    assert thinned(samples[:3], 100) == samples[:3]
