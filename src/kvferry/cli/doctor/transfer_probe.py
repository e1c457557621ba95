"""Tries a path with the real thing: its kernels, a small host pool, and digests."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.kernels import MoveKernels
from kvferry.kernels.jit import process_loader
from kvferry.testing import DeviceLayout, GuardedDeviceBuffer, RoundTrip
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.kernels import CopyPath
    from kvferry.testing import DeviceMemory

__all__ = ["round_trip_error", "transfer_error"]

# Every path takes it, token by token, and the pools stay below 64 KiB.
_ELEMENT_SIZE = 256


def transfer_error(path: CopyPath, gpu: int) -> str:
    """Why `path` carries nothing on GPU `gpu`; empty: it does, exactly, with digests."""
    try:
        loader = process_loader()
        context = loader.driver.context(gpu)
        with context.current():
            MoveKernels(loader, gpu).load(path)
    except KVFerryError as bad:
        return str(bad)
    return round_trip_error(path.value, functools.partial(GuardedDeviceBuffer, context=context))


def round_trip_error(path: str, allocate: Callable[[int], DeviceMemory]) -> str:
    """What went wrong in storing a few pages and loading them again; empty: nothing did.

    `allocate` makes guarded memory of the device. All bytes are compared, those around the pages
    too, and a page that is damaged on purpose must be refused.
    """
    try:
        with RoundTrip(
            element_size=_ELEMENT_SIZE,
            kind=SlotKind.PAGE,
            device_run=1,
            host_layout=None,
            device_layout=DeviceLayout.FLAT,
            allocate=allocate,
        ) as trip:
            trip.store(path, "int64")
            trip.load(path, "int32")
    except (AssertionError, KVFerryError) as bad:
        return str(bad)
    return ""
