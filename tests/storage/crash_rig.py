"""Writers that are killed at random points, and what must be true after each restart.

    PYTHONPATH=src:. python -m tests.storage.crash_rig --kills 200

runs as many as asked for; the tests run a few.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from kvferry.storage import FileBackend, ItemStatus, PageStore

_ROOT = Path(__file__).parents[2]
_CAPACITY = 40 * 69632
_KEYS = 64

# Torch-free, so that it starts in a tenth of a second. It says when it begins, and then writes,
# reads and deletes until it is killed.
_CHILD = """
import random, sys
import numpy as np
from tests.storage.crash_rig import open_store, pages_of
rng = random.Random(int(sys.argv[2]))
backend, store = open_store(sys.argv[1])
print("begun", flush=True)
while True:
    numbers = rng.sample(range(64), 6)
    action = rng.randrange(10)
    keys = [b"%d" % number for number in numbers]
    pages, digests, addresses = pages_of(numbers)
    if action < 7:
        store.write(keys, addresses, digests)
    elif action < 9:
        store.read(keys, addresses, digests)
    else:
        backend.delete(keys)
"""


def open_store(folder: str) -> tuple[FileBackend, PageStore]:
    """The backend and store of both sides."""
    from kvferry.geometry import Geometry, Plane

    plane = Plane(name="k", num_layers=4, element_size=256)
    backend = FileBackend(folder, capacity_bytes=_CAPACITY)
    return backend, PageStore(backend, Geometry(planes=(plane,)))


def pages_of(
    numbers: list[int],
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """What the pages `numbers` hold, their digests, and where they lie."""
    memory = np.zeros(len(numbers) * 65536 + 4096, dtype=np.uint8)
    begin = -memory.ctypes.data % 4096
    pages = memory[begin : begin + len(numbers) * 65536].reshape(len(numbers), 65536)
    digests = np.zeros((len(numbers), 4), dtype=np.uint64)
    for row, number in enumerate(numbers):
        rng = np.random.default_rng(number)
        pages[row] = rng.integers(0, 256, 65536, dtype=np.uint8)
        digests[row] = rng.integers(1, 1 << 63, 4, dtype=np.uint64)
    return pages, digests, [int(page.ctypes.data) for page in pages]


def check_folder(folder: Path) -> int:
    """Every object is whole or a miss, and usage is what lies there; how many are whole."""
    backend, store = open_store(str(folder))
    left = list(folder.rglob(".*.tmp"))
    assert left == [], f"files of dead writers: {left}"
    files = sorted(folder.rglob("*.kvo"))
    stats = backend.stats()
    sizes = sum(path.stat().st_size for path in files)
    assert (stats.objects, stats.num_bytes) == (len(files), sizes), f"{stats}, {len(files)} files"
    assert stats.num_bytes <= _CAPACITY, f"{stats}"
    numbers = list(range(_KEYS))
    expected, digests, _ = pages_of(numbers)
    found, found_digests, addresses = pages_of([0] * _KEYS)
    found[:] = 0xA5
    results = store.read([b"%d" % number for number in numbers], addresses, found_digests)
    whole = 0
    for number, result in zip(numbers, results, strict=True):
        assert result.status in (ItemStatus.OK, ItemStatus.MISS), f"page {number}: {result}"
        if result.ok:
            whole += 1
            assert np.array_equal(found[number], expected[number]), f"page {number}"
            assert np.array_equal(found_digests[number], digests[number]), f"page {number}"
    assert whole == len(files)
    assert all(one.ok for one in store.write([b"0"], addresses[:1], digests[:1]))
    backend.delete([b"0"])
    backend.close()
    return whole


def run_kills(folder: Path, kills: int, seed: int) -> tuple[int, int]:
    """Kill `kills` writers in `folder`, one after another.

    Returns how many objects were whole after restarts, in all, and how many temporary files the
    dead left. Raises AssertionError where a restart finds what it must not.
    """
    rng = random.Random(seed)
    whole = left = 0
    path = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    for number in range(kills):
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(folder), str(seed * 1000 + number)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"begun\n", "the writer did not begin"
            # Not a wait for anything: the random moment at which it is killed.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(rng.uniform(0, 0.25))
            assert child.poll() is None, f"the writer ended by itself: {child.returncode}"
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate(timeout=30)
        left += sum(1 for _ in folder.rglob(".*.tmp"))
        whole += check_folder(folder)
    return whole, left


def main() -> int:
    """Run as many kills as asked for, in a folder of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where to make it; the system's default else")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        whole, left = run_kills(Path(folder) / "store", args.kills, args.seed)
    sys.stdout.write(
        f"{args.kills} writers killed (seed {args.seed}): {whole} objects whole after restarts, "
        f"none wrong; {left} temporary files of the dead removed\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
