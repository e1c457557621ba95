"""A rank that loads from a host copy which another process of its machine keeps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvferry.cache.parts import make_engines, resolved_config
from kvferry.closing import ClosedAtExit
from kvferry.errors import RankError, RankTimeoutError, TransferTimeoutError
from kvferry.sharing import JoinedHost
from kvferry.tiers import DataPlane, Moved, Verify, check_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvferry.config import Config
    from kvferry.geometry import Geometry, PoolView
    from kvferry.tiers import RunningTransfer

__all__ = ["HostPeer", "PeerLoad"]


class PeerLoad:
    """A load on this rank. Whether its bytes may be used is told by the keeper's `LoadHandle`."""

    def __init__(self, peer: HostPeer, jobs: tuple[int, ...]) -> None:
        self._peer = peer
        self.jobs = jobs
        """The ticket."""

        self.transfers: list[RunningTransfer] = []
        self.error = ""
        """Why some of it was refused here; the keeper is told."""

    @property
    def done(self) -> bool:
        """Whether it is over on this rank."""
        return all(one.handle.done for one in self.transfers)

    def wait_layer(self, layer: int, stream: int | None = None) -> None:
        """Order later work on `stream` after the bytes of model layer `layer`. Does not block."""
        for one in self.transfers:
            if one.has_layer(layer):
                one.wait_layer(layer, stream)

    def wait_all(self, stream: int | None = None) -> None:
        """Order later work on `stream` after all bytes. Does not block."""
        for one in self.transfers:
            one.wait_all(stream)

    def wait(self, timeout: float = 60.0) -> None:
        """Block until it is over here, and tell the keeper.

        Raises TransferTimeoutError after `timeout` seconds; it goes on then.
        """
        self._peer.wait_for(self, timeout)


class HostPeer(ClosedAtExit):
    """The part of the cache that a rank has whose host copy is kept by rank 0 of its machine.

    It has no index and decides nothing. The keeper's `LoadHandle.ticket`, which the engine passes
    on with the rest of a step, is all it needs: the same pages go to the same device slots here. A
    load begins in the call of `load`, never by itself, since only the engine knows when its device
    slots are free; so each ticket must be taken. One thread uses it.

    Args:
        name: That of the keeper's `SharedHost`.
        geometry: The planes, as there.
        device_pool: Where this rank's engine keeps them; as large as the keeper's.
        rank: Which rank of the machine this is, from 1 on.
        config: For its section ``transfer``; None: from the environment and its file.
        timeout: Seconds until the keeper must be there and have answered.
        overrides: Settings by section, which win over `config`.

    Raises:
        ConfigError: A setting is wrong, or the keeper refused this process, and says why.
        RankTimeoutError: There is no keeper, or it does not answer.
        RankError: It is gone, or another user's.
        ViewError, NoDeviceError, ...: As `TransferEngine` says.
    """

    def __init__(
        self,
        name: str,
        geometry: Geometry,
        device_pool: PoolView,
        *,
        rank: int,
        config: Config | None = None,
        timeout: float = 30.0,
        **overrides: Mapping[str, Any],
    ) -> None:
        check_seconds("timeout", timeout)
        resolved = resolved_config(config, overrides)
        self._host = host = JoinedHost(name, geometry, rank=rank, timeout=timeout)
        self.rank = rank
        try:
            self._engines = make_engines(
                device_pool,
                host.pools,
                resolved,
                verify=host.verify is Verify.ALWAYS,
                timed=False,
            )
        except BaseException:
            host.close()
            raise
        self._data = DataPlane(geometry, self._engines, {}, verify=host.verify)
        self._closed = False

    @property
    def generation(self) -> int:
        """The keeper's number for this process; no other has it."""
        return self._host.generation

    @property
    def keeper_alive(self) -> bool:
        """Whether the keeper is there. A peer without one loads nothing any more: close it."""
        return not self._closed and self._host.keeper_alive

    def load(self, ticket: Sequence[int], timeout: float = 10.0) -> PeerLoad:
        """Begin what the keeper's `LoadHandle.ticket` names, behind this rank's current stream.

        Raises:
            RankTimeoutError: It did not come from the keeper within `timeout` seconds.
            RankError: The keeper is gone, the ticket was taken before, or this peer is closed.
        """
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        load = PeerLoad(self, tuple(ticket))
        for job in ticket:
            if self._closed:
                raise RankError(f"rank {self.rank} was closed: make a new HostPeer")
            while True:
                # Looked at first: what a keeper sent before it died can be loaded.
                is_alive = self._host.keeper_alive
                if (command := self._host.take(job)) is not None:
                    break
                left = deadline - time.monotonic()
                if not is_alive:
                    raise RankError(
                        f"the keeper (process {self._host.keeper_pid}) is gone: close this peer, "
                        f"and make a new one when it is back"
                    )
                if left <= 0:
                    raise RankTimeoutError(
                        f"load {job} did not come within {timeout} s: is {tuple(ticket)} a ticket "
                        f"of this keeper, made since this rank joined?"
                    )
                self._host.wait(min(left, 0.05))
            running = self._data.execute(command)
            if running is not None:
                load.transfers.append(running)
        self._tell(load)
        return load

    def poll(self) -> int:
        """Tell the keeper of loads that are over; how many. Never blocks.

        To be called in each step, as the keeper's pages are held until it knows.
        """
        return 0 if self._closed else self._tell(None)

    def wait_for(self, load: PeerLoad, timeout: float) -> None:
        """Block until `load` is over here; see `PeerLoad.wait`."""
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        while not load.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeoutError(
                    f"a load on rank {self.rank} is not over after {timeout} s; it goes on: wait "
                    f"again, or poll()"
                )
            self._data.wait(min(left, 0.05))
        self.poll()

    def close(self, timeout: float = 10.0) -> None:
        """End what runs, tell the keeper, and give the memory back; once closed, a no-op.

        Loads that were not begun here fail.

        Raises PoolInUseError where the memory is still in use, as by a transfer that does not end
        in `timeout` seconds: the keeper goes on holding it, and `close` may be called again.
        """
        if not self._closed:
            deadline = time.monotonic() + check_seconds("timeout", timeout)
            while self._data.num_running and (left := deadline - time.monotonic()) > 0:
                self._data.wait(min(left, 0.05))
                self._tell(None)
            self._tell(None)
            self._closed = True
            for engine in self._engines.values():
                engine.close()
        self._host.close()

    def _tell(self, load: PeerLoad | None) -> int:
        self._host.hear()
        told = 0
        for done in self._data.poll():
            if isinstance(done, Moved):
                if load is not None and done.job in load.jobs:
                    load.error = load.error or done.error
                self._host.answer(done)
                told += 1
        return told
