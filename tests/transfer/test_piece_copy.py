"""Copies of many pieces in one call, which takes other arguments in CUDA 12 than in 13."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.transfer.fake_gpu import FakeGpu, Status

from kvferry.errors import DriverError, DriverTooOldError
from kvferry.kernels.jit import Context, Driver, PieceCopy, Stream

_NUM_ARGUMENTS = {12080: 9, 13000: 8}


class _Gpu(FakeGpu):
    """One whose driver is of some version, and notes what the call for pieces is given."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version
        self.asked: list[int] = []
        self.given: list[tuple[int | None, ...]] = []
        self.answer = 0
        self._made: list[Any] = []

    def _cu_driver_get_version(self) -> int:
        return self.version

    def _cu_get_proc_address(self, name: bytes, version: int, _: int) -> tuple[int, int]:
        assert name == b"cuMemcpyBatchAsync"
        self.asked.append(version)
        kinds = [ctypes.c_void_p] * _NUM_ARGUMENTS[version]
        entry = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._called)
        self._made.append(entry)
        return ctypes.cast(entry, ctypes.c_void_p).value or 0, 0

    def _called(self, *given: int | None) -> int:
        self.given.append(given)
        return self.answer


@contextlib.contextmanager
def _context(gpu: _Gpu) -> Iterator[Context]:
    """Of the fake GPU, current."""
    found = Driver(gpu, "12.0.0").context(0)
    with found.current():
        yield found


def _numbers(*values: int) -> Any:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("version", "wanted"), [(12080, 12080), (12090, 12080), (13000, 13000), (13010, 13000)]
)
def test_the_call_is_that_of_the_driver(version: int, wanted: int) -> None:
    """It is asked for by the version whose arguments it gets, with the stream as the last."""
    gpu = _Gpu(version)
    targets, sources, sizes = _numbers(1, 2, 3), _numbers(4, 5, 6), _numbers(7, 8, 9)

    with _context(gpu) as context:
        stream = Stream(context)
        PieceCopy(context).submit(stream, targets, sources, sizes)
        (given,) = gpu.given
        assert len(given) == _NUM_ARGUMENTS[wanted]
        assert given[:4] == (targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, 3)
        assert given[6] == 1
        assert all(given[4:6])
        assert given[-1] == stream.handle
    assert gpu.asked == [wanted]


def test_an_older_driver_is_not_asked() -> None:
    """It has no such call: the error names its version and the first that would do."""
    gpu = _Gpu(12070)

    with (
        _context(gpu) as context,
        pytest.raises(DriverTooOldError, match=r"CUDA 12\.7,.* from 12\.8 on"),
    ):
        PieceCopy(context)
    assert gpu.asked == []


def test_a_refusal_is_typed() -> None:
    """With the driver's code, and how many pieces there were."""
    gpu = _Gpu(13000)
    gpu.answer = Status.CUDA_ERROR_LAUNCH_FAILED

    with _context(gpu) as context:
        stream, numbers = Stream(context), _numbers(1, 2)
        with pytest.raises(DriverError, match="2 pieces could not be copied") as refused:
            PieceCopy(context).submit(stream, numbers, numbers, numbers)
    assert refused.value.code == Status.CUDA_ERROR_LAUNCH_FAILED
