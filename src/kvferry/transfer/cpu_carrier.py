"""Carries plans out between two pools in host memory, before it returns."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import (
    ConfigError,
    PlanError,
    TransferError,
    TransferFaultError,
    ViewError,
)
from kvferry.kernels import NO_DIGEST
from kvferry.transfer.handle import CompletedTransfer
from kvferry.transfer.indices import DeviceRows
from kvferry.transfer.paths import choose_cpu_path
from kvferry.transfer.span_move import SpanMove
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvferry.geometry import PoolView
    from kvferry.kernels import CopyDecision
    from kvferry.transfer.captured_transfer import CapturedTransfer
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan

__all__ = ["CpuCarrier"]

# Below this many bytes handing work to another thread costs more than it saves.
_BYTES_WORTH_A_THREAD = 1 << 20
_MAX_DEFAULT_THREADS = 4


class CpuCarrier:
    """The ``cpu`` and ``cpu_numpy`` paths.

    Raises ViewError where the pools overlap, and ConfigError for a path that is not there or fewer
    threads than one.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        *,
        verify: bool,
        num_threads: int | None,
        path: str | None,
    ) -> None:
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
        self._num_threads = min(_MAX_DEFAULT_THREADS, cores) if num_threads is None else num_threads

    @property
    def path(self) -> str:
        """``cpu`` or ``cpu_numpy``."""
        return self._path

    def submit(self, plan: TransferPlan, stream: int | None) -> CompletedTransfer:
        """Carry out a plan that the engine has checked; the host pool is leased meanwhile."""
        if stream is not None:
            raise PlanError(
                f"stream {stream}: pools in host memory have no streams; submit without one"
            )
        self._host.acquire(plan.host_slots)
        try:
            good = self._run(self._moves(plan), plan)
        except (MemoryError, OSError, RuntimeError) as fault:
            self._forget_digests(plan)
            failed = TransferFaultError(
                f"{plan.direction.value} of {plan.num_pages} pages failed: {fault}"
            )
            # Without its traceback, whose frames would keep the pool's memory from being closed.
            failed.__cause__ = fault.with_traceback(None)
            return CompletedTransfer(plan, self._path, self._verify, fault=failed)
        except BaseException:
            # An interrupt, say. It goes on, but not with some layers old and others new.
            self._forget_digests(plan)
            raise
        finally:
            self._host.release(plan.host_slots)
        bad = tuple(int(page) for page in np.flatnonzero(~good))
        return CompletedTransfer(plan, self._path, self._verify, failed_pages=bad)

    def _forget_digests(self, plan: TransferPlan) -> None:
        """After a store that ended midway: its slots are a mixture that nothing vouches for."""
        if plan.direction is Direction.STORE:
            self._host.digests[plan.host_slots] = NO_DIGEST

    def capture(self, plan: TransferPlan, stream: int | None, owner: object) -> CapturedTransfer:  # noqa: ARG002
        """Refuse."""
        raise TransferError(
            f"path {self._path} moves on the CPU, where there are no graphs; load and store"
        )

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]:  # noqa: ARG002
        """Nothing: there is one path for every plane."""
        return {}

    def route(self, plan: TransferPlan) -> None:
        """None: there is one way."""

    def close(self) -> None:
        """Nothing to give back: no transfer outlives `submit`."""

    def _moves(self, plan: TransferPlan) -> list[SpanMove]:
        moves = []
        for span in plan.spans:
            name = span.plane.name
            rows = plan.device_rows[name]
            if isinstance(rows, DeviceRows):  # the engine refuses them for a pool in host memory
                raise PlanError(f"device slots of plane {name!r} are on {rows.device}")
            moves.append(
                SpanMove(
                    span=span,
                    device=self._device.view(name, span.layer),
                    host=self._host.view.view(name, span.layer),
                    device_rows=rows,
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
