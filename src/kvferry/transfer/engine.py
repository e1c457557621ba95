"""Carries plans out between one device pool and one host pool."""

from __future__ import annotations

import logging
import math
import weakref
from typing import TYPE_CHECKING, Protocol

from kvferry.closing import ClosedAtExit
from kvferry.env import debug_checks
from kvferry.errors import ConfigError, DriverError, PlanError, TransferTimeoutError, ViewError
from kvferry.kernels.jit import process_loader
from kvferry.transfer.cpu_carrier import CpuCarrier
from kvferry.transfer.gpu_carrier import GpuCarrier
from kvferry.transfer.gpu_options import GpuOptions
from kvferry.transfer.indices import DeviceRows, check_unique, run_length
from kvferry.transfer.shared_rows import check_apart
from kvferry.types import Direction

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import PoolView
    from kvferry.kernels import CopyDecision
    from kvferry.transfer.captured_transfer import CapturedTransfer
    from kvferry.transfer.handle import TransferHandle
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.profile import DeviceProfile
    from kvferry.transfer.route import Route

__all__ = ["TransferEngine"]

_logger = logging.getLogger(__name__)


class _Carrier(Protocol):
    """What carries plans out, once they are checked."""

    @property
    def path(self) -> str: ...

    def submit(self, plan: TransferPlan, stream: int | None) -> TransferHandle: ...

    def capture(
        self, plan: TransferPlan, stream: int | None, owner: object
    ) -> CapturedTransfer: ...

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]: ...

    def route(self, plan: TransferPlan) -> Route | None: ...

    def close(self) -> None: ...


class TransferEngine(ClosedAtExit):
    """Loads and stores between a device pool and a host pool.

    A device pool in host memory (an engine on the CPU) is served by the ``cpu`` path, or by
    ``cpu_numpy`` where the compiled kernel is not installed. There `load` and `store` copy before
    they return, so they are ordered with the caller's own work, and the handle they return is done.

    A device pool on an NVIDIA GPU is served by two movers, in streams of their own. ``direct``:
    kernels, ``flat`` or ``realign``, read and write the host pool in place. ``staged``: the copy
    engine crosses the link and the same kernels put bytes in place on the device; it is faster from
    some megabytes on, and takes page_major and layer_first host pools. `load` and `store` return at
    once; a transfer starts after what the caller's stream held when it was submitted, and the
    caller's stream waits for it where `TransferHandle.wait_layer` or `wait_all` says so. The host
    pool is pinned when the engine is made. One thread at a time may use an engine.

    Args:
        device: The engine's pool.
        host: Page slots: a `HostPool` or a `RegisteredHostPool`.
        verify: Make digests on store and check them on load.
        num_threads: On the CPU, threads a large transfer is spread over; None: up to 4, as cores
            allow.
        path: Take this path and no other, or refuse; None: the best there is. ``grouped``, on a
            GPU, is taken on request only.
        unroll: With ``grouped``: 32 / unroll threads share an element.
        num_blocks: On a GPU, the most multiprocessors a kernel may take; None: as measured.
        mover: On a GPU, ``direct`` or ``staged``; None: the faster for each plan.
        staging_bytes: On a GPU, device memory of each direction for what is staged, allocated with
            the engine; None: 64 MiB; 0: none, and nothing is staged.
        profile: On a GPU, what it can do, for choosing a mover; None: as calibrated, else built in.
        timed: On a GPU, note when the bytes of each transfer were on the link, by the GPU's clock;
            `TransferHandle.link_seconds` has it. Off, no event takes the time.

    Raises:
        ViewError: The pools are of different geometries or overlap, or no path serves the device.
        ConfigError: Every path that could serve it is switched off, `path` is not there, or
            a number is below 1.
        PoolClosedError: The host pool is closed.
        MissingDependencyError, NoDeviceError, DriverTooOldError, PinError: The GPU cannot be used;
            the message says what to do.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        *,
        verify: bool = True,
        num_threads: int | None = None,
        path: str | None = None,
        unroll: int | None = None,
        num_blocks: int | None = None,
        mover: str | None = None,
        staging_bytes: int | None = None,
        profile: DeviceProfile | None = None,
        timed: bool = False,
    ) -> None:
        if device.geometry.fingerprint != host.geometry.fingerprint:
            raise ViewError(
                f"device pool {device.geometry.fingerprint} and host pool "
                f"{host.geometry.fingerprint} are of different geometries; build both from one"
            )
        self._device = device
        self._host = host
        self._verify = verify
        kind = device.device.partition(":")[0]
        self._carrier: _Carrier
        if kind == "cpu":
            for_gpus = {
                "unroll": unroll,
                "num_blocks": num_blocks,
                "mover": mover,
                "staging_bytes": staging_bytes,
                "profile": profile,
                "timed": timed or None,
            }
            given = [f"{name}={value}" for name, value in for_gpus.items() if value is not None]
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: for GPU pools only, and this one is in host memory; "
                    f"leave that out"
                )
            self._carrier = CpuCarrier(
                device, host, verify=verify, num_threads=num_threads, path=path
            )
        elif kind == "cuda":
            if num_threads is not None:
                raise ConfigError(
                    f"num_threads={num_threads} is for pools in host memory, and this one is on "
                    f"{device.device}; give num_blocks, or leave it out"
                )
            options = GpuOptions.checked(
                host,
                verify=verify,
                path=path,
                unroll=unroll,
                num_blocks=num_blocks,
                mover=mover,
                staging_bytes=staging_bytes,
                profile=profile,
                timed=timed,
            )
            self._carrier = GpuCarrier(device, host, process_loader(), options)
        else:
            raise ViewError(
                f"no path serves device {device.device}; pass tensors on an NVIDIA GPU (cuda) or "
                f"in host memory (cpu)"
            )
        # An engine that is dropped is closed: memory must not go while a GPU uses it.
        weakref.finalize(self, _close_dropped, self._carrier).atexit = False

    def __repr__(self) -> str:
        return (
            f"TransferEngine(path={self.path!r}, verify={self.verify}, device={self._device!r}, "
            f"host={self._host!r})"
        )

    @property
    def path(self) -> str:
        """``cpu``, ``cpu_numpy``, ``direct`` or ``staged``, which takes either mover.

        On a GPU each handle names its mover and kernels.
        """
        return self._carrier.path

    @property
    def verify(self) -> bool:
        """Whether digests are made and checked."""
        return self._verify

    def load(self, plan: TransferPlan, stream: int | None = None) -> TransferHandle:
        """Bring the plan's pages to the device.

        Pages whose digest does not match are in `TransferHandle.bad_pages`; their rows hold
        nothing that may be used.

        Args:
            plan: What moves.
            stream: On a GPU, the handle of the stream whose work so far reads or writes the rows
                that are overwritten; None: the caller's current stream.

        Raises:
            PlanError: Before a byte moves: the plan is a store, is of another geometry or slot
                kind, an index lies outside its pool, or it cannot move as the engine was told to.
            SlotOwnershipError: Before a byte moves: a slot of a `HostPool` is free.
            PoolClosedError: The host pool is closed.
            TransferError: On a GPU: the engine is closed, or the stream is being captured into a
                graph; submit before the replay.
            JITError, MissingDependencyError: On a GPU: a kernel cannot be compiled.
        """
        return self._submit(plan, Direction.LOAD, stream)

    def store(self, plan: TransferPlan, stream: int | None = None) -> TransferHandle:
        """Take the plan's pages from the device; errors as for `load`.

        On a GPU `stream` is the one whose work so far wrote the pages.
        """
        return self._submit(plan, Direction.STORE, stream)

    def capture(self, plan: TransferPlan, stream: int | None = None) -> CapturedTransfer:
        """Put a load or store into the CUDA graph that a stream is capturing just now.

        Each replay carries it out anew. A transfer that comes once stays outside of graphs: submit
        it, and `wait_all` on the stream that replays, before the replay.

        Args:
            plan: What moves at every replay; host slots must stay those of the same owner.
            stream: The stream that is being captured; None: the caller's current stream.

        Raises:
            As `load`, and TransferError: the stream is not being captured, or the pool is in host
                memory, where there are no graphs.
        """
        self.check(plan, plan.direction)
        return self._carrier.capture(plan, stream, self)

    def explain(self, plan: TransferPlan) -> Mapping[tuple[str, int], CopyDecision]:
        """For each (plane, layer) that `plan` moves: which kernel carries it on a GPU, and why.

        Empty in host memory, where `path` is all there is to say.

        Raises:
            PlanError: The plan is of another geometry or slot kind.
        """
        self._check_pools(plan)
        return self._carrier.explain(plan)

    def route(self, plan: TransferPlan) -> Route | None:
        """Which mover carries `plan` on a GPU, in which steps, and why; None in host memory.

        Raises:
            PlanError: The plan is of another geometry or slot kind.
        """
        self._check_pools(plan)
        return self._carrier.route(plan)

    def close(self) -> None:
        """Wait for what is in flight and give back what the engine holds of a GPU."""
        self._carrier.close()

    def _submit(
        self, plan: TransferPlan, direction: Direction, stream: int | None
    ) -> TransferHandle:
        self.check(plan, direction)
        return self._carrier.submit(plan, stream)

    def check(self, plan: TransferPlan, direction: Direction) -> None:
        """Raise what a `load` or `store` of `plan`, as `direction` says, would before it starts."""
        if plan.direction is not direction:
            raise PlanError(f"the plan is a {plan.direction.value}, not a {direction.value}")
        self._check_pools(plan)
        for pool in (self._device, self._host.view):
            if not pool.still_there():
                raise ViewError(
                    f"the tensors of {pool!r} were resized or given other memory since they were "
                    f"registered; register them anew and make a new engine"
                )
        _check_range("host_slots", plan.host_slots, self._host.num_slots, "slots of the host pool")
        self._host.check_slots(plan.host_slots)
        for name, rows in plan.device_rows.items():
            if name not in self._device.layers:
                raise PlanError(
                    f"the device pool has no plane {name!r}; register it, or leave it out of the "
                    f"plan with planes="
                )
            what = f"device slots of plane {name!r}"
            if isinstance(rows, DeviceRows):
                if rows.device != self._device.device:
                    raise PlanError(
                        f"{what} are on {rows.device}, but the pool is on {self._device.device}; "
                        f"move them there, or to host memory"
                    )
                if not debug_checks():
                    continue
                promised = rows.run
                rows = plan.rows_on_host(name)
                if math.gcd(run_length(rows), promised) != promised:
                    raise PlanError(
                        f"{what} are not in runs of {promised} as device_run promised, but of "
                        f"{run_length(rows)}; promise what the engine keeps"
                    )
                if rows.size and int(rows.min()) < 0:
                    raise PlanError(f"{what} holds {int(rows.min())}; rows count from 0")
                if direction is Direction.LOAD:
                    check_unique(what, rows.ravel())
            _check_range(what, rows, self._device.num_rows(name), "rows")
        if self._device.shared_storage and direction is Direction.LOAD:
            check_apart(plan, self._device)

    def _check_pools(self, plan: TransferPlan) -> None:
        # Also of a plan that is only asked about: routes are kept, by what tells those of one
        # geometry apart.
        if plan.geometry.fingerprint != self._device.geometry.fingerprint:
            raise PlanError("the plan is of another geometry than the pools; build it from theirs")
        if plan.kind is not self._host.kind:
            raise PlanError(
                f"the plan moves {plan.kind.value} slots, but the host pool keeps "
                f"{self._host.kind.value} slots"
            )


# What a GPU may still use although its engine is gone: kept, as it must not be used for else.
_parked: list[_Carrier] = []


def _close_dropped(carrier: _Carrier) -> None:
    try:
        carrier.close()
    except TransferTimeoutError as late:
        _parked.append(carrier)
        _logger.warning(
            "an engine was dropped with a transfer that does not end (%s); its pools and buffers "
            "are kept. Call close() before an engine goes, and wait for its transfers",
            late,
        )
    except DriverError as refused:
        _logger.warning(
            "an engine was dropped, and the driver kept some of what it held (%s); all else is "
            "given back. Call close() before an engine goes, to see this where it happens",
            refused,
        )


def _check_range(what: str, indices: NDArray[np.int64], limit: int, of: str) -> None:
    if indices.size and int(indices.max()) >= limit:
        raise PlanError(f"{what} holds {int(indices.max())}, but there are only {limit} {of}")
