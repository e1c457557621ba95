"""Which of the processes of a replica are gone, as far as this machine can tell."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.ranks.machine import machine_number

if TYPE_CHECKING:
    from kvferry.ranks.base import Ranks

__all__ = ["ProcessWatch"]

_PID_NAMESPACE = Path("/proc/self/ns/pid")
_NOT_MINE = (1 << 63) - 1


class ProcessWatch:
    """The processes of all ranks: one agreement, and then nothing of the others' doing.

    Ranks that are threads of this process, on another machine, or in another process namespace are
    not watched.

    Args:
        ranks: All of them make this at the same time.
        timeout: Seconds.

    Raises as `Ranks.agree_min`.
    """

    def __init__(self, ranks: Ranks, *, timeout: float) -> None:
        own = (machine_number(), _namespace(), os.getpid())
        table = [_NOT_MINE] * (3 * ranks.size)
        table[3 * ranks.rank : 3 * ranks.rank + 3] = own
        told = ranks.agree_min(table, timeout=timeout)
        self._processes: dict[int, int] = {}
        self._pids = told[2::3]
        for rank in range(ranks.size):
            machine, namespace, pid = told[3 * rank : 3 * rank + 3]
            if (machine, namespace) == own[:2] and pid != own[2]:
                # Without one, as on an old kernel or for a process that is gone already, an error
                # names no rank; it comes all the same.
                with contextlib.suppress(OSError):
                    self._processes[rank] = os.pidfd_open(pid)

    def gone(self, timeout: float) -> list[int]:
        """Ranks whose process has ended; waits at most `timeout` seconds for there to be one.

        The connections of a process that is killed close a moment before it counts as ended.
        """
        waiting = select.poll()
        rank_of = {process: rank for rank, process in self._processes.items()}
        for process in rank_of:
            waiting.register(process, select.POLLIN)
        ended = waiting.poll(max(0.0, timeout) * 1000) if rank_of else []
        return sorted(rank_of[process] for process, _ in ended)

    def named(self, timeout: float) -> str:
        """``rank 2 (process 17) is gone``, or nothing; waits as `gone`."""
        gone = self.gone(timeout)
        return " and ".join(f"rank {rank} (process {self._pids[rank]}) is gone" for rank in gone)

    def close(self) -> None:
        """Watch no more; a second call does nothing."""
        for rank in list(self._processes):
            os.close(self._processes.pop(rank))


def _namespace() -> int:
    """A number that process namespaces of one machine differ in."""
    try:
        return _PID_NAMESPACE.stat().st_ino
    except OSError:
        return 0
