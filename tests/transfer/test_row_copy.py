"""Copies of evenly spaced rows, over a fake GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from tests.transfer.fake_gpu import FakeGpu, Status

from kvferry.errors import DriverError
from kvferry.kernels.jit import Context, DeviceBuffer, Driver, PinnedBuffer, RowCopy, Stream
from kvferry.testing import memory_at

WIDTH, ROWS = 13, 5
HOST_PITCH, DEVICE_PITCH = 40, 17


class Sides:
    """Pinned and device memory of random bytes, and a stream."""

    def __init__(self, context: Context) -> None:
        rng = np.random.default_rng(0)
        self.stream = Stream(context)
        self._buffers = (PinnedBuffer(context, 256), DeviceBuffer(context, 256))
        self.host, self.device = (one.address for one in self._buffers)
        for address in (self.host, self.device):
            seen(address)[:] = rng.integers(0, 256, 256, dtype=np.uint8)

    def submit(self, copy: RowCopy, *, host_pitch: int = HOST_PITCH, skip: int = 0) -> None:
        """Copy all rows, on the host from `skip` bytes on."""
        copy.submit(
            self.stream, host=self.host + skip, host_pitch=host_pitch, device=self.device,
            device_pitch=DEVICE_PITCH, width=WIDTH, rows=ROWS,
        )  # fmt: skip

    def free(self) -> None:
        """Give the memory back."""
        for one in self._buffers:
            one.close()


def seen(address: int) -> npt.NDArray[np.uint8]:
    """The 256 bytes there."""
    return memory_at(address, 256)


def expected(
    target: npt.NDArray[np.uint8], to: int, source: npt.NDArray[np.uint8], at: int
) -> npt.NDArray[np.uint8]:
    """The target after all rows moved from one pitch to the other."""
    after = target.copy()
    for row in range(ROWS):
        after[row * to :][:WIDTH] = source[row * at :][:WIDTH]
    return after


@pytest.fixture
def context(gpu: FakeGpu) -> Iterator[Context]:
    """The context of the fake GPU, current."""
    found = Driver(gpu, "13.0.0").context(0)
    with found.current():
        yield found


@pytest.fixture
def sides(context: Context) -> Sides:
    """Both sides of a copy."""
    return Sides(context)


def test_rows_arrive_on_the_device_and_nothing_beside_them(context: Context, sides: Sides) -> None:
    """Both pitches are kept, and the bytes between rows stay what they were."""
    wanted = expected(seen(sides.device), DEVICE_PITCH, seen(sides.host), HOST_PITCH)
    sides.submit(RowCopy(context, to_device=True))
    np.testing.assert_array_equal(seen(sides.device), wanted)


def test_rows_arrive_on_the_host_and_nothing_beside_them(context: Context, sides: Sides) -> None:
    """The same the other way."""
    wanted = expected(seen(sides.host), HOST_PITCH, seen(sides.device), DEVICE_PITCH)
    sides.submit(RowCopy(context, to_device=False))
    np.testing.assert_array_equal(seen(sides.host), wanted)


def test_copies_that_wait_in_a_stream_are_apart(
    gpu: FakeGpu, context: Context, sides: Sides
) -> None:
    """What was said of a later copy does not change one that has not begun."""
    copy = RowCopy(context, to_device=True)
    before = seen(sides.device).copy()
    first = expected(before, DEVICE_PITCH, seen(sides.host), HOST_PITCH)
    both = expected(first, DEVICE_PITCH, seen(sides.host)[7:], HOST_PITCH)
    after = []
    with gpu.held(sides.stream.handle):
        sides.submit(copy)
        gpu.enqueue(sides.stream.handle, lambda: after.append(seen(sides.device).copy()))
        sides.submit(copy, skip=7)
        np.testing.assert_array_equal(seen(sides.device), before)
    np.testing.assert_array_equal(after[0], first)
    np.testing.assert_array_equal(seen(sides.device), both)


def test_rows_that_overlap_are_refused(context: Context, sides: Sides) -> None:
    """A pitch below the width is the driver's error, typed."""
    with pytest.raises(DriverError, match="copy rows between host and device") as refused:
        sides.submit(RowCopy(context, to_device=True), host_pitch=WIDTH - 1)
    assert refused.value.code == Status.CUDA_ERROR_INVALID_VALUE


def test_rows_in_memory_that_was_freed_are_a_fault(
    gpu: FakeGpu, context: Context, sides: Sides
) -> None:
    """The fake GPU sees a copy that comes after its memory has gone."""
    with gpu.held(sides.stream.handle):
        sides.submit(RowCopy(context, to_device=True))
        sides.free()
    assert gpu.faults
    assert all(fault.startswith("a copy of rows uses") for fault in gpu.faults)
    gpu.faults.clear()
