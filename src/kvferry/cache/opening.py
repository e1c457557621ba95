"""A backend that is opened and tried out by a thread, so that who waits may give it up."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError, StorageError
from kvferry.storage import try_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.cache.steps import Steps
    from kvferry.storage import StorageBackend

__all__ = ["BackendOpening"]


class BackendOpening:
    """Opens a backend, and closes it again where nobody takes it.

    Args:
        make: Opens it, or has it open.
        probe: Whether it is tried out, too.
        owned: Whether it is closed here where it does not work, or is late.
        wake: Is called when it is over, by its thread: there is a step to make.
    """

    def __init__(
        self,
        make: Callable[[], StorageBackend],
        *,
        probe: bool,
        owned: bool,
        wake: Callable[[], object],
    ) -> None:
        self._make = make
        self._wake = wake
        self._probe = probe
        self._owned = owned
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._given_up = False
        self._opened: StorageBackend | None = None
        self._tried = False
        self._error: KVFerryError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-attach", daemon=True)

    def steps(self, timeout: float) -> Steps[StorageBackend]:
        """Open it and try it out; the backend.

        Raises:
            StorageError: It took longer than `timeout` seconds, or does not do what it should.
            KVFerryError: What opening it raised.
        """
        deadline = time.monotonic() + timeout
        self._thread.start()
        with contextlib.ExitStack() as unless_taken:
            unless_taken.callback(self._give_up)
            while not self._over.is_set():
                if time.monotonic() >= deadline:
                    raise StorageError(
                        f"storage was not open and tried out after {timeout:g} s; see to what it "
                        f"waits for, or give a longer timeout"
                    )
                yield
            if self._error is not None:
                raise self._error
            if self._opened is None or not self._tried:  # by what is no error, such as SystemExit
                raise StorageError("the thread that opened storage was ended; attach it again")
            unless_taken.pop_all()
            return self._opened

    def _run(self) -> None:
        opened = None
        try:
            opened = self._make()
            if self._probe and not self._given_up and not (result := try_backend(opened)).ok:
                raise StorageError(
                    f"storage does not do what it should: {result.reason}; see to it, or attach "
                    f"another backend (probe=False goes without this test)"
                )
            self._tried = True
        except KVFerryError as bad:
            self._error = bad
        finally:
            with self._lock:
                self._opened = opened
                is_late = self._given_up
                self._over.set()
            if is_late:
                self._close()
            self._wake()

    def _give_up(self) -> None:
        with self._lock:
            self._given_up = True
            is_over = self._over.is_set()
        if is_over:
            self._close()

    def _close(self) -> None:
        if self._opened is None or not self._owned:
            return
        # Other people's code, and nobody wants the backend any more.
        with contextlib.suppress(Exception):
            self._opened.close()
