"""First touch: by several threads at once, all of it, and an error that stops them."""

from __future__ import annotations

import errno
import threading

import pytest

from kvferry.errors import BudgetError, ConfigError
from kvferry.memory import first_touch, linux_calls
from kvferry.memory.first_touch import Commit, commit_pages

LONG = 60.0
PIECE = 4096


def _touching() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "kvferry-touch"]


def _commit(num_bytes: int, threads: int | None) -> Commit:
    return commit_pages(0, num_bytes, threads=threads, piece_bytes=PIECE, advice=23)


@pytest.mark.parametrize("knows_advice", [True, False])
def test_threads_touch_at_the_same_time(
    monkeypatch: pytest.MonkeyPatch, knows_advice: bool
) -> None:
    """Four are in the kernel at once, which each of them waits for; every byte comes once."""
    together = threading.Barrier(4)
    seen: list[tuple[int, int]] = []

    def touch(address: int, length: int, *_: int) -> None:
        if address < 4 * PIECE:
            together.wait(LONG)
        seen.append((address, length))

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(linux_calls, "advise", touch if knows_advice else refuse)
    monkeypatch.setattr(linux_calls, "clear", touch)
    assert _commit(9 * PIECE + 5, 4) == ("populate_write" if knows_advice else "touch", 4)
    assert sorted(seen) == [*((at * PIECE, PIECE) for at in range(9)), (9 * PIECE, 5)]


def test_the_interpreter_lock_is_free_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real calls, on memory of their own: both ways end with the pages present and zero."""
    import ctypes
    import mmap

    for advice in (linux_calls.MADV_POPULATE_WRITE, 0x7FFF):
        with mmap.mmap(-1, 64 * PIECE) as memory:
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            commit_pages(address, 64 * PIECE, threads=3, piece_bytes=PIECE, advice=advice)
            assert bytes(memory) == bytes(64 * PIECE)
    # PyDLL and PYFUNCTYPE would keep the lock; CDLL and CFUNCTYPE give it back.
    assert type(linux_calls._libc()) is ctypes.CDLL
    assert not ctypes.memset._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]


def test_no_more_threads_than_pieces_or_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default one a processor that the process may use, and 16 at most."""
    monkeypatch.setattr(linux_calls, "advise", lambda *_: None)
    for processors, expected in ((1, 1), (3, 3), (64, 16)):
        monkeypatch.setattr(
            "os.sched_getaffinity", lambda _pid, count=processors: set(range(count))
        )
        assert _commit(100 * PIECE, None).threads == expected
        assert _commit(100 * PIECE, 40).threads == 40
    assert _commit(PIECE + 1, 8).threads == 2
    with pytest.raises(ConfigError, match="threads=0"):
        _commit(PIECE, 0)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT, 133])
def test_a_refusal_stops_all_threads(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The error has both sizes, and pieces behind the failure are not begun by anybody."""
    failed = threading.Event()
    seen: list[int] = []

    def touch(address: int, _length: int, _advice: int) -> None:
        if address == 5 * PIECE:
            failed.set()
            raise OSError(code, "no more")
        seen.append(address)
        if address > 5 * PIECE:
            assert failed.wait(LONG)

    monkeypatch.setattr(linux_calls, "advise", touch)
    with pytest.raises(BudgetError, match=rf"of {1000 * PIECE} bytes .*no more"):
        _commit(1000 * PIECE, 2)
    assert len(seen) < 10
    assert _touching() == []


def test_an_interrupt_lets_no_thread_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is about to go: no thread may be left that touches it."""
    main = threading.current_thread()
    inside = threading.Event()
    seen: list[int] = []

    def touch(address: int, _length: int, _advice: int) -> None:
        if threading.current_thread() is main:
            assert inside.wait(LONG)
            raise KeyboardInterrupt
        inside.set()
        seen.append(address)
        # Until the main thread has left: there are more pieces than it would take till then.
        with first_touch_done:
            first_touch_done.wait_for(stopped.is_set, LONG)

    first_touch_done = threading.Condition()
    stopped = threading.Event()
    stop = first_touch._Pieces.stop

    def stop_and_tell(pieces: first_touch._Pieces) -> None:
        stop(pieces)
        stopped.set()
        with first_touch_done:
            first_touch_done.notify_all()

    monkeypatch.setattr(first_touch._Pieces, "stop", stop_and_tell)
    monkeypatch.setattr(linux_calls, "advise", touch)
    with pytest.raises(KeyboardInterrupt):
        _commit(1000 * PIECE, 2)
    assert len(seen) == 1
    assert _touching() == []
