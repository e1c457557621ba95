"""Reserved address space: far offsets without the memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from kvferry.errors import BudgetError, ConfigError, PoolClosedError
from kvferry.testing.reserved import ReservedSpace

SPACE = (1 << 42) + 12345


@pytest.mark.parametrize("offset", [0, (1 << 31) - 3, (1 << 32) - 1, (1 << 40) + 7, SPACE - 16])
def test_committed_bytes_lie_at_their_offset(offset: int) -> None:
    """A view shows the very bytes at address + offset, zero at first, then what was written."""
    with ReservedSpace(SPACE) as space:
        view = space.commit(offset, 16)
        assert len(view) == 16
        assert bytes(view) == bytes(16)
        view[:] = bytes(range(1, 17))
        assert ctypes.string_at(space.address + offset, 16) == bytes(range(1, 17))


def test_committing_again_keeps_the_bytes() -> None:
    """Ranges may overlap; what was written stays."""
    with ReservedSpace(1 << 41) as space:
        space.commit(1 << 40, 10)[3] = 9
        assert space.commit((1 << 40) - 5000, 6000)[5003] == 9


def test_uncommitted_bytes_cannot_be_touched() -> None:
    """A read outside the committed pages ends the process."""
    code = (
        "import ctypes; from kvferry.testing.reserved import ReservedSpace\n"
        "space = ReservedSpace(1 << 41); space.commit(1 << 40, 1)\n"
        "ctypes.string_at(space.address + (1 << 40), 1); print('there', flush=True)\n"
        "ctypes.string_at(space.address + (1 << 40) + 8192, 1); print('not there', flush=True)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert child.stdout == b"there\n"
    assert child.returncode == -11


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 0), (4096, 1), (0, 4097)])
def test_ranges_outside_the_space(offset: int, size: int) -> None:
    """A commit outside the space is refused before the system is asked."""
    with ReservedSpace(4096) as space, pytest.raises(ConfigError, match="bytes 0 to 4096"):
        space.commit(offset, size)


def test_sizes_that_cannot_be() -> None:
    """Nothing, and more than any address space, are refused with the size."""
    with pytest.raises(ConfigError, match="num_bytes=0"):
        ReservedSpace(0)
    with pytest.raises(BudgetError, match=str(1 << 62)):
        ReservedSpace(1 << 62)


def test_use_after_close() -> None:
    """close may be repeated; address and commit raise afterwards."""
    space = ReservedSpace(4096)
    space.close()
    space.close()
    with pytest.raises(PoolClosedError):
        space.commit(0, 1)
    with pytest.raises(PoolClosedError):
        _ = space.address
