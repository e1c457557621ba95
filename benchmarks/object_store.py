"""How fast the object-store backend is, against its library called plainly in the same run.

    python benchmarks/object_store.py
    python benchmarks/object_store.py --mebibytes 512 --json object_store.json

Objects go to a server on loopback (moto's, in a process of its own), and to a folder. The plain
client puts and gets as many objects at a time, from and to memory of its own, and is taken in turns
with the backend and with a `PageStore` over it; a figure is the median of all rounds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvferry import Geometry, Plane
from kvferry.storage import PageStore
from kvferry.storage.object_store import ObjectStoreBackend

_BATCH = 32
_REQUESTS = 16
_KIB, _MIB = 1 << 10, 1 << 20
_START_SECS = 60.0
_SETTINGS = {"region": "us-east-1", "access_key_id": "x", "secret_access_key": "x"}


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kibibytes", type=int, nargs="+", metavar="N", default=[256, 2048, 8192],
        help="sizes of a page (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--mebibytes", type=int, metavar="N", default=256, help="of pages a round (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="(%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures too")
    args = parser.parse_args()
    told: dict[str, Any] = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "rows": []}
    print(f"{'store':<7} {'page':>9} {'way':<6} {'plain':>7} {'backend':>8} {'part':>5} "
          f"{'checked':>8} {'part':>5}   GB/s")  # fmt: skip
    for name in ("http", "folder"):
        with _store(name) as (url, settings):
            for kibibytes in args.kibibytes:
                for row in _rows(name, url, settings, kibibytes * _KIB, args):
                    told["rows"].append(row)
                    print(f"{row['store']:<7} {row['page_bytes'] // _KIB:>5} KiB {row['way']:<6} "
                          f"{row['plain']:>7.2f} {row['backend']:>8.2f} "
                          f"{row['backend_over_plain']:>5.2f} {row['checked']:>8.2f} "
                          f"{row['checked_over_plain']:>5.2f}", flush=True)  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


@contextmanager
def _store(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where objects go, and the settings for it."""
    if name == "folder":
        folder = tempfile.mkdtemp(prefix="kvferry-objects-")
        try:
            yield pathlib.Path(folder).as_uri(), {}
        finally:
            shutil.rmtree(folder)
        return
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    server = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{port}"
        bucket = urllib.request.Request(f"{endpoint}/pages", method="PUT")  # noqa: S310
        ends, pause = time.monotonic() + _START_SECS, threading.Event()
        while True:
            try:
                urllib.request.urlopen(bucket, timeout=5).close()  # noqa: S310
                break
            except OSError:
                if time.monotonic() > ends:
                    raise
                pause.wait(0.05)
        yield "s3://pages/bench", {"endpoint": endpoint, **_SETTINGS}
    finally:
        server.kill()
        server.wait()


def _rows(
    name: str, url: str, settings: dict[str, Any], page_bytes: int, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    count = max(_BATCH, args.mebibytes * _MIB // page_bytes // _BATCH * _BATCH)
    geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=page_bytes // 64),))
    assert geometry.slot_bytes() == page_bytes
    pages = np.random.default_rng(0).integers(0, 256, (_BATCH, page_bytes), dtype=np.uint8)
    expected = pages.copy()
    at = [int(one.ctypes.data) for one in pages]
    digests = np.ones((_BATCH, 1), dtype=np.uint64)
    backend = ObjectStoreBackend(url, num_requests=_REQUESTS, **settings)
    store = PageStore(backend, geometry)
    buffers = [[(one, page_bytes)] for one in at]
    plain = backend._client
    threads = concurrent.futures.ThreadPoolExecutor(_REQUESTS)

    def put_plainly(some: Sequence[bytes]) -> bool:
        names = [f"plain/{key.hex()}" for key in some]
        list(
            threads.map(
                lambda one: plain.library.put(plain.store, *one), zip(names, pages, strict=False)
            )
        )
        return True

    def get_plainly(some: Sequence[bytes]) -> bool:
        names = [f"plain/{key.hex()}" for key in some]
        got = threads.map(lambda one: plain.library.get(plain.store, one).bytes(), names)
        return all(len(one) == page_bytes for one in got)

    def ok(results: Any) -> bool:
        return all(one.ok for one in results)

    ways: dict[str, dict[str, Callable[[list[bytes]], bool]]] = {
        "write": {
            "plain": put_plainly,
            "backend": lambda some: ok(backend.write_from(some, buffers)),
            "checked": lambda some: ok(store.write(some, at, digests)),
        },
        "read": {
            "plain": get_plainly,
            "backend": lambda some: ok(backend.read_into(some, buffers)),
            "checked": lambda some: ok(store.read(some, at, digests)),
        },
    }
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(args.rounds):
        order = list(ways["write"])
        for one in order[number % 3 :] + order[: number % 3]:
            keys = [os.urandom(32) for _ in range(count)]
            for way in ("write", "read"):
                begun = time.perf_counter()
                for first in range(0, count, _BATCH):
                    assert ways[way][one](keys[first : first + _BATCH])
                seconds.setdefault((way, one), []).append(time.perf_counter() - begun)
            assert (pages == expected).all()
            if one == "plain":
                plain.library.delete(plain.store, [f"plain/{key.hex()}" for key in keys])
            else:
                assert ok(backend.delete(keys))
    threads.shutdown()
    backend.close()
    for way in ("write", "read"):
        speed = {
            one: page_bytes * count / statistics.median(seconds[way, one]) / 1e9
            for one in ways[way]
        }
        row: dict[str, Any] = {"store": name, "page_bytes": page_bytes, "way": way}
        for one, value in speed.items():
            row[one] = round(value, 3)
            if one != "plain":
                row[f"{one}_over_plain"] = round(value / speed["plain"], 3)
        yield row


if __name__ == "__main__":
    sys.exit(main())
