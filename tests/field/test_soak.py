"""Eight processes over files, a Mooncake and S3, all of which fail: no wrong byte, and no leak.

Servers and clients are killed with ``kill -9`` and started again, a master is stopped for a while,
and a proxy before S3 refuses, cuts and hangs.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.storage.mooncake.pool_rig import Master, Member, store_module
from tests.storage.object_store.fault_proxy import FaultProxy, Harm
from tests.storage.object_store.s3_rig import BUCKET, Server, moto

from kvferry.storage import FileBackend

_SECS, _SOAK_SECS = 45.0, 180.0
"""Of a plain run; and of a soak, for each of its factors: 30 minutes with ten."""

_END_SECS = 100.0
_ENOUGH = 3
"""Times that a client was without storage before it is known what it holds then."""

_SECRETS = {"region": "us-east-1", "access_key_id": "x", "secret_access_key": "x"}


class Running:
    """A client process."""

    def __init__(self, kind: str, storage: dict[str, Any], seed: int) -> None:
        self.kind, self.storage, self.seed = kind, storage, seed
        self.lives = 0
        self.start()

    def start(self) -> None:
        """Begin, as another life with other requests."""
        self.lives += 1
        told = json.dumps({"storage": self.storage, "seed": 100 * self.seed + self.lives})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.field.client", told],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"

    def check(self) -> None:
        """It has not come to an end by itself, as after a wrong byte."""
        assert self.process.stdout is not None
        assert self.process.poll() is None, self.process.stdout.read()

    def kill(self) -> None:
        """As by ``kill -9``."""
        self.process.kill()
        self.process.wait(_END_SECS)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def end(self) -> dict[str, Any]:
        """Let it come to its end; what it says."""
        out, _ = self.process.communicate(timeout=_END_SECS)
        told: dict[str, Any] = json.loads(out)
        return told


def kill_all(clients: list[Running]) -> None:
    """Whatever became of the test."""
    for one in clients:
        one.kill()


class Faults:
    """What goes wrong, one thing after another."""

    def __init__(
        self, rng: random.Random, master: Master, server: Server, proxy: FaultProxy,
        clients: list[Running],
    ) -> None:  # fmt: skip
        self._rng, self._master, self._server, self._proxy = rng, master, server, proxy
        self._clients = clients
        self._nap = threading.Event()
        self.counts: dict[str, int] = {}

    def one(self) -> None:
        """Something."""
        kinds: tuple[Callable[[], None], ...] = (
            self.kill_client, self.kill_client, self.restart_s3, self.pause_master,
            self.restart_master, self.harm, self.harm, self.harm, self.heal,
        )  # fmt: skip
        kind = self._rng.choice(kinds)
        kind()
        name = kind.__name__
        self.counts[name] = self.counts.get(name, 0) + 1

    def kill_client(self) -> None:
        """A process dies in the middle of whatever it does, and another one comes."""
        victim = self._rng.choice(self._clients)
        victim.check()
        victim.kill()
        victim.start()

    def restart_s3(self) -> None:
        """All objects of the bucket are lost too: this server keeps them in memory."""
        self._server.restart()

    def pause_master(self) -> None:
        """It hangs for a while."""
        self._master.pause()
        self._nap.wait(self._rng.uniform(0.2, 2.0))
        self._master.go_on()

    def restart_master(self) -> None:
        """It has forgotten everything."""
        self._master.restart()

    def harm(self) -> None:
        """Some requests to S3 go wrong."""
        self._proxy.harm(self._rng.choice(list(Harm)), times=self._rng.randint(1, 40))

    def heal(self) -> None:
        """Nothing goes wrong there any more."""
        self._proxy.harm(None)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_eight_clients_while_all_storage_fails(
    tmp_path: Path, soak_factor: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes are right whenever there are any; what a process holds does not grow."""
    store_module()
    secs = _SECS if soak_factor == 1 else _SOAK_SECS * soak_factor
    folder = tmp_path / "kv"
    with contextlib.ExitStack() as servers:
        master = servers.enter_context(Master())
        servers.enter_context(Member(master.address, 128 << 20))
        server = servers.enter_context(moto())
        proxy = servers.enter_context(FaultProxy(server.port))
        places: dict[str, dict[str, Any]] = {
            "file": {"url": f"{folder.as_uri()}?capacity_bytes=8MiB"},
            "mooncake": {
                "url": f"mooncake://{master.address}?buffer_bytes=4MiB&key_prefix=soak/"
                f"&deadline_secs=2"
            },
            "s3": {
                "url": f"s3://{BUCKET}/soak?deadline_secs=2",
                "options": {"endpoint": proxy.endpoint, **_SECRETS},
            },
        }
        kinds = ["file"] * 3 + ["mooncake"] * 3 + ["s3"] * 2
        clients: list[Running] = []
        servers.callback(lambda: kill_all(clients))
        for seed, kind in enumerate(kinds):
            clients.append(Running(kind, places[kind], seed))
        faults = Faults(random.Random(5), master, server, proxy, clients)
        ends = time.monotonic() + secs
        between = threading.Event()
        while time.monotonic() < ends:
            between.wait(1.5)  # requests go on meanwhile: that is what is tested
            faults.one()
        faults.heal()
        told = [(one.kind, one.end()) for one in clients]
    assert {one["error"] for _, one in told if "error" in one} == set()
    total: dict[str, dict[str, int]] = {}
    looked_at = 0
    for kind, one in told:
        assert one["clean"], one
        # Once a library was loaded and had its connections, it takes no more of anything.
        if one["times_detached"] >= _ENOUGH:
            looked_at += 1
            assert one["late"]["descriptors"] <= one["most"]["descriptors"], one
            assert one["late"]["threads"] <= one["most"]["threads"], one
        for name, count in one["counts"].items():
            of = total.setdefault(kind, {})
            of[name] = of.get(name, 0) + count
    assert looked_at > 0
    figures = json.dumps({
        "seconds": secs, "faults": faults.counts, "clients": total, "measured": looked_at,
    })  # fmt: skip
    with capsys.disabled():
        sys.stdout.write(f"\n{figures}\n")
    assert set(total) == {"file", "mooncake", "s3"}
    for kind in total:
        assert total[kind]["fetched"] > 0, figures
    # Of those that were killed in the middle of a file nothing is left behind.
    with closing(FileBackend(folder, capacity_bytes=8 << 20)) as left:
        assert left.stats().num_bytes <= 8 << 20
    assert list(folder.rglob(".*.tmp")) == []
