"""How fast the direct mover is on this GPU, against a plain memcpy of the same run.

    python3 benchmarks/direct.py --json benchmarks/results/direct.json

M is the best plain pinned copy of 1 GiB a direction, in GB/s (10^9 bytes a second). A figure is the
median of several transfers of random data, in GB/s of payload, between events in the caller's
stream, which is kept busy while the CPU submits: it is the time of the GPU and the link. The bytes
of a round trip are compared before anything is timed. Digests are on unless said. Baselines:
`grouped`, and torch's gather on the device with one copy a layer.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from kvferry import (
    Geometry,
    HostPool,
    Plane,
    PoolView,
    RegisteredHostPool,
    TransferEngine,
    TransferHandle,
    TransferPlan,
)
from kvferry.errors import PlanError
from kvferry.memory import SlotOwner

_PAGE_SIZE = 64
_DEVICE = "cuda:0"
_GIB = 1 << 30
# About 1 ms: longer than any submit.
_SLEEP_CYCLES = 2_000_000


class Case(NamedTuple):
    """One geometry and one pair of layouts."""

    element_size: int
    device_run: int
    host_layout: str


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[132, 512, 576, 656, 1152, 2048])
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument(
        "--layouts", nargs="+", default=["page_major", "layer_first", "token_major"]
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[0], help="0: the default")
    parser.add_argument("--paths", nargs="+", default=["best"], help="best, realign, grouped")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--no-digests", action="store_true")
    parser.add_argument("--mover", choices=["direct", "staged"], default="direct")
    parser.add_argument("--host-run", type=int, default=1, help="pages in neighbouring slots")
    parser.add_argument("--staging-mib", type=int, default=64, help="of a direction")
    parser.add_argument("--json", type=pathlib.Path, help="write the figures to this file")
    args = parser.parse_args()

    link = measure_link()
    print(f"{torch.cuda.get_device_name(0)}; M: H2D {link['h2d']:.1f}, D2H {link['d2h']:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    for case in _cases(args):
        for row in _measure(case, args):
            row["h2d_over_m"] = round(row["h2d"] / link["h2d"], 3)
            row["d2h_over_m"] = round(row["d2h"] / link["d2h"], 3)
            rows.append(row)
            print(
                f"{row['element_size']:>6} run {row['device_run']:<3} {row['host_layout']:<11} "
                f"{row['what']:<16} blocks {row['blocks']:>3}  "
                f"H2D {row['h2d']:>5.1f} ({row['h2d_over_m']:.2f})  "
                f"D2H {row['d2h']:>5.1f} ({row['d2h_over_m']:.2f})",
                flush=True,
            )
    if args.json:
        told = {
            "command": " ".join(sys.argv),
            "machine": machine(),
            "link": link,
            "unit": "GB/s",
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for layout in args.layouts:
        for element_size in args.elements:
            for run in args.runs:
                yield Case(element_size, run, layout)


def _measure(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    plane = Plane(name="latent", num_layers=args.layers, element_size=case.element_size)
    geometry = Geometry(planes=(plane,), page_size=_PAGE_SIZE)
    num_pages = args.tokens // _PAGE_SIZE
    payload = num_pages * geometry.page_bytes
    generator = torch.Generator(device=_DEVICE).manual_seed(1)
    shape = (args.layers, args.tokens, case.element_size)
    source = torch.randint(0, 256, shape, dtype=torch.uint8, device=_DEVICE, generator=generator)
    target = torch.full_like(source, 0xA5)
    rng = np.random.default_rng(2)
    runs = rng.permutation(args.tokens // case.device_run)
    slots = (runs[:, None] * case.device_run + np.arange(case.device_run)).reshape(num_pages, -1)
    with _host_pool(geometry, case, num_pages) as pool:
        blocks_of = rng.permutation(num_pages // args.host_run)
        order = (blocks_of[:, None] * args.host_run + np.arange(args.host_run)).ravel()
        keys = [b"%d" % page for page in order]
        plans = [
            make(geometry, host_slots=order, device_slots=slots, page_keys=keys)
            for make in (TransferPlan.store, TransferPlan.load)
        ]
        told = {**case._asdict(), "num_bytes": payload}
        for path in args.paths:
            for blocks in args.blocks:
                engines = [
                    TransferEngine(
                        PoolView.from_tensors(geometry, {"latent": tensor}),
                        pool,
                        verify=not args.no_digests,
                        path=None if path == "best" else path,
                        mover=args.mover,
                        staging_bytes=args.staging_mib << 20,
                        num_blocks=blocks or None,
                    )
                    for tensor in (source, target)
                ]
                try:
                    writer, reader = engines
                    target.fill_(0xA5)
                    stored = writer.store(plans[0])
                    stored.wait()
                    loaded = reader.load(plans[1])
                    loaded.wait()
                    torch.cuda.synchronize()
                    assert torch.equal(source, target), "bytes differ; no figure is worth printing"
                    assert args.no_digests or loaded.verified_pages == num_pages, loaded.bad_pages
                    d2h = _speed(partial(writer.store, plans[0]), payload, args.repeats)
                    h2d = _speed(partial(reader.load, plans[1]), payload, args.repeats)
                    yield {**told, "what": stored.path, "blocks": blocks, "h2d": h2d, "d2h": d2h}
                except PlanError as refused:
                    print(f"{case.element_size:>6} {path}: refused: {refused}", flush=True)
                finally:
                    for engine in engines:
                        engine.close()
    if not args.no_baselines:
        yield {
            **told,
            "what": "torch index+copy",
            "blocks": 0,
            **_torch(source, target, slots, args),
        }


def _host_pool(geometry: Geometry, case: Case, num_pages: int) -> Any:
    if case.host_layout == "page_major":
        pool = HostPool(geometry, num_slots=num_pages)
        pool.allocate(num_pages, SlotOwner.INDEX)
        return pool
    plane = geometry.planes[0]
    tokens, layers, size = num_pages * _PAGE_SIZE, plane.num_layers, plane.element_size
    token_major = case.host_layout == "token_major"
    shape = (tokens, layers, size) if token_major else (layers, tokens, size)
    tensor = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    registered = RegisteredHostPool.from_tensors(
        geometry, {"latent": tensor}, layer_dim=1 if token_major else 0
    )
    return _Closing(registered)


class _Closing:
    """A context manager over a pool that has none."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __enter__(self) -> Any:
        return self._pool

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def _speed(submit: Callable[[], TransferHandle], payload: int, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        begin, end = (_timed_event() for _ in range(2))
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        handle = submit()
        handle.wait_all()
        end.record()
        handle.wait()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return round(payload / float(statistics.median(seconds[1:])) / 1e9, 2)


def _torch(
    source: torch.Tensor, target: torch.Tensor, slots: np.ndarray, args: argparse.Namespace
) -> dict[str, float]:
    """A gather on the device and one pinned copy a layer, and the reverse."""
    index = torch.from_numpy(slots.reshape(-1)).to(_DEVICE)
    host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)

    def store() -> None:
        for layer in range(source.shape[0]):
            host[layer].copy_(source[layer].index_select(0, index), non_blocking=True)

    def load() -> None:
        for layer in range(source.shape[0]):
            target[layer].index_copy_(0, index, host[layer].to(_DEVICE, non_blocking=True))

    found = {}
    for name, work in (("d2h", store), ("h2d", load)):
        seconds = []
        for _ in range(args.repeats + 1):
            begin, end = (_timed_event() for _ in range(2))
            torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        found[name] = round(source.numel() / statistics.median(seconds[1:]) / 1e9, 2)
    return found


def _timed_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure_link(num_bytes: int = _GIB) -> dict[str, float]:
    """The best plain pinned copy of `num_bytes` each way, GB/s: M."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=_DEVICE)
    found = {}
    for name, target, source in (("d2h", host, device), ("h2d", device, host)):
        best = float("inf")
        for _ in range(5):
            begin, end = (_timed_event() for _ in range(2))
            begin.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        found[name] = round(num_bytes / best / 1e9, 2)
    return found


def machine() -> dict[str, Any]:
    """What a figure must be read with."""
    return {
        "gpu": torch.cuda.get_device_name(0),
        "capability": list(torch.cuda.get_device_capability(0)),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    sys.exit(main())
