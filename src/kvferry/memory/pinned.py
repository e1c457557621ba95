"""Registering host memory with the driver, so that a GPU reaches it.

A GPU may know host memory under another address than the CPU does, so every address that goes to
it comes from `Registration.device_address`. Nothing here imports CUDA: what talks to the driver is
passed in.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from typing import NoReturn

from kvferry.errors import ConfigError, DriverError, PinError
from kvferry.memory.budget import format_bytes
from kvferry.memory.registration import PinDriver, PinnedChunk, Registration, give_up

__all__ = ["is_registered", "look_up", "register"]

# Refused pieces are halved down to this. A smaller one is not refused for its size.
_SMALLEST_CHUNK_BYTES = 16 << 20
# How often a piece that cannot be made smaller is tried again: some refusals pass by themselves.
_MORE_TRIES = 3
# No allocator pins in smaller units, and asking at every page would take a second a GiB.
_LOOK_EVERY_BYTES = 2 << 20

_ALREADY_REGISTERED = 712
# Not initialised, deinitialised, no device, no context, a lost context (7xx), registered already,
# not permitted, not supported: none of them depends on the size of a piece.
_WHATEVER_THE_SIZE = frozenset(
    {3, 4, 100, 101, 201, 700, 709, _ALREADY_REGISTERED, 714, 715, 716, 717, 718, 719, 800, 801}
)


def register(
    address: int,
    num_bytes: int,
    driver: PinDriver,
    *,
    chunk_bytes: int | None = None,
    granule_bytes: int | None = None,
    allow_gaps: bool = False,
    owner: object = None,
) -> Registration:
    """Pin exactly ``[address, address + num_bytes)``, all of it or nothing.

    It is one registration, unless the driver refuses that: then as few and as large ones as it
    accepts, each at least 16 MiB.

    Args:
        address: Where the range starts, on a boundary of the system's memory pages.
        num_bytes: Its length; any.
        driver: What talks to the driver.
        chunk_bytes: The most that one registration may have; None: no limit.
        granule_bytes: The range is a row of pieces of this size, and no registration ends inside
            one.
        allow_gaps: Accept registrations that do not follow on one another on the GPU's side.
        owner: What keeps the memory; it stays alive until the memory is unregistered, so it must
            not hold the registration.

    Raises:
        ConfigError: A size or address that cannot be.
        PinError: The driver refused, or has the range in pieces that are apart. Nothing stays
            registered.
    """
    step = math.lcm(mmap.PAGESIZE, granule_bytes or 1)
    _check_arguments(address, num_bytes, chunk_bytes, granule_bytes, step)
    own: list[int] = []
    try:
        chunks = _register_all(driver, own, address, num_bytes, chunk_bytes, step)
        shifts = {chunk.device_address - chunk.address for chunk in chunks}
        if len(shifts) > 1 and not allow_gaps:
            raise PinError(
                f"{format_bytes(num_bytes)} at {address:#x} took {len(chunks)} registrations, and "
                f"the GPU has them apart ({len(shifts)} different offsets), so base + offset "
                f"would lead elsewhere: make the pool small enough for one registration "
                f"(at most {format_bytes(chunks[0].num_bytes)} here), or pass allow_gaps=True "
                f"and ask for the address of each piece"
            )
    except BaseException as cause:
        _roll_back(driver, own, owner, cause)
        raise
    return Registration(driver, chunks, own=own, contiguous=len(shifts) == 1, owner=owner)


def look_up(
    address: int, num_bytes: int, driver: PinDriver, *, owner: object = None
) -> Registration:
    """The addresses of memory that somebody else has pinned and will unpin.

    Raises:
        PinError: Some of it is not pinned, or it is not one piece on the GPU's side.
    """
    shifts = set()
    for place in _samples(address, num_bytes):
        if not driver.is_pinned(place):
            raise PinError(
                f"{format_bytes(num_bytes)} at {address:#x} should be pinned, and at byte "
                f"{place - address} are not: allocate them pinned (pin_memory=True), have kvferry "
                f"pin them (pin_tensors=True), or take a path that does without"
            )
        shifts.add(driver.device_pointer(place) - place)
    if len(shifts) > 1:
        raise PinError(
            f"{format_bytes(num_bytes)} at {address:#x} are pinned in pieces that the GPU has "
            f"apart ({len(shifts)} different offsets): pin them in one registration"
        )
    chunk = PinnedChunk(address, num_bytes, address + shifts.pop())
    return Registration(driver, [chunk], own=(), contiguous=True, owner=owner)


def is_registered(address: int, num_bytes: int, driver: PinDriver) -> bool:
    """Whether the range is pinned: its first and last byte, and one every 2 MiB in between."""
    return all(driver.is_pinned(place) for place in _samples(address, num_bytes))


def _samples(address: int, num_bytes: int) -> Iterator[int]:
    yield from range(address, address + num_bytes - 1, _LOOK_EVERY_BYTES)
    yield address + num_bytes - 1


def _register_all(
    driver: PinDriver,
    own: list[int],
    address: int,
    num_bytes: int,
    chunk_bytes: int | None,
    step: int,
) -> list[PinnedChunk]:
    """The chunks of the whole range. `own` gets what is registered, also when this raises."""
    if chunk_bytes is None or chunk_bytes >= num_bytes:
        limit = num_bytes
    else:
        limit = chunk_bytes // step * step
    smallest = -(-_SMALLEST_CHUNK_BYTES // step) * step
    chunks: list[PinnedChunk] = []
    offset = tries = 0
    while offset < num_bytes:
        start, size = address + offset, min(limit, num_bytes - offset)
        try:
            driver.register(start, size)
        except DriverError as bad:
            driver.clear_error()
            smaller = max(size // 2 // step * step, smallest)
            # A piece that cannot be halved is tried as it is; refusals of others are not counted.
            tries += smaller >= size
            if bad.code in _WHATEVER_THE_SIZE or tries > _MORE_TRIES:
                _refuse(bad, address, num_bytes, offset, size, len(own))
            limit = min(limit, smaller)
            continue
        own.append(start)
        try:
            chunks.append(PinnedChunk(start, size, driver.device_pointer(start)))
        except DriverError as bad:
            driver.clear_error()
            raise PinError(
                f"{size} bytes at offset {offset} of {num_bytes} ({start:#x}) are registered, but "
                f"the driver has no address for the GPU: code {bad.code} ({bad}). Use a path that "
                f"does without mapped host memory"
            ) from bad
        offset, tries = offset + size, 0
    return chunks


def _refuse(
    bad: DriverError, address: int, num_bytes: int, offset: int, size: int, num_before: int
) -> NoReturn:
    if bad.code == _ALREADY_REGISTERED:
        step = "Part of it is registered already: look it up instead, or close that registration"
    elif bad.code in _WHATEVER_THE_SIZE:
        step = "The size does not matter here: see to the driver, or use the paths for the CPU"
    else:
        step = "Ask for less, or free host memory and GPU memory that others hold"
    before = f"The {num_before} chunks before it were given back. " if num_before else ""
    raise PinError(
        f"the driver did not register {size} bytes at offset {offset} of {num_bytes} "
        f"({address + offset:#x}): code {bad.code} ({bad}). {before}{step}"
    ) from bad


def _roll_back(driver: PinDriver, own: list[int], owner: object, cause: BaseException) -> None:
    failures = give_up(driver, own, owner)
    if failures:
        cause.add_note(
            f"{len(failures)} chunks could not be given back, the first at {failures[0][0]:#x}: "
            f"{failures[0][1]}"
        )


def _check_arguments(
    address: int, num_bytes: int, chunk_bytes: int | None, granule_bytes: int | None, step: int
) -> None:
    if address < 1 or address % mmap.PAGESIZE:
        raise ConfigError(
            f"address={address:#x} must be a multiple of the system's page of {mmap.PAGESIZE} "
            f"bytes: map the memory, or round it down to the page it lies in"
        )
    if num_bytes < 1 or (granule_bytes is not None and granule_bytes < 1):
        raise ConfigError(
            f"num_bytes={num_bytes} and granule_bytes={granule_bytes} must be positive"
        )
    if chunk_bytes is not None and chunk_bytes < min(step, num_bytes):
        raise ConfigError(
            f"chunk_bytes={chunk_bytes} is less than {step}, the least that splits neither a "
            f"memory page nor one of the pieces of {granule_bytes or 1} bytes: give at least that"
        )
