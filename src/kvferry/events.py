"""What happened to pages, as typed events: for routers that send prompts to where pages are."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.types import Tier

__all__ = [
    "DEFAULT_MAX_EVENTS",
    "Chain",
    "Event",
    "EventLog",
    "PagesEvicted",
    "PagesLoaded",
    "PagesQuarantined",
    "PagesStored",
    "StorageChanged",
    "chains_of",
]

DEFAULT_MAX_EVENTS = 16_384
"""How many events wait for `EventLog.drain` unless told otherwise."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _OfPages:
    keys: tuple[bytes, ...]
    """Keys of pages that follow one another in a prompt: each is the parent of the next."""

    parent_key: bytes | None
    """Key of the page before the first; None where a prompt begins."""

    tier: Tier


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagesStored(_OfPages):
    """Pages are in `tier` now, and can be found there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagesEvicted(_OfPages):
    """Pages are no longer in `tier`; other tiers may still have them."""

    reason: str = "capacity"
    """Why, in a word: ``capacity``, ``reset``…"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagesLoaded(_OfPages):
    """Pages were brought from `tier` to the next faster one, and verified where that is on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PagesQuarantined(_OfPages):
    """Pages in `tier` are not what was stored there, and are not served any more."""

    reason: str
    """What was wrong, in a word: ``digest``, ``checksum``, ``length``…"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StorageChanged(_OfPages):
    """Storage came or went as a whole; it is about no page, and has no keys."""

    keys: tuple[bytes, ...] = ()
    parent_key: bytes | None = None
    tier: Tier = Tier.STORAGE
    state: str
    """``attached``; ``down``, as it kept failing: nobody asks it; ``back``, as it works again;
    ``detached``."""

    reason: str = ""
    """In words, where there is more to say."""


Event = PagesStored | PagesEvicted | PagesLoaded | PagesQuarantined | StorageChanged

Subscriber = Callable[[Sequence[Event]], None]


class Chain(NamedTuple):
    """Pages that follow one another, as events have them."""

    keys: tuple[bytes, ...]
    parent_key: bytes | None


def chains_of(pages: Iterable[tuple[bytes, bytes | None]]) -> list[Chain]:
    """Split `pages`, in any order, into chains for one event each.

    Args:
        pages: (key, key of its parent or None) of each page. Victims of an eviction come leaves
            first, and from many prompts.

    Returns:
        Chains whose keys are all of `pages`, once each. A page with several children here is in
        the chain of the first of them.
    """
    parent_of = dict(pages)
    next_of: dict[bytes, bytes] = {}
    for key, parent in parent_of.items():
        if parent is not None and parent in parent_of:
            next_of.setdefault(parent, key)
    chains = []
    for key, parent in parent_of.items():
        if parent is not None and next_of.get(parent) == key:
            continue
        keys = [key]
        while (following := next_of.get(keys[-1])) is not None:
            keys.append(following)
        chains.append(Chain(tuple(keys), parent))
    return chains


class EventLog:
    """The last events, until somebody drains them, and the callbacks that are told of them.

    `record` may be called amid bookkeeping: it only appends. Callbacks run in `dispatch`, which
    the cache calls when its bookkeeping is whole again. All methods may be called on any thread.

    Args:
        max_events: How many wait to be drained; of more, the oldest are dropped and counted.
            0: none are kept, and none count as dropped.

    Raises:
        ConfigError: `max_events` is negative.
    """

    def __init__(self, max_events: int = DEFAULT_MAX_EVENTS) -> None:
        if max_events < 0:
            raise ConfigError(f"max_events={max_events} must be 0 or more")
        self._lock = threading.Lock()
        self._max_events = max_events
        self._waiting: collections.deque[Event] = collections.deque(maxlen=max_events)
        self._undelivered: list[Event] = []
        # Replaced whole, so that `dispatch` walks over those of one moment.
        self._subscribers: tuple[Subscriber, ...] = ()
        self._num_dropped = 0

    @property
    def active(self) -> bool:
        """Whether anybody would learn of an event. If not, there is no need to make one."""
        return bool(self._max_events or self._subscribers)

    @property
    def num_dropped(self) -> int:
        """How many events were dropped since the start because nobody drained them in time."""
        return self._num_dropped

    def record(self, event: Event) -> None:
        """Note that something happened."""
        if not self.active:
            return
        with self._lock:
            if self._max_events:
                if len(self._waiting) == self._max_events:
                    self._num_dropped += 1
                self._waiting.append(event)
            if self._subscribers:
                self._undelivered.append(event)

    def drain(self) -> list[Event]:
        """Take all events that wait, oldest first."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Have `subscriber` told of all later events, in batches; call the answer to end that.

        Draining is no matter of subscribers: both see every event.
        """

        def told(events: Sequence[Event]) -> None:
            subscriber(events)

        def unsubscribe() -> None:
            with self._lock:
                self._subscribers = tuple(one for one in self._subscribers if one is not told)
                if not self._subscribers:
                    self._undelivered.clear()

        with self._lock:
            self._subscribers = (*self._subscribers, told)
        return unsubscribe

    @property
    def has_undelivered(self) -> bool:
        """Whether `dispatch` has something to tell."""
        return bool(self._undelivered)

    def dispatch(self) -> None:
        """Tell subscribers what was recorded since the last time.

        What a subscriber raises goes to the caller, after all others were told. The events count
        as delivered then too: nobody is told twice.
        """
        if not self._undelivered:
            return
        with self._lock:
            events, self._undelivered = tuple(self._undelivered), []
            subscribers = self._subscribers
        with contextlib.ExitStack() as stack:
            for subscriber in reversed(subscribers):
                stack.callback(subscriber, events)
