"""How fast the CPU paths move pages, against a plain memcpy of the same bytes in the same run.

    make bench
    python benchmarks/cpu_copy.py --json benchmarks/results/cpu_copy.json

Figures are GB/s (10^9 bytes of payload a second), each the median of several transfers of random
data, after the bytes of a round trip were compared. memcpy is a plain copy of as many bytes in one
piece, on one thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvferry import Geometry, HostPool, Plane, PoolView, SlotOwner, TransferEngine, TransferPlan
from kvferry.transfer import available_cpu_paths

_PAGE_SIZE = 64
_LAYERS = 8

_LEGEND = """\
element   bytes of a token in one layer     run      consecutive tokens in consecutive device slots
digest    made on store, checked on load    threads  that the transfer is spread over
memcpy, store, load   GB/s of payload       part     of what memcpy reaches: 1.00 is as fast"""


class _Case(NamedTuple):
    element_size: int
    device_run: int
    path: str
    digest: bool
    num_threads: int


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--elements",
        type=int,
        nargs="+",
        metavar="BYTES",
        default=[132, 512, 576, 656, 1152, 2048],
        help="element sizes (%(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=int,
        nargs="+",
        metavar="TOKENS",
        default=[1, 16, 64],
        help=f"device runs, each a divisor of the page size {_PAGE_SIZE} (%(default)s)",
    )
    parser.add_argument(
        "--mebibytes",
        type=int,
        metavar="N",
        default=128,
        help="payload of a transfer (%(default)s)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        metavar="N",
        default=5,
        help="transfers of which a figure is the median (%(default)s)",
    )
    parser.add_argument(
        "--json", type=pathlib.Path, metavar="FILE", help="write the figures to this file too"
    )
    args = parser.parse_args()

    rows = []
    print(
        f"{_machine()['cpu']}, {os.cpu_count()} cores; pages of {_PAGE_SIZE} tokens, "
        f"{_LAYERS} layers, {args.mebibytes} MiB a transfer\n\n{_LEGEND}\n"
    )
    print(
        f"{'element':>7} {'run':>3} {'path':<9} {'digest':<6} {'threads':>7} "
        f"{'memcpy':>6} {'store':>6} {'part':>5} {'load':>6} {'part':>5}"
    )
    for element_size in args.elements:
        for device_run in args.runs:
            for row in _measure(element_size, device_run, args.mebibytes << 20, args.repeats):
                rows.append(row)
                print(
                    f"{row['element_size']:>7} {row['device_run']:>3} {row['path']:<9} "
                    f"{'on' if row['digest'] else 'off':<6} {row['num_threads']:>7} "
                    f"{row['memcpy']:>6.1f} {row['store']:>6.1f} {row['store_over_m']:>5.2f} "
                    f"{row['load']:>6.1f} {row['load_over_m']:>5.2f}"
                )
    if args.json:
        told = {"command": " ".join(sys.argv), "machine": _machine(), "unit": "GB/s", "rows": rows}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def _measure(
    element_size: int, device_run: int, num_bytes: int, repeats: int
) -> list[dict[str, Any]]:
    plane = Plane(name="latent", num_layers=_LAYERS, element_size=element_size)
    geometry = Geometry(planes=(plane,), page_size=_PAGE_SIZE)
    num_pages = max(1, num_bytes // geometry.page_bytes)
    tokens = num_pages * _PAGE_SIZE
    rng = np.random.default_rng(element_size)
    source = rng.integers(0, 256, (_LAYERS, tokens, element_size), dtype=np.uint8)
    target = np.full_like(source, 0xA5)
    runs = rng.permutation(tokens // device_run)
    slots = (runs[:, None] * device_run + np.arange(device_run)).reshape(num_pages, _PAGE_SIZE)
    payload = num_pages * geometry.page_bytes
    rows = []
    with HostPool(geometry, num_slots=num_pages) as pool:
        pool.allocate(num_pages, SlotOwner.INDEX)
        order = rng.permutation(num_pages)
        plans = [
            make(
                geometry, host_slots=order, device_slots=slots, page_keys=[b"%d" % p for p in order]
            )
            for make in (TransferPlan.store, TransferPlan.load)
        ]
        for case in _cases(element_size, device_run):
            os.environ["KVFERRY_DISABLE_PATHS"] = ",".join(
                name for name in ("cpu", "cpu_numpy") if name != case.path
            )
            writer, reader = (
                TransferEngine(
                    PoolView.from_tensors(geometry, {"latent": tensor}),
                    pool,
                    verify=case.digest,
                    num_threads=case.num_threads,
                )
                for tensor in (source, target)
            )
            writer.store(plans[0]).wait()
            reader.load(plans[1]).wait()
            assert np.array_equal(source, target), "bytes differ; no figure is worth printing"
            memcpy = payload / _median(partial(_memcpy, target, source), repeats) / 1e9
            store = payload / _median(partial(writer.store, plans[0]), repeats) / 1e9
            load = payload / _median(partial(reader.load, plans[1]), repeats) / 1e9
            rows.append(
                {
                    **case._asdict(),
                    "memcpy": round(memcpy, 2),
                    "store": round(store, 2),
                    "store_over_m": round(store / memcpy, 3),
                    "load": round(load, 2),
                    "load_over_m": round(load / memcpy, 3),
                }
            )
    return rows


def _cases(element_size: int, device_run: int) -> list[_Case]:
    os.environ.pop("KVFERRY_DISABLE_PATHS", None)
    cases = []
    for path in available_cpu_paths():
        cases += [_Case(element_size, device_run, path.name, digest, 1) for digest in (False, True)]
        if path.name == "cpu":
            cases.append(_Case(element_size, device_run, path.name, True, 2))
    return cases


def _memcpy(target: np.ndarray, source: np.ndarray) -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def _median(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
