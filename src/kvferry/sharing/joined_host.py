"""A peer's side of a shared host copy: the memory, and what the keeper wants loaded from it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError, RankError, RankTimeoutError
from kvferry.memory import AttachedHostPool
from kvferry.sharing.channel import Channel, address_of, framed, is_gone, open_process, process_at
from kvferry.sharing.messages import PROTOCOL, Answer, Bye, Hello, Load, Refused, Welcome

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvferry.geometry import Geometry
    from kvferry.tiers import Moved, MovePages, Verify
    from kvferry.types import SlotKind

__all__ = ["JoinedHost"]

# How long to wait between two looks for a keeper that is not there yet.
_LOOK_SECS = 0.02


class JoinedHost:
    """A connection to the keeper called `name`, and its pools, mapped here.

    Args:
        name: The keeper's.
        geometry: The same as there.
        rank: Which rank of the machine this is, from 1 on.
        timeout: Seconds until the keeper must be there and have answered.

    Raises:
        ConfigError: The keeper refused; the message has its reason.
        RankTimeoutError: There is none, or it does not answer.
        RankError: It is gone, or another user's.
    """

    def __init__(self, name: str, geometry: Geometry, *, rank: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        connection = _connected(name, deadline, timeout)
        try:
            self.keeper_pid = process_at(connection)
            self._process = open_process(self.keeper_pid)
        except BaseException:
            connection.close()
            raise
        self._channel = Channel(connection)
        self._waiting: dict[int, MovePages] = {}
        self._newest = 0
        self.pools: Mapping[SlotKind, AttachedHostPool] = {}
        try:
            welcome, fds = self._greet(Hello(rank, geometry.fingerprint), deadline, timeout, name)
            self.generation: int = welcome.generation
            self.verify: Verify = welcome.verify
            self.pools = _attached(geometry, welcome, fds)
        except BaseException:
            self.close()
            raise

    def _greet(
        self, hello: Hello, deadline: float, timeout: float, name: str
    ) -> tuple[Welcome, list[int]]:
        try:
            self._channel.send_first(hello, [])
            answer, fds = self._channel.receive_first(max(deadline - time.monotonic(), 0.001))
        except TimeoutError as bad:
            raise RankTimeoutError(
                f"the keeper of {name!r} (process {self.keeper_pid}) did not answer within "
                f"{timeout} s: does it poll its cache, or wait_for_peers()?"
            ) from bad
        except OSError as bad:
            raise RankError(
                f"the keeper of {name!r} is gone, or closed ({bad.strerror or bad})"
            ) from bad
        if isinstance(answer, Welcome):
            return answer, fds
        for fd in fds:
            os.close(fd)
        if isinstance(answer, Refused):
            raise ConfigError(f"the keeper of {name!r} refused this process: {answer.reason}")
        raise ConfigError(f"the keeper of {name!r} does not speak version {PROTOCOL}")

    @property
    def keeper_alive(self) -> bool:
        """Whether the keeper is there, and its end of the connection open."""
        self.hear()
        return not self._channel.ended and not is_gone(self._process)

    def take(self, job: int) -> MovePages | None:
        """What the keeper wants loaded as `job`, once; None: it has not come yet.

        Raises RankError where it will not come: the job was taken before, is older than this
        connection, or was not sent.
        """
        self.hear()
        command = self._waiting.pop(job, None)
        if command is None and job <= self._newest:
            raise RankError(
                f"load {job} was begun on this rank before, or before it joined, or was not sent, "
                f"as this rank had left too much unread: take each ticket once, and poll often"
            )
        return command

    def hear(self) -> None:
        """Take note of what the keeper sent."""
        for message in self._channel.receive():
            if isinstance(message, Load):
                self._waiting[message.command.job] = message.command
                self._newest = max(self._newest, message.command.job)

    def answer(self, moved: Moved) -> None:
        """Tell the keeper that a load is over; one that reads no answers is taken for gone."""
        if not self._channel.send(framed(Answer(moved))):
            self._channel.close()

    def wait(self, timeout: float) -> None:
        """Block until the keeper may have said something, at most `timeout` seconds."""
        self._channel.wait(timeout)

    def close(self, timeout: float = 1.0) -> None:
        """Unmap the pools, tell the keeper so, and close the connection; once closed, a no-op.

        Raises PoolInUseError while a transfer uses a pool. The keeper is told nothing then, and
        holds what is read here; `close` may be called again.
        """
        with contextlib.ExitStack() as each:
            for pool in self.pools.values():
                each.callback(pool.close)
        if not self._channel.closed:
            if self.pools:
                self._channel.send(framed(Bye()))
            self._channel.close(timeout)
            os.close(self._process)


def _connected(name: str, deadline: float, timeout: float) -> socket.socket:
    """A connection to the keeper, who may yet have to start."""
    address = address_of(name)
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(address)
        except (ConnectionError, BlockingIOError) as absent:
            connection.close()
            left = deadline - time.monotonic()
            if left <= 0:
                raise RankTimeoutError(
                    f"nobody keeps a host copy called {name!r} after {timeout} s: start rank 0 of "
                    f"this machine with KVFerry(..., shared=SharedHost({name!r}, ...))"
                ) from absent
            # Nothing tells of an address that comes into being.
            select.select([], [], [], min(left, _LOOK_SECS))
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def _attached(
    geometry: Geometry, welcome: Welcome, fds: list[int]
) -> dict[SlotKind, AttachedHostPool]:
    pools: dict[SlotKind, AttachedHostPool] = {}
    try:
        if len(fds) != len(welcome.slots):
            raise RankError(
                f"the keeper sent {len(fds)} descriptors for {len(welcome.slots)} pools: raise "
                f"ulimit -n, and join again"
            )
        for (kind, num_slots), fd in zip(welcome.slots.items(), fds, strict=True):
            pools[kind] = AttachedHostPool(geometry, fd, num_slots=num_slots, kind=kind)
    except BaseException:
        for pool in pools.values():
            pool.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
    return pools
