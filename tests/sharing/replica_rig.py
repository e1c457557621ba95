"""Ranks that share a host copy: a keeper in this process, peers here or in processes of their own.

What a page holds follows from its key alone, so every process knows what its rows must be.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvferry import Geometry, HostPeer, KVFerry, Namespace, Plane, PoolView, SharedHost
from kvferry.memory.pool_layout import PoolLayout
from kvferry.tiers import LoadHandle
from kvferry.types import SlotKind

PAGE = 4
PLANES = (
    Plane(name="latent", num_layers=3, element_size=56),
    Plane(name="index_key", num_layers=2, element_size=33),
)
GEOMETRY = Geometry(planes=PLANES, page_size=PAGE)
NAMESPACE = Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint)
DEVICE_PAGES = 24
FAST = {"load": {"threshold_tokens": 1}, "prefetch": {"threshold_tokens": 1}}

Tensors = dict[str, list[Any]]
_names = itertools.count()


def new_name() -> str:
    """A name that no other test has."""
    return f"test-{os.getpid()}-{next(_names)}"


def page_bytes(key: bytes, geometry: Geometry = GEOMETRY) -> Tensors:
    """The rows of a page, by plane and layer. Shape of each ``[P, element_size]``."""
    rng = np.random.default_rng(int.from_bytes(key[:8], "big"))
    return {
        plane.name: [
            rng.integers(0, 256, (geometry.page_size, plane.element_size), dtype=np.uint8)
            for _ in range(plane.num_layers)
        ]
        for plane in geometry.planes
    }


class Device:
    """The tensors of one rank."""

    def __init__(self, geometry: Geometry = GEOMETRY, pages: int = DEVICE_PAGES) -> None:
        self.geometry = geometry
        self.page = geometry.page_size
        self.tensors: Tensors = {
            plane.name: [
                np.full((pages * self.page, plane.element_size), 0xA5, np.uint8)
                for _ in range(plane.num_layers)
            ]
            for plane in geometry.planes
        }
        self.view = PoolView.from_tensors(geometry, self.tensors)

    def compute(self, keys: Sequence[bytes], first: int) -> None:
        """Write what pages hold, from device page `first` on."""
        for at, key in enumerate(keys, start=first):
            rows = slice(at * self.page, (at + 1) * self.page)
            for name, layers in page_bytes(key, self.geometry).items():
                for tensor, layer in zip(self.tensors[name], layers, strict=True):
                    tensor[rows] = layer

    def wipe(self) -> None:
        """Poison everywhere."""
        for tensor in itertools.chain(*self.tensors.values()):
            tensor[:] = 0xA5

    def wrong(self, keys: Sequence[bytes], first: int) -> list[str]:
        """Which pages from device page `first` on are not what their keys say."""
        found = []
        for at, key in enumerate(keys, start=first):
            rows = slice(at * self.page, (at + 1) * self.page)
            for name, layers in page_bytes(key, self.geometry).items():
                for number, layer in enumerate(layers):
                    if not np.array_equal(self.tensors[name][number][rows], layer):
                        found.append(f"page {at} of {name}, layer {number}")
        return found

    def slots(self, first: int, pages: int) -> Any:
        """Device slots of pages."""
        return np.arange(first * self.page, (first + pages) * self.page)


class Keeper:
    """Rank 0 of the machine."""

    def __init__(
        self,
        *,
        num_peers: int,
        num_slots: int = 6,
        geometry: Geometry = GEOMETRY,
        name: str | None = None,
        **given: Any,
    ) -> None:
        self.name = name or new_name()
        self.device = Device(geometry)
        self.host = SharedHost(self.name, num_peers=num_peers)
        namespace = Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint)
        num_bytes = PoolLayout(geometry, SlotKind.PAGE).total_bytes(num_slots)
        sections = {**FAST, "host": {"num_bytes": num_bytes}, **given}
        self.cache = KVFerry(
            geometry, self.device.view, namespace=namespace, shared=self.host, **sections
        )

    def store(self, prompt: Sequence[int]) -> list[bytes]:
        """Compute a prompt and store it; its keys."""
        keys = self.cache.keys(prompt)
        self.device.compute(keys, 0)
        self.cache.store(prompt, device_slots=self.device.slots(0, len(keys))).wait(30)
        self.device.wipe()
        return keys

    def load(self, prompt: Sequence[int], first: int) -> tuple[LoadHandle, list[bytes]]:
        """Begin to load what is here of a prompt to device page `first`; and the keys of that."""
        with self.cache.match(prompt) as found:
            pages = found.num_tokens // self.device.page
            handle = self.cache.load(found, device_slots=self.device.slots(first, pages))
        return handle, self.cache.keys(prompt)[:pages]

    def until(self, condition: Callable[[], bool], what: str = "it") -> None:
        """Let the keeper run until `condition` holds."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"{what} never came true"
            self.cache.wait(0.01)

    def close(self) -> None:
        """All of it, which must be clean."""
        self.cache.check_integrity()
        report = self.cache.close()
        assert report.clean, report

    def join(self, *ranks: int, geometry: Geometry = GEOMETRY) -> list[tuple[HostPeer, Device]]:
        """Peers in this process."""
        devices = [Device(geometry) for _ in ranks]
        with ThreadPoolExecutor(len(ranks)) as threads:
            made = [
                threads.submit(HostPeer, self.name, geometry, device.view, rank=rank, timeout=60)
                for rank, device in zip(ranks, devices, strict=True)
            ]
            self.until(lambda: all(one.done() for one in made), "joining")
        return [(one.result(), device) for one, device in zip(made, devices, strict=True)]


# ------------------------------------------------------------------------- peers as processes


def serve(pipe: Connection, name: str, rank: int, told: dict[str, Any], pages: int) -> None:
    """A peer that does what the pipe says, until it says None."""
    geometry = Geometry.from_dict(told)
    device = Device(geometry, pages)
    peer = HostPeer(name, geometry, device.view, rank=rank, timeout=60)
    pipe.send(peer.generation)
    begun: Any = None
    while (message := pipe.recv()) is not None:
        what, *given = message
        if what == "load":
            ticket, keys, first, delay = given
            device.wipe()
            select.select([], [], [], delay)  # a rank that is slower than the others
            peer.load(ticket, timeout=60).wait(60)
            pipe.send(device.wrong(keys, first))
        elif what == "begin":  # without telling the keeper that it is over
            begun = hold_answers(peer, given[0])
            pipe.send(len(begun.transfers))
        elif what == "hang_up":
            peer._host._channel.close()
            pipe.send(None)
        elif what == "memory":
            pipe.send(shared_pss(os.getpid()))
    peer.close()
    pipe.send("closed")


def hold_answers(peer: HostPeer, ticket: Sequence[int]) -> Any:
    """Begin a load whose answer is not sent."""
    answer = peer._host.answer
    peer._host.answer = lambda _: None  # type: ignore[method-assign,assignment]
    try:
        return peer.load(ticket, timeout=60)
    finally:
        peer._host.answer = answer  # type: ignore[method-assign]


class PeerProcess:
    """A peer in a process of its own."""

    def __init__(
        self, name: str, rank: int, geometry: Geometry = GEOMETRY, pages: int = DEVICE_PAGES
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.ended = False
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, name, rank, geometry.to_dict(), pages), daemon=True
        )
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, *message: Any) -> None:
        """Say something; `answer` has what comes back."""
        self.pipe.send(message)

    def answer(self) -> Any:
        """What it says."""
        assert self.pipe.poll(60), f"rank {self.rank} says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """kill -9, whatever it is at."""
        self.process.kill()
        self.process.join(30)
        self.ended = True
        assert not self.process.is_alive()
        self.process.close()
        self.pipe.close()

    def close(self) -> None:
        """Let it close its peer and end."""
        self.pipe.send(None)
        assert self.answer() == "closed"
        self.process.join(30)
        assert self.process.exitcode == 0
        self.process.close()
        self.pipe.close()
        self.ended = True


@contextlib.contextmanager
def replica(num_ranks: int, **options: Any) -> Iterator[tuple[Keeper, dict[int, PeerProcess]]]:
    """A keeper and peers in processes; whoever is still there at the end must close cleanly."""
    keeper = Keeper(num_peers=num_ranks - 1, **options)
    peers: dict[int, PeerProcess] = {}
    try:
        for rank in range(1, num_ranks):
            peers[rank] = PeerProcess(keeper.name, rank, keeper.device.geometry)
        welcome(keeper, peers.values())
        yield keeper, peers
        for peer in peers.values():
            peer.close()
        keeper.close()
    finally:
        for peer in peers.values():
            if not peer.ended:
                peer.kill()
        keeper.cache.close(0.1)


def welcome(keeper: Keeper, peers: Any) -> None:
    """Take in processes that have just started."""
    keeper.host.wait_for_peers(60)
    for peer in peers:
        assert isinstance(peer.answer(), int)


# ------------------------------------------------------------------------- what a process has


def shared_pss(pid: int) -> int:
    """The share of a process in memory that kvferry's processes map together, in bytes.

    Memory that n processes have counts 1/n for each.
    """
    total, ours = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = "/memfd:kvferry" in line
        elif ours and head[0] == "Pss:":
            total += int(head[1]) * 1024
    return total


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
