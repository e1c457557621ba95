"""A cache that runs: polling, storage that comes and goes, and how everything ends."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING, Any, TypeVar

from kvferry.cache.commands import Actions, CommandDesk
from kvferry.cache.opening import BackendOpening
from kvferry.cache.reports import CloseReport, FlushReport
from kvferry.cache.steps import drive
from kvferry.closing import ClosedAtExit
from kvferry.control import ControlSocket
from kvferry.errors import BackendInterfaceError, ConfigError, PoolInUseError
from kvferry.storage import check_backend, open_backend
from kvferry.tiers import LinkState, check_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvferry.cache.steps import Steps
    from kvferry.memory import HostPool
    from kvferry.storage import StorageBackend
    from kvferry.switches import Switches
    from kvferry.tiers import DataPlane, TierManager, TierStats
    from kvferry.transfer import TransferEngine
    from kvferry.types import SlotKind

__all__ = ["CacheLife"]

_R = TypeVar("_R")

# Long enough that waiting costs nothing, short enough that deadlines of others are seen.
_LONGEST_WAIT_SECS = 0.05

# How often a flush offers pages once more of which storage took none.
_TRIES = 3


# A folder of many files is scanned as it is opened.
_ATTACH_SECS = 120.0


class CacheLife(ClosedAtExit):
    """Both planes of a cache in one process, without prompts: see `KVFerry`."""

    switches: Switches
    """What the cache does at all; may be flipped at any time."""

    def __init__(
        self,
        manager: TierManager,
        data: DataPlane,
        engines: Mapping[SlotKind, TransferEngine],
        pools: Mapping[SlotKind, HostPool],
        *,
        num_threads: int,
    ) -> None:
        self._manager = manager
        self._data = data
        self._engines = engines
        self._pools = pools
        self._num_threads = num_threads
        self._desk: CommandDesk | None = None

    def _listen(self, path: Path, rank: int | None) -> None:
        """Carry out orders that come over a socket at `path`, of several ranks at ``path.rank``."""
        if rank is not None:
            path = path.with_name(f"{path.name}.{rank}")
        actions = Actions(self.stats, self._attaching, self._detaching, self._flushing)
        self._desk = CommandDesk(ControlSocket(path, wake=self._data.wake), actions)

    # ---------------------------------------------------------------- running

    def poll(self) -> int:
        """Take note of what has ended; how much. Never blocks."""
        taken = self._manager.poll()
        if self._desk is not None and self._desk.has_work:
            self._desk.step()
        return taken

    def wait(self, timeout: float) -> int:
        """`poll`, but block up to `timeout` seconds until there is something to take note of."""
        check_seconds("timeout", timeout)
        taken = self.poll()
        if not taken and self._data.wait(timeout):
            taken = self.poll()
        return taken

    def _pump(self, timeout: float) -> None:
        self.wait(min(timeout, _LONGEST_WAIT_SECS))

    def stats(self) -> TierStats:
        """What is where, and what is in flight."""
        return self._manager.stats()

    def check_integrity(self) -> None:
        """Prove that all books agree; raises the first difference. Costs O(pages)."""
        self._manager.check_integrity()

    # ---------------------------------------------------------------- storage

    def attach_storage(
        self,
        backend: StorageBackend | str,
        *,
        probe: bool = True,
        timeout: float = _ATTACH_SECS,
        **options: Any,
    ) -> None:
        """Use a storage backend from now on; requests may run, and what ends meanwhile is noted.

        Args:
            backend: One that is open, closed with the cache; or what `open_backend` takes, such as
                a URL.
            probe: Write, read and delete a small object first.
            timeout: Seconds for opening and probing. A backend that is open later is closed then;
                one that was given open is yours again, when the call that hangs has returned.
            options: For `open_backend`.

        Raises:
            CacheError: One is attached already.
            StorageError: It cannot be opened, the probe failed, or the time is over.
        """
        self._wait_for(self._attaching(backend, probe=probe, timeout=timeout, **options))

    def _attaching(
        self,
        backend: StorageBackend | str,
        *,
        probe: bool = True,
        timeout: float = _ATTACH_SECS,
        **options: Any,
    ) -> Steps[None]:
        """`attach_storage`, step by step."""
        check_seconds("timeout", timeout)
        generation = self._manager.new_generation()
        make: Callable[[], StorageBackend]
        if isinstance(backend, str):
            make = functools.partial(open_backend, backend, **options)
        elif options:
            raise ConfigError(
                f"options {', '.join(options)} are for a backend that is opened here: give its "
                f"name, or open it with them"
            )
        else:
            if isinstance(backend, type):
                raise BackendInterfaceError(
                    f"storage={backend.__name__} is a class: open one of it"
                )
            check_backend(backend, f"storage={str(backend)[:80]}")
            make = functools.partial(_same, backend)
        is_owned = isinstance(backend, str)
        opening = BackendOpening(make, probe=probe, owned=is_owned, wake=self._data.wake)
        opened = yield from opening.steps(timeout)
        with contextlib.ExitStack() as unless_attached:
            if is_owned:
                unless_attached.callback(opened.close)
            self._data.attach_storage(generation, opened, num_threads=self._num_threads)
            unless_attached.pop_all()
        self.switches.flip(storage=True)
        self.poll()

    def detach_storage(self, timeout: float = 10.0, *, force: bool = False) -> bool:
        """Stop using storage, and wait for what is in flight; requests may run.

        Args:
            timeout: Seconds; what was not over by then goes on, and may be waited for again.
            force: After that time, give it up: True in any case. Slots that a read still writes to
                stay parked until it returns; its backend is closed then.

        Returns:
            Whether storage is gone.
        """
        return self._wait_for(self._detaching(timeout, force=force))

    def _detaching(self, timeout: float, *, force: bool = False) -> Steps[bool]:
        """`detach_storage`, step by step."""
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        while not self._manager.detach_storage():
            if time.monotonic() >= deadline:
                return self._manager.detach_storage(force=True) if force else False
            yield
        return True

    def flush(self, timeout: float = 60.0) -> FlushReport:
        """Write every page of the host that storage lacks, and wait for it.

        The report says whether storage has whole chains afterwards: pages that never left the
        device are not on the host, and cannot be written.
        """
        return self._wait_for(self._flushing(timeout))

    def _flushing(self, timeout: float) -> Steps[FlushReport]:
        """`flush`, step by step."""
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        num_left, is_told = 0, False
        for _ in range(2):  # again what storage dropped meanwhile, to make room for others
            num_left = yield from self._write_all(deadline)
            num_dropped = None if num_left else (yield from self._ask_for_all(deadline))
            is_told = num_dropped is not None
            if not num_dropped:
                break
        unstored, holes = self._manager.backup_gaps()
        return FlushReport(
            complete=is_told and not (num_left or unstored or holes),
            num_left=num_left,
            num_unstored=unstored,
            num_holes=holes,
        )

    def _write_all(self, deadline: float) -> Steps[int]:
        """Write what storage lacks, as far as is known; how many pages are left.

        What storage refuses, or fails to write, is offered again a few times, and not until the
        deadline: a full disk is not to be asked thousands of times a second.
        """
        fewest, tries = None, _TRIES
        while tries:
            self._manager.offer_all()
            while num_left := self._manager.num_unwritten:
                is_late = time.monotonic() >= deadline
                if is_late or self._manager.storage_state is not LinkState.ATTACHED:
                    return num_left
                yield
            num_unstored, _ = self._manager.backup_gaps()
            if not num_unstored:
                break
            tries -= fewest is not None and num_unstored >= fewest
            fewest = num_unstored
        return 0

    def _ask_for_all(self, deadline: float) -> Steps[int | None]:
        """How many of the pages that were written storage says it has not; None: it did not say."""
        if not self._manager.options.writes_storage:  # what it has, another rank writes
            return 0
        handles = self._manager.confirm_stored()
        for handle in handles:
            while not handle.done and time.monotonic() < deadline:
                yield
        if any(handle.reason or not handle.done for handle in handles):
            return None
        return sum(handle.found.count(False) for handle in handles)

    def _wait_for(self, steps: Steps[_R]) -> _R:
        """All of `steps`; requests may run meanwhile, and what ends is taken note of."""
        return drive(steps, lambda: self._pump(_LONGEST_WAIT_SECS))

    # ---------------------------------------------------------------- ends

    def reset(self) -> None:
        """Forget every page of the host. Storage keeps what it has."""
        self.poll()
        self._manager.reset()

    def close(self, timeout: float = 30.0) -> CloseReport:
        """End everything, and give memory back; again does nothing.

        Args:
            timeout: Seconds to wait for what is in flight. Memory that is still written to after
                that is kept, and told.
        """
        deadline = time.monotonic() + check_seconds("timeout", timeout)
        if self._desk is not None:
            self._desk.close()
            self._desk = None
        self._manager.close()
        self._manager.detach_storage()
        while self._manager.num_jobs and (left := deadline - time.monotonic()) > 0:
            self._pump(left)
        ended = self._data.close(max(0.0, deadline - time.monotonic()))
        self.poll()
        jobs, parked = self._manager.num_jobs, self._manager.stats().num_parked
        clean = ended and not jobs
        if clean:
            self._manager.reset()
            for engine in self._engines.values():
                engine.close()
            for pool in self._pools.values():
                try:
                    pool.close()
                except PoolInUseError:
                    clean = False
        return CloseReport(clean=clean, jobs=jobs, parked_slots=parked)


def _same(backend: StorageBackend) -> StorageBackend:
    return backend
