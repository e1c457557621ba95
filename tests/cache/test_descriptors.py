"""A cache over files with few descriptors, and with none left: none leaks, and it goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvferry

_START = """
import os, resource, sys
import numpy as np
from kvferry import Geometry, KVFerry, Namespace, Plane, PoolView
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
PAGE = 4
geometry = Geometry(planes=(Plane(name="k", num_layers=1, element_size=24),), page_size=PAGE)
rows = np.random.default_rng(1).integers(0, 256, (80, 24), dtype=np.uint8)
sent = rows.copy()
cache = KVFerry(
    geometry,
    PoolView.from_tensors(geometry, {"k": [rows]}),
    namespace=Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint),
    host={"num_bytes": "64KiB"},  # 16 pages
    load={"threshold_tokens": 1},
    storage={
        "enabled": True, "path": sys.argv[1], "capacity_bytes": "1MiB", "breaker_failures": 10**6,
    },
    prefetch={"policy": "wait_complete", "threshold_tokens": 1},
)
def descriptors():
    return len(os.listdir("/proc/self/fd"))
def prompt(number):
    return [number] + list(range(1, 40))
def store(number):
    cache.store(prompt(number), device_slots=np.arange(40)).wait(30)
    return cache.flush(30)
def load(number):
    fetch = cache.prefetch(prompt(number))
    fetch.wait(30)
    with cache.match(prompt(number)) as found:
        count = found.num_tokens
        loaded = cache.load(found, device_slots=np.arange(40, 40 + count))
        loaded.wait(30)
    assert (rows[40 : 40 + loaded.usable_tokens] == sent[: loaded.usable_tokens]).all()
    return loaded.usable_tokens
"""

_WITHOUT = """
def without_descriptors(call, number):
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    try:
        return call(number)
    finally:
        for one in taken:
            os.close(one)
"""

_MANY = """
before, hits, failed = None, 0, 0
for number in range(250):
    assert store(number).complete
    usable = [load(number), load(max(number - 3, 0)), load(10**6)]
    assert usable[0] == 40 and usable[2] == 0, usable
    hits += usable[1]
    if number % 10 == 9:  # what fails leaves none open either, and is told by a value
        told = without_descriptors(store, 10**7 + number)
        assert not told.complete and told.num_unstored, told
        assert number < 20 or without_descriptors(load, number - 20) == 0
        assert cache.flush(30).complete  # there are some again
        failed += 1
    if number == 20:
        before = descriptors()
assert (hits, failed) == (250 * 40, 25), (hits, failed)
assert descriptors() <= before, (before, descriptors())
print("done")
cache.close()
"""

_NONE = """
assert store(0).complete
cache.reset()
usable = without_descriptors(load, 0)  # a miss just now, and no error of the caller
assert usable == 0, usable
assert store(1).complete
assert load(1) == 40
cache.check_integrity()
print("done")
cache.close()
"""


def _run(script: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _START + _WITHOUT + script, str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(kvferry.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_few_descriptors_are_enough(tmp_path: Path) -> None:
    """10,000 pages stored, looked for, read back, missed and failed, with 64: none is left open."""
    assert _run(_MANY, tmp_path / "store") == "done\n"


def test_without_descriptors_it_is_a_miss(tmp_path: Path) -> None:
    """What needs a file fails while there is none, and works again afterwards."""
    assert _run(_NONE, tmp_path / "store") == "done\n"
