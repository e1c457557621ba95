"""A batch over threads: order, errors, and nothing that goes on behind the caller's back."""

from __future__ import annotations

import threading

import pytest

from kvferry.storage.batch_threads import BatchThreads

_DEADLINE_SECS = 30


def test_results_are_in_the_order_of_items() -> None:
    """Every item is worked on once, whatever thread takes it."""
    threads, seen = BatchThreads(4), list[int]()

    def work(number: int) -> int:
        seen.append(number)
        return number * number

    assert threads.map(work, range(100)) == [number * number for number in range(100)]
    assert sorted(seen) == list(range(100))
    assert threads.map(str, []) == []
    threads.close()
    assert threads.map(str, [1, 2]) == ["1", "2"]


def test_items_run_side_by_side() -> None:
    """As many as there are threads are worked on at a time, the caller's among them."""
    threads, together = BatchThreads(3), threading.Barrier(3)
    threads.map(lambda _: together.wait(_DEADLINE_SECS), range(3))
    threads.close()


def test_an_error_comes_when_nothing_runs_any_more() -> None:
    """A batch that raises has let go of the memory of all its items."""
    threads = BatchThreads(2)
    busy, release, over = threading.Event(), threading.Event(), threading.Event()
    caller = threading.get_ident()

    def work(item: int) -> None:
        if threading.get_ident() == caller:
            assert busy.wait(_DEADLINE_SECS)
            # Its last deed before it raises: the other one ends only after this.
            threading.Timer(0.05, release.set).start()
            raise OSError(f"item {item}")
        busy.set()
        assert release.wait(_DEADLINE_SECS)
        over.set()

    with pytest.raises(OSError, match="item"):
        threads.map(work, range(2))
    assert over.is_set()
    threads.close()


def test_an_error_in_another_thread_comes_through() -> None:
    """What any item raises, the call raises."""
    threads = BatchThreads(2)
    caller, other = threading.get_ident(), threading.Event()

    def work(_: int) -> None:
        if threading.get_ident() != caller:
            other.set()
            raise MemoryError("here")
        assert other.wait(_DEADLINE_SECS)

    with pytest.raises(MemoryError, match="here"):
        threads.map(work, range(2))
    threads.close()
