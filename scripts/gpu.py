"""Everything that needs a GPU, in one go: tests, self-test, benchmarks and compute-sanitizer.

    make gpu PYTHON=python3
    make gpu PYTHON=python3 GPU_ARGS="--only pytest,selftest"

It installs nothing and runs from `src/` with the interpreter it is started with. Each step is a
process with a time limit. What came out goes, step by step, into one JSON file under
`benchmarks/results/`; the exit status is 0 if no step failed. A step whose tool is not there is
skipped, and named at the end; a step that ran and tested nothing has failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SOURCE = _ROOT / "src"
_KEPT_CHARACTERS = 4000

EXIT_FAILED, EXIT_NO_GPU = 1, 2

# Tests marked gpu. Their folders are named, as collecting all others takes longer than these run.
_TESTS = (
    "tests/gpu",
    "tests/kernels/jit/test_gpu.py",
    "tests/memory/test_pin_driver.py",
    "tests/cli/test_doctor.py",
)
# Tests of the cache, in a step of their own: they take about as long as all others.
_CACHE_TESTS = ("tests/gpu/test_cache.py",)
# Tests of PrefixCache with models of transformers, which may not be there.
_PREFIX_TESTS = ("tests/gpu/test_prefix_cache.py",)
# Each starts a process with torch and a context of its own.
_RANK_TESTS = ("tests/gpu/test_shared_host.py",)
# Other versions of torch and numpy warn about other things, and plug-ins of the machine about
# themselves: that is no failure. What a destructor or a thread swallows is one.
_PYTEST_OPTIONS = (
    *("-m", "gpu", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--durations=10"),
    *("-W", "default", "-W", "error::pytest.PytestUnraisableExceptionWarning"),
    *("-W", "error::pytest.PytestUnhandledThreadExceptionWarning"),
)
# The rows of the targets: docs/performance.md.
# Half a gigabyte and more in each transfer, but for the small prompts: this tells what a byte costs
# from what a transfer costs whatever its size is.
_THROUGHPUT = {
    "direct_small_elements": (
        "--mover direct --layouts layer_first --paths best grouped --tokens 262144 "
        "--elements 66 132"
    ),
    "direct_layer_first": (
        "--mover direct --layouts layer_first --paths best grouped --tokens 65536 "
        "--elements 512 576 656 1152 2048 4096"
    ),
    "direct_small_prompts": (
        "--mover direct --layouts layer_first --runs 64 --tokens 8192 --layers 61 "
        "--elements 132 576 656 1152"
    ),
    "direct_token_major": (
        "--mover direct --layouts token_major --elements 576 656 1152 --runs 1 --tokens 12288 "
        "--layers 61"
    ),
    "direct_page_major": (
        "--mover direct --layouts page_major --runs 1 64 --tokens 32768 "
        "--elements 64 66 131 132 576 656 1152"
    ),
    "staged_elements": (
        "--mover staged --layouts page_major --no-baselines "
        "--elements 512 528 576 584 656 1024 1152 2048 4096 37440"
    ),
    "staged_small_elements": (
        "--mover staged --layouts page_major --no-baselines --elements 64 66 131 132 160 288"
    ),
    "staged_single_pages": (
        "--mover best direct staged --layouts page_major --no-baselines --host-run 1 "
        "--elements 656 --runs 1 --layers 61"
    ),
}
_SANITIZERS = (("memcheck", "30"), ("racecheck", "12"), ("initcheck", "20 --strided-copies"))
_SANITIZER_SECS = 45
# Steps that take minutes: only where they are asked for.
_SOAKS = frozenset({"long_contexts", "long_write_backs"})
# 40 times the 5 rounds that the tests make without.
_SOAK_OPTIONS = ("-m", "gpu and soak", "--soak-factor", "40", "-o", "timeout=400")


@dataclasses.dataclass(frozen=True)
class _Step:
    """One process. Whatever it writes to `{json}` becomes part of the results."""

    name: str
    command: tuple[str, ...]
    timeout_secs: int
    prints_json: bool = False
    must_print: str = ""
    """A pattern without which it did nothing, and has failed."""
    skipped: str = ""
    """Why it cannot be run here."""


@dataclasses.dataclass(frozen=True)
class _Outcome:
    status: str
    """``passed``, ``failed``, ``timed out`` or ``skipped``."""

    seconds: float
    command: str
    exit_status: int | None = None
    result: Any = None
    output: str = ""
    """The end of what was printed."""


def main() -> int:
    """Run the steps that were asked for."""
    known = tuple(step.name for step in _steps(quick=False))
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=f"Steps: {', '.join(known)}."
    )
    parser.add_argument("--only", help="run these steps, separated by commas; sanitizer: all tools")
    parser.add_argument("--skip", default="", help="leave out these steps, separated by commas")
    parser.add_argument("--soak", action="store_true", help=f"also {', '.join(sorted(_SOAKS))}")
    parser.add_argument("--quick", action="store_true", help="fewer element sizes in the self-test")
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=_ROOT / "benchmarks" / "results",
        help="folder for the JSON file",
    )
    args = parser.parse_args()
    wanted = _chosen(parser, known, args.only, args.skip) | (_SOAKS if args.soak else set())
    machine = _machine()
    if isinstance(machine, str):
        print(f"gpu: {machine}", file=sys.stderr)
        return EXIT_NO_GPU
    print(f"{machine['gpu']}, driver {machine['driver']}, Python {machine['python']}", flush=True)
    told: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine, "steps": {}}
    file = args.results / f"gpu-{_slug(machine['gpu'])}.json"
    args.results.mkdir(parents=True, exist_ok=True)
    for step in _steps(quick=args.quick):
        if step.name not in wanted:
            continue
        print(f"=== {step.name}", flush=True)
        outcome = _run(step)
        told["steps"][step.name] = dataclasses.asdict(outcome)
        # After each step: what is known must survive the next.
        file.write_text(json.dumps(told, indent=1) + "\n")
        print(f"--- {step.name}: {outcome.status}, {outcome.seconds:.1f} s", flush=True)
    print(f"written: {file}")
    verdict, status = _verdict({name: step["status"] for name, step in told["steps"].items()})
    print(verdict)
    return status


def _verdict(statuses: Mapping[str, str]) -> tuple[str, int]:
    """The last line, and the exit status."""
    skipped = [name for name, status in statuses.items() if status == "skipped"]
    failed = [name for name, status in statuses.items() if status not in ("passed", "skipped")]
    not_run = f"skipped: {', '.join(skipped)}" if skipped else ""
    if failed:
        return f"FAILED: {', '.join(failed)}{not_run and '; '}{not_run}", EXIT_FAILED
    return f"passed, but {not_run}" if skipped else "all steps passed", 0


def _steps(*, quick: bool) -> Iterator[_Step]:
    python = sys.executable
    # Where torch sees no GPU every test is skipped, which pytest counts as success.
    tested = r"\b[1-9]\d* passed\b"
    apart = (*_CACHE_TESTS, *_PREFIX_TESTS, *_RANK_TESTS)
    others = tuple(f"--ignore={name}" for name in apart)
    tests = (python, "-m", "pytest", *_TESTS, *others, *_PYTEST_OPTIONS)
    yield _Step("pytest", tests, 240, must_print=tested)
    # What is skipped is named, with its reason: storage needs a package that may not be there.
    of_cache = (python, "-m", "pytest", *_CACHE_TESTS, *_PYTEST_OPTIONS, "-rs")
    yield _Step("cache", of_cache, 240, must_print=tested)
    of_prefixes = (python, "-m", "pytest", *_PREFIX_TESTS, *_PYTEST_OPTIONS, "-rs")
    yield _Step("prefix_cache", of_prefixes, 240, must_print=tested)
    of_ranks = (python, "-m", "pytest", *_RANK_TESTS, *_PYTEST_OPTIONS)
    yield _Step("ranks", of_ranks, 240, must_print=tested)
    selftest = ("selftest", "--json", *(("--quick",) if quick else ()))
    yield _Step("selftest", (python, "-m", "kvferry", *selftest), 150, prints_json=True)
    yield _Step("doctor", (python, "-m", "kvferry", "doctor", "--json"), 90, prints_json=True)
    for name, arguments in _THROUGHPUT.items():
        yield _Step(name, _benchmark(python, "throughput", arguments), 180)
    yield _Step("beside", _benchmark(python, "beside"), 150)
    yield _Step("latency", _benchmark(python, "latency"), 120)
    yield _Step("cache_bench", _benchmark(python, "cache"), 240)
    # A percent is told from the noise of rounds by many of them.
    rounds = "" if quick else "--rounds 200 --seconds 330"
    yield _Step("engine", _benchmark(python, "toy_engine", rounds), 240 if quick else 570)
    yield _Step("first_token", _benchmark(python, "first_token"), 180)
    yield _Step("jit", (python, "benchmarks/jit.py", "--json", "{json}"), 60)
    tool = _sanitizer()
    for name, cases in _SANITIZERS:
        yield _Step(
            name,
            (
                *(tool or "compute-sanitizer", "--tool", name, "--error-exitcode", "99"),
                *(python, "scripts/sanitize.py", "--cases", *cases.split()),
            ),
            _SANITIZER_SECS,
            skipped=""
            if tool
            else "compute-sanitizer is neither on PATH nor in CUDA's folders; "
            "it comes with the CUDA toolkit",
        )
    soaks = (python, "-m", "pytest", *_TESTS, *_PYTEST_OPTIONS, *_SOAK_OPTIONS)
    yield _Step("long_write_backs", soaks, 420, must_print=tested)
    yield _Step("long_contexts", _benchmark(python, "long_contexts", "--seconds 300"), 580)


def _benchmark(python: str, script: str, arguments: str = "") -> tuple[str, ...]:
    return (python, f"benchmarks/gpu/{script}.py", *arguments.split(), "--json", "{json}")


def _chosen(
    parser: argparse.ArgumentParser, known: Sequence[str], only: str | None, skip: str
) -> set[str]:
    groups = {
        "sanitizer": {name for name, _ in _SANITIZERS},
        **{
            group: {name for name in known if name.startswith(f"{group}_")}
            for group in ("direct", "staged")
        },
    }

    def named(text: str) -> set[str]:
        found: set[str] = set()
        for name in filter(None, (part.strip() for part in text.split(","))):
            if name not in known and name not in groups:
                parser.error(f"there is no step {name}; there are: {', '.join(known)}")
            found |= groups.get(name, {name})
        return found

    return (set(known) - _SOAKS if only is None else named(only)) - named(skip)


def _run(step: _Step) -> _Outcome:
    shown = " ".join("python" if part == sys.executable else part for part in step.command).replace(
        str(_ROOT), "."
    )
    if step.skipped:
        print(f"skipped: {step.skipped}")
        return _Outcome("skipped", 0.0, shown, output=step.skipped)
    with tempfile.TemporaryDirectory() as folder:
        written = pathlib.Path(folder, "result.json")
        command = [part.replace("{json}", str(written)) for part in step.command]
        began = time.monotonic()
        code, output, errors = _call(command, step)
        seconds = time.monotonic() - began
        status = "timed out" if code is None else "failed" if code else "passed"
        result = None
        try:
            if step.prints_json and code is not None:
                result = json.loads(output)
            elif written.exists():
                result = json.loads(written.read_text())
        except json.JSONDecodeError as bad:
            status, errors = "failed", f"{errors}\nwhat was to be JSON is not: {bad}"
    if status == "passed" and not re.search(step.must_print, output):
        status, errors = "failed", f"{errors}\nit tested nothing: torch may see no GPU here"
    if status != "passed" or not step.prints_json:
        print(f"{output}{errors}".strip(), flush=True)
    kept = errors if step.prints_json and result is not None else output + errors
    return _Outcome(status, round(seconds, 2), shown, code, result, kept[-_KEPT_CHARACTERS:])


def _call(command: Sequence[str], step: _Step) -> tuple[int | None, str, str]:
    """The exit status, None after its time is up, and what was printed."""
    # In a session of its own: a tool that is stopped takes along the program that it runs.
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if step.prints_json else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=step.timeout_secs)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate(timeout=30)
            return None, output, f"{errors or ''}\nstopped after {step.timeout_secs} s"
        return process.returncode, output, errors or ""


def _environment() -> dict[str, str]:
    paths = [str(_SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def _machine() -> dict[str, Any] | str:
    """What the results must be read with, or why nothing can be run here."""
    sys.path.insert(0, str(_SOURCE))
    from kvferry.errors import KVFerryError
    from kvferry.kernels.jit import Driver

    try:
        driver = Driver.open()
        context = driver.context(0)
        name = driver.call("cuDeviceGetName", 256, 0)
    except KVFerryError as absent:
        return str(absent)
    return {
        "gpu": name.split(b"\0")[0].decode().strip(),
        "capability": list(context.capability),
        "multiprocessors": context.num_multiprocessors,
        "driver": _driver_text() or ".".join(map(str, driver.version)),
        "cuda": ".".join(map(str, driver.version)),
        "python": platform.python_version(),
        "packages": _versions("torch", "numpy", "transformers", "cuda-bindings", "pytest"),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def _driver_text() -> str:
    """The driver's own version number, which is not CUDA's."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", text)
    return found[1] if found else ""


def _versions(*packages: str) -> dict[str, str | None]:
    from importlib import metadata

    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _commit() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    told = [
        subprocess.run(
            [git, *arguments], cwd=_ROOT, capture_output=True, text=True, check=False, timeout=30
        )
        for arguments in (("rev-parse", "HEAD"), ("status", "--porcelain"))
    ]
    if told[0].returncode:
        return None
    return told[0].stdout.strip() + (" with changes" if told[1].stdout.strip() else "")


def _sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    for folder in (pathlib.Path("/usr/local/cuda"), *pathlib.Path("/usr/local").glob("cuda-*")):
        for place in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            if (folder / place).exists():
                return str(folder / place)
    return None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
