"""How fast the Mooncake backend is, against the library's own batch calls in the same run.

    python benchmarks/mooncake_pool.py
    python benchmarks/mooncake_pool.py --mebibytes 1024 --json mooncake_pool.json

A master and another client, which gives all memory, are started on loopback, so every byte crosses
a socket. Plain client, backend and store take turns at the same pages, in memory that both have
registered; a figure is the median of all rounds. The store has headers and checksums too. The way
through the buffer is measured beside it: pages in memory that is not registered.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry import Geometry, Plane
from kvferry.storage import PageStore
from kvferry.storage.mooncake import MooncakeBackend

_BATCH = 32
_KIB, _MIB = 1 << 10, 1 << 20
_START_SECS = 30.0
_MEMBER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kibibytes", type=int, nargs="+", metavar="N", default=[256, 2048, 8192],
        help="sizes of a page (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mebibytes", type=int, metavar="N", default=512, help="of pages a round (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", default=7, help="(%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures too")
    args = parser.parse_args()
    try:
        module = importlib.import_module("mooncake.store")
    except ImportError as absent:
        print(f"mooncake: not measured, as its library does not load here: {absent}")
        return 0
    told: dict[str, Any] = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "rows": []}
    print(f"{'page':>9} {'way':<6} {'plain':>7} {'backend':>8} {'part':>5} {'store':>7} "
          f"{'part':>5} {'staged':>7} {'part':>5}   GB/s")  # fmt: skip
    with _pool(module, (args.mebibytes + 256) * 5 * _MIB) as address:
        for kibibytes in args.kibibytes:
            for row in _rows(module, address, kibibytes * _KIB, args):
                told["rows"].append(row)
                print(f"{row['page_bytes'] // _KIB:>5} KiB {row['way']:<6} {row['plain']:>7.2f} "
                      f"{row['backend']:>8.2f} {row['backend_over_plain']:>5.2f} "
                      f"{row['store']:>7.2f} {row['store_over_plain']:>5.2f} "
                      f"{row['staged']:>7.2f} {row['staged_over_plain']:>5.2f}")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


@contextmanager
def _pool(module: Any, num_bytes: int) -> Iterator[str]:
    """The address of a master, with one client that gives so much memory."""
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = one.getsockname()[1], other.getsockname()[1]
    address = f"127.0.0.1:{port}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    master = subprocess.Popen(  # noqa: S603
        [pathlib.Path(module.__file__).parent / "mooncake_master", "--rpc_address=127.0.0.1",
         f"--rpc_port={port}", "--metrics_host=127.0.0.1", f"--metrics_port={metrics}"], **quiet
    )  # type: ignore[call-overload]  # fmt: skip
    member = None
    try:
        ends, pause = time.monotonic() + _START_SECS, threading.Event()
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                if time.monotonic() > ends:
                    raise
                pause.wait(0.02)
        member = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", _MEMBER, address, str(num_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert member.stdout is not None
        assert member.stdout.readline().strip() == b"0"
        yield address
    finally:
        for process in (member, master):
            if process is not None:
                process.kill()
                process.wait()


def _memory(page_bytes: int, seed: int) -> tuple[Any, list[int]]:
    """`_BATCH` random pages on block borders, and where they are."""
    raw = np.empty(page_bytes * _BATCH + 4096, dtype=np.uint8)
    begin = -int(raw.ctypes.data) % 4096
    pages = raw[begin : begin + page_bytes * _BATCH]
    pages[:] = np.random.default_rng(seed).integers(0, 256, pages.size, dtype=np.uint8)
    return pages, [int(pages.ctypes.data) + row * page_bytes for row in range(_BATCH)]


def _rows(
    module: Any, address: str, page_bytes: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    count = max(_BATCH, args.mebibytes * _MIB // page_bytes // _BATCH * _BATCH)
    geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=page_bytes // 64),))
    assert geometry.slot_bytes() == page_bytes
    pages, at = _memory(page_bytes, 0)
    other, other_at = _memory(page_bytes, 1)
    digests = np.ones((_BATCH, 1), dtype=np.uint64)
    plain = module.MooncakeDistributedStore()
    assert plain.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
    assert plain.register_buffer(at[0], pages.size) == 0
    backend = MooncakeBackend(address, buffer_bytes=max(64 * _MIB, 8 * page_bytes))
    assert backend.register_memory(at[0], pages.size)
    store = PageStore(backend, geometry)
    sizes = [page_bytes] * _BATCH
    buffers = [[(one, page_bytes)] for one in at]
    staged = [[(one, page_bytes)] for one in other_at]

    def by_batch(call: Callable[[list[bytes]], bool], keys: list[bytes]) -> float:
        begun = time.perf_counter()
        for first in range(0, len(keys), _BATCH):
            assert call(keys[first : first + _BATCH])
        return time.perf_counter() - begun

    def ok(results: Any) -> bool:
        return all(one.ok for one in results)

    ways: dict[str, dict[str, Callable[[list[bytes]], bool]]] = {
        "write": {
            "plain": lambda some: not any(plain.batch_put_from([k.hex() for k in some], at, sizes)),
            "backend": lambda some: ok(backend.write_from(some, buffers)),
            "store": lambda some: ok(store.write(some, at, digests)),
            "staged": lambda some: ok(backend.write_from(some, staged)),
        },
        "read": {
            "plain": lambda some: plain.batch_get_into([k.hex() for k in some], at, sizes) == sizes,
            "backend": lambda some: ok(backend.read_into(some, buffers)),
            "store": lambda some: ok(store.read(some, at, digests)),
            "staged": lambda some: ok(backend.read_into(some, staged)),
        },
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    expected = pages.copy(), other.copy()
    for number in range(args.rounds):
        names = list(ways["write"])
        for name in names[number % 4 :] + names[: number % 4]:
            keys = [os.urandom(32) for _ in range(count)]
            for way in ("write", "read"):
                taken = by_batch(ways[way][name], keys)
                seconds.setdefault((way, name), []).append(taken)
            assert (pages == expected[0]).all()
            assert (other == expected[1]).all()
            plain.remove_all(True)
    plain.close()
    backend.close()
    for way in ("write", "read"):
        speed = {
            name: page_bytes * count / statistics.median(seconds[way, name]) / 1e9
            for name in ways[way]
        }
        row: dict[str, Any] = {"page_bytes": page_bytes, "way": way}
        for name, value in speed.items():
            row[name] = round(value, 3)
            if name != "plain":
                row[f"{name}_over_plain"] = round(value / speed["plain"], 3)
        yield row


if __name__ == "__main__":
    sys.exit(main())
