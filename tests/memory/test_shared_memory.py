"""Shared memory: mapped by several processes, and nothing left of it when they are gone."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from kvferry.errors import BudgetError, ConfigError, PoolClosedError
from kvferry.geometry import Geometry, Plane
from kvferry.memory import HostMapping, HostPool, linux_calls, mapping

MIB = 1 << 20
_ROOT = Path(__file__).parents[2]
_SHM = Path("/dev/shm")  # noqa: S108

_OWNER = """
import array, socket, sys
from kvferry.geometry import Geometry, Plane
from kvferry.memory import HostPool
pool = HostPool(
    Geometry(planes=(Plane(name="k", num_layers=1, element_size=65536),), page_size=16),
    num_slots=16, shared=True,
)
pool.slot_view(15)[:4] = b"mine"
with socket.socket(fileno=int(sys.argv[1])) as out:
    socket.send_fds(out, [str(pool.num_bytes).encode()], [pool.fd])
    out.recv(1)
    assert bytes(pool.slot_view(0)[:5]) == b"yours"
    out.send(b"x")
    out.recv(1)
"""

_CARELESS = """
import sys
from multiprocessing import shared_memory
shared_memory.SharedMemory(sys.argv[1], create=True, size=4096)
print("made", flush=True)
sys.stdin.read()
"""


def _geometry() -> Geometry:
    return Geometry(planes=(Plane(name="k", num_layers=1, element_size=65536),), page_size=16)


def _left_in_shm() -> set[str]:
    return {path.name for path in _SHM.iterdir() if "kvferry" in path.name}


def test_two_processes_share_a_pool_and_kill_9_leaves_nothing() -> None:
    """What one writes the other reads; the killed owner's memory lives as long as it is mapped."""
    before = _left_in_shm()
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    child = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(_ROOT / "src")},
    )
    theirs.close()
    try:
        text, (fd,), _, _ = socket.recv_fds(ours, 100, 1)
        assert "/memfd:kvferry" in Path(f"/proc/{child.pid}/maps").read_text()
        assert _left_in_shm() == before
        num_bytes = int(text)
        with HostMapping.attach(fd, num_bytes) as attached:
            os.close(fd)
            slot = 16 * 65536
            assert bytes(attached.view[15 * slot : 15 * slot + 4]) == b"mine"
            attached.view[:5] = b"yours"
            ours.send(b"x")
            assert ours.recv(1) == b"x"
            child.send_signal(signal.SIGKILL)
            assert child.wait(60) == -signal.SIGKILL
            assert bytes(attached.view[15 * slot : 15 * slot + 4]) == b"mine"
            assert attached.backing.shared
            assert attached.commit_method == "attach"
    finally:
        child.kill()
        child.wait(60)
        ours.close()
    assert _left_in_shm() == before
    assert "/memfd:kvferry" not in Path("/proc/self/maps").read_text()


def test_shared_memory_with_a_name_is_left_behind() -> None:
    """Control: the same kill after memory with a name, which the check above sees."""
    name = f"kvferry-control-{os.getpid()}"
    before = _left_in_shm()
    with subprocess.Popen(
        [sys.executable, "-c", _CARELESS, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        start_new_session=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == b"made\n"
        # With its helper, which would tidy up after it.
        os.killpg(child.pid, signal.SIGKILL)
    try:
        assert _left_in_shm() == before | {name}
    finally:
        left = shared_memory.SharedMemory(name)
        left.close()
        left.unlink()


@pytest.mark.parametrize("alignment", [1, 4096, 65536, 2 * MIB])
def test_shared_memory_is_as_any_other(alignment: int) -> None:
    """Aligned on both sides, zeroed, committed, and closed as private memory is."""
    with HostMapping(3 * MIB + 5, alignment=alignment, shared=True) as made:
        assert made.address % max(alignment, 4096) == 0
        assert bytes(made.view) == bytes(3 * MIB + 5)
        about = os.fstat(made.fd)
        assert about.st_blocks * 512 >= 3 * MIB + 5  # all of it, before it was read
        with HostMapping.attach(made.fd, 3 * MIB + 5, alignment=alignment) as other:
            assert other.address != made.address
            assert other.address % max(alignment, 4096) == 0
            other.view[-1] = 7
            assert made.view[-1] == 7
            other.check_no_view()
        made.check_no_view()
    with pytest.raises(PoolClosedError):
        _ = made.fd


def test_attaching_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even on a kernel whose only way to commit is to write zeros."""
    with HostMapping(MIB, shared=True) as made:
        made.view[:] = b"\xa5" * MIB
        monkeypatch.setattr(mapping, "_MADV_POPULATE_WRITE", 0x7FFF)
        with HostMapping.attach(made.fd, MIB) as other:
            assert bytes(other.view) == b"\xa5" * MIB


def test_nobody_can_shrink_it_under_the_others() -> None:
    """Which would be a SIGBUS in a process that did nothing wrong."""
    with HostMapping(MIB, shared=True) as made:
        for size in (0, 2 * MIB):
            with pytest.raises(PermissionError):
                os.ftruncate(made.fd, size)


def test_sizes_that_the_memory_has_not() -> None:
    """More than there is, and nothing, are refused with what there is."""
    with HostMapping(5000, shared=True) as made:
        for wrong in (5001, 0, -1):
            with pytest.raises(ConfigError, match=rf"num_bytes={wrong}.*5000 bytes"):
                HostMapping.attach(made.fd, wrong)


def test_descriptors_go_with_the_mapping() -> None:
    """Neither closed ones, nor refused ones, nor forgotten ones leave a descriptor."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with HostMapping(MIB, shared=True) as made, HostMapping.attach(made.fd, MIB):
            pass
        with pytest.raises(ConfigError), HostMapping(5000, shared=True) as made:
            HostMapping.attach(made.fd, 5001)
        with pytest.raises(BudgetError):
            HostMapping(1 << 60, shared=True)
        HostMapping(MIB, shared=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_private_memory_has_no_descriptor() -> None:
    """Asking for it says how to have one."""
    with (
        HostPool(_geometry(), num_slots=1) as pool,
        pytest.raises(ConfigError, match="shared=True"),
    ):
        _ = pool.fd


def test_a_pool_in_shared_memory() -> None:
    """Slots and digests are at the same places for another process; repr says what it is."""
    with HostPool(_geometry(), num_slots=2, shared=True) as pool:
        assert "shared" in repr(pool)
        pool.digests[1] = 77
        pool.slot_view(1)[:2] = b"ab"
        with HostMapping.attach(pool.fd, pool.num_bytes) as other:
            assert bytes(other.view[-8:]) == (77).to_bytes(8, sys.byteorder)
            assert bytes(other.view[pool.slot_bytes : pool.slot_bytes + 2]) == b"ab"
    with pytest.raises(PoolClosedError):
        _ = pool.fd


def test_memory_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system without memfd_create, and one that does not map it, are budget errors."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    lost = list(mapping._LOST)
    monkeypatch.setattr(linux_calls, "map_over", refuse)
    with pytest.raises(BudgetError, match=r"did not map 5 bytes of shared.*not implemented"):
        HostMapping(5, shared=True)
    # What may have a hole is kept for good: unmapping it could take others' memory.
    assert len(mapping._LOST) == len(lost) + 1
    monkeypatch.setattr(linux_calls, "shared_memory", refuse)
    with pytest.raises(BudgetError, match=r"5 bytes of shared memory .*not implemented"):
        HostMapping(5, shared=True)
