"""The self-test: every path on this machine, every size and layout, both ways, byte for byte.

A case stores pages into poisoned host slots and loads them back into other, poisoned device rows.
After each step both pools are compared whole with what they should be: rows, padding, slots nobody
owns, and the guards around the pools. Then one stored byte is flipped, and exactly that page must
be refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvferry.errors import ConfigError, KVFerryError
from kvferry.testing.layouts import DeviceLayout
from kvferry.testing.patterns import GuardedBuffer
from kvferry.testing.round_trip import DeviceMemory, RoundTrip
from kvferry.transfer import available_cpu_paths, available_gpu_paths, staging_is_disabled
from kvferry.types import Direction, Layout, Mover, SlotKind

__all__ = [
    "PathCounts",
    "SelfTestCase",
    "SelfTestFailure",
    "SelfTestReport",
    "run_selftest",
    "selftest_cases",
]

# What real models keep of a token in one layer of one plane, and sizes that nothing divides.
_PAGE_SIZES = (
    *(1, 2, 3, 7, 16, 64, 66, 100, 128, 131, 132, 160, 192, 256, 288, 384, 512, 528, 576, 584, 640),
    *(656, 768, 1024, 1152, 2048, 4096, 4100, 8448, 9216, 37440),
)
_QUICK_SIZES = (1, 7, 64, 132, 576, 656, 2048, 4100)
_STATE_SIZES = (49152,)
_DEVICE_RUNS = (1, 16, 64)
_OWN_POOL = "host_pool"
_HOST_LAYOUTS = (_OWN_POOL, *(layout.value for layout in Layout))
_INDEX_TYPES = ("int32", "int64")
_SHOWN_FAILURES = 20
_KNOWN_PATHS = ("cpu", "cpu_numpy", "flat", "realign", "grouped", "staged")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTestCase:
    """One store and one load, on every path."""

    element_size: int
    """In bytes."""

    kind: SlotKind
    """STATE for checkpoints, which have one row and so a device run of 1."""

    device_run: int
    """How many consecutive tokens lie in consecutive device slots."""

    host_layout: str
    """``host_pool`` for kvferry's own, or a `Layout` of an engine's."""

    device_layout: DeviceLayout
    store_index_type: str
    """``int32`` or ``int64``."""

    load_index_type: str

    def __str__(self) -> str:
        return (
            f"{self.element_size} B, {self.kind.value}, run {self.device_run}, "
            f"{self.device_layout.value} to {self.host_layout}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTestFailure:
    """Something that was not as it should be."""

    path: str
    case: SelfTestCase
    direction: Direction
    message: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "path": self.path,
            "direction": self.direction.value,
            **dataclasses.asdict(self.case),
            "message": self.message,
        }


@dataclasses.dataclass(kw_only=True)
class PathCounts:
    """What was tried on one path."""

    cases: int = 0
    """Transfers: two a `SelfTestCase`."""

    num_failures: int = 0
    num_bytes: int = 0
    """Bytes of KV that were moved and compared."""

    seconds: float = 0.0
    """In transfers alone, without preparing and comparing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelfTestReport:
    """The outcome of a self-test."""

    paths: dict[str, PathCounts]
    failures: tuple[SelfTestFailure, ...]
    """The first of them; `PathCounts.num_failures` counts all."""

    absent: tuple[str, ...]
    """Paths that were not tested: switched off, not installed, or among `idle`."""

    seconds: float
    idle: tuple[str, ...] = ()
    """Paths that are there and took no case."""

    @property
    def ok(self) -> bool:
        """Whether at least one transfer was made and all were exact."""
        return self.cases > 0 and not self.num_failures

    @property
    def cases(self) -> int:
        """Transfers on all paths."""
        return sum(counts.cases for counts in self.paths.values())

    @property
    def num_failures(self) -> int:
        """Failed transfers on all paths."""
        return sum(counts.num_failures for counts in self.paths.values())

    @property
    def num_bytes(self) -> int:
        """Bytes moved on all paths."""
        return sum(counts.num_bytes for counts in self.paths.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values: ok, transfers, failed, failures, paths, absent, seconds, bytes."""
        return {
            "ok": self.ok,
            "transfers": self.cases,
            "failed": self.num_failures,
            "failures": [failure.to_dict() for failure in self.failures],
            "paths": {
                name: {
                    "transfers": counts.cases,
                    "failed": counts.num_failures,
                    "bytes": counts.num_bytes,
                    "seconds": round(counts.seconds, 3),
                }
                for name, counts in self.paths.items()
            },
            "absent": list(self.absent),
            "seconds": round(self.seconds, 3),
            "bytes": self.num_bytes,
        }


@dataclasses.dataclass(frozen=True)
class _Device:
    """A kind of device memory and the paths that serve it."""

    allocate: Callable[[int], DeviceMemory]
    paths: tuple[str, ...]


def _devices() -> tuple[_Device, ...]:
    host = _Device(GuardedBuffer, tuple(path.name for path in available_cpu_paths()))
    gpu_paths = available_gpu_paths()
    if not gpu_paths:
        return (host,)
    from kvferry.testing.device_memory import GuardedDeviceBuffer

    names = [path.value for path in gpu_paths]
    if not staging_is_disabled():
        names.append(Mover.STAGED.value)
    return (host, _Device(GuardedDeviceBuffer, tuple(names)))


def selftest_cases(*, quick: bool = False) -> Iterator[SelfTestCase]:
    """Every case, with int32 and int64 indices taking turns; `quick` takes fewer sizes."""
    sizes = [(size, SlotKind.PAGE) for size in (_QUICK_SIZES if quick else _PAGE_SIZES)]
    sizes += [(size, SlotKind.STATE) for size in _STATE_SIZES]
    turn = itertools.count()
    for size, kind in sizes:
        for run in _DEVICE_RUNS if kind is SlotKind.PAGE else _DEVICE_RUNS[:1]:
            for host_layout, device_layout in itertools.product(_HOST_LAYOUTS, DeviceLayout):
                first = next(turn) % 2
                yield SelfTestCase(
                    element_size=size,
                    kind=kind,
                    device_run=run,
                    host_layout=host_layout,
                    device_layout=device_layout,
                    store_index_type=_INDEX_TYPES[first],
                    load_index_type=_INDEX_TYPES[1 - first],
                )


def run_selftest(
    *, quick: bool = False, progress: Callable[[SelfTestCase], None] | None = None
) -> SelfTestReport:
    """Run every case on every path there is.

    Args:
        quick: Take fewer element sizes.
        progress: Called with each case before it runs.

    Raises:
        ConfigError: Every path is switched off.
        BudgetError: There is no memory for the small pools this needs.
    """
    devices = _devices()
    paths = {name: PathCounts() for device in devices for name in device.paths}
    if not paths:
        raise ConfigError("every path is switched off; take one out of KVFERRY_DISABLE_PATHS")
    failures: list[SelfTestFailure] = []
    began = time.perf_counter()
    for case in selftest_cases(quick=quick):
        if progress is not None:
            progress(case)
        for device in devices:
            _run_case(case, device, paths, failures)
    tested = {name: counts for name, counts in paths.items() if counts.cases}
    return SelfTestReport(
        paths=tested,
        failures=tuple(failures[:_SHOWN_FAILURES]),
        absent=tuple(name for name in _KNOWN_PATHS if name not in tested),
        seconds=time.perf_counter() - began,
        idle=tuple(name for name in paths if name not in tested),
    )


def _run_case(
    case: SelfTestCase,
    device: _Device,
    paths: dict[str, PathCounts],
    failures: list[SelfTestFailure],
) -> None:
    with RoundTrip(
        element_size=case.element_size,
        kind=case.kind,
        device_run=case.device_run,
        host_layout=None if case.host_layout == _OWN_POOL else Layout(case.host_layout),
        device_layout=case.device_layout,
        allocate=device.allocate,
    ) as trip:
        for path in device.paths:
            if not trip.takes(path):
                continue
            counts = paths[path]
            for direction, message in _outcomes(trip, case, path, counts):
                counts.cases += 1
                counts.num_bytes += trip.num_bytes
                if message is not None:
                    counts.num_failures += 1
                    failures.append(
                        SelfTestFailure(path=path, case=case, direction=direction, message=message)
                    )


def _outcomes(
    trip: RoundTrip, case: SelfTestCase, path: str, counts: PathCounts
) -> Sequence[tuple[Direction, str | None]]:
    """Store, then load; each with what was wrong, or None. A load needs a store that was right."""
    outcomes: list[tuple[Direction, str | None]] = []
    for direction in (Direction.STORE, Direction.LOAD):
        is_store = direction is Direction.STORE
        index_type = case.store_index_type if is_store else case.load_index_type
        run = trip.store if is_store else trip.load
        try:
            counts.seconds += run(path, index_type)
        except (AssertionError, KVFerryError) as wrong:
            outcomes.append((direction, f"{type(wrong).__name__}: {wrong}"))
            break
        outcomes.append((direction, None))
    return outcomes
