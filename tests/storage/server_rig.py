"""Processes that serve storage on loopback, started and killed by the tests."""

from __future__ import annotations

import abc
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from kvferry.closing import ClosedAtExit

DEADLINE_SECS = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Try again until it holds, or fail at the deadline."""
    ends = time.monotonic() + DEADLINE_SECS
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < ends, what
        pause.wait(0.02)


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Process(ClosedAtExit, abc.ABC):
    """One that `_start` starts; at the end of its block it is killed."""

    def __init__(self) -> None:
        self.process = self._start()

    @abc.abstractmethod
    def _start(self) -> subprocess.Popen[bytes]:
        """A new one, once it serves."""

    def kill(self) -> None:
        """As by ``kill -9``."""
        self.process.kill()
        self.process.wait(DEADLINE_SECS)

    def restart(self) -> None:
        """A new one at the same address."""
        self.kill()
        self.process = self._start()

    def close(self) -> None:
        """Nothing of it is left."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
