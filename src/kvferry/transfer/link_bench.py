"""What a calibration times: copies and kernels between pinned memory and one GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvferry.errors import ConfigError, DriverError, DriverTooOldError, TransferTimeoutError
from kvferry.kernels import MoveKernels
from kvferry.kernels.jit import DeviceBuffer, PieceCopy, PinnedBuffer, RowCopy, process_loader
from kvferry.transfer.direct_trial import DirectTrial, TrialSize
from kvferry.transfer.gpu_clock import GpuClock
from kvferry.transfer.profile import BUILT_IN
from kvferry.types import Direction

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvferry.kernels.jit import Context, Stream
    from kvferry.transfer.profile import WidthCurve

__all__ = ["FULL", "QUOTAS", "WIDTHS", "BestQuota", "Effort", "LinkBench"]

WIDTHS = (
    656, 1_312, 2_624, 5_248, 8_192, 9_216, 10_496, 13_120, 15_744, 20_992, 36_864, 41_984,
)  # fmt: skip
"""Of rows, in bytes: close together where copies from some devices have a cliff."""

QUOTAS = (8, 16, 24, 32, 48, 64)
"""Blocks of `flat`. More would starve what computes beside it."""

# The least quota that comes this near to the best is taken: the rest is noise.
_NEAR_BEST = 0.995

# From page to page on the host, as slots are: whole pages of the system, and no power of two, for
# which caches and memory channels are slow in a way that slots never are.
_PITCH = 17 * 4096
_MAX_COLUMNS = 8
_LEAST_BYTES = 256 << 10
_RANDOM_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much is moved. Smaller is quicker and less exact."""

    buffer_bytes: int
    """Of pinned memory, and as much on the device. The largest plain copy. 256 KiB at least."""
    batch_bytes: int
    """Of one strided copy that is timed, or of several calls together."""
    delay_bytes: int
    """Copied ahead of what is timed, for as long as it takes to submit that."""
    num_calls: int
    """Into which a copy is cut to see what a call costs; two or more."""
    trial: TrialSize
    """What the direct mover's kernel carries: two layers or more, of which each gets a launch."""
    repeats: int = 3
    """The median of as many counts, after one that warms up."""
    seconds: float = 2.0
    """After these no further figure is begun. One takes 0.8 s where the link carries 3 GB/s."""

    def __post_init__(self) -> None:
        if self.buffer_bytes < _LEAST_BYTES or self.num_calls < 2 or self.trial.num_layers < 2:
            raise ConfigError(
                f"{self}: a calibration needs {_LEAST_BYTES:,} bytes, 2 calls and 2 layers, or "
                f"there is nothing to compare; take more"
            )


FULL = Effort(
    buffer_bytes=256 << 20,
    batch_bytes=32 << 20,
    delay_bytes=16 << 20,
    num_calls=64,
    trial=TrialSize(num_pages=96, num_layers=16),
)
"""About 15 GB in all: a third of a second where the link carries 55 GB/s."""


class BestQuota(NamedTuple):
    """What the sweep over quotas came to."""

    blocks: int
    num_bytes: int
    seconds: float
    """Of one launch that moves them."""

    def rate(self, launch_seconds: float) -> float:
        """GB/s, beside what the launch costs."""
        return _rate(self.num_bytes, self.seconds, launch_seconds)


class LinkBench:
    """Memory on both sides, and what is timed between them.

    A context manager that allocates and frees; the driver's context must be current throughout.
    What the GPU may still use after a copy that did not end is never freed.

    Raises:
        DriverError, JITError, MissingDependencyError, TransferTimeoutError: As `calibrate`; from
            each method too.
    """

    def __init__(self, context: Context, effort: Effort) -> None:
        self._context = context
        self._effort = effort
        self._quotas = [one for one in QUOTAS if one <= context.num_multiprocessors] or QUOTAS[:1]
        self._held: list[PinnedBuffer | DeviceBuffer | GpuClock] = []
        self.moved = 0
        """Bytes so far, those that only delay not counted."""

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException as bad:
            self._give_back(bad)
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._give_back(exc)

    def _set_up(self) -> None:
        context, room = self._context, self._effort.trial.room
        size = max(self._effort.buffer_bytes, room.host, room.device)
        self._host = self._pinned(size)
        self._device = self._on_device(size)
        tables, staging = self._on_device(room.tables), self._pinned(room.tables)
        self._clock = GpuClock(context, self._delay)
        self._held.append(self._clock)
        self._rows = {way: RowCopy(context, to_device=way is Direction.LOAD) for way in Direction}
        self._pieces: PieceCopy | None
        try:
            self._pieces = PieceCopy(context)
        except DriverTooOldError:
            self._pieces = None
        _fill(self._host)
        self._trial = DirectTrial(
            self._effort.trial,
            MoveKernels(process_loader(), context.device),
            self._clock.stream,
            host=self._seen_by_gpu(self._host.address),
            device=self._device.address,
            tables=tables.address,
            staging=staging.address,
            device_name=f"cuda:{context.device}",
        )
        self._clock.stream.copy_in(self._device.address, self._host.address, size)
        self._clock.settle()

    def _pinned(self, num_bytes: int) -> PinnedBuffer:
        self._held.append(made := PinnedBuffer(self._context, num_bytes))
        return made

    def _on_device(self, num_bytes: int) -> DeviceBuffer:
        self._held.append(made := DeviceBuffer(self._context, num_bytes))
        return made

    def _seen_by_gpu(self, address: int) -> int:
        driver = self._context.driver
        kind = driver.bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        return int(driver.call("cuPointerGetAttribute", kind, address))

    def _give_back(self, failed: BaseException | None) -> None:
        if failed is not None and not self._at_rest(failed):
            _parked.append(self)
            return
        first: DriverError | None = None
        while self._held:
            try:
                self._held.pop().close()
            except DriverError as bad:
                first = first or bad
        # What failed before says more than what failed because of it.
        if first is not None and failed is None:
            raise first

    def _at_rest(self, failed: BaseException) -> bool:
        """Whether nothing of what was submitted before `failed` still runs."""
        if isinstance(failed, TransferTimeoutError):
            return False
        try:
            for one in self._held:
                if isinstance(one, GpuClock):
                    one.settle()
        except TransferTimeoutError:
            return False
        except DriverError:
            pass  # the context is lost, and nothing runs in it any more
        return True

    def _delay(self, stream: Stream) -> None:
        size = min(self._effort.delay_bytes, self._device.num_bytes)
        stream.copy_in(self._device.address, self._host.address, size)

    def _seconds(self, num_bytes: int, work: Callable[[Stream], None]) -> float:
        repeats = self._effort.repeats
        self.moved += (1 + repeats) * num_bytes
        return self._clock.seconds(work, repeats=repeats)

    def link(self, way: Direction) -> float:
        """GB/s of one plain copy of all there is."""
        size = self._effort.buffer_bytes
        return _rate(size, self._seconds(size, functools.partial(self._copy, way, size)))

    def _copy(self, way: Direction, num_bytes: int, stream: Stream) -> None:
        host, device = self._host.address, self._device.address
        if way is Direction.LOAD:
            stream.copy_in(device, host, num_bytes)
        else:
            stream.copy_out(host, device, num_bytes)

    def copy_seconds(self) -> float:
        """What a call more costs, the mean of both ways: one copy against the same in parts."""
        width = WIDTHS[-1]
        calls = min(self._effort.num_calls, self._num_rows(width))
        each = self._num_rows(width) // calls
        found = []
        for way in Direction:
            whole, parts = (
                self._seconds(
                    calls * each * width,
                    functools.partial(self._copy_pages, way, width, calls * each // cut, cut),
                )
                for cut in (1, calls)
            )
            found.append(max(0.0, parts - whole) / (calls - 1))
        return sum(found) / len(found)

    def piece_seconds(self) -> float:
        """What a piece of one call costs the CPU; the built-in figure where the driver has no such
        call, as then it counts for nothing."""
        if self._pieces is None:
            return BUILT_IN.piece_seconds
        width = WIDTHS[-1]
        at = np.arange(self._num_rows(width) // _MAX_COLUMNS)
        host = at * _PITCH + self._host.address
        device = at * width + self._device.address
        sizes = np.full_like(at, width)
        spent = []
        for _ in range(1 + self._effort.repeats):
            begin = time.perf_counter()
            self._pieces.submit(self._clock.stream, device, host, sizes)
            spent.append(time.perf_counter() - begin)
            self._clock.settle()
        self.moved += len(spent) * len(at) * width
        return statistics.median(spent[1:]) / len(at)

    def _copy_pages(
        self, way: Direction, width: int, rows: int, calls: int, stream: Stream
    ) -> None:
        """The first `width` bytes of `calls` times `rows` pages, one after another."""
        for first in range(0, calls * rows, rows):
            self._submit(stream, way, width, rows, host=first * _PITCH, device=first * width)

    def widths(self, way: Direction, copy_seconds: float) -> WidthCurve:
        """Each width with its rate in GB/s, beside what the calls themselves cost."""
        return tuple((width, self._width(way, width, copy_seconds)) for width in WIDTHS)

    def _width(self, way: Direction, width: int, copy_seconds: float) -> float:
        wanted = self._effort.batch_bytes
        rows = min(self._num_rows(width), -(-wanted // width))
        # Narrow rows are few bytes in all, so several columns of them are taken, a call each.
        columns = min(_PITCH // width, max(1, wanted // (rows * width)), _MAX_COLUMNS)
        size = columns * rows * width
        work = functools.partial(self._copy_columns, way, width, rows, columns)
        return _rate(size, self._seconds(size, work), columns * copy_seconds)

    def _copy_columns(
        self, way: Direction, width: int, rows: int, columns: int, stream: Stream
    ) -> None:
        """`columns` times `width` bytes of the first `rows` pages."""
        for column in range(columns):
            self._submit(
                stream, way, width, rows, host=column * width, device=column * rows * width
            )

    def _num_rows(self, width: int) -> int:
        """How many rows the pinned memory has at the pitch of a page, in its columns too."""
        columns = min(_PITCH // width, _MAX_COLUMNS)
        return (self._host.num_bytes - columns * width) // _PITCH + 1

    def _submit(
        self, stream: Stream, way: Direction, width: int, rows: int, *, host: int, device: int
    ) -> None:
        self._rows[way].submit(
            stream,
            host=self._host.address + host,
            host_pitch=_PITCH,
            device=self._device.address + device,
            device_pitch=width,
            width=width,
            rows=rows,
        )

    def direct(self, way: Direction) -> BestQuota:
        """The least quota that is about as fast as any."""
        size = self._effort.trial.num_bytes
        found = []
        for quota in self._quotas:
            work = functools.partial(self._launch, way, quota, 1)
            found.append(BestQuota(quota, size, self._seconds(size, work)))
        best = min(one.seconds for one in found)
        return next(one for one in found if one.seconds * _NEAR_BEST <= best)

    def launch_seconds(self, quotas: Mapping[Direction, int]) -> float:
        """What a launch more costs, the mean of both ways: one for all layers, or one each."""
        size, layers = self._effort.trial.num_bytes, self._effort.trial.num_layers
        found = []
        for way in Direction:
            whole, parts = (
                self._seconds(size, functools.partial(self._launch, way, quotas[way], cut))
                for cut in (1, layers)
            )
            found.append(max(0.0, parts - whole) / (layers - 1))
        return sum(found) / len(found)

    def _launch(self, way: Direction, quota: int, launches: int, stream: Stream) -> None:
        self._trial.move(stream, way, quota, launches=launches)


# Benches whose last copy did not end. Their memory must not be used for anything else.
_parked: list[LinkBench] = []


def _fill(buffer: PinnedBuffer) -> None:
    """Random bytes, the same again each MiB: a link that compresses must not profit."""
    piece = os.urandom(_RANDOM_BYTES)
    for at in range(0, buffer.num_bytes, _RANDOM_BYTES):
        ctypes.memmove(buffer.address + at, piece, min(_RANDOM_BYTES, buffer.num_bytes - at))


def _rate(num_bytes: int, seconds: float, beside: float = 0.0) -> float:
    """GB/s of `num_bytes`, where `beside` of the seconds went into something else, but not most."""
    return num_bytes / max(seconds - beside, seconds / 2) / 1e9
