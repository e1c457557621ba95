"""How fast transfers are on this GPU, against a plain memcpy of the same run.

    python3 benchmarks/gpu/throughput.py --mover staged --json benchmarks/results/staged.json

A figure is the median of several transfers of random data, in GB/s of payload, between events in
the caller's stream, which is kept busy while the CPU submits: it is the time of the GPU and the
link. A load and a store count until `handle.wait_all` lets that stream go on. The bytes of a round
trip are compared before anything is timed. Digests are on unless said.

Baselines, for what an engine could do instead: `grouped` (ask for it with --paths), torch's gather
on the device with one copy a layer, and one cudaMemcpyBatchAsync of a piece for each page, to
device memory laid out as the host's, which leaves out putting bytes in place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import rig

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry import TransferPlan

_MOVERS = ("best", "direct", "staged")
# More pieces than that tell nothing new, and the CPU takes long to hand them over.
_MOST_PIECES = 16384


def main() -> int:
    """Print the table; with --json write it as well."""
    args = arguments().parse_args()
    link = rig.begin()
    rows = []
    for layout in args.layouts:
        for element_size in args.elements:
            for row in _measure(element_size, layout, args):
                row["h2d_over_m"] = round(row["h2d"] / link["h2d"], 3)
                row["d2h_over_m"] = round(row["d2h"] / link["d2h"], 3)
                rows.append(row)
                print(_line(row), flush=True)
    rig.write(args.json, link, rows)
    return 0


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--elements", type=int, nargs="+", default=[132, 512, 576, 656, 1152, 2048])
    add("--runs", type=int, nargs="+", default=[1, 16, 64], help="device runs, in tokens")
    add(
        "--layouts",
        nargs="+",
        choices=["page_major", "layer_first", "token_major"],
        default=["page_major", "layer_first", "token_major"],
        help="of the host pool",
    )
    add(
        "--host-run",
        type=int,
        nargs="+",
        default=[8],
        help="pages in neighbouring host slots, the runs in random order",
    )
    add("--mover", nargs="+", choices=_MOVERS, default=["best"], help="best: as the engine chooses")
    add("--blocks", type=int, nargs="+", default=[0], help="multiprocessors; 0: the default")
    add("--paths", nargs="+", default=["best"], help="best, flat, realign, grouped")
    add("--megabytes", type=int, default=512, help="payload of a transfer, 10^6 bytes")
    add("--tokens", type=int, help="tokens of a transfer, in place of --megabytes")
    add("--layers", type=int, default=16)
    add("--repeats", type=int, default=5)
    add("--no-baselines", action="store_true")
    add("--no-digests", action="store_true")
    add("--staging-mib", type=int, default=64, help="of a direction")
    return parser


def _line(row: dict[str, Any]) -> str:
    blocks = f"blocks {row['blocks']:<3} " if row["blocks"] else ""
    exposed = " (with the CPU's time)" if row["num_exposed"] else ""
    return (
        f"{row['element_size']:>6} run {row['device_run']:<3} {row['host_layout']:<11} "
        f"host run {row['host_run']:<3} {row['what']:<16} {blocks}"
        f"H2D {row['h2d']:>5.1f} ({row['h2d_over_m']:.2f})  "
        f"D2H {row['d2h']:>5.1f} ({row['d2h_over_m']:.2f}){exposed}"
    )


def _measure(element_size: int, layout: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    geometry = rig.latent(element_size, args.layers)
    if args.tokens is None:
        num_pages = rig.pages_of(args.megabytes * 1e6, geometry.page_bytes, max(args.host_run))
    else:
        num_pages = args.tokens // rig.PAGE_SIZE
    with rig.pools(geometry, num_pages, layout) as pools:
        told: dict[str, Any] = {
            "element_size": element_size,
            "host_layout": layout,
            "layers": args.layers,
            "num_pages": num_pages,
            "num_bytes": pools.num_bytes,
            "digests": not args.no_digests,
            "blocks": 0,
            "num_exposed": 0,
        }
        for host_run in args.host_run:
            rng = np.random.default_rng(2)
            order = rig.in_runs(rng, num_pages, host_run)
            for run in args.runs:
                slots = rig.device_slots(rng, num_pages, run)
                told |= {"host_run": host_run, "device_run": run}
                plans = rig.plans(geometry, order, slots)
                for row in _transfers(pools, plans, args):
                    yield {**told, **row}
                if not args.no_baselines and host_run == args.host_run[0]:
                    yield {**told, "what": "torch index+copy", "mover": "torch"} | _torch(
                        pools, slots, args.repeats
                    )
            # Whatever the device run is, it is the same copy.
            if not args.no_baselines:
                batch = _batch(pools, order, layout, args.repeats)
                if batch:
                    yield {**told, "what": "memcpy batch", "mover": "batch", **batch}


def _transfers(
    pools: rig.Pools, plans: tuple[TransferPlan, TransferPlan], args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    from kvferry.errors import ConfigError, PlanError

    for mover in args.mover:
        for path in args.paths:
            for blocks in args.blocks:
                try:
                    yield _transfer(pools, plans, args, mover, path, blocks)
                except (ConfigError, PlanError) as refused:
                    size = pools.geometry.planes[0].element_size
                    print(f"{size:>6} {mover} {path}: refused: {refused}", flush=True)


def _transfer(
    pools: rig.Pools,
    plans: tuple[TransferPlan, TransferPlan],
    args: argparse.Namespace,
    mover: str,
    path: str,
    blocks: int,
) -> dict[str, Any]:
    """One cell, both ways."""
    options = {
        "verify": not args.no_digests,
        "path": None if path == "best" else path,
        "mover": None if mover == "best" else mover,
        "staging_bytes": args.staging_mib << 20,
        "num_blocks": blocks or None,
    }
    with (
        rig.engine(pools, pools.source, **options) as writer,
        rig.engine(pools, pools.target, **options) as reader,
    ):
        stored, loaded = rig.check_round_trip(pools, writer, reader, plans)
        routes = [one.route(plan) for one, plan in ((writer, plans[0]), (reader, plans[1]))]
        d2h = rig.gpu_timing(partial(rig.carry, writer, plans[0]), args.repeats)
        h2d = rig.gpu_timing(partial(rig.carry, reader, plans[1]), args.repeats)
    assert routes[0] is not None
    assert routes[1] is not None
    return {
        "what": loaded.path if loaded.path == stored.path else f"{loaded.path} / {stored.path}",
        "asked": mover,
        "mover": routes[1].mover.value,
        "steps": [len(routes[1].sizes), len(routes[0].sizes)],
        "blocks": blocks,
        "num_exposed": h2d.num_exposed + d2h.num_exposed,
        "h2d": rig.gb_per_sec(pools.num_bytes, h2d.seconds),
        "d2h": rig.gb_per_sec(pools.num_bytes, d2h.seconds),
    }


def _torch(pools: rig.Pools, slots: NDArray[np.int64], repeats: int) -> dict[str, float]:
    """A gather on the device and one pinned copy a layer, and the reverse."""
    import torch

    source, target = pools.source, pools.target
    index = torch.from_numpy(slots.reshape(-1)).to(rig.DEVICE)
    host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)

    def store() -> None:
        for layer in range(source.shape[0]):
            host[layer].copy_(source[layer].index_select(0, index), non_blocking=True)

    def load() -> None:
        for layer in range(source.shape[0]):
            target[layer].index_copy_(0, index, host[layer].to(rig.DEVICE, non_blocking=True))

    return {
        name: rig.gb_per_sec(pools.num_bytes, rig.gpu_timing(work, repeats).seconds)
        for name, work in (("d2h", store), ("h2d", load))
    }


def _batch(
    pools: rig.Pools, order: NDArray[np.int64], layout: str, repeats: int
) -> dict[str, Any] | None:
    """One cudaMemcpyBatchAsync of a piece for each page; None where it cannot be called."""
    import torch
    from cuda.bindings import driver

    if not hasattr(driver, "cuMemcpyBatchAsync"):
        print("memcpy batch: left out, as these cuda-bindings do not have it", flush=True)
        return None
    host = torch.empty(pools.num_bytes, dtype=torch.uint8, pin_memory=True)
    # In a layer_first pool a page is a piece in every layer.
    parts = pools.geometry.planes[0].num_layers if layout == "layer_first" else 1
    size = pools.geometry.page_bytes // parts
    offsets = [
        part * size * pools.num_pages + int(page) * size for part in range(parts) for page in order
    ][:_MOST_PIECES]
    sides = [
        [driver.CUdeviceptr(tensor.data_ptr() + offset) for offset in offsets]
        for tensor in (host, pools.target)
    ]
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    sizes = [size] * len(offsets)
    # The driver takes no default stream here.
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def copy(sources: list[Any], targets: list[Any]) -> None:
        status, *_ = driver.cuMemcpyBatchAsync(
            targets, sources, sizes, len(sizes), [attributes], [0], 1, stream.cuda_stream
        )
        if status:
            raise RuntimeError(f"cuMemcpyBatchAsync: {status}")

    found: dict[str, Any] = {"num_bytes": size * len(offsets), "num_exposed": 0}
    with torch.cuda.stream(stream):
        for name, ends in (("d2h", (sides[1], sides[0])), ("h2d", (sides[0], sides[1]))):
            try:
                timing = rig.gpu_timing(partial(copy, *ends), repeats)
            except RuntimeError as refused:
                print(f"memcpy batch: left out: {refused}", flush=True)
                return None
            found[name] = rig.gb_per_sec(found["num_bytes"], timing.seconds)
            found["num_exposed"] += timing.num_exposed
    return found


if __name__ == "__main__":
    sys.exit(main())
