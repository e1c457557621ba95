"""Writers killed by SIGKILL: whole or a miss, usage right, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.storage.crash_rig import check_folder, run_kills
from tests.storage.storage_rig import put

import kvferry
from kvferry.storage import FileBackend

# Stops inside a write, with its temporary file half written, until it is killed.
_HALF_WRITTEN = """
import os, sys
import numpy as np
from kvferry.storage import FileBackend
from tests.storage.storage_rig import put
inner = os.pwritev
def half(descriptor, buffers, offset):
    inner(descriptor, [memoryview(np.zeros(4096, np.uint8))], offset)
    print("half", flush=True)
    sys.stdin.read()
os.pwritev = half
backend = FileBackend(sys.argv[1], direct_io=False)
put(backend, [1], 8192)
"""


@pytest.mark.soak
def test_writers_killed_at_random(tmp_path: Path, soak_factor: int) -> None:
    """After each of 20 kills every object is whole or a miss, and usage is what is there."""
    whole, _ = run_kills(tmp_path / "store", kills=20 * soak_factor, seed=7)
    assert whole > 100, "the writers got nowhere, so nothing was tested"


def test_what_a_dead_writer_left_is_counted_until_it_is_removed(tmp_path: Path) -> None:
    """A half-written file counts while its writer lives, and goes when it is dead."""
    folder = tmp_path / "store"
    roots = [str(Path(kvferry.__file__).parents[1]), str(Path(__file__).parents[2])]
    child = subprocess.Popen(
        [sys.executable, "-c", _HALF_WRITTEN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"half\n"
        alive = FileBackend(folder, rescan_secs=0)
        assert alive.stats().num_bytes == 4096
        assert alive.stats().counts["other_bytes"] == 4096
        put(alive, [5], 100)  # looks through the folder once more
        assert alive.stats().num_bytes == 4096 + 100
        assert len(list(folder.rglob(".*.tmp"))) == 1
    finally:
        child.kill()
        child.wait(30)
        child.communicate()
    put(alive, [6], 100)
    assert alive.stats().num_bytes == 200
    assert alive.stats().counts["dead_writers"] == 1
    assert list(folder.rglob(".*.tmp")) == []
    alive.close()


def test_the_check_sees_a_torn_object(tmp_path: Path) -> None:
    """An object that is not whole under its final name would fail the test above."""
    run_kills(tmp_path / "store", kills=1, seed=3)
    path = next((tmp_path / "store").rglob("*.kvo"))
    path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))
    with pytest.raises(AssertionError, match="corrupt"):
        check_folder(tmp_path / "store")
