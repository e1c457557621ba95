"""Ranks as processes that share a host copy: random delays, kill -9, and what is left of it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import threading
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.sharing.replica_rig import (
    DEVICE_PAGES,
    GEOMETRY,
    PAGE,
    Device,
    Keeper,
    PeerProcess,
    new_name,
    open_files,
    replica,
    shared_pss,
    welcome,
)

from kvferry import Geometry, HostPeer, Plane, SharedHost
from kvferry.errors import RankError, TransferTimeoutError
from kvferry.memory import HostPool
from kvferry.storage import FileBackend
from kvferry.tiers import PageState, Reason
from kvferry.types import SlotKind

_SHM = Path("/dev/shm")  # noqa: S108
PROMPT = list(range(3 * PAGE))
OTHER = list(range(1000, 1000 + 4 * PAGE))


def _grown(rng: random.Random) -> list[int]:
    """A prompt whose pages are each one of two, so that prompts share prefixes and part."""
    return [token for _ in range(rng.randint(1, 5)) for token in [rng.randrange(2)] * PAGE]


def _held(keeper: Keeper) -> int:
    return sum(state.pages_held for state in keeper.host.peers())


@pytest.mark.soak
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_every_rank_loads_the_bytes_that_were_stored(num_ranks: int, soak_factor: int) -> None:
    """Prompts that evict each other in six slots, loaded by ranks that are slow at random."""
    rng = random.Random(num_ranks)
    loaded = 0
    with replica(num_ranks) as (keeper, peers):
        for _ in range(25 * soak_factor):
            keeper.store(_grown(rng))
            prompt = _grown(rng)
            first = rng.randrange(DEVICE_PAGES - 5)
            keeper.device.wipe()
            handle, keys = keeper.load(prompt, first)
            if not keys:
                continue
            for peer in peers.values():
                delay = rng.choice([0, 0, rng.uniform(0, 0.01)])
                peer.ask("load", handle.ticket, keys, first, delay)
            if rng.random() < 0.5:  # the keeper goes on storing meanwhile, and evicts
                keeper.cache.store(OTHER, device_slots=keeper.device.slots(0, 4))
            handle.wait(60)
            assert handle.usable_tokens == len(keys) * PAGE, handle.error
            assert [peer.answer() for peer in peers.values()] == [[]] * (num_ranks - 1)
            assert keeper.device.wrong(keys, first) == []
            keeper.cache.check_integrity()
            loaded += len(keys)
        assert _held(keeper) == 0
    assert loaded > 10


def test_wrong_bytes_on_a_rank_are_seen() -> None:
    """Control: a rank that is told other keys says that its rows are wrong."""
    with replica(2) as (keeper, peers):
        keys = keeper.store(PROMPT)
        handle, _ = keeper.load(PROMPT, 5)
        peers[1].ask("load", handle.ticket, keys[::-1], 5, 0)
        handle.wait(60)
        assert len(peers[1].answer()) == 2 * 5  # all layers of the two pages that changed places


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_rank_gives_back_what_it_read(when: str) -> None:
    """Until it is gone its pages are not given to others; then they are, and the load has failed.

    Killed before it began, or after, with its answer unsent.
    """
    with replica(3, num_slots=4) as (keeper, peers):
        keys = keeper.store(PROMPT)
        keeper.device.wipe()
        handle, _ = keeper.load(PROMPT, 5)
        peers[2].ask("load", handle.ticket, keys, 5, 0)
        assert peers[2].answer() == []
        if when == "during":
            peers[1].ask("begin", handle.ticket)
            assert peers[1].answer() == 1
        keeper.until(lambda: _held(keeper) == 3)
        keeper.device.compute(keeper.cache.keys(OTHER), 0)
        stored = keeper.cache.store(OTHER, device_slots=keeper.device.slots(0, 4))
        stored.wait(30)
        assert (stored.num_stored, stored.reason) == (1, Reason.HOST_FULL)
        assert not handle.done
        pid = peers[1].pid
        peers[1].kill()
        handle.wait(60)
        assert f"rank 1 (process {pid}) is gone" in handle.error
        assert (handle.usable_tokens, handle.reason) == (0, Reason.TRANSFER_FAILED)
        assert [state.rank for state in keeper.host.peers()] == [2]
        keeper.cache.check_integrity()
        stored = keeper.cache.store(OTHER, device_slots=keeper.device.slots(0, 4))
        stored.wait(30)
        assert stored.num_already + stored.num_stored == 4
        peers[1] = PeerProcess(keeper.name, 1)
        welcome(keeper, [peers[1]])
        keys = keeper.cache.keys(OTHER)
        handle, _ = keeper.load(OTHER, 8)
        for peer in peers.values():
            peer.ask("load", handle.ticket, keys, 8, 0)
        handle.wait(60)
        assert handle.usable_tokens == len(OTHER)
        assert [peer.answer() for peer in peers.values()] == [[], []]


def test_a_rank_that_hangs_holds_its_pages_visibly() -> None:
    """It is waited for as long as the caller likes; its pages stay as they are until it is gone."""
    with replica(2, num_slots=3) as (keeper, peers):
        keys = keeper.store(PROMPT)
        os.kill(peers[1].pid, signal.SIGSTOP)
        handle, _ = keeper.load(PROMPT, 5)
        with pytest.raises(TransferTimeoutError):
            handle.wait(0.05)
        (state,) = keeper.host.peers()
        assert (state.connected, state.num_loads, state.pages_held) == (True, 1, 3)
        assert state.silent_secs > 0
        keeper.cache.reset()  # not even this gives them away
        slots = keeper.cache.stats().slots[SlotKind.PAGE]
        assert slots[PageState.CONDEMNED] == 3
        assert keeper.cache.store(OTHER, device_slots=keeper.device.slots(0, 4)).num_submitted == 0
        # It goes on, and finds the bytes that were there when it was asked.
        os.kill(peers[1].pid, signal.SIGCONT)
        peers[1].ask("load", handle.ticket, keys, 5, 0)
        handle.wait(60)
        assert peers[1].answer() == []
        assert handle.usable_tokens == len(PROMPT)
        assert keeper.cache.stats().slots[SlotKind.PAGE][PageState.ABSENT] == 3


def test_a_rank_that_hangs_up_is_read_by_until_it_ends() -> None:
    """A closed connection says nothing about what a process still reads; the end of it does."""
    with replica(2) as (keeper, peers):
        keeper.store(PROMPT)
        handle, _ = keeper.load(PROMPT, 5)
        peers[1].ask("begin", handle.ticket)
        assert peers[1].answer() == 1
        peers[1].ask("hang_up")
        peers[1].answer()
        keeper.until(lambda: keeper.host.missing_ranks() == [1])
        (state,) = keeper.host.peers()
        assert (state.connected, state.pages_held) == (False, 3)
        assert not handle.done
        # Another process may have its rank meanwhile.
        peers[2] = PeerProcess(keeper.name, 1)
        welcome(keeper, [peers[2]])
        assert [state.connected for state in keeper.host.peers()] == [False, True]
        peers.pop(1).kill()
        handle.wait(60)
        assert "is gone" in handle.error
        assert _held(keeper) == 0


@pytest.mark.soak
def test_ranks_killed_at_random(soak_factor: int) -> None:
    """Wherever it hits them: every load ends, no rank has a wrong byte, nothing stays held."""
    rng = random.Random(5)
    deaths = whole = 0
    resource_tracker.ensure_running()  # multiprocessing's own, which stays
    before, threads = open_files(), threading.active_count()
    with replica(4) as (keeper, peers):
        for _ in range(14 * soak_factor):
            keeper.store(_grown(rng))
            handle, keys = keeper.load(_grown(rng), 5)
            if not keys:
                continue
            delay = rng.uniform(0, 0.02)
            for peer in peers.values():
                peer.ask("load", handle.ticket, keys, 5, delay)
            victim = rng.choice([*peers, 0])
            if victim:
                # Not a wait for anything: the moment at which it is killed.
                peers[victim].pipe.poll(rng.uniform(0, 2 * delay))
                peers.pop(victim).kill()
                deaths += 1
            handle.wait(60)
            assert [peer.answer() for peer in peers.values()] == [[]] * len(peers)
            assert keeper.device.wrong(keys, 5) == []
            if not victim:
                assert handle.usable_tokens == len(keys) * PAGE
            else:  # it may have answered just before
                assert handle.usable_tokens in (0, len(keys) * PAGE)
                whole += handle.usable_tokens > 0
                peers[victim] = PeerProcess(keeper.name, victim)
                welcome(keeper, [peers[victim]])
            keeper.cache.check_integrity()
            assert _held(keeper) == 0
        keeper.cache.reset()
        assert keeper.cache.stats().slots[SlotKind.PAGE][PageState.ABSENT] == 6
    assert deaths >= 4
    assert (open_files(), threading.active_count()) == (before, threads)


# ------------------------------------------------------------------------- the keeper dies


def _keep(pipe: Connection, name: str) -> None:
    """A keeper that stores and loads a prompt and then waits to be killed."""
    keeper = Keeper(num_peers=1, name=name)
    keeper.host.wait_for_peers(60)
    keys = keeper.store(PROMPT)
    handles = [keeper.load(PROMPT, 5)[0] for _ in range(2)]
    pipe.send((keys, [handle.ticket for handle in handles]))
    pipe.recv()


def test_a_killed_keeper_is_an_error_on_its_peers_and_leaves_nothing() -> None:
    """The memory lives while peers map it; the name is free at once, for a keeper with no pages."""
    name = new_name()
    gc.collect()  # what other tests have dropped
    before = {path.name for path in _SHM.iterdir()}
    resource_tracker.ensure_running()
    files = open_files()
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    child = context.Process(target=_keep, args=(theirs, name), daemon=True)
    child.start()
    theirs.close()
    device = Device()
    peer = HostPeer(name, GEOMETRY, device.view, rank=1, timeout=60)
    assert pipe.poll(60)
    keys, (first, second) = pipe.recv()
    assert peer.keeper_alive
    waiting = peer._host._waiting
    while len(waiting) < 2:  # threads of the keeper send them
        peer._host.wait(30)
        assert peer.keeper_alive
    child.kill()
    child.join(30)
    assert not peer.keeper_alive
    # What was asked for is there, and its digests say whether the bytes are.
    assert set(waiting) == {*first, *second}
    peer.load(first).wait(30)
    assert device.wrong(keys, 5) == []
    with pytest.raises(RankError, match=r"the keeper \(process \d+\) is gone"):
        peer.load((10**6,))
    assert shared_pss(os.getpid()) > 0
    SharedHost(name, num_peers=1).close()
    peer.close()
    pipe.close()
    assert shared_pss(os.getpid()) == 0
    assert {path.name for path in _SHM.iterdir()} - before == set()
    child.close()
    assert open_files() == files


def _write(pipe: Connection, folder: str, seed: int) -> None:
    """A keeper that stores prompts and writes them to a folder, until it is killed."""
    rng = random.Random(seed)
    storage = FileBackend(folder, capacity_bytes=1 << 20)
    keeper = Keeper(num_peers=0, storage=storage)
    pipe.send("begun")
    while True:
        keeper.store(_grown(rng))


@pytest.mark.soak
def test_what_a_killed_keeper_wrote_is_whole_or_a_miss(tmp_path: Path, soak_factor: int) -> None:
    """Killed at random while it writes: the next one, and its peer, load nothing that is wrong."""
    rng = random.Random(11)
    context = multiprocessing.get_context("spawn")
    found = 0
    for seed in range(4 * soak_factor):
        pipe, theirs = context.Pipe()
        child = context.Process(target=_write, args=(theirs, str(tmp_path), seed), daemon=True)
        child.start()
        theirs.close()
        assert pipe.poll(60)
        assert pipe.recv() == "begun"
        # Not a wait for anything: the moment at which it is killed.
        pipe.poll(rng.uniform(0, 0.1))
        child.kill()
        child.join(30)
        child.close()
        pipe.close()
        storage = FileBackend(str(tmp_path), capacity_bytes=1 << 20)
        keeper = Keeper(num_peers=1, storage=storage)
        ((peer, device),) = keeper.join(1)
        for _ in range(5):
            prompt = _grown(rng)
            keeper.cache.prefetch(prompt).wait(30)
            handle, keys = keeper.load(prompt, 3)
            if not keys:
                continue
            peer.load(handle.ticket).wait(30)
            handle.wait(30)
            assert handle.usable_tokens == len(keys) * PAGE
            assert keeper.device.wrong(keys, 3) == device.wrong(keys, 3) == []
            found += len(keys)
        peer.close()
        keeper.close()
    assert found > 0


# ------------------------------------------------------------------------- what it takes


def _touched(keeper: Keeper, prompt: list[int], peers: dict[int, PeerProcess]) -> None:
    """Have every rank read every page of the host copy."""
    keys = keeper.store(prompt)
    handle, found = keeper.load(prompt, 0)
    assert found == keys
    for peer in peers.values():
        peer.ask("load", handle.ticket, keys, 0, 0)
    handle.wait(60)
    assert all(peer.answer() == [] for peer in peers.values())


def test_eight_ranks_take_the_memory_of_one() -> None:
    """By the system's own account, with every page read by every rank: at most 1 % more."""
    plane = Plane(name="latent", num_layers=8, element_size=576)
    geometry = Geometry(planes=(plane,), page_size=PAGE)
    prompt = list(range(DEVICE_PAGES * PAGE))
    taken: dict[int, int] = {}
    for num_ranks in (1, 8):
        options: dict[str, Any] = {"num_slots": DEVICE_PAGES * 16, "geometry": geometry}
        with replica(num_ranks, **options) as (keeper, peers):
            for number in range(16):  # other prompts, so that all slots are used
                _touched(keeper, [number * 1000 + token for token in prompt], peers)
            slots = keeper.cache.stats().slots[SlotKind.PAGE]
            assert slots[PageState.RESIDENT] == DEVICE_PAGES * 16
            for peer in peers.values():
                peer.ask("memory")
            shares = [shared_pss(os.getpid()), *(peer.answer() for peer in peers.values())]
            assert min(shares) > 0
            taken[num_ranks] = sum(shares)
            size = keeper.cache._pools[SlotKind.PAGE].num_bytes
            assert taken[num_ranks] <= 1.01 * size + 4096 * num_ranks
    assert taken[8] <= 1.01 * taken[1]


def test_memory_of_ranks_apart_is_counted() -> None:
    """Control: two pools are counted as two."""
    with (
        HostPool(GEOMETRY, num_slots=64, shared=True) as one,
        HostPool(GEOMETRY, num_slots=64, shared=True) as other,
    ):
        taken = shared_pss(os.getpid())
        assert taken >= 2 * min(one.num_bytes, other.num_bytes)
