"""The link meter, on made-up intervals of a GPU's clock."""

from __future__ import annotations

import math
import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import MetricsError
from kvferry.metrics import LinkMeter
from kvferry.metrics.link_meter import MAX_INTERVALS
from kvferry.types import Direction

_LOAD, _STORE = Direction.LOAD, Direction.STORE
_GB = 10**9


def test_speed_is_that_of_busy_time() -> None:
    """Two copies with a rest between them: the rest lowers the fraction and not the speed."""
    meter = LinkMeter(window_secs=10)
    meter.add(_LOAD, 50 * _GB, 100, 101)
    meter.add(_LOAD, 50 * _GB, 103, 104)
    assert meter.read(_LOAD) == (50.0, 0.5, 4.0)


def test_directions_have_one_clock_and_figures_of_their_own() -> None:
    """A load moves the window of both, and the bytes of one are not those of the other."""
    meter = LinkMeter(window_secs=4)
    meter.add(_LOAD, 10 * _GB, 0, 1)
    meter.add(_STORE, 30 * _GB, 1, 4)
    assert meter.read(_LOAD) == (10.0, 0.25, 4.0)
    assert meter.read(_STORE) == (10.0, 0.75, 4.0)
    meter.add(_STORE, 0, 8, 8)
    assert meter.read(_LOAD) == (0.0, 0.0, 4.0)


@pytest.mark.parametrize("late_first", [False, True])
def test_overlapping_transfers_share_their_time(late_first: bool) -> None:
    """Two in flight at once are busy once, whichever is told of first; one within another too."""
    meter = LinkMeter(window_secs=10)
    added = [(20 * _GB, 0, 2), (20 * _GB, 1, 3), (5 * _GB, 1.25, 1.5)]
    for num_bytes, begin, end in reversed(added) if late_first else added:
        meter.add(_LOAD, num_bytes, begin, end)
    assert meter.read(_LOAD, 5) == (15.0, 0.6, 5.0)


def test_the_same_interval_twice() -> None:
    """Two copies of the same times have the bytes of both and the time of one."""
    meter = LinkMeter()
    for _ in range(2):
        meter.add(_STORE, 3 * _GB, 5, 6)
    assert meter.read(_STORE) == (6.0, 1.0, 1.0)


def test_what_the_window_cuts_counts_in_part() -> None:
    """Of a transfer that began before the window, the part inside counts, in bytes and in time."""
    meter = LinkMeter(window_secs=10)
    meter.add(_LOAD, 40 * _GB, 0, 8)
    assert meter.read(_LOAD, 12) == (5.0, 0.6, 10.0)
    assert meter.read(_LOAD, 17) == (5.0, 0.1, 10.0)
    assert meter.read(_LOAD, 18) == (0.0, 0.0, 10.0)
    # A moment amid the transfer.
    assert meter.read(_LOAD, 4) == (5.0, 1.0, 4.0)


def test_a_link_that_rests_is_not_busy() -> None:
    """With the time told, the fraction falls while nothing moves; without, it stays."""
    meter = LinkMeter(window_secs=10)
    meter.add(_LOAD, _GB, 0, 10)
    assert meter.read(_LOAD).busy_fraction == 1.0
    assert meter.read(_LOAD, 15).busy_fraction == 0.5
    assert meter.read(_LOAD, 1e6) == (0.0, 0.0, 10.0)


def test_nothing_yet() -> None:
    """Before the first transfer, and in no time at all, there is no speed and no window."""
    meter = LinkMeter()
    assert meter.read(_LOAD) == (0.0, 0.0, 0.0)
    assert meter.read(_LOAD, 5.0) == (0.0, 0.0, 0.0)
    meter.add(_LOAD, 100, 5, 5)
    assert meter.read(_LOAD) == (0.0, 0.0, 0.0)
    # The other direction had the time that this one did not use.
    meter.add(_LOAD, 100, 5, 6)
    assert meter.read(_STORE) == (0.0, 0.0, 1.0)


def test_a_transfer_too_short_for_the_clock_has_its_bytes() -> None:
    """Its bytes count, its time does not; with others the speed is still a number."""
    meter = LinkMeter()
    meter.add(_LOAD, _GB, 0, 1)
    meter.add(_LOAD, _GB, 1, 1)
    assert meter.read(_LOAD) == (2.0, 1.0, 1.0)


def test_what_left_the_window_is_forgotten() -> None:
    """A meter of a cache that runs for days holds what is in the window and no more."""
    meter = LinkMeter(window_secs=1)
    for number in range(5000):
        meter.add(_LOAD, 10, number * 0.1, number * 0.1 + 0.05)
    assert len(meter._intervals[_LOAD]) <= 11
    assert meter.read(_LOAD).busy_fraction == pytest.approx(0.5, abs=0.06)


def test_very_many_transfers_shorten_the_window() -> None:
    """Beyond the limit the oldest go, and the figures are those of the time that is left."""
    meter = LinkMeter(window_secs=1e6)
    count = MAX_INTERVALS + 1000
    for number in range(count):
        meter.add(_LOAD, _GB, number, number + 0.5)
    assert len(meter._intervals[_LOAD]) == MAX_INTERVALS
    speed, busy, window = meter.read(_LOAD)
    assert window == count - 1000
    assert (speed, busy) == (2.0, 0.5)
    # The other direction has forgotten nothing.
    assert meter.read(_STORE).window_secs == count - 0.5


@pytest.mark.parametrize(
    ("num_bytes", "begin", "end"),
    [
        (-1, 0, 1),
        (1, 2, 1),
        (1, math.nan, 1),
        (1, 0, math.nan),
        (1, 0, math.inf),
        (1, -math.inf, 0),
    ],
)
def test_what_is_no_transfer_is_refused(num_bytes: int, begin: float, end: float) -> None:
    """Ends before begins, negative bytes and times that are none: an error, and nothing changes."""
    meter = LinkMeter()
    meter.add(_LOAD, _GB, 0, 1)
    with pytest.raises(MetricsError, match="are no transfer"):
        meter.add(_LOAD, num_bytes, begin, end)
    assert meter.read(_LOAD) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("window_secs", [0, -1, math.nan, math.inf])
def test_a_window_that_is_none(window_secs: float) -> None:
    """The window has a length."""
    with pytest.raises(MetricsError, match="window_secs"):
        LinkMeter(window_secs)
    meter = LinkMeter()
    meter.add(_LOAD, 1, 0, 1)
    with pytest.raises(MetricsError, match="now_seconds"):
        meter.read(_LOAD, math.nan)


_TIMES = st.integers(0, 40)
_TRANSFERS = st.lists(
    st.tuples(st.sampled_from(Direction), st.integers(0, 1000), _TIMES, _TIMES), max_size=12
)


@given(_TRANSFERS, st.integers(1, 15), st.integers(0, 20))
def test_it_agrees_with_counting_seconds(
    transfers: list[tuple[Direction, int, int, int]], window: int, later: int
) -> None:
    """Against a count of whole seconds, exact in fractions, for any overlaps, order and window."""
    meter = LinkMeter(window_secs=window)
    kept = []
    for direction, num_bytes, one, other in transfers:
        begin, end = min(one, other), max(one, other)
        if begin == end:
            end += 1
        kept.append((direction, num_bytes * _GB, begin, end))
        meter.add(*kept[-1])
    if not kept:
        return
    now = max(end for *_, end in kept) + later
    first = max(min(begin for _, _, begin, _ in kept), now - window)
    for direction in Direction:
        own = [one for one in kept if one[0] is direction]
        busy = [
            second
            for second in range(first, now)
            if any(begin <= second < end for _, _, begin, end in own)
        ]
        moved = sum(
            Fraction(num_bytes, end - begin)
            for _, num_bytes, begin, end in own
            for second in range(first, now)
            if begin <= second < end
        )
        speed, fraction, seen = meter.read(direction, now)
        assert seen == now - first
        assert fraction == pytest.approx(len(busy) / (now - first))
        assert speed == pytest.approx(float(moved / len(busy) / _GB) if busy else 0.0)


def test_a_reading_is_of_one_moment() -> None:
    """Time and intervals are taken under the lock that a transfer is added under."""
    meter = LinkMeter()
    held = []

    class _Watched(dict[Direction, list[tuple[float, float, int]]]):
        def __getitem__(self, direction: Direction) -> list[tuple[float, float, int]]:
            held.append(meter._lock.locked())
            return super().__getitem__(direction)

    meter._intervals = _Watched(meter._intervals)
    meter.add(_LOAD, _GB, 0, 1)
    assert meter.read(_LOAD) == (1.0, 1.0, 1.0)
    assert held == [True, True]


def test_threads_may_add_and_read() -> None:
    """Readers beside writers see figures that can be, and nothing is lost in the end."""
    meter = LinkMeter(window_secs=1e9)
    begin, stop = threading.Barrier(3), threading.Event()
    wrong = []

    def write(direction: Direction) -> None:
        begin.wait(60)
        for number in range(2000):
            meter.add(direction, _GB, number, number + 0.5)

    def read() -> None:
        begin.wait(60)
        while not stop.is_set():
            for direction in Direction:
                told = meter.read(direction)
                if not (0 <= told.busy_fraction <= 1 and told.gigabytes_per_second in (0.0, 2.0)):
                    wrong.append(told)

    threads = [threading.Thread(target=write, args=(direction,)) for direction in Direction]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join(60)
    stop.set()
    reader.join(60)
    assert wrong == []
    for direction in Direction:
        speed, busy, window = meter.read(direction)
        assert (speed, window) == (2.0, 1999.5)
        assert busy == pytest.approx(1000 / 1999.5)
