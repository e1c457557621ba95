"""A keeper and its peers in one process: what is loaded where, what is refused, what is held."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tests.sharing.replica_rig import (
    GEOMETRY,
    PAGE,
    PLANES,
    Device,
    Keeper,
    hold_answers,
    new_name,
    open_files,
)

from kvferry import (
    Geometry,
    HitRule,
    HostPeer,
    KVFerry,
    Namespace,
    Plane,
    PoolView,
    SharedHost,
    SlotKind,
)
from kvferry.errors import ConfigError, PlanError, PoolInUseError, RankError, RankTimeoutError
from kvferry.ranks import ThreadRanks
from kvferry.sharing.channel import address_of, framed
from kvferry.sharing.messages import Hello
from kvferry.sharing.shared_plane import _Load
from kvferry.storage import MemoryBackend
from kvferry.testing import flip_host_bit
from kvferry.tiers import Moved, PageState, Reason

PROMPT = list(range(3 * PAGE))


def test_what_the_keeper_stores_every_rank_loads() -> None:
    """From one copy: the peers' pools are the keeper's memory, and nobody stores but the keeper."""
    keeper = Keeper(num_peers=2)
    peers = keeper.join(1, 2)
    keys = keeper.store(PROMPT)
    handle, loaded = keeper.load(PROMPT, 5)
    assert loaded == keys
    assert not handle.done  # two have not even begun
    for peer, device in peers:
        load = peer.load(handle.ticket)
        load.wait_layer(0)
        load.wait(30)
        assert (load.done, load.error) == (True, "")
        assert device.wrong(keys, 5) == []
    handle.wait(30)
    assert (handle.usable_tokens, handle.verified_pages) == (len(PROMPT), 3)
    assert keeper.device.wrong(keys, 5) == []
    for peer, _ in peers:
        peer.close()
    keeper.close()


def test_a_load_waits_for_the_last_rank() -> None:
    """And holds its pages until then: room is made elsewhere, or not at all."""
    keeper = Keeper(num_peers=2, num_slots=4)
    (first, one), (second, other) = keeper.join(1, 2)
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    first.load(handle.ticket).wait(30)
    keeper.until(lambda: [state.pages_held for state in keeper.host.peers()] == [0, 3])
    assert not handle.done
    crowd = keeper.store(list(range(100, 100 + 4 * PAGE)))
    assert sum(keeper.cache.explain(list(range(100, 116))).tokens_by_tier.values()) == PAGE
    assert len(crowd) == 4
    second.load(handle.ticket).wait(30)
    handle.wait(30)
    assert other.wrong(keys, 5) == one.wrong(keys, 5) == []
    keeper.store(list(range(100, 100 + 4 * PAGE)))
    assert keeper.cache.match(PROMPT).num_tokens == 0  # now they could go
    first.close()
    second.close()
    keeper.close()


def test_a_page_that_is_bad_on_one_rank_is_bad_for_all() -> None:
    """Whoever finds it; a damaged page is left out everywhere, and leaves the host."""
    keeper = Keeper(num_peers=1)
    ((peer, device),) = keeper.join(1)
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)  # whole on the keeper, which copies at once
    flip_host_bit(keeper.cache, keys[1])
    peer.load(handle.ticket).wait(30)
    handle.wait(30)
    assert (handle.bad_pages, handle.usable_tokens) == ((1,), PAGE)
    assert handle.reason is Reason.BAD_PAGES
    assert device.wrong(keys[:1], 5) == []
    keeper.until(lambda: keeper.cache.match(PROMPT).num_tokens == PAGE)
    peer.close()
    keeper.close()


def test_what_one_rank_did_not_verify_is_not_verified() -> None:
    """Answers of all ranks make one: the worst of each, and the keeper's own figures."""
    load = _Load()
    load.own = Moved(7, verified=True, bad_pages=(2,), path="cpu", num_bytes=5)
    load.told = [Moved(7, verified=True, bad_pages=(1, 2)), Moved(7, path="x", num_bytes=9)]
    load.owed = {3}
    assert load.merged() is None
    load.owed.clear()
    assert load.merged() == Moved(7, verified=False, bad_pages=(1, 2), path="cpu", num_bytes=5)
    load.told.append(Moved(7, error="gone"))
    assert load.merged() == Moved(7, error="gone", path="cpu", num_bytes=5)


def test_one_object_a_page_in_storage() -> None:
    """Only the keeper writes, and what it reads back is everybody's."""
    backend = MemoryBackend()
    keeper = Keeper(num_peers=2, storage=backend)
    peers = keeper.join(1, 2)
    keys = keeper.store(PROMPT)
    assert keeper.cache.flush().complete
    assert backend.stats().objects == 3
    keeper.cache.reset()
    keeper.cache.prefetch(PROMPT).wait(30)
    handle, _ = keeper.load(PROMPT, 2)
    for peer, device in peers:
        peer.load(handle.ticket).wait(30)
        assert device.wrong(keys, 2) == []
    handle.wait(30)
    assert handle.usable_tokens == len(PROMPT)
    assert backend.stats().objects == 3
    for peer, _ in peers:
        peer.close()
    keeper.close()


def test_a_rank_that_is_missing_fails_the_load_and_nothing_else() -> None:
    """A replica cannot use a prefix that one rank lacks. Storing goes on; a new process serves."""
    keeper = Keeper(num_peers=2)
    ((first, one),) = keeper.join(1)
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    handle.wait_layer(0)  # as an engine does, which knows nothing yet
    first.load(handle.ticket).wait(30)
    handle.wait(30)
    assert (handle.usable_tokens, handle.reason) == (0, Reason.TRANSFER_FAILED)
    assert "nobody is there for ranks 2" in handle.error
    with pytest.raises(RankTimeoutError, match=r"ranks \[2\] did not join"):
        keeper.host.wait_for_peers(0.01)
    ((second, other),) = keeper.join(2)
    keeper.host.wait_for_peers(0.01)
    handle, _ = keeper.load(PROMPT, 5)
    for peer in (first, second):
        peer.load(handle.ticket).wait(30)
    handle.wait(30)
    assert handle.usable_tokens == len(PROMPT)
    assert one.wrong(keys, 5) == other.wrong(keys, 5) == []
    first.close()
    second.close()
    keeper.close()


def test_rows_that_one_rank_refuses() -> None:
    """A smaller device pool over there: the load fails as a whole, and gives everything back."""
    keeper = Keeper(num_peers=1)
    small = Device(pages=4)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(HostPeer, keeper.name, GEOMETRY, small.view, rank=1, timeout=60)
        keeper.until(made.done)
    peer = made.result()
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    load = peer.load(handle.ticket)
    assert "PlanError" in load.error
    handle.wait(30)
    assert (handle.usable_tokens, handle.reason) == (0, Reason.TRANSFER_FAILED)
    assert small.wrong([], 0) == []
    assert all((tensor == 0xA5).all() for layers in small.tensors.values() for tensor in layers)
    peer.close()
    keeper.close()


def test_rows_that_the_keeper_refuses_are_sent_to_nobody() -> None:
    """Neither wrong ones, nor indices on a device that others cannot see."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)

    class OnDevice:
        is_cuda = True

        def __getitem__(self, _: Any) -> OnDevice:
            return self

        def __len__(self) -> int:
            return len(PROMPT)

        def is_contiguous(self) -> bool:
            return True

        def reshape(self, *_: int) -> OnDevice:
            return self

    for slots, what in ((np.arange(3 * PAGE) + 10**6, "only 96 rows"), (OnDevice(), "on the host")):
        with keeper.cache.match(PROMPT) as found, pytest.raises(PlanError, match=what):
            keeper.cache.load(found, device_slots=slots)
    assert [state.num_loads for state in keeper.host.peers()] == [0]
    assert keeper.cache.stats().readers == 0
    peer.close()
    keeper.close()


def test_a_ticket_is_taken_once() -> None:
    """A second time it is refused, as is one that nobody made; the load is begun once."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    peer.load(handle.ticket).wait(30)
    with pytest.raises(RankError, match="take each ticket once"):
        peer.load(handle.ticket)
    with pytest.raises(RankTimeoutError, match=r"did not come within 0\.01 s"):
        peer.load((10**6,), timeout=0.01)
    assert peer.load(()).done
    assert keeper.device.wrong([], 0) == []
    handle.wait(30)
    peer.close()
    with pytest.raises(RankError, match="was closed"):
        peer.load((1,))
    keeper.close()


def test_a_peer_that_closes_answers_what_it_did_not_begin() -> None:
    """So nothing is held for it; and its rank may be taken again."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    peer.close()
    peer.close()
    assert not peer.keeper_alive
    handle.wait(30)
    assert handle.error.endswith("was closed")
    keeper.until(lambda: not keeper.host.peers())
    ((again, device),) = keeper.join(1)
    assert again.generation > peer.generation
    handle, keys = keeper.load(PROMPT, 5)
    again.load(handle.ticket).wait(30)
    handle.wait(30)
    assert device.wrong(keys, 5) == []
    again.close()
    keeper.close()


def test_what_came_just_before_the_end_is_loaded() -> None:
    """A command and the end of the connection that arrive together: the command counts."""
    keeper = Keeper(num_peers=1)
    ((peer, device),) = keeper.join(1)
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    assert keeper.cache.close(timeout=0.05).clean  # what was to be sent is sent before
    peer.load(handle.ticket).wait(30)
    assert device.wrong(keys, 5) == []
    peer.close()


def test_a_peer_that_cannot_let_go_says_nothing() -> None:
    """While its memory is in use the keeper is not told that it is not; closed again, it is."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    hold_answers(peer, handle.ticket)
    (pool,) = peer._host.pools.values()
    pool.acquire()
    with pytest.raises(PoolInUseError):
        peer.close()
    keeper.cache.wait(0.05)
    assert [state.pages_held for state in keeper.host.peers()] == [3]
    with pytest.raises(RankError, match="was closed"):
        peer.load((1,))
    pool.release()
    peer.close()
    handle.wait(30)
    assert handle.error.endswith("was closed")
    keeper.close()


def test_a_cache_that_closes_gives_its_memory_back() -> None:
    """With an answer that is late the load fails; the peer has the bytes mapped, and goes on."""
    keeper = Keeper(num_peers=1)
    ((peer, device),) = keeper.join(1)
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    load = hold_answers(peer, handle.ticket)
    report = keeper.cache.close(timeout=0.05)
    assert report.clean
    assert handle.done
    assert "the keeper closed before rank 1" in handle.error
    assert not peer.keeper_alive
    load.wait(30)
    assert device.wrong(keys, 5) == []
    with pytest.raises(RankError, match="is gone"):
        peer.load((10**6,))
    peer.close()


def _refusal(keeper: Keeper, **given: Any) -> str:
    """What a process is told that cannot be a peer."""
    asked = {"name": keeper.name, "geometry": GEOMETRY, "rank": 1, **given}
    device = Device(asked["geometry"])
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(
            HostPeer,
            asked["name"],
            asked["geometry"],
            device.view,
            rank=asked["rank"],
            timeout=60,
        )
        keeper.until(made.done)
    with pytest.raises(ConfigError) as refused:
        made.result()
    return str(refused.value)


def test_who_cannot_be_a_peer_learns_why() -> None:
    """Another geometry, a rank that is not or is served, another version: nothing is given away."""
    keeper = Keeper(num_peers=2)
    ((peer, _),) = keeper.join(1)
    other = Geometry(planes=(Plane(name="latent", num_layers=1, element_size=8),), page_size=PAGE)
    assert "only ranks whose planes are all the same" in _refusal(keeper, geometry=other, rank=2)
    assert "peers of" in _refusal(keeper, rank=3)
    assert "peers of" in _refusal(keeper, rank=0)
    assert "is there already" in _refusal(keeper, rank=1)
    assert keeper.host.num_refused == 4
    assert [state.rank for state in keeper.host.peers()] == [1]
    peer.close()
    keeper.close()


def test_strangers_are_not_listened_to() -> None:
    """Bytes that are no message, another version, silence: the keeper goes on with its peers."""
    keeper = Keeper(num_peers=1)
    ((peer, device),) = keeper.join(1)
    keys = keeper.store(PROMPT)
    greetings = [
        b"\xff" * 64,
        (5).to_bytes(8, "little") + b"hello",
        framed(Hello(1, GEOMETRY.fingerprint, protocol=99)),
        b"",
    ]
    for number, bytes_sent in enumerate(greetings, start=1):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(address_of(keeper.name))
            stranger.sendall(bytes_sent)
            if not bytes_sent:
                stranger.close()
            keeper.until(lambda number=number: keeper.host.num_refused == number)  # type: ignore[misc]
    # A peer that begins to talk nonsense is a peer no more.
    peer._host._channel.send(b"\xff" * 64)
    keeper.until(lambda: keeper.host.missing_ranks() == [1])
    peer.close()
    ((peer, device),) = keeper.join(1)
    handle, _ = keeper.load(PROMPT, 5)
    peer.load(handle.ticket).wait(30)
    handle.wait(30)
    assert device.wrong(keys, 5) == []
    peer.close()
    keeper.close()


def test_another_users_process_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says whose a connection is, and nothing is read from it, or told to it."""
    name = new_name()
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(RankTimeoutError):  # each user has names of their own
        HostPeer(name, GEOMETRY, Device().view, rank=1, timeout=0.01)
    keeper = Keeper(num_peers=1, name=name)
    with pytest.raises(RankError, match=f"user {user}'s"):
        HostPeer(name, GEOMETRY, Device().view, rank=1, timeout=60)
    keeper.until(lambda: keeper.host.num_refused == 1)
    assert keeper.host.peers() == ()
    monkeypatch.undo()
    keeper.close()


def test_names() -> None:
    """One keeper a name at a time; it is free again when that is closed."""
    name = new_name()
    with SharedHost(name, num_peers=1) as host:
        with pytest.raises(ConfigError, match="another process keeps one"):
            SharedHost(name, num_peers=1)
        with pytest.raises(ConfigError, match=r"KVFerry\(\.\.\., shared=host\)"):
            host.wait_for_peers(0.01)
    SharedHost(name, num_peers=1).close()
    for wrong in ("", "x\0y", "x" * 65):
        with pytest.raises(ConfigError, match="1 to 64 bytes"):
            SharedHost(wrong, num_peers=1)
    with pytest.raises(ConfigError, match="num_peers=-1"):
        SharedHost(name, num_peers=-1)
    with pytest.raises(RankTimeoutError, match="nobody keeps a host copy"):
        HostPeer(name, GEOMETRY, Device().view, rank=1, timeout=0.01)
    keeper = Keeper(num_peers=1)
    with pytest.raises(ConfigError, match="make one a cache"):
        keeper.host.offer(GEOMETRY, {}, keeper.host._offer.verify)  # type: ignore[union-attr]
    keeper.close()


def test_a_keeper_that_does_not_answer() -> None:
    """One that has no cache yet, or does not poll, is an error at the peer's deadline."""
    name = new_name()
    with (
        SharedHost(name, num_peers=1),
        pytest.raises(RankTimeoutError, match=r"did not answer within 0\.05 s"),
    ):
        HostPeer(name, GEOMETRY, Device().view, rank=1, timeout=0.05)


def test_an_idle_keeper_lets_peers_in() -> None:
    """One that waits for its own work, and has none, answers who wants to join."""
    keeper = Keeper(num_peers=1)
    device = Device()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(HostPeer, keeper.name, GEOMETRY, device.view, rank=1, timeout=20)
        while keeper.host.missing_ranks() and not made.done():
            keeper.cache.wait(40)
        made.result().close()
    keeper.close()


def test_storage_is_not_waited_for_behind_a_peer() -> None:
    """A prefetch comes to its end while a rank takes its time; and the other way round."""
    keeper = Keeper(num_peers=1, num_slots=8, storage=MemoryBackend())
    ((peer, device),) = keeper.join(1)
    other = keeper.store(list(range(100, 100 + 2 * PAGE)))
    assert keeper.cache.flush().complete
    keeper.cache.reset()
    keys = keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    fetch = keeper.cache.prefetch(list(range(100, 100 + 2 * PAGE)))
    fetch.wait(30)
    assert fetch.result().num_tokens == len(other) * PAGE
    assert not handle.done
    peer.load(handle.ticket).wait(30)
    handle.wait(30)
    assert device.wrong(keys, 5) == []
    peer.close()
    keeper.close()


def test_machines_agree_by_their_keepers() -> None:
    """Two machines with a keeper and a peer each: all four load what both machines have."""
    told: dict[int, Any] = {}

    def machine(ranks: ThreadRanks) -> None:
        keeper = Keeper(num_peers=1, ranks=ranks)
        ((peer, device),) = keeper.join(1)
        keys = keeper.store(PROMPT if ranks.rank else PROMPT[: 2 * PAGE])[:2]
        handle, _ = keeper.load(PROMPT, 5)
        peer.load(handle.ticket).wait(30)
        handle.wait(30)
        wrong = [*keeper.device.wrong(keys, 5), *device.wrong(keys, 5)]
        told[ranks.rank] = (handle.num_tokens, handle.agreed_tokens(), wrong)
        peer.close()
        keeper.close()

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(machine, ranks) for ranks in ThreadRanks.make(2)]:
            done.result(60)
    assert told == {0: (2 * PAGE, 2 * PAGE, []), 1: (2 * PAGE, 2 * PAGE, [])}


def test_nothing_is_left_open() -> None:
    """Descriptors and threads of keepers and peers that closed, were refused, or failed."""
    keeper = Keeper(num_peers=1)  # what is opened once and stays, is open now
    keeper.close()
    before = open_files()
    for _ in range(3):
        keeper = Keeper(num_peers=1)
        ((peer, _),) = keeper.join(1)
        keeper.store(PROMPT)
        handle, _ = keeper.load(PROMPT, 5)
        _refusal(keeper, rank=1)
        with contextlib.suppress(RankTimeoutError):
            HostPeer(new_name(), GEOMETRY, Device().view, rank=1, timeout=0.01)
        peer.load(handle.ticket).wait(30)
        handle.wait(30)
        peer.close()
        keeper.close()
    assert open_files() == before
    assert not [one for one in threading.enumerate() if one.name == "kvferry-share"]


def test_a_failure_while_joining_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose engine cannot be made is none, and its rank stays free."""
    keeper = Keeper(num_peers=1)
    before = open_files()

    def refuse(*_: object, **__: object) -> None:
        raise ConfigError("no path")

    with monkeypatch.context() as patched:
        patched.setattr("kvferry.cache.peer.make_engines", refuse)
        with ThreadPoolExecutor(1) as threads:
            made = threads.submit(
                HostPeer, keeper.name, GEOMETRY, Device().view, rank=1, timeout=60
            )
            keeper.until(made.done)
            with pytest.raises(ConfigError, match="no path"):
                made.result()
    keeper.until(lambda: keeper.host.missing_ranks() == [1] and not keeper.host.peers())
    assert open_files() == before
    keeper.close()


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, None])
def test_times_that_are_none_are_refused(seconds: Any) -> None:
    """By keeper and peer, before they wait for anything."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    load = peer.load(handle.ticket)
    waits: list[Callable[[], object]] = [
        lambda: HostPeer(keeper.name, GEOMETRY, Device().view, rank=1, timeout=seconds),
        lambda: keeper.host.wait_for_peers(seconds),
        lambda: peer.load(handle.ticket, seconds),
        lambda: load.wait(seconds),
        lambda: peer.close(seconds),
    ]
    for wait in waits:
        with pytest.raises(ConfigError, match=rf"timeout={seconds!r}.* 0 to 86400"):
            wait()
    load.wait(30)
    handle.wait(30)
    peer.close()
    keeper.close()


def test_checkpoints_are_shared_like_pages() -> None:
    """A model with states has two pools, and a load of it two tickets' worth of jobs."""
    state = Plane(
        name="state", num_layers=2, element_size=40, rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )  # fmt: skip
    geometry = Geometry(planes=(PLANES[0], state), page_size=PAGE)

    def tensors(value: int) -> dict[str, Any]:
        return {
            "latent": [np.full((96, 56), value, np.uint8) for _ in range(3)],
            "state": [np.full((24, 40), value, np.uint8) for _ in range(2)],
        }

    name, ours, theirs = new_name(), tensors(7), tensors(1)
    host = SharedHost(name, num_peers=1)
    cache = KVFerry(
        geometry,
        PoolView.from_tensors(geometry, ours),
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint),
        shared=host,
        host={"num_bytes": 16 * geometry.page_bytes + (1 << 16)},
        load={"threshold_tokens": 1},
    )
    view = PoolView.from_tensors(geometry, theirs)
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(HostPeer, name, geometry, view, rank=1, timeout=60)
        host.wait_for_peers(60)
        peer = made.result(60)
    cache.store(
        PROMPT, device_slots=np.arange(12), plane_slots={"state": [3]}, has_state=True
    ).wait(30)
    with cache.match(PROMPT) as found:
        handle = cache.load(found, device_slots=np.arange(40, 52), plane_slots={"state": [9]})
    assert len(handle.ticket) == 2
    peer.load(handle.ticket).wait(30)
    handle.wait(30)
    assert handle.usable_tokens == 12
    assert all((layer[40:52] == 7).all() for layer in theirs["latent"])
    assert all((layer[9] == 7).all() for layer in theirs["state"])
    assert all((layer[:9] == 1).all() for layer in theirs["state"])
    assert cache.stats().slots[SlotKind.STATE][PageState.RESIDENT] == 1
    peer.close()
    assert cache.close().clean
