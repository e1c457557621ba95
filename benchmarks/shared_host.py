"""One host copy for several ranks: what it takes of the machine's memory, and how fast all load it.

    python benchmarks/shared_host.py --ranks 1,2,4,8 --mebibytes 256 --json shared_host.json

Ranks are processes on the CPU, without torch. For each number of them, with one copy and with a
copy each: the host bytes of all together, by the system's own account (Pss, which counts what n
processes map 1/n for each), when every rank has read every page; and the time in which all ranks
load all pages, the median of several rounds. On fewer cores than ranks they share those, so times
say what the ranks cost each other, and not what as many GPUs would do. With one copy the keeper
moves all of its own pages first: on a CPU a load is carried out by the call that begins it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry import Geometry, HostPeer, KVFerry, Namespace, Plane, PoolView, SharedHost
from kvferry.memory import HostPool
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PAGE = 64
_BATCH_PAGES = 8
_PLANES = (
    Plane(name="latent", num_layers=16, element_size=656),
    Plane(name="index_key", num_layers=4, element_size=132),
)
_GEOMETRY = Geometry(planes=_PLANES, page_size=_PAGE)
_NAMESPACE = Namespace(model="m", revision="1", dtype="u8", geometry=_GEOMETRY.fingerprint)
_WAIT_SECS = 120.0


def host_bytes(pid: int) -> int:
    """A process's share of the memory of host copies, shared ones and its own, in bytes."""
    total, ours = 0, False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = "/memfd:kvferry" in line
        elif ours and head[0] == "Pss:":
            total += int(head[1]) * 1024
    return total


def _device_pool() -> PoolView:
    rows = _BATCH_PAGES * _PAGE
    tensors = {
        plane.name: [np.ones((rows, plane.element_size), np.uint8) for _ in range(plane.num_layers)]
        for plane in _PLANES
    }
    return PoolView.from_tensors(_GEOMETRY, tensors)


def _copy_of_its_own(rank: int, num_slots: int, pipe: Connection) -> None:
    """A rank with a cache of its own: it stores all pages, then loads them when told to."""
    with _cache(num_slots, SharedHost(f"bench-{os.getppid()}-{rank}", num_peers=0)) as cache:
        _store_all(cache, num_slots)
        pipe.send(None)
        while pipe.recv() is not None:
            for prompt in _prompts(num_slots):
                _load(cache, prompt).wait(_WAIT_SECS)
            pipe.send(host_bytes(os.getpid()))


def _peer(rank: int, name: str, pipe: Connection) -> None:
    """A rank that loads from the shared copy when told to."""
    with HostPeer(name, _GEOMETRY, _device_pool(), rank=rank, timeout=_WAIT_SECS) as peer:
        pipe.send(None)
        while (tickets := pipe.recv()) is not None:
            for ticket in tickets:
                peer.load(ticket, timeout=_WAIT_SECS).wait(_WAIT_SECS)
            pipe.send(host_bytes(os.getpid()))


def _cache(num_slots: int, shared: SharedHost) -> KVFerry:
    with HostPool(_GEOMETRY, num_slots=1) as one:
        num_bytes = (num_slots + 1) * one.num_bytes
    return KVFerry(
        _GEOMETRY,
        _device_pool(),
        namespace=_NAMESPACE,
        shared=shared,
        host={"num_bytes": num_bytes},
        load={"threshold_tokens": 1},
    )


def _prompts(num_slots: int) -> list[range]:
    tokens = _BATCH_PAGES * _PAGE
    return [range(at * tokens, (at + 1) * tokens) for at in range(num_slots // _BATCH_PAGES)]


def _store_all(cache: KVFerry, num_slots: int) -> None:
    for prompt in _prompts(num_slots):
        cache.store(prompt, device_slots=np.arange(len(prompt))).wait(_WAIT_SECS)


def _load(cache: KVFerry, prompt: range) -> Any:
    with cache.match(prompt) as found:
        assert found.num_tokens == len(prompt)
        return cache.load(found, device_slots=np.arange(len(prompt)))


class _Processes:
    """Ranks 1 and up."""

    def __init__(self, target: Any, arguments: list[tuple[Any, ...]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for given in arguments:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*given, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, what: Any) -> None:
        for pipe in self.pipes:
            pipe.send(what)

    def hear(self) -> list[Any]:
        told = []
        for pipe in self.pipes:
            assert pipe.poll(_WAIT_SECS), "a rank says nothing"
            told.append(pipe.recv())
        return told

    def end(self) -> None:
        self.tell(None)
        for process in self.processes:
            process.join(_WAIT_SECS)
            assert process.exitcode == 0


def _measure(num_ranks: int, num_slots: int, rounds: int, *, is_shared: bool) -> dict[str, Any]:
    name = f"bench-{os.getpid()}"
    shared = SharedHost(name, num_peers=num_ranks - 1 if is_shared else 0)
    with _cache(num_slots, shared) as cache:
        if is_shared:
            others = _Processes(_peer, [(rank, name) for rank in range(1, num_ranks)])
            shared.wait_for_peers(_WAIT_SECS)
        else:
            others = _Processes(
                _copy_of_its_own, [(rank, num_slots) for rank in range(1, num_ranks)]
            )
        _store_all(cache, num_slots)
        others.hear()
        seconds, taken = [], 0
        for _ in range(rounds):
            begin = time.perf_counter()
            if is_shared:
                # A batch a step: as an engine does, which tells its ranks of each.
                handles = []
                for prompt in _prompts(num_slots):
                    handles.append(_load(cache, prompt))
                others.tell([handle.ticket for handle in handles])
                for handle in handles:
                    handle.wait(_WAIT_SECS)
                    assert handle.verified_pages == _BATCH_PAGES
            else:
                others.tell(True)
                for prompt in _prompts(num_slots):
                    _load(cache, prompt).wait(_WAIT_SECS)
            shares = others.hear()
            seconds.append(time.perf_counter() - begin)
            taken = host_bytes(os.getpid()) + sum(shares)
        others.end()
        asked = sum(pool.num_bytes for pool in cache._pools.values())
    return {
        "ranks": num_ranks,
        "shared": is_shared,
        "pool_bytes": asked,
        "host_bytes": taken,
        "seconds": statistics.median(seconds),
        "loaded_bytes": num_ranks * num_slots * _GEOMETRY.page_bytes,
    }


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks (%(default)s)")
    parser.add_argument("--mebibytes", type=int, default=64, help="of a copy (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="loads of everything (%(default)s)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    page = _GEOMETRY.slot_bytes(SlotKind.PAGE)
    num_slots = max(1, (arguments.mebibytes << 20) // page // _BATCH_PAGES) * _BATCH_PAGES
    rows = []
    for num_ranks in map(int, arguments.ranks.split(",")):
        for is_shared in (True, False):
            row = _measure(num_ranks, num_slots, arguments.rounds, is_shared=is_shared)
            rows.append(row)
            how = "one copy  " if is_shared else "a copy each"
            times = row["host_bytes"] / row["pool_bytes"]
            speed = row["loaded_bytes"] / row["seconds"] / 1e9
            print(
                f"{num_ranks} ranks, {how:11} {row['host_bytes'] / 2**20:8.1f} MiB, {times:6.3f} "
                f"times a pool; all load all in {row['seconds'] * 1e3:7.1f} ms, {speed:5.2f} GB/s"
            )
    if arguments.json:
        report = {
            "argv": sys.argv,
            "cores": len(os.sched_getaffinity(0)),
            "path": "cpu",
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
