"""Two processes on one GPU, one host copy: what the keeper stores a peer loads, byte for byte."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_cache import PLANES, Model

from kvferry import KVFerry, SharedHost
from kvferry.tiers import PageState, Reason
from kvferry.types import SlotKind

pytestmark = pytest.mark.gpu

_PAGES = 7

# Says "joined", then takes lines: a ticket, a prompt, rows, and whether to tell the keeper.
_PEER = """
import json, os, sys
sys.path[:0] = {paths!r}
import numpy as np
import torch
from test_cache import PLANES, Model
from test_shared_host import shared_pss
from kvferry import HostPeer

model = Model(PLANES["mla"], {mover!r})
transfer = dict(mover={mover!r}, staging_bytes=8 << 20)
peer = HostPeer(
    {name!r}, model.geometry, model.view, rank=1, timeout=100, transfer=transfer
)
print("joined", flush=True)
for line in sys.stdin:
    ticket, prompt, rows, answers = json.loads(line)
    model.poison()
    torch.cuda.synchronize()
    if not answers:
        peer._host.answer = lambda moved: None
    load = peer.load(ticket, timeout=60)
    for layer in range(model.planes[0].num_layers):
        load.wait_layer(layer)
    load.wait(60)
    model.check(np.array(rows), model.kv(prompt), "on the peer")
    print("checked", shared_pss(os.getpid()), flush=True)
peer.close()
model.close()
print("closed", flush=True)
"""


def shared_pss(pid: int) -> int:
    """The share of a process in memory that kvferry's processes map together, in bytes."""
    total, ours = 0, False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            ours = "/memfd:kvferry" in line
        elif ours and head[0] == "Pss:":
            total += int(head[1]) * 1024
    return total


class Peer:
    """The other process."""

    def __init__(self, model: Model, name: str) -> None:
        code = _PEER.format(
            paths=[str(pathlib.Path(__file__).parent), *sys.path], mover=model.mover, name=name
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, *message: Any) -> None:
        """One line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def says(self) -> list[str]:
        """The next line, in words; none where it died."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def end(self) -> None:
        """Close its input, and see it close everything."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.says() == ["closed"]
        assert self.process.wait(60) == 0

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait(60)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def two_ranks(mover: str) -> Iterator[tuple[Model, KVFerry, SharedHost, Peer]]:
    """A keeper here and a peer there, on the same GPU."""
    model = Model(PLANES["mla"], mover)
    host = SharedHost(f"gpu-test-{os.getpid()}-{mover}", num_peers=1)
    cache = model.cache(shared=host)
    peer = Peer(model, host.name)
    try:
        host.wait_for_peers(100)
        assert peer.says() == ["joined"]
        yield model, cache, host, peer
    finally:
        peer.kill()
        model.close()


@pytest.mark.parametrize("mover", ["direct", "staged"])
def test_two_processes_load_from_one_copy(mover: str) -> None:
    """Into other rows each time; and the pinned memory of both is there once."""
    with two_ranks(mover) as (model, cache, _, peer):
        shares = []
        for seed in range(1, 5):
            prompt = model.prompt(seed, _PAGES)
            kv, rows = model.keep(cache, prompt, seed), model.rows(50 + seed, _PAGES)
            with cache.match(prompt) as found:
                loaded = cache.load(found, device_slots=rows)
            torch.cuda.synchronize()
            cache.poll()
            assert not loaded.done  # the peer has not begun
            peer.tell(loaded.ticket, prompt, rows.tolist(), True)
            word, share = peer.says()
            assert word == "checked"
            loaded.wait()
            assert (loaded.usable_tokens, loaded.verified_pages) == (len(prompt), _PAGES)
            model.check(rows, kv, "on the keeper")
            model.poison()
            shares = [int(share), shared_pss(os.getpid())]
        size = cache._pools[SlotKind.PAGE].num_bytes
        assert all(shares), shares
        assert sum(shares) <= 1.01 * size + (4 << 20), (shares, size)
        peer.end()


@pytest.mark.parametrize("mover", ["direct", "staged"])
@pytest.mark.parametrize("began", [False, True])
def test_a_killed_peer_gives_back_what_it_read(mover: str, began: bool) -> None:
    """The keeper's pages stay pinned for itself, whole, and may be evicted again."""
    with two_ranks(mover) as (model, cache, host, peer):
        prompt = model.prompt(1, _PAGES)
        kv, rows = model.keep(cache, prompt), model.rows(2, _PAGES)
        with cache.match(prompt) as found:
            loaded = cache.load(found, device_slots=rows)
        if began:
            peer.tell(loaded.ticket, prompt, rows.tolist(), False)
            assert peer.says()[0] == "checked"
        torch.cuda.synchronize()
        cache.poll()
        assert [state.pages_held for state in host.peers()] == [_PAGES]
        assert not loaded.done
        peer.kill()
        loaded.wait()
        assert loaded.reason is Reason.TRANSFER_FAILED
        assert "is gone" in loaded.error
        assert host.peers() == ()
        model.check(rows, kv, "on the keeper")
        model.poison()
        cache.check_integrity()
        cache.reset()
        states = cache.stats().slots[SlotKind.PAGE]
        assert states[PageState.ABSENT] == sum(states.values())
        # The memory is as good as before.
        second = model.prompt(9, _PAGES)
        model.keep(cache, second)
        assert cache.match(second).num_tokens == len(second)
