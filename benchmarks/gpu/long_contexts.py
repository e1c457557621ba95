"""Long contexts, stored, evicted and loaded in turn through a host pool that cannot hold them all.

    python3 benchmarks/gpu/long_contexts.py --seconds 300 --json benchmarks/results/long.json

Several sequences of 128k tokens take turns: 78 layers of 576 bytes (latent attention), then the
same number of 656 bytes with 21 layers of 132 beside them (a sparse-attention indexer). In each
turn a sequence that is not on the host is stored in parts, for which the one used least recently
is evicted, while another that is there is loaded into poisoned rows. Every load is verified by its
digests, and some of its layers are made anew and compared byte for byte. Device memory and the
resident memory of the process are recorded, and must not grow.

The exit status is not 0 if a byte was wrong or memory grew.
"""

from __future__ import annotations

import argparse
import pathlib
import resource
import statistics
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import rig

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from kvferry import Geometry, HostPool, TransferEngine

_MIB = 1 << 20
# What a sequence's share of the host pool is less than it: no pool holds all of them.
_HELD = 0.6
# Of memory, between the first part of the time and the last; libraries round up what they take.
_MOST_GROWTH_MIB = 64
_MOST_SAMPLES = 200


class Sample(NamedTuple):
    """Memory after a turn."""

    seconds: float
    device_mib: int
    """Taken of the GPU, by whomever."""

    resident_mib: int


def main() -> int:
    """Print a line a turn now and then; with --json write the figures."""
    args = arguments().parse_args()
    link = rig.begin()
    rows = []
    for name in args.geometries:
        row = _Soak(name, args).run(args.seconds / len(args.geometries))
        rows.append(row)
        print({key: value for key, value in row.items() if key != "samples"}, flush=True)
    rig.write(args.json, link, rows)
    return 0 if all(row["bad_pages"] == 0 and row["flat"] for row in rows) else 1


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = rig.parser(__doc__)
    add = parser.add_argument
    add("--seconds", type=float, default=300, help="for all geometries together")
    add("--geometries", nargs="+", choices=["latent", "indexed"], default=["latent", "indexed"])
    add("--sequences", type=int, default=8)
    add("--tokens", type=int, default=131072, help="of a sequence")
    add("--layers", type=int, default=78)
    add("--run", type=int, default=1, help="device run, in tokens")
    add("--part", type=int, default=256, help="pages that are stored at once")
    add("--compared", type=int, default=4, help="layers of each load that are compared")
    add("--mover", choices=["best", "direct", "staged"], default="best")
    add("--seed", type=int, default=1)
    return parser


def growth_mib(samples: Sequence[Sample]) -> tuple[int, int]:
    """By how much device and resident memory grew: most of the last quarter less the second's.

    The first quarter is left out, in which pools, kernels and caches come to their size.
    """
    quarter = max(1, len(samples) // 4)
    early, late = samples[quarter : 2 * quarter] or samples[:1], samples[-quarter:]
    return (
        max(one.device_mib for one in late) - max(one.device_mib for one in early),
        max(one.resident_mib for one in late) - max(one.resident_mib for one in early),
    )


def thinned(samples: Sequence[Sample], most: int = _MOST_SAMPLES) -> list[Sample]:
    """At most so many of them, evenly, the last one among them."""
    step = -(-len(samples) // most)
    return list(samples[::-1][::step][::-1])


def _geometry(name: str, num_layers: int) -> Geometry:
    from kvferry import Geometry, Plane

    if name == "latent":
        return rig.latent(576, num_layers)
    with_index = max(1, num_layers * 21 // 78)
    layers = tuple(layer * num_layers // with_index for layer in range(with_index))
    planes = (
        Plane(name="latent", num_layers=num_layers, element_size=656),
        Plane(name="index_key", num_layers=with_index, element_size=132, layer_ids=layers),
    )
    return Geometry(planes=planes, page_size=rig.PAGE_SIZE)


class _Soak:
    """One geometry: rows on the device for two sequences, one that is stored and one loaded."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch

        torch.cuda.empty_cache()  # of the geometry before
        self._name, self._args = name, args
        self._geometry = _geometry(name, args.layers)
        self._num_pages = args.tokens // rig.PAGE_SIZE
        self._tokens = self._num_pages * rig.PAGE_SIZE
        self._rng = np.random.default_rng(args.seed)
        self._pool = {
            plane.name: torch.full(
                (plane.num_layers, 2 * self._tokens, plane.element_size),
                rig.POISON,
                dtype=torch.uint8,
                device=rig.DEVICE,
            )
            for plane in self._geometry.planes
        }
        # Least recently used first; where the pages of each sequence are on the host.
        self._held: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._samples: list[Sample] = []
        self._counts = dict.fromkeys(("turns", "stores", "loads", "evictions", "compared"), 0)
        self._bad_pages = 0
        self._rates: dict[str, list[float]] = {"store": [], "load": [], "both": []}

    def run(self, seconds: float) -> dict[str, Any]:
        """Turns for so many seconds, and what came out."""
        from kvferry import HostPool, PoolView, TransferEngine

        slots = max(self._num_pages, int(self._args.sequences * _HELD * self._num_pages))
        began = time.monotonic()
        options = {} if self._args.mover == "best" else {"mover": self._args.mover}
        with (
            HostPool(self._geometry, num_slots=slots) as host,
            TransferEngine(
                PoolView.from_tensors(self._geometry, self._pool), host, **options
            ) as engine,
        ):
            print(
                f"{self._name}: {self._args.sequences} sequences of {self._tokens} tokens, "
                f"{self._sequence_bytes / 1e9:.1f} GB each; a host pool of "
                f"{host.num_bytes / 1e9:.1f} GB, ready after {time.monotonic() - began:.0f} s",
                flush=True,
            )
            # What fills the pool and makes kernels and tables is no part of the time.
            for _ in range(self._args.sequences):
                self._turn(host, engine)
            self._samples.clear()
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                self._turn(host, engine)
                self._record(time.monotonic() - began)
            host.check_integrity()
            self._evict(host, host.num_slots)
            pool_bytes = host.num_bytes
        return self._told(pool_bytes)

    @property
    def _sequence_bytes(self) -> int:
        return int(self._num_pages * self._geometry.page_bytes)

    def _told(self, pool_bytes: int) -> dict[str, Any]:
        device, resident = growth_mib(self._samples)
        return {
            "geometry": self._name,
            "planes": [[one.name, one.num_layers, one.element_size] for one in
                       self._geometry.planes],
            "sequences": self._args.sequences,
            "tokens": self._tokens,
            "sequence_bytes": self._sequence_bytes,
            "pool_bytes": pool_bytes,
            "device_run": self._args.run,
            **self._counts,
            "bad_pages": self._bad_pages,
            "gb_per_sec": {
                name: round(statistics.median(each), 2)
                for name, each in self._rates.items() if each
            },
            "device_growth_mib": device,
            "resident_growth_mib": resident,
            "flat": max(device, resident) <= _MOST_GROWTH_MIB,
            "samples": [list(one) for one in thinned(self._samples)],
        }  # fmt: skip

    def _turn(self, host: HostPool, engine: TransferEngine) -> None:
        """Store one sequence while another is loaded, as far as there are such."""
        import torch

        rows = rig.device_slots(self._rng, 2 * self._num_pages, self._args.run)
        mine, theirs = rows[: self._num_pages], rows[self._num_pages :]
        absent = [one for one in range(self._args.sequences) if one not in self._held]
        loads = self._pick(list(self._held))
        stores = self._pick(absent)
        if loads is not None:
            self._held.move_to_end(loads)
            self._write(theirs, None)
        if stores is not None:
            self._write(mine, stores)
        torch.cuda.synchronize()
        began, moved = time.perf_counter(), 0
        stored, loaded, slots = [], None, None
        if loads is not None:
            loaded = engine.load(self._plan(loads, self._held[loads], theirs, load=True))
            moved += 1
        if stores is not None:
            slots = self._allocate(host)
            for first in range(0, self._num_pages, self._args.part):
                part = slice(first, first + self._args.part)
                stored.append(
                    engine.store(self._plan(stores, slots[part], mine[part], first=first))
                )
            moved += 1
        for handle in (*stored, *([] if loaded is None else [loaded])):
            handle.wait()
        seconds = time.perf_counter() - began
        if stores is not None and slots is not None:
            self._hand_over(host, slots)
            self._held[stores] = slots
            self._counts["stores"] += 1
        if loads is not None and loaded is not None:
            self._bad_pages += len(loaded.bad_pages)
            if loaded.verified_pages != self._num_pages:
                print(f"sequence {loads}: only {loaded.verified_pages} pages verified", flush=True)
                self._bad_pages += not loaded.bad_pages
            self._compare(loads, theirs)
            self._counts["loads"] += 1
        self._counts["turns"] += 1
        kind = "both" if moved == 2 else "load" if loaded is not None else "store"
        self._rates[kind].append(moved * self._sequence_bytes / seconds / 1e9)

    def _pick(self, among: Sequence[int]) -> int | None:
        return among[int(self._rng.integers(len(among)))] if among else None

    def _plan(
        self,
        sequence: int,
        slots: NDArray[np.int64],
        rows: NDArray[np.int64],
        *,
        first: int = 0,
        load: bool = False,
    ) -> Any:
        from kvferry import TransferPlan

        make = TransferPlan.load if load else TransferPlan.store
        keys = [b"%d/%d" % (sequence, first + page) for page in range(len(slots))]
        return make(self._geometry, host_slots=slots, device_slots=rows, page_keys=keys)

    def _allocate(self, host: HostPool) -> NDArray[np.int64]:
        """Slots for one sequence, after as much was evicted as that takes."""
        self._evict(host, self._num_pages)
        runs = host.allocate(self._num_pages)
        assert runs is not None
        return np.concatenate([np.arange(run.start, run.stop) for run in runs])

    def _hand_over(self, host: HostPool, slots: NDArray[np.int64]) -> None:
        from kvferry import SlotOwner

        host.hand_over(slots.tolist(), SlotOwner.TRANSFER, SlotOwner.INDEX)

    def _evict(self, host: HostPool, num_slots: int) -> None:
        """Until so many are free. What was used last is read just now, and is never reached."""
        from kvferry import SlotOwner

        while host.num_free < num_slots:
            _, slots = self._held.popitem(last=False)
            host.free(slots.tolist(), SlotOwner.INDEX)
            self._counts["evictions"] += 1

    # ------------------------------------------------------------------------------------ the bytes

    def _layer(self, sequence: int, plane: int, layer: int) -> torch.Tensor:
        """What a sequence holds in one layer, made anew: ``[tokens, element_size]``."""
        import torch

        size = self._geometry.planes[plane].element_size
        seed = (sequence * len(self._geometry.planes) + plane) * 4096 + layer
        generator = torch.Generator(device=rig.DEVICE).manual_seed(seed)
        words = torch.randint(
            -(1 << 31),
            1 << 31,
            (self._tokens, size // 4),
            dtype=torch.int32,
            device=rig.DEVICE,
            generator=generator,
        )
        return words.view(torch.uint8)

    def _write(self, rows: NDArray[np.int64], sequence: int | None) -> None:
        """Fill rows of the device pool: with a sequence, or with poison."""
        index = self._index(rows)
        for number, plane in enumerate(self._geometry.planes):
            for layer in range(plane.num_layers):
                target = self._pool[plane.name][layer]
                if sequence is None:
                    target.index_fill_(0, index, rig.POISON)
                else:
                    target.index_copy_(0, index, self._layer(sequence, number, layer))

    def _compare(self, sequence: int, rows: NDArray[np.int64]) -> None:
        """Some layers of every plane, byte for byte; the last one always."""
        import torch

        index = self._index(rows)
        for number, plane in enumerate(self._geometry.planes):
            count = min(self._args.compared, plane.num_layers)
            layers = {plane.num_layers - 1, *self._rng.integers(plane.num_layers, size=count - 1)}
            for layer in map(int, layers):
                found = self._pool[plane.name][layer].index_select(0, index)
                if not torch.equal(found, self._layer(sequence, number, layer)):
                    print(f"sequence {sequence}, {plane.name} {layer}: bytes differ", flush=True)
                    self._bad_pages += 1
                self._counts["compared"] += 1

    def _index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        import torch

        return torch.from_numpy(rows.reshape(-1)).to(rig.DEVICE)

    def _record(self, seconds: float) -> None:
        import torch

        free, total = torch.cuda.mem_get_info()
        resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        sample = Sample(
            round(seconds, 1),
            (total - free) // _MIB,
            resident * resource.getpagesize() // _MIB,
        )
        self._samples.append(sample)
        if len(self._samples) % 20 == 1:
            print(
                f"{sample.seconds:>6.1f} s  {self._counts['stores']} stored, "
                f"{self._counts['loads']} loaded, {self._counts['evictions']} evicted; device "
                f"{sample.device_mib} MiB, resident {sample.resident_mib} MiB; "
                f"{self._bad_pages} bad pages",
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
