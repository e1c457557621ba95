"""Registering host memory: whole or in chunks, all or nothing, and what the GPU calls it."""

from __future__ import annotations

import gc
import math
import mmap
import random
import weakref
from collections.abc import Callable

import pytest
from tests.memory.fake_pins import (
    ALREADY_REGISTERED,
    INVALID_VALUE,
    NOT_REGISTERED,
    OUT_OF_MEMORY,
    Asked,
    FakePins,
)

from kvferry.errors import ConfigError, PinError
from kvferry.memory import Registration, is_registered, look_up, register

MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40
PAGE = mmap.PAGESIZE
# No byte of these ranges is touched, so they need not exist.
BASE = 0x7F00_0000_0000


def _larger_than(limit: int) -> Callable[[Asked], int | None]:
    return lambda asked: INVALID_VALUE if asked.num_bytes > limit else None


def _covers(registration: Registration, address: int, num_bytes: int) -> bool:
    place = address
    for chunk in registration.chunks:
        assert chunk.address == place
        place = chunk.end
    return place == address + num_bytes


def test_one_registration_of_exactly_the_range() -> None:
    """Nothing is rounded, one call is enough, and close takes it back at its address."""
    driver = FakePins()
    size = 5 * PAGE + 123
    with register(BASE, size, driver) as registration:
        assert driver.pinned == {BASE: size}
        assert registration.num_bytes == size
        assert registration.contiguous
        assert is_registered(BASE, size, driver)
        assert not is_registered(BASE, size + 1, driver)
    assert driver.asked == [(BASE, size)]
    assert driver.unregistered == [BASE]
    assert not is_registered(BASE, size, driver)


def test_too_large_at_once_becomes_chunks() -> None:
    """A driver that takes 64 MiB at most gets such pieces, on page boundaries, gap-free."""
    driver = FakePins(_larger_than(64 * MIB))
    size = 1 * GIB + 5 * PAGE + 7
    registration = register(BASE, size, driver)
    assert _covers(registration, BASE, size)
    assert max(chunk.num_bytes for chunk in registration.chunks) <= 64 * MIB
    assert len(registration.chunks) <= 2 * size // (64 * MIB)
    assert all(chunk.address % PAGE == 0 for chunk in registration.chunks)
    assert registration.contiguous
    assert driver.pending is None
    starts = [chunk.address for chunk in registration.chunks]
    registration.close()
    assert driver.unregistered == starts[::-1]
    assert driver.pinned == {}


@pytest.mark.parametrize("granule", [1, 656, 40 * 1024 + 512, 3 * PAGE, 2_359_296, 37 * MIB])
def test_no_chunk_ends_inside_a_slot(granule: int) -> None:
    """Every boundary is one of a memory page and of a slot, whatever the slot's size."""
    driver = FakePins(_larger_than(200 * MIB))
    num_slots = 2 * GIB // granule
    registration = register(BASE, num_slots * granule + 99, driver, granule_bytes=granule)
    assert len(registration.chunks) > 8
    for chunk in registration.chunks:
        assert (chunk.address - BASE) % math.lcm(granule, PAGE) == 0
    assert _covers(registration, BASE, num_slots * granule + 99)


def test_slots_that_cannot_be_parted_are_refused_whole() -> None:
    """Where no boundary fits into the range it is one registration or none, and it says so."""
    driver = FakePins(_larger_than(64 * MIB))
    with pytest.raises(PinError, match="did not register"):
        register(BASE, 128 * MIB, driver, granule_bytes=100 * MIB + 1)
    assert set(driver.asked) == {(BASE, 128 * MIB)}
    assert driver.pinned == {}


@pytest.mark.parametrize("code", [INVALID_VALUE, OUT_OF_MEMORY])
def test_failure_on_the_third_chunk_takes_all_back(code: int) -> None:
    """All goes back in reverse order, no error state stays, and the message has the numbers."""
    bad = BASE + 2 * 64 * MIB

    def refuse(asked: Asked) -> int | None:
        return code if asked.address >= bad or asked.num_bytes > 64 * MIB else None

    driver = FakePins(refuse)
    with pytest.raises(PinError) as raised:
        register(BASE, GIB, driver)
    assert driver.unregistered == [BASE + 64 * MIB, BASE]
    assert driver.pinned == {}
    assert driver.pending is None
    message = str(raised.value)
    assert f"did not register {16 * MIB} bytes at offset {128 * MIB} of {GIB}" in message
    assert f"{bad:#x}" in message
    assert f"code {code}" in message
    assert "2 chunks before it were given back" in message
    assert "Ask for less" in message
    # Bounded: down from 1 GiB to 16 MiB, and a few more tries at the last size.
    assert len(driver.asked) < 20


@pytest.mark.parametrize("seed", range(20))
def test_refusals_at_random_are_got_over(seed: int) -> None:
    """A driver that refuses one call in ten still registers everything, exactly once."""
    chance = random.Random(seed)

    def refuse(asked: Asked) -> int | None:
        return INVALID_VALUE if chance.random() < 0.1 else None

    driver = FakePins(refuse)
    size = 8 * GIB + 3 * PAGE
    registration = register(BASE, size, driver, granule_bytes=656)
    assert _covers(registration, BASE, size)
    assert driver.pending is None
    registration.close()
    assert driver.pinned == {}


def test_a_driver_that_refuses_everything_is_asked_a_few_times() -> None:
    """The end comes after a bounded number of calls, however large the pool."""
    driver = FakePins(lambda _: OUT_OF_MEMORY)
    with pytest.raises(PinError, match="code 2"):
        register(BASE, 4 * TIB, driver)
    assert len(driver.asked) < 30
    assert driver.pending is None


@pytest.mark.parametrize(
    ("code", "step"),
    [(ALREADY_REGISTERED, "look it up instead"), (801, "paths for the CPU"), (700, "the driver")],
)
def test_what_no_size_can_help_is_not_tried_again(code: int, step: str) -> None:
    """Registered already, not supported, a lost context: one call, and the right advice."""
    driver = FakePins(lambda _: code)
    with pytest.raises(PinError, match=step):
        register(BASE, GIB, driver)
    assert len(driver.asked) == 1


def test_chunk_bytes_is_kept() -> None:
    """The caller's limit holds from the first call on, rounded down to what splits nothing."""
    driver = FakePins()
    registration = register(BASE, GIB, driver, chunk_bytes=100 * MIB + 5, granule_bytes=3 * PAGE)
    assert {size for _, size in driver.asked[:-1]} == {100 * MIB // (3 * PAGE) * 3 * PAGE}
    assert _covers(registration, BASE, GIB)
    # A limit beyond the range is none, also where the range is less than one step.
    small = register(2 * BASE, PAGE, FakePins(), chunk_bytes=PAGE, granule_bytes=PAGE + 1)
    assert len(small.chunks) == 1


def test_addresses_of_the_gpu_come_from_the_driver() -> None:
    """With host memory 64 TiB higher on the GPU, each byte of each chunk is found there."""
    driver = FakePins(_larger_than(64 * MIB), shift=64 * TIB)
    registration = register(BASE, 200 * MIB, driver)
    assert registration.contiguous
    for offset in (0, 1, 64 * MIB - 1, 64 * MIB, 150 * MIB + 3, 200 * MIB - 1):
        assert registration.device_address(BASE + offset) == BASE + offset + 64 * TIB
    assert registration.device_address(BASE, 200 * MIB) == BASE + 64 * TIB
    for outside in (BASE - 1, BASE + 200 * MIB):
        with pytest.raises(PinError, match="not in this registration"):
            registration.device_address(outside)
    with pytest.raises(PinError, match="not in this registration"):
        registration.device_address(BASE + 1, 200 * MIB)
    registration.close()
    with pytest.raises(PinError, match="closed"):
        registration.device_address(BASE)


def test_chunks_apart_on_the_gpu_are_refused() -> None:
    """Base + offset would lead elsewhere: everything goes back, and the reason is told."""
    driver = FakePins(_larger_than(64 * MIB), gap=-84 * MIB)
    with pytest.raises(PinError, match=r"4 registrations.*base \+ offset.*allow_gaps=True"):
        register(BASE, 256 * MIB, driver)
    assert driver.unregistered == [BASE + chunk * 64 * MIB for chunk in (3, 2, 1, 0)]
    assert driver.pinned == {}


def test_chunks_apart_on_request() -> None:
    """Who asks address by address may have gaps; what crosses one is refused."""
    driver = FakePins(_larger_than(64 * MIB), shift=64 * TIB, gap=-84 * MIB)
    registration = register(BASE, 256 * MIB, driver, allow_gaps=True)
    assert not registration.contiguous
    for chunk in range(4):
        shift = 64 * TIB - 84 * MIB * chunk
        for place in (BASE + 64 * MIB * chunk, BASE + 64 * MIB * (chunk + 1) - 1):
            assert registration.device_address(place) == place + shift
            assert registration.chunk_of(place).address == BASE + 64 * MIB * chunk
    assert registration.device_address(BASE, 64 * MIB) == BASE + 64 * TIB
    with pytest.raises(PinError, match=f"cross .* at {BASE + 64 * MIB:#x}"):
        registration.device_address(BASE, 64 * MIB + 1)
    registration.close()


def test_memory_without_a_gpu_address_is_given_back() -> None:
    """Registered but not mapped is no use: refused, rolled back, error state clear."""
    driver = FakePins()
    driver.has_no_pointer.add(BASE)
    with pytest.raises(PinError, match="no address for the GPU: code 1"):
        register(BASE, GIB, driver)
    assert driver.unregistered == [BASE]
    assert driver.pending is None


def test_close_may_be_repeated() -> None:
    """A second close asks the driver nothing."""
    driver = FakePins()
    registration = register(BASE, GIB, driver)
    registration.close()
    registration.close()
    assert driver.unregistered == [BASE]
    assert registration.closed


def test_a_chunk_that_stays_does_not_keep_the_others() -> None:
    """The failure surfaces, the rest is unregistered, and a later close gets the last one too."""
    driver = FakePins()
    registration = register(BASE, 192 * MIB, driver, chunk_bytes=64 * MIB)
    stuck = BASE + 64 * MIB
    driver.keeps[stuck] = 999
    with pytest.raises(PinError, match=r"1 of 3 chunks .* call close\(\) again") as raised:
        registration.close()
    assert f"{stuck:#x} with code 999" in str(raised.value)
    assert driver.unregistered == [BASE + 128 * MIB, BASE]
    assert driver.pending is None
    with pytest.raises(PinError, match="closed"):
        registration.device_address(BASE)
    driver.keeps.clear()
    registration.close()
    assert driver.unregistered[-1] == stuck


def test_memory_that_others_unregistered_is_told_once() -> None:
    """Not registered any more is an error, but nothing is left to try again."""
    driver = FakePins()
    registration = register(BASE, GIB, driver)
    driver.unregister(BASE)
    with pytest.raises(PinError, match=f"code {NOT_REGISTERED}.*something else unregistered"):
        registration.close()
    registration.close()


def test_failing_close_does_not_hide_the_error_of_a_block() -> None:
    """The block's own exception leaves, with a note on what could not be unregistered."""
    driver = FakePins()
    driver.keeps[BASE] = 999
    with pytest.raises(ZeroDivisionError) as raised, register(BASE, GIB, driver):
        1 // 0  # noqa: B018
    assert "not closed" in raised.value.__notes__[0]


def test_failing_roll_back_keeps_the_memory() -> None:
    """What the driver holds on to must not be reused: its owner stays, and the error says so."""

    class Memory:
        pass

    def refuse(asked: Asked) -> int | None:
        return INVALID_VALUE if asked.address > BASE or asked.num_bytes > 64 * MIB else None

    driver = FakePins(refuse)
    driver.keeps[BASE] = 999
    owner = Memory()
    alive = weakref.ref(owner)
    with pytest.raises(PinError) as raised:
        register(BASE, GIB, driver, owner=owner)
    assert "1 chunks could not be given back" in raised.value.__notes__[0]
    del owner, raised
    gc.collect()
    assert alive() is not None


def test_an_interrupted_registration_is_rolled_back() -> None:
    """Whatever breaks in, nothing stays pinned."""

    def refuse(asked: Asked) -> int | None:
        if asked.call == 2:
            raise KeyboardInterrupt
        return None

    driver = FakePins(refuse)
    with pytest.raises(KeyboardInterrupt):
        register(BASE, GIB, driver, chunk_bytes=64 * MIB)
    assert driver.unregistered == [BASE + 64 * MIB, BASE]
    assert driver.pinned == {}


def test_a_dropped_registration_is_unregistered_before_its_memory_goes() -> None:
    """The owner outlives the registration; both go when the last reference to the latter does."""
    driver = FakePins()
    gone: list[dict[int, int]] = []

    class Memory:
        def __del__(self) -> None:
            gone.append(dict(driver.pinned))

    registration = register(BASE, GIB, driver, owner=Memory())
    gc.collect()
    assert gone == []
    del registration
    gc.collect()
    assert gone == [{}]
    assert driver.unregistered == [BASE]


def test_pinned_memory_of_others_is_looked_up() -> None:
    """Addresses are the driver's, and close leaves the memory pinned."""
    driver = FakePins(shift=64 * TIB)
    driver.register(BASE, 100 * MIB)
    with look_up(BASE + 5, 90 * MIB, driver) as found:
        assert found.device_address(BASE + 6) == BASE + 6 + 64 * TIB
        assert found.num_bytes == 90 * MIB
    assert driver.unregistered == []


@pytest.mark.parametrize(("start", "size"), [(-1, 10), (0, 100 * MIB + 1), (100 * MIB, 1)])
def test_memory_that_is_not_pinned_is_refused(start: int, size: int) -> None:
    """A range whose first or last byte is not pinned is named, with what to do."""
    driver = FakePins()
    driver.register(BASE, 100 * MIB)
    assert not is_registered(BASE + start, size, driver)
    with pytest.raises(PinError, match="pin_tensors=True"):
        look_up(BASE + start, size, driver)


def test_a_hole_between_pinned_ends_is_seen() -> None:
    """Memory in the middle that is not pinned is found, though both ends are."""
    driver = FakePins()
    driver.register(BASE, 10 * MIB)
    driver.register(BASE + 14 * MIB, 10 * MIB)
    with pytest.raises(PinError, match=f"at byte {10 * MIB} are not"):
        look_up(BASE, 24 * MIB, driver)


def test_looked_up_memory_must_be_one_piece() -> None:
    """Two pinned neighbours that the GPU has apart are no pool for base + offset."""
    driver = FakePins(gap=MIB)
    driver.register(BASE, 10 * MIB)
    driver.register(BASE + 10 * MIB, 10 * MIB)
    assert is_registered(BASE, 20 * MIB, driver)
    with pytest.raises(PinError, match="apart"):
        look_up(BASE, 20 * MIB, driver)


@pytest.mark.parametrize(
    ("address", "num_bytes", "options", "named"),
    [
        (BASE + 1, 10, {}, "multiple of the system's page"),
        (0, 10, {}, "address=0x0"),
        (BASE, 0, {}, "num_bytes=0"),
        (BASE, 10, {"granule_bytes": 0}, "granule_bytes=0"),
        (BASE, 2 * PAGE, {"chunk_bytes": PAGE - 1}, f"chunk_bytes={PAGE - 1} is less than {PAGE}"),
        (BASE, GIB, {"chunk_bytes": PAGE, "granule_bytes": PAGE + 1}, "pieces of"),
    ],
)
def test_impossible_ranges_are_refused(
    address: int, num_bytes: int, options: dict[str, int], named: str
) -> None:
    """Bad sizes never reach the driver."""
    driver = FakePins()
    with pytest.raises(ConfigError, match=named):
        register(address, num_bytes, driver, **options)  # type: ignore[arg-type]
    assert driver.asked == []
