"""A real master and clients of its pool, started and stopped by the tests, all on loopback."""

from __future__ import annotations

import importlib
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.storage.server_rig import Process, free_port, until

from kvferry.storage.mooncake import MooncakeBackend

_MEMBER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print("ready" if code == 0 else f"code {code}", flush=True)
sys.stdin.read()
store.close()
"""


def store_module() -> Any:
    """Mooncake's module, or skip the test: what a machine lacks is the only reason to."""
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as absent:
        pytest.skip(f"no Mooncake here ({absent}): make setup, and apt-get install libibverbs1")


class Master(Process):
    """A master; leases last 0.3 s, and a client that is silent for 3 s is dead."""

    def __init__(self, *options: str) -> None:
        self._port, self._options = free_port(), options
        self.address = f"127.0.0.1:{self._port}"
        super().__init__()

    def _start(self) -> subprocess.Popen[bytes]:
        store = store_module()
        program = Path(store.__file__).parent / "mooncake_master"
        process = subprocess.Popen(
            [
                program, "--rpc_address=127.0.0.1", f"--rpc_port={self._port}",
                "--metrics_host=127.0.0.1", f"--metrics_port={free_port()}",
                "--default_kv_lease_ttl=300", "--client_ttl=3", *self._options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip

        def answers() -> bool:
            assert process.poll() is None, f"the master ended with {process.returncode}"
            try:
                socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            except OSError:
                return False
            return True

        until(answers, "the master does not listen")
        return process

    def pause(self) -> None:
        """It hears and says nothing from now on."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")

        def stopped() -> bool:
            states = [(task / "stat").read_text().rpartition(")")[2] for task in tasks.iterdir()]
            return all(state.split()[0] == "T" for state in states)

        until(stopped, "the master does not stop")

    def go_on(self) -> None:
        """It goes on where it was."""
        self.process.send_signal(signal.SIGCONT)


class Member(Process):
    """A process that gives memory to a pool."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._told = [address, str(num_bytes)]
        super().__init__()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", _MEMBER, *self._told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        assert said == b"ready", said
        return process


def opened(master: Master, **options: Any) -> MooncakeBackend:
    """A backend of that pool; it gives no memory unless told to."""
    options = {"buffer_bytes": 4 << 20, "deadline_secs": 20.0, **options}
    return MooncakeBackend(master.address, **options)
