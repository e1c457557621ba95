"""The keeper's side of a shared host copy: who the peers are, what they owe, and who is gone.

peer 1 ── connects, says hello ──▶ keeper ── memory, generation ──▶ peer 1
          ◀── Load ──                        ── Answer ──▶
          socket closed: no more loads       process gone: nothing is owed any more
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from kvferry.closing import ClosedAtExit
from kvferry.errors import ConfigError, KVFerryError, RankError, RankTimeoutError
from kvferry.sharing.channel import Channel, address_of, framed, is_gone, open_process, process_at
from kvferry.sharing.messages import PROTOCOL, Answer, Bye, Hello, Load, Refused, Welcome
from kvferry.tiers import Moved, Verify, check_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.geometry import Geometry
    from kvferry.memory import HostPool
    from kvferry.tiers import MovePages
    from kvferry.types import SlotKind

__all__ = ["Owed", "PeerState", "SharedHost"]

# How long a process that connected may take to say what it wants.
_HELLO_SECS = 10.0
_NOT_OWED = (0.0, 0)


@dataclasses.dataclass(frozen=True)
class PeerState:
    """One peer at one moment."""

    rank: int
    pid: int
    generation: int
    """No other process that ever was a peer of this keeper has it."""

    connected: bool
    """False: its connection is closed, and its process has yet to end."""

    num_loads: int
    """Loads that it was sent and has not answered."""

    pages_held: int
    """Pages and checkpoints that those read, each as often as it is read."""

    silent_secs: float
    """For how long it owes its oldest answer; 0 where it owes none."""


@dataclasses.dataclass(frozen=True)
class Owed:
    """What became of one load on one peer: its answer, or that there will be none."""

    generation: int
    moved: Moved


class _Offer(NamedTuple):
    """What a peer gets."""

    geometry: Geometry
    pools: Mapping[SlotKind, HostPool]
    verify: Verify


class _Peer:
    def __init__(self, rank: int, pid: int, process: int, generation: int, channel: Channel):
        self.rank = rank
        self.pid = pid
        self.process = process
        self.generation = generation
        self.channel = channel
        self.loads: dict[int, tuple[float, int]] = {}
        """By job: since when, and how many pages it reads."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.pid})"


class _Guest:
    """A connection that has not said hello."""

    def __init__(self, connection: socket.socket, pid: int, deadline: float) -> None:
        self.channel = Channel(connection)
        self.pid = pid
        self.deadline = deadline


class SharedHost(ClosedAtExit):
    """One host copy for the ranks of one machine whose bytes are the same, seen by its keeper.

    The keeper is rank 0 of the machine. Give this to its `KVFerry`, which closes it; every other
    rank makes a `HostPeer` of the same name. Belongs to the thread of the cache. It is a context
    manager too, for when there may be no cache to close it.

    Args:
        name: What peers look for: text, and no file. Nobody else of this user on this machine may
            use it meanwhile.
        num_peers: How many other ranks there are: 1 to `num_peers`; 0 where this is the only one.

    Raises:
        ConfigError: The name is none, or taken; `num_peers` is below 0; or the system cannot watch
            processes.
    """

    def __init__(self, name: str, *, num_peers: int) -> None:
        if num_peers < 0:
            raise ConfigError(f"num_peers={num_peers}: give the number of other ranks, from 0 on")
        if not hasattr(os, "pidfd_open"):
            raise ConfigError("a shared host copy needs Linux 5.3 or newer (pidfd_open)")
        self.name = name
        self.num_peers = num_peers
        self._peers: dict[int, _Peer] = {}
        """By generation; those too whose connection is closed and that still owe answers."""

        self._guests: list[_Guest] = []
        self._generation = 0
        self._offer: _Offer | None = None
        self._over: list[Owed] = []
        self._closed = False
        self.num_refused = 0
        """Processes that wanted to be peers and were not taken."""

        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(address_of(name))
            self._listener.listen(max(8, 2 * num_peers))
            self._listener.setblocking(False)
        except OSError as bad:
            self._listener.close()
            raise ConfigError(
                f"name={name!r} of a shared host copy cannot be had ({bad.strerror}): another "
                f"process keeps one of that name; end it, or take another name"
            ) from bad
        except BaseException:
            self._listener.close()
            raise

    # ---------------------------------------------------------------- who is there

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def peers(self) -> tuple[PeerState, ...]:
        """Every peer that is connected, or still owes an answer, by rank."""
        now = time.monotonic()
        return tuple(
            PeerState(
                rank=peer.rank,
                pid=peer.pid,
                generation=peer.generation,
                connected=not peer.channel.ended,
                num_loads=len(peer.loads),
                pages_held=sum(pages for _, pages in peer.loads.values()),
                silent_secs=max((now - since for since, _ in peer.loads.values()), default=0.0),
            )
            for peer in sorted(self._peers.values(), key=lambda peer: (peer.rank, peer.generation))
        )

    def missing_ranks(self) -> list[int]:
        """The ranks that nobody is connected for."""
        here = {peer.rank for peer in self._peers.values() if not peer.channel.ended}
        return [rank for rank in range(1, self.num_peers + 1) if rank not in here]

    def wait_for_peers(self, timeout: float) -> None:
        """Block until every rank is connected; RankTimeoutError after `timeout` seconds.

        To be called once the `KVFerry` of the keeper is made.
        """
        if self._offer is None:
            raise ConfigError("give this SharedHost to a KVFerry first: KVFerry(..., shared=host)")
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        self._look()
        while missing := self.missing_ranks():
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankTimeoutError(
                    f"ranks {missing} did not join {self.name!r} within {timeout} s "
                    f"({self.num_refused} processes were refused): start their HostPeer"
                )
            self.wait(left)
            self._look()

    # ---------------------------------------------------------------- what the data plane calls

    def offer(self, geometry: Geometry, pools: Mapping[SlotKind, HostPool], verify: Verify) -> None:
        """Take peers from now on, and give them these pools, which are shared.

        Raises ConfigError where that was said before, and after `close`.
        """
        if self._closed or self._offer is not None:
            raise ConfigError(f"SharedHost {self.name!r} is closed or in use: make one a cache")
        self._offer = _Offer(geometry, pools, verify)

    def send(self, command: MovePages) -> set[int]:
        """Have every peer load this; the generations that owe an answer now."""
        frame = framed(Load(dataclasses.replace(command, stream=None)))
        now, pages = time.monotonic(), len(command.host_slots)
        asked = set()
        for peer in self._peers.values():
            if peer.channel.ended:
                continue
            asked.add(peer.generation)
            if peer.channel.send(frame):
                peer.loads[command.job] = (now, pages)
            else:
                error = f"{peer.name} does not read what it is sent, and was not sent this load"
                self._over.append(Owed(peer.generation, Moved(command.job, error=error)))
        return asked

    def poll(self) -> list[Owed]:
        """What peers have answered since the last time, and what none of them will any more."""
        self._look()
        over, self._over = self._over, []
        return over

    def wait(self, timeout: float) -> bool:
        """Block until a peer says something, comes or goes, at most `timeout` seconds."""
        if self._closed:
            return False
        waiting = select.poll()
        waiting.register(self._listener, select.POLLIN)
        for guest in self._guests:
            waiting.register(guest.channel, select.POLLIN)
        for peer in self._peers.values():
            waiting.register(peer.process, select.POLLIN)
            if not peer.channel.ended:
                waiting.register(peer.channel, select.POLLIN)
        return bool(waiting.poll(max(0.0, timeout) * 1000))

    def close(self, timeout: float = 1.0) -> None:
        """Take leave of all peers. What they owe has failed; again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._listener.close()
        for guest in self._guests:
            guest.channel.close()
        for peer in self._peers.values():
            peer.channel.close(timeout)
            os.close(peer.process)
            # What they read is mapped by themselves, and nobody writes to it any more.
            for job in peer.loads:
                error = f"the keeper closed before {peer.name} answered"
                self._over.append(Owed(peer.generation, Moved(job, error=error)))
        self._guests.clear()
        self._peers.clear()

    # ---------------------------------------------------------------- inside

    def _look(self) -> None:
        if self._closed or self._offer is None:
            return
        for peer in list(self._peers.values()):
            self._hear(peer)
        self._accept()
        for guest in list(self._guests):
            self._greet(guest, self._offer)

    def _hear(self, peer: _Peer) -> None:
        # Before it is listened to: of a process that is gone there is nothing more to come.
        gone = is_gone(peer.process)
        try:
            for message in peer.channel.receive():
                if isinstance(message, Bye):
                    self._forget(peer, "was closed")
                    return
                if not isinstance(message, Answer):
                    continue
                if peer.loads.pop(message.moved.job, _NOT_OWED) is not _NOT_OWED:
                    self._over.append(Owed(peer.generation, message.moved))
        except RankError:  # it cannot be understood, so it is no peer any more
            peer.channel.close()
        if gone or (peer.channel.ended and not peer.loads):
            self._forget(peer, "is gone")

    def _forget(self, peer: _Peer, why: str) -> None:
        """Whatever its loads read is read by it no more."""
        del self._peers[peer.generation]
        peer.channel.close()
        os.close(peer.process)
        for job in peer.loads:
            self._over.append(Owed(peer.generation, Moved(job, error=f"{peer.name} {why}")))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # it is gone, or there are no descriptors left for it
                self.num_refused += 1
                return
            try:
                pid = process_at(connection)
            except RankError:
                self.num_refused += 1
                connection.close()
                continue
            self._guests.append(_Guest(connection, pid, time.monotonic() + _HELLO_SECS))

    def _greet(self, guest: _Guest, offer: _Offer) -> None:
        try:
            messages = guest.channel.receive()
        except RankError:
            messages = []
            guest.deadline = 0.0
        if not messages:
            if guest.channel.ended or time.monotonic() >= guest.deadline:
                self._guests.remove(guest)
                self.num_refused += 1
                guest.channel.close()
            return
        self._guests.remove(guest)
        hello = messages[0]
        try:
            self._admit(guest, hello, offer)
        except (KVFerryError, OSError) as refused:
            self.num_refused += 1
            with contextlib.suppress(OSError):
                guest.channel.send_first(Refused(str(refused)), [])
            guest.channel.close()

    def _admit(self, guest: _Guest, hello: object, offer: _Offer) -> None:
        geometry, pools, verify = offer
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise ConfigError(
                f"this keeper speaks version {PROTOCOL} and its guest another: run one version of "
                f"kvferry on all ranks"
            )
        if hello.geometry != geometry.fingerprint:
            raise ConfigError(
                f"the keeper's geometry is {geometry.fingerprint}, and yours {hello.geometry}: "
                f"only ranks whose planes are all the same can share a host copy"
            )
        if not 1 <= hello.rank <= self.num_peers:
            raise ConfigError(
                f"rank={hello.rank}: peers of {self.name!r} are 1 to {self.num_peers}"
            )
        for other in list(self._peers.values()):
            if other.rank == hello.rank:
                self._hear(other)
                if other.generation in self._peers and not other.channel.ended:
                    raise ConfigError(f"{other.name} is there already: give each its own rank")
        # Before the welcome: if that can be sent, the process lived on after it was opened here,
        # and this is no later one with the same number.
        process = open_process(guest.pid)
        try:
            self._generation += 1
            welcome = Welcome(
                self._generation,
                {kind: pool.num_slots for kind, pool in pools.items()},
                verify,
            )
            guest.channel.send_first(welcome, [pool.fd for pool in pools.values()])
        except BaseException:
            os.close(process)
            raise
        self._peers[self._generation] = _Peer(
            hello.rank, guest.pid, process, self._generation, guest.channel
        )
