"""The ring of staging memory over a fake GPU: no room is written before what lay there is gone."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator

import numpy as np
import pytest
from tests.transfer.fake_gpu import FakeGpu

from kvferry.errors import DriverError
from kvferry.kernels.jit import Context, Driver, Stream
from kvferry.transfer.staging_ring import MAX_ROOMS, StagingRing, StagingRoom

_ALIGNMENT = 512
_RING_BYTES = 8 * _ALIGNMENT


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    """Movers have no part in this, so there is one GPU; nothing may use memory that was gone."""
    made = FakeGpu()
    yield made
    made.release()
    assert made.faults == []


@pytest.fixture
def context(gpu: FakeGpu) -> Iterator[Context]:
    """The context of the fake GPU, current."""
    found = Driver(gpu, "13.0.0").context(0)
    with found.current():
        yield found


class _Ring:
    """A ring with streams on both sides, and who has which of its bytes on the GPU."""

    def __init__(
        self,
        gpu: FakeGpu,
        context: Context,
        *,
        num_bytes: int = _RING_BYTES,
        writers: int = 2,
        readers: int = 1,
    ) -> None:
        self.gpu = gpu
        self.ring = StagingRing(context, num_bytes)
        (self.start,) = gpu.device_memory
        self.writers = [Stream(context) for _ in range(writers)]
        self.readers = [Stream(context) for _ in range(readers)]
        self.owners = np.zeros(num_bytes, np.int64)
        self.complaints: list[str] = []
        self.written = self.read = 0

    def put(self, size: int, *, writer: int = 0, reader: int = 0) -> StagingRoom:
        """Take a room; fill it in one stream and empty it in another, each with its event."""
        room = self.ring.take(size, self.writers)
        begin = room.address - self.start
        where = slice(begin, begin + size)
        assert 0 <= begin <= begin + size <= self.ring.num_bytes
        brings, takes = self.writers[writer], self.readers[reader]
        self.gpu.enqueue(brings.handle, functools.partial(self._write, where))
        room.filled.record(brings.handle)
        takes.wait_for(room.filled)
        self.gpu.enqueue(takes.handle, functools.partial(self._empty, where))
        room.emptied.record(takes.handle)
        return room

    def _write(self, where: slice) -> None:
        if self.owners[where].any():
            self.complaints.append(f"{where} is written before it is empty")
        self.written += 1
        self.owners[where] = self.written

    def _empty(self, where: slice) -> None:
        first = self.owners[where.start]
        if not first or (self.owners[where] != first).any():
            self.complaints.append(f"{where} is not what was written there")
        self.read += 1
        self.owners[where] = 0

    def check(self, count: int) -> None:
        """Fail unless so many rooms were filled and emptied, each in its turn."""
        self.gpu.release()
        assert self.complaints == []
        assert (self.written, self.read) == (count, count)
        assert self.gpu.num_pending() == 0


@pytest.mark.parametrize(("writers", "readers"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("seed", range(8))
def test_no_room_is_written_before_it_is_empty(
    gpu: FakeGpu, context: Context, writers: int, readers: int, seed: int
) -> None:
    """Rooms of random sizes, while streams of both sides stand still and go on at random."""
    rng = random.Random(seed)
    num_bytes = rng.choice((_ALIGNMENT, 3 * _ALIGNMENT + 100, _RING_BYTES, 20 * _ALIGNMENT - 1))
    one = _Ring(gpu, context, num_bytes=num_bytes, writers=writers, readers=readers)
    handles = [stream.handle for stream in (*one.writers, *one.readers)]
    held = 0
    for _ in range(300):
        move = gpu.hold if rng.random() < 0.5 else gpu.release
        move(rng.choice(handles))
        size = rng.randint(1, rng.choice((num_bytes, max(1, num_bytes // 5))))
        one.put(size, writer=rng.randrange(writers), reader=rng.randrange(readers))
        held += bool(gpu.num_pending())
    assert held > 100, "streams were hardly ever behind"
    one.check(300)


@pytest.mark.parametrize("seed", range(8))
def test_streams_that_go_on_in_any_order(gpu: FakeGpu, context: Context, seed: int) -> None:
    """All rooms are taken before any is written; then one entry at a time, of a random stream."""
    rng = random.Random(seed)
    one = _Ring(gpu, context, readers=2)
    gpu.hold_all()
    for _ in range(60):
        one.put(rng.randint(1, _RING_BYTES), writer=rng.randrange(2), reader=rng.randrange(2))
    assert one.written == 0
    gpu.interleave(seed)
    one.check(60)


def test_the_oracle_sees_a_writer_that_does_not_wait(gpu: FakeGpu, context: Context) -> None:
    """Control: a stream that the ring was not told of writes over what is still to be read."""
    one = _Ring(gpu, context)
    told = one.writers[:1]
    with gpu.held(one.readers[0].handle):
        one.put(_RING_BYTES)
        one.writers, untold = told, one.writers[1]
        room = one.ring.take(_RING_BYTES, told)
        assert room.address == one.start
        gpu.enqueue(untold.handle, functools.partial(one._write, slice(0, _RING_BYTES)))
    assert one.complaints == [f"{slice(0, _RING_BYTES)} is written before it is empty"]


def test_rooms_follow_each_other_and_begin_anew(gpu: FakeGpu, context: Context) -> None:
    """In order, each on an aligned address; what does not fit before the end goes to the start."""
    one = _Ring(gpu, context)
    sizes = (1, 512, 513, 2048, 512, 512, 4096, 4096, 1)
    places = [one.put(size).address - one.start for size in sizes]
    assert places == [0, 512, 1024, 2048, 0, 512, 0, 0, 0]
    one.check(len(sizes))


def test_a_room_at_the_start_waits_for_those_behind_the_end(gpu: FakeGpu, context: Context) -> None:
    """The end of the ring is left early: what lies there is older, and is not forgotten."""
    one = _Ring(gpu, context)
    with gpu.held(one.readers[0].handle):
        one.put(4 * _ALIGNMENT)
        one.put(3 * _ALIGNMENT)
        one.put(2 * _ALIGNMENT)  # at the start
        one.put(2 * _ALIGNMENT)
        one.put(4 * _ALIGNMENT)  # over what was put second
        assert one.written == 2
        assert one.complaints == []
    one.check(5)


def test_only_what_is_in_the_way_is_waited_for(gpu: FakeGpu, context: Context) -> None:
    """A full room keeps nobody from the others; both writers wait for one that is in the way."""
    one = _Ring(gpu, context)
    with gpu.held(one.readers[0].handle):
        for _ in range(4):
            one.put(2 * _ALIGNMENT)
        assert one.written == 4
        assert [gpu.num_pending(stream.handle) for stream in one.writers] == [0, 0]
        one.put(_ALIGNMENT, writer=1)
        assert one.written == 4
        assert all(gpu.num_pending(stream.handle) for stream in one.writers)
    one.check(5)


@pytest.mark.parametrize("num_bytes", [1, _ALIGNMENT - 1, _ALIGNMENT, _ALIGNMENT + 1, 5000])
def test_the_largest_room_is_the_ring(gpu: FakeGpu, context: Context, num_bytes: int) -> None:
    """It begins at the start each time, waits for all there is, and small ones come after it."""
    one = _Ring(gpu, context, num_bytes=num_bytes)
    assert one.ring.num_bytes == num_bytes
    gpu.hold(one.readers[0].handle)
    for _ in range(3):
        assert one.put(num_bytes).address == one.start
        assert one.put(1).address == one.start
    assert one.written == 1
    one.check(6)


def test_events_are_used_again(gpu: FakeGpu, context: Context) -> None:
    """A room has two, and there are no more than for all rooms that the ring notes."""
    one = _Ring(gpu, context)
    assert len(gpu.events) == 2 * MAX_ROOMS
    before = set(gpu.events)
    for number in range(200):
        room = one.put(1 + number * 37 % _RING_BYTES, writer=number % 2)
        assert {room.filled.handle, room.emptied.handle} <= before
        assert room.filled.handle != room.emptied.handle
    assert gpu.events == before
    assert gpu.calls.count("cuEventCreate") == 2 * MAX_ROOMS
    one.check(200)


def test_more_rooms_than_are_noted(gpu: FakeGpu, context: Context) -> None:
    """Of very small ones the oldest are waited for, although nothing is in their way."""
    one = _Ring(gpu, context, num_bytes=4 * MAX_ROOMS * _ALIGNMENT)
    with gpu.held(one.readers[0].handle):
        for _ in range(MAX_ROOMS):
            one.put(1)
        assert one.written == MAX_ROOMS
        one.put(1)
        assert one.written == MAX_ROOMS
    one.check(MAX_ROOMS + 1)


def test_closing_gives_everything_back(gpu: FakeGpu, context: Context) -> None:
    """Memory, and the events of rooms that are live and of those that are not."""
    nothing = gpu.holdings
    one = _Ring(gpu, context)
    for _ in range(8):
        one.put(_ALIGNMENT)
    one.put(5 * _ALIGNMENT)
    one.check(9)
    assert gpu.holdings["events"] == 2 * MAX_ROOMS
    assert gpu.holdings["device bytes"] == _RING_BYTES
    one.ring.close()
    assert gpu.holdings == nothing


def test_memory_that_cannot_be_had(gpu: FakeGpu, context: Context) -> None:
    """The error names the size and what to pass instead; nothing is held."""
    nothing = gpu.holdings
    with gpu.failing("cuMemAlloc") as refused, pytest.raises(DriverError) as full:
        StagingRing(context, 123_456)
    assert refused == [(123_456,)]
    (note,) = full.value.__notes__
    assert "123,456 bytes of staging memory" in note
    assert "staging_bytes" in note
    assert gpu.holdings == nothing


@pytest.mark.parametrize("made", [0, 1, 2 * MAX_ROOMS - 1])
def test_an_event_that_cannot_be_made(gpu: FakeGpu, context: Context, made: int) -> None:
    """Whichever of them: there is no ring, and all is given back."""
    nothing = gpu.holdings
    left = iter(range(made))
    with (
        gpu.failing("cuEventCreate", when=lambda *_: next(left, None) is None),
        pytest.raises(DriverError),
    ):
        StagingRing(context, _RING_BYTES)
    assert gpu.holdings == nothing


@pytest.mark.parametrize("failed", [0, 1])
def test_a_wait_that_is_refused_is_made_by_the_next(
    gpu: FakeGpu, context: Context, failed: int
) -> None:
    """A room stays in the way until each writer waits for it, and its events stay its own."""
    nothing = gpu.holdings
    one = _Ring(gpu, context)
    with gpu.held(one.readers[0].handle):
        one.put(_RING_BYTES)
        stream = one.writers[failed].handle
        refusing = gpu.failing("cuStreamWaitEvent", when=lambda at, *_: at == stream)
        with refusing as refused, pytest.raises(DriverError):
            one.put(_RING_BYTES)
        assert len(refused) == 1
        one.put(_RING_BYTES, writer=failed)
        assert one.written == 1
    one.check(2)
    one.ring.close()
    assert gpu.holdings == nothing
