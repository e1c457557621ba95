"""How fast the file backend is, against a plain O_DIRECT stream of the same blocks in the same run.

    python benchmarks/storage.py
    python benchmarks/storage.py --folder /mnt/nvme --mebibytes 4096 --json storage.json

The stream writes, and reads, one large file from front to back, a page at a time, by one thread.
The backend moves as many pages of the same size, each an object of its own; the store does the same
with headers and checksums. Stream, backend and store take turns, and a figure is the median of all
rounds. Then: how long a start takes with many objects, and what `contains` of 64 keys costs.

Nothing is removed before the end. ext4 without a journal takes a millisecond to make a file where
files were removed within the last minutes; give a --folder elsewhere if somebody did that here.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from kvferry import Geometry, Plane
from kvferry.storage import FileBackend, PageStore

_BATCH = 32
_KIB, _MIB = 1 << 10, 1 << 20


def main() -> int:
    """Print the tables; with --json write them as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, help="on the disk to measure (the system's)")
    parser.add_argument(
        "--kibibytes", type=int, nargs="+", metavar="N", default=[256, 2048, 8192],
        help="sizes of a page (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mebibytes", type=int, metavar="N", default=1024, help="of pages a round (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="(%(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", default=4, help="(%(default)s)")
    parser.add_argument(
        "--objects", type=int, nargs="+", metavar="N", default=[1_000, 100_000],
        help="in the folder for the start and `contains` (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures too")
    args = parser.parse_args()
    told: dict[str, Any] = {"command": " ".join(sys.argv), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        print(f"{'page':>9} {'way':<6} {'stream':>7} {'backend':>8} {'part':>5} "
              f"{'store':>7} {'part':>5}   GB/s, {args.threads} threads")  # fmt: skip
        told["throughput"] = []
        for kibibytes in args.kibibytes:
            for row in _throughput(pathlib.Path(folder), kibibytes * _KIB, args):
                told["throughput"].append(row)
                print(f"{row['page_bytes'] // _KIB:>5} KiB {row['way']:<6} {row['stream']:>7.2f} "
                      f"{row['backend']:>8.2f} {row['backend_over_stream']:>5.2f} "
                      f"{row['store']:>7.2f} {row['store_over_stream']:>5.2f}")  # fmt: skip
        print(f"\n{'objects':>9} {'start':>9} {'64 known':>10} {'64 unknown':>11}")
        told["scale"] = []
        for count in args.objects:
            row = _scale(pathlib.Path(folder), count)
            told["scale"].append(row)
            print(f"{count:>9,} {row['start_seconds']:>7.2f} s {row['known_us']:>7.0f} us "
                  f"{row['unknown_us']:>8.0f} us")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


class _Memory:
    """Pages of random bytes on block borders."""

    def __init__(self, page_bytes: int, count: int) -> None:
        self.map = mmap.mmap(-1, page_bytes * count)
        self.view = memoryview(self.map)
        self.array = np.frombuffer(self.map, dtype=np.uint8)
        self.array[:] = np.random.default_rng(0).integers(0, 256, self.array.size, dtype=np.uint8)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.addresses = [base + number * page_bytes for number in range(count)]
        self.parts = [
            self.view[number * page_bytes : (number + 1) * page_bytes] for number in range(count)
        ]


def _throughput(
    folder: pathlib.Path, page_bytes: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    count = max(_BATCH, args.mebibytes * _MIB // page_bytes)
    memory = _Memory(page_bytes, _BATCH)
    plane = Plane(name="k", num_layers=1, element_size=page_bytes // 64)
    geometry = Geometry(planes=(plane,))
    assert geometry.slot_bytes() == page_bytes
    digests = np.ones((_BATCH, 1), dtype=np.uint64)
    buffers = [[(address, page_bytes)] for address in memory.addresses]
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds):
        here = folder / f"{page_bytes} {number}"
        here.mkdir()
        backend = FileBackend(here / "backend", num_threads=args.threads)
        other = FileBackend(here / "store", num_threads=args.threads)
        store = PageStore(other, geometry)
        keys = [os.urandom(32) for _ in range(count)]
        batches = [keys[at : at + _BATCH] for at in range(0, count, _BATCH)]

        def write_backend(batches: Any = batches, backend: Any = backend) -> None:
            for batch in batches:
                assert all(one.ok for one in backend.write_from(batch, buffers[: len(batch)]))

        def read_backend(batches: Any = batches, backend: Any = backend) -> None:
            for batch in batches:
                assert all(one.ok for one in backend.read_into(batch, buffers[: len(batch)]))

        def write_store(batches: Any = batches, store: Any = store) -> None:
            for batch in batches:
                n = len(batch)
                assert all(one.ok for one in store.write(batch, memory.addresses[:n], digests[:n]))

        def read_store(batches: Any = batches, store: Any = store) -> None:
            for batch in batches:
                n = len(batch)
                assert all(one.ok for one in store.read(batch, memory.addresses[:n], digests[:n]))

        expected = memory.array.copy()
        ways: dict[str, dict[str, Callable[[], object]]] = {
            "write": {
                "stream": partial(_stream, here, memory, count, os.O_WRONLY),
                "backend": write_backend,
                "store": write_store,
            },
            "read": {
                "stream": partial(_stream, here, memory, count, os.O_RDONLY),
                "backend": read_backend,
                "store": read_store,
            },
        }
        for way, works in ways.items():
            for name, work in works.items():
                seconds.setdefault((way, name), []).append(_timed(work))
                assert np.array_equal(memory.array, expected), "bytes differ"
        assert backend.stats().counts.get("buffered", 0) == 0 or not backend.direct_io
        for one in (backend, other):
            one.close()
    for way in ("write", "read"):
        rates = {
            name: count * page_bytes / statistics.median(seconds[way, name]) / 1e9
            for name in ("stream", "backend", "store")
        }
        yield {
            "page_bytes": page_bytes,
            "way": way,
            **{name: round(rate, 3) for name, rate in rates.items()},
            "backend_over_stream": round(rates["backend"] / rates["stream"], 3),
            "store_over_stream": round(rates["store"] / rates["stream"], 3),
        }


def _stream(folder: pathlib.Path, memory: _Memory, count: int, flags: int) -> None:
    move = os.pwritev if flags == os.O_WRONLY else os.preadv
    descriptor = os.open(folder / "stream", flags | os.O_CREAT | os.O_DIRECT, 0o600)
    size = len(memory.parts[0])
    try:
        for number in range(count):
            part = memory.parts[number % _BATCH]
            assert move(descriptor, [part], number * size) == size
    finally:
        os.close(descriptor)


def _scale(folder: pathlib.Path, count: int) -> dict[str, Any]:
    path = folder / f"{count} objects"
    backend = FileBackend(path, capacity_bytes=1 << 40)
    content = np.zeros(64, dtype=np.uint8)
    buffers = [[(int(content.ctypes.data), 64)]]
    keys = [os.urandom(32) for _ in range(count)]
    for at in range(0, count, 1000):
        batch = keys[at : at + 1000]
        assert all(one.ok for one in backend.write_from(batch, buffers * len(batch)))
    backend.close()
    begun = time.perf_counter()
    again = FileBackend(path, capacity_bytes=1 << 40)
    start = time.perf_counter() - begun
    assert again.stats().objects == count
    known = keys[:64]
    unknown = [os.urandom(32) for _ in range(64)]
    assert all(again.contains(known))
    assert not any(again.contains(unknown))
    row = {
        "objects": count,
        "start_seconds": start,
        "known_us": 1e6 * statistics.median(_timed(lambda: again.contains(known))
                                            for _ in range(200)),
        "unknown_us": 1e6 * statistics.median(_timed(lambda: again.contains(unknown))
                                              for _ in range(200)),
    }  # fmt: skip
    again.close()
    return row


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    sys.exit(main())
