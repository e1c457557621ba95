"""What needs no GPU, measured: `make bench`.

    make bench
    make bench BENCH_ARGS="--only storage,index --full --results benchmarks/results"

Each benchmark is a script of its own in `benchmarks/`, with `--help`. Some measure less than they
can, so that all take some minutes; with --full they do not. With --results each writes its figures
there as JSON. The exit status is not 0 if one failed.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_SCRIPTS = {
    "cpu_copy": "",
    "host_runs": "--slots 20000 --evicted entry --operations 200000",
    "host_memory": "--mebibytes 512",
    "index": "--policies lru --repeats 5",
    "tiers": "",
    "storage": "--mebibytes 256 --rounds 3",
    "mooncake_pool": "--mebibytes 128 --rounds 3",
    "object_store": "--mebibytes 64 --rounds 3",
    "shared_host": "--ranks 1,8",
    "metrics_cost": "",
}
"""In the order they run, with the options of those that would take minutes."""

_TIMEOUT_SECS = 900


def main() -> int:
    """Run those that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog=f"Benchmarks: {', '.join(_SCRIPTS)}."
    )
    parser.add_argument("--only", help="run these, separated by commas")
    parser.add_argument("--full", action="store_true", help="measure all that the scripts can")
    parser.add_argument("--results", type=pathlib.Path, help="folder for a JSON file of each")
    args = parser.parse_args()
    chosen = tuple(_SCRIPTS) if args.only is None else tuple(filter(None, args.only.split(",")))
    unknown = [name for name in chosen if name not in _SCRIPTS]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(_SCRIPTS)}")
    if args.results and pathlib.Path.cwd() != _ROOT:
        args.results = args.results.absolute()
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
    failed = [name for name in chosen if not _run(name, args.results, full=args.full)]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _run(name: str, results: pathlib.Path | None, *, full: bool) -> bool:
    print(f"=== {name}", flush=True)
    # As it would be typed there: scripts put their command into what they write.
    command = [sys.executable, f"benchmarks/{name}.py"]
    if not full:
        command += _SCRIPTS[name].split()
    if results:
        command += ["--json", str(results / f"{name}.json")]
    try:
        return (
            subprocess.run(command, check=False, cwd=_ROOT, timeout=_TIMEOUT_SECS).returncode == 0
        )
    except subprocess.TimeoutExpired:
        print(f"stopped after {_TIMEOUT_SECS} s", file=sys.stderr)
        return False


if __name__ == "__main__":
    sys.exit(main())
