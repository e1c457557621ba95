"""Carries plans out between one device pool and one host pool."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import ConfigError, PlanError, TransferFaultError, ViewError
from kvferry.geometry import PoolView
from kvferry.transfer.handle import CompletedTransfer, TransferHandle
from kvferry.transfer.paths import choose_cpu_path
from kvferry.transfer.span_move import SpanMove
from kvferry.types import Direction

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan

__all__ = ["TransferEngine"]

# Below this many bytes handing work to another thread costs more than it saves.
_BYTES_WORTH_A_THREAD = 1 << 20


class TransferEngine:
    """Loads and stores between a device pool and a host pool.

    A device pool in host memory (an engine on the CPU) is served by the ``cpu`` path, or by
    ``cpu_numpy`` where the compiled kernel is not installed. There `load` and `store` copy before
    they return, so they are ordered with the caller's own work, and the handle they return is done.

    Args:
        device: The engine's pool.
        host: Page slots: a `HostPool` or a `RegisteredHostPool`.
        verify: Make digests on store and check them on load.
        num_threads: Threads a large transfer is spread over; None: up to 4, as cores allow.
        path: Take this path and no other; None: the best there is.

    Raises:
        ViewError: The pools are of different geometries or overlap, or no path serves the device.
        ConfigError: Every path that could serve it is switched off, `path` is not there, or
            `num_threads` is below 1.
        PoolClosedError: The host pool is closed.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        *,
        verify: bool = True,
        num_threads: int | None = None,
        path: str | None = None,
    ) -> None:
        if device.geometry.fingerprint != host.geometry.fingerprint:
            raise ViewError(
                f"device pool {device.geometry.fingerprint} and host pool "
                f"{host.geometry.fingerprint} are of different geometries; build both from one"
            )
        if device.device != "cpu":
            raise ViewError(
                f"no path serves device {device.device} yet; pass tensors in host memory"
            )
        shared = device.overlap_with(host.view)
        if shared is not None:
            raise ViewError(
                f"the device's {shared[0]} and the host's {shared[1]} overlap in memory; give each "
                f"pool its own"
            )
        if num_threads is not None and num_threads < 1:
            raise ConfigError(f"num_threads={num_threads}: give at least 1, or None")
        self._device = device
        self._host = host
        self._verify = verify
        self._path, self._move_span = choose_cpu_path(path)
        cores = len(os.sched_getaffinity(0))
        self._num_threads = min(4, cores) if num_threads is None else num_threads

    def __repr__(self) -> str:
        return (
            f"TransferEngine(path={self.path!r}, verify={self.verify}, device={self._device!r}, "
            f"host={self._host!r})"
        )

    @property
    def path(self) -> str:
        """The path that transfers take: ``cpu`` or ``cpu_numpy``."""
        return self._path

    @property
    def verify(self) -> bool:
        """Whether digests are made and checked."""
        return self._verify

    def load(self, plan: TransferPlan) -> TransferHandle:
        """Bring the plan's pages to the device.

        Pages whose digest does not match are in `TransferHandle.bad_pages`; their rows hold
        nothing that may be used.

        Raises:
            PlanError: Before a byte moves: the plan is a store, is of another geometry or slot
                kind, or an index lies outside its pool.
            SlotOwnershipError: Before a byte moves: a slot of a `HostPool` is free.
            PoolClosedError: The host pool is closed.
        """
        return self._submit(plan, Direction.LOAD)

    def store(self, plan: TransferPlan) -> TransferHandle:
        """Take the plan's pages from the device; errors as for `load`."""
        return self._submit(plan, Direction.STORE)

    def _submit(self, plan: TransferPlan, direction: Direction) -> TransferHandle:
        self._check(plan, direction)
        self._host.acquire()
        try:
            moves = self._moves(plan)
            good = self._run(moves, plan)
        except (MemoryError, OSError) as fault:
            # The slots may hold half the old bytes, half the new: no digest vouches for them.
            if direction is Direction.STORE:
                self._host.digests[plan.host_slots] = 0
            failed = TransferFaultError(
                f"{direction.value} of {plan.num_pages} pages failed: {fault}"
            )
            # Without its traceback, whose frames would keep the pool's memory from being closed.
            failed.__cause__ = fault.with_traceback(None)
            return CompletedTransfer(plan, self._path, self._verify, fault=failed)
        finally:
            self._host.release()
        bad = tuple(int(page) for page in np.flatnonzero(~good))
        return CompletedTransfer(plan, self._path, self._verify, failed_pages=bad)

    def _check(self, plan: TransferPlan, direction: Direction) -> None:
        if plan.direction is not direction:
            raise PlanError(f"the plan is a {plan.direction.value}, not a {direction.value}")
        if plan.geometry.fingerprint != self._device.geometry.fingerprint:
            raise PlanError("the plan is of another geometry than the pools; build it from theirs")
        if plan.kind is not self._host.kind:
            raise PlanError(
                f"the plan moves {plan.kind.value} slots, but the host pool keeps "
                f"{self._host.kind.value} slots"
            )
        _check_range("host_slots", plan.host_slots, self._host.num_slots, "slots of the host pool")
        self._host.check_slots(plan.host_slots)
        for name, rows in plan.device_rows.items():
            if name not in self._device.layers:
                raise PlanError(
                    f"the device pool has no plane {name!r}; register it, or leave it out of the "
                    f"plan with planes="
                )
            _check_range(
                f"device slots of plane {name!r}", rows, self._device.num_rows(name), "rows"
            )

    def _moves(self, plan: TransferPlan) -> list[SpanMove]:
        moves = []
        for span in plan.spans:
            name = span.plane.name
            moves.append(
                SpanMove(
                    span=span,
                    device=self._device.view(name, span.layer),
                    host=self._host.view.view(name, span.layer),
                    device_rows=plan.device_rows[name],
                    host_slots=plan.host_slots,
                    page_seeds=plan.page_seeds,
                    digests=self._host.digests[:, span.index],
                )
            )
        return moves

    def _run(self, moves: list[SpanMove], plan: TransferPlan) -> NDArray[np.bool_]:
        good = np.ones(plan.num_pages, dtype=np.bool_)
        if not plan.num_pages:
            return good

        def move(one: SpanMove) -> NDArray[np.bool_]:
            return self._move_span(one, plan.direction, verify=self._verify)

        workers = min(self._num_threads, len(moves), plan.num_bytes // _BYTES_WORTH_A_THREAD)
        if workers <= 1:
            for one in moves:
                good &= move(one)
            return good
        with ThreadPoolExecutor(workers, thread_name_prefix="kvferry-copy") as threads:
            for found in threads.map(move, moves):
                good &= found
        return good


def _check_range(what: str, indices: NDArray[np.int64], limit: int, of: str) -> None:
    if indices.size and int(indices.max()) >= limit:
        raise PlanError(f"{what} holds {int(indices.max())}, but there are only {limit} {of}")
