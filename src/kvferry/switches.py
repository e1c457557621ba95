"""What a running cache does at all: three switches that any thread may flip at any time."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvferry.errors import ConfigError

__all__ = ["SwitchState", "Switches"]


class SwitchState(NamedTuple):
    """All three switches at one moment."""

    store: bool
    load: bool
    storage: bool


class Switches:
    """Whether a cache stores, loads, and uses storage. Reading takes no lock.

    A switch decides what is begun. What was begun before it was flipped goes on to its end.

    Args:
        store: Pages go from the device to the host.
        load: Pages come back to the device.
        storage: Storage is read and written.

    Raises:
        ConfigError: One of them is neither True nor False.
    """

    def __init__(self, *, store: bool = True, load: bool = True, storage: bool = True) -> None:
        self._lock = threading.Lock()
        # One tuple that is replaced whole: a reader sees all of a flip, or nothing of it.
        self._state = SwitchState(
            _switch("store", store), _switch("load", load), _switch("storage", storage)
        )

    @property
    def state(self) -> SwitchState:
        """All three as they are now, from one moment."""
        return self._state

    @property
    def store(self) -> bool:
        """Whether pages are stored."""
        return self._state.store

    @property
    def load(self) -> bool:
        """Whether pages are loaded."""
        return self._state.load

    @property
    def storage(self) -> bool:
        """Whether storage is read and written."""
        return self._state.storage

    def flip(
        self, *, store: bool | None = None, load: bool | None = None, storage: bool | None = None
    ) -> SwitchState:
        """Set those that are given, all at once; what they were before.

        Raises:
            ConfigError: One that is given is neither True nor False; nothing was set.
        """
        given = {"store": store, "load": load, "storage": storage}
        changes = {name: _switch(name, to) for name, to in given.items() if to is not None}
        with self._lock:
            before = self._state
            self._state = before._replace(**changes)
        return before

    def __repr__(self) -> str:
        store, load, storage = self._state
        return f"Switches(store={store}, load={load}, storage={storage})"


def _switch(name: str, value: object) -> bool:
    # Text such as "false" would count as true.
    if not isinstance(value, bool):
        raise ConfigError(f"switch {name}={value!r} must be True or False")
    return value
