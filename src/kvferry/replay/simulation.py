"""A cache without bytes: the real prefix index and slot bookkeeping, fed with a trace.

There is no device tier here: what a request finds is what host memory and storage have of its
prompt, as after every request the engine's own memory might be needed for others. The store policy
says which pages go to the host, and when: of those that a request has computed. With `write_back`
that is when they leave the engine's memory, which here is at once. From the host pages are written
to storage as soon as they are there, under every policy. Storage drops the page that was used least
recently when it is full.
"""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvferry.errors import ConfigError, PrefixIndexError, TraceError
from kvferry.index import EvictionPolicyName, PrefixIndex
from kvferry.memory import SlotOwner, SlotOwners
from kvferry.replay.trace import BLOCK_TOKENS, TracedRequest
from kvferry.tiers import HitCounter, StorePolicy
from kvferry.types import Tier

__all__ = ["Replay", "ReplayResult", "Share", "TierResult"]

_PARTS = 40


@dataclasses.dataclass
class TierResult:
    """What happened in one tier, in pages."""

    capacity_pages: int | None
    """None: as many as there are."""

    hit_pages: int = 0
    stored_pages: int = 0
    evicted_pages: int = 0
    used_pages: int = 0

    refused_pages: int = 0
    """For which there was no room beside what the same request uses."""


class Share(NamedTuple):
    """The pages of some requests that follow one another, and how many were found where."""

    requests: int
    pages: int
    host: int
    storage: int
    infinite: int


@dataclasses.dataclass
class ReplayResult:
    """What came out, in pages; `to_dict` has bytes, too."""

    page_size: int
    page_bytes: int
    eviction: str
    store: str
    host: TierResult
    storage: TierResult
    requests: int = 0
    pages: int = 0
    infinite_pages: int = 0
    """Found if nothing were ever dropped."""

    prefetched_pages: int = 0
    """Brought from storage to the host; the others of the host came from the device."""

    seconds: float = 0.0
    shares: list[Share] = dataclasses.field(default_factory=list)
    """The requests in some 40 parts of equal length."""

    @property
    def hit_ratio(self) -> float:
        """Pages in the leading run that some tier has, over all pages."""
        return (self.host.hit_pages + self.storage.hit_pages) / max(1, self.pages)

    @property
    def hit_ratio_infinite(self) -> float:
        """The same if nothing were ever dropped."""
        return self.infinite_pages / max(1, self.pages)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        size = self.page_bytes
        return {
            "requests": self.requests,
            "hit_ratio": self.hit_ratio,
            "hit_ratio_infinite": self.hit_ratio_infinite,
            "tiers": {
                tier.value: {
                    "hit_ratio": told.hit_pages / max(1, self.pages),
                    **dataclasses.asdict(told),
                    "stored_bytes": told.stored_pages * size,
                    "capacity_bytes": None
                    if told.capacity_pages is None
                    else told.capacity_pages * size,
                }
                for tier, told in ((Tier.HOST, self.host), (Tier.STORAGE, self.storage))
            },
            "moved_bytes": {
                "load": (self.host.hit_pages + self.storage.hit_pages) * size,
                "store": (self.host.stored_pages - self.prefetched_pages) * size,
                "prefetch": self.prefetched_pages * size,
                "backup": self.storage.stored_pages * size,
            },
            "pages": self.pages,
            "page_size": self.page_size,
            "page_bytes": size,
            "policies": {"eviction": self.eviction, "store": self.store},
            "shares": [share._asdict() for share in self.shares],
            "seconds": self.seconds,
        }


class Replay:
    """One cache that a trace goes through.

    Args:
        page_size: Tokens a page; a divisor of the trace's 512.
        page_bytes: Of a page in a tier.
        host_pages: Pages that the host holds; None: all.
        storage_pages: Pages that storage holds, 0 for none; None: all.
        eviction: Which page leaves the host first.
        store: When pages go to the host, as in the cache; see `StorePolicy`.
        selective_hits: Requests that make `write_through_selective` store a page.

    Raises:
        ConfigError: One of these cannot be.
    """

    def __init__(
        self,
        *,
        page_size: int,
        page_bytes: int,
        host_pages: int | None,
        storage_pages: int | None,
        eviction: EvictionPolicyName = EvictionPolicyName.LRU,
        store: str = StorePolicy.WRITE_THROUGH,
        selective_hits: int = 2,
    ) -> None:
        if page_size < 1 or BLOCK_TOKENS % page_size:
            raise ConfigError(
                f"page_size={page_size} does not divide the {BLOCK_TOKENS} tokens of a traced "
                f"block; take a power of two up to {BLOCK_TOKENS}"
            )
        if store not in set(StorePolicy):
            raise ConfigError(f"store={store!r} is none of {', '.join(StorePolicy)}")
        if selective_hits < 1:
            raise ConfigError(f"selective_hits={selective_hits}; give 1 or more")
        for name, pages in (("host_pages", host_pages), ("storage_pages", storage_pages)):
            if pages is not None and pages < 0:
                raise ConfigError(f"{name}={pages}; give 0 or more, or None for no limit")
        self._parts_of_block = BLOCK_TOKENS // page_size
        self._index = PrefixIndex(policy=eviction)
        self._needed_hits = selective_hits if store == StorePolicy.WRITE_THROUGH_SELECTIVE else 0
        self._hits = HitCounter()  # the cache's own, which forgets in the end
        self._result = ReplayResult(
            page_size,
            page_bytes,
            eviction,
            store,
            TierResult(host_pages),
            TierResult(storage_pages),
        )
        self._stored: OrderedDict[bytes, int] = OrderedDict()  # the node of each, oldest use first

    def run(self, requests: Iterable[TracedRequest]) -> ReplayResult:
        """Serve `requests` one after another.

        Raises:
            TraceError: An id stands for two prompts.
        """
        trace = list(requests)
        result = self._result
        began = time.perf_counter()
        self._slots = SlotOwners(max(1, self._host_capacity(trace)))
        every = -(-len(trace) // _PARTS)
        seen: set[int] = set()
        since = (0, 0, 0, 0, 0)
        for number, request in enumerate(trace, 1):
            ids = request.hash_ids
            new = next((at for at, one in enumerate(ids) if one not in seen), len(ids))
            seen.update(ids[new:])
            result.infinite_pages += new * self._parts_of_block
            try:
                self._serve(self._keys(ids))
            except PrefixIndexError as confused:
                raise TraceError(f"request {number} of the trace: {confused}") from confused
            result.requests = number
            if number % every == 0 or number == len(trace):
                now = self._counted()
                result.shares.append(Share(*(a - b for a, b in zip(now, since, strict=True))))
                since = now
        result.host.used_pages = self._index.num_on_host
        result.storage.used_pages = len(self._stored)
        result.seconds = time.perf_counter() - began
        return result

    def _counted(self) -> tuple[int, int, int, int, int]:
        told = self._result
        return (
            *(told.requests, told.pages, told.host.hit_pages),
            *(told.storage.hit_pages, told.infinite_pages),
        )

    def _host_capacity(self, trace: Sequence[TracedRequest]) -> int:
        limit = self._result.host.capacity_pages
        # No more slots than the trace has pages: bookkeeping costs memory for each.
        most = len({one for request in trace for one in request.hash_ids}) * self._parts_of_block
        return most if limit is None else min(limit, most)

    def _keys(self, ids: Sequence[int]) -> list[bytes]:
        parts = range(self._parts_of_block)
        return [(one * self._parts_of_block + part).to_bytes(16) for one in ids for part in parts]

    def _serve(self, keys: list[bytes]) -> None:
        index, result = self._index, self._result
        found = index.match(keys)
        held = found.nodes[: found.num_held]
        absent = [node for node in held if index.host_slot(node) < 0]
        result.pages += len(keys)
        result.host.hit_pages += len(held) - len(absent)
        result.storage.hit_pages += len(absent)
        chain = index.insert(keys)
        index.touch(chain)
        index.pin(chain)
        for node in held:
            if index.is_stored(node):
                self._stored.move_to_end(index.key_of(node))
        # What storage had comes back first: it is in front.
        result.prefetched_pages += self._place(absent)
        offered = len(keys)
        if self._needed_hits:
            offered = self._hits.count(keys, self._needed_hits)
        computed = chain[len(held) : offered]
        self._place([node for node in computed if index.host_slot(node) < 0])
        index.unpin(chain)
        index.forget(chain[::-1])

    def _place(self, nodes: Sequence[int]) -> int:
        """Give pages a slot each, evicting others; how many, as there may be too few slots."""
        index, told = self._index, self._result.host
        limit = told.capacity_pages
        room = (self._slots.num_slots if limit is None else limit) - index.num_on_host
        if len(nodes) > room:
            room += self._evict(len(nodes) - room)
        told.refused_pages += max(0, len(nodes) - room)
        placed = nodes[:room]
        if not placed:
            return 0
        runs = self._slots.allocate(len(placed), SlotOwner.INDEX)
        assert runs is not None  # noqa: S101  as many are free
        index.set_host(placed, [slot for run in runs for slot in run.slots])
        told.stored_pages += len(placed)
        self._back_up(placed)
        return len(placed)

    def _evict(self, num_pages: int) -> int:
        victims = self._index.evict_host(num_pages)
        self._slots.free(self._index.clear_host(victims), SlotOwner.INDEX)
        self._result.host.evicted_pages += len(victims)
        self._index.forget(victims)
        return len(victims)

    def _back_up(self, nodes: Sequence[int]) -> None:
        """Write pages to storage that it has not, and drop its oldest where it is full."""
        index, told = self._index, self._result.storage
        if told.capacity_pages == 0:
            return
        for node in nodes:
            if index.is_stored(node):
                continue
            self._stored[index.key_of(node)] = node
            index.set_stored([node], True)
            told.stored_pages += 1
            if told.capacity_pages is not None and len(self._stored) > told.capacity_pages:
                _, oldest = self._stored.popitem(last=False)
                index.set_stored([oldest], False)
                told.evicted_pages += 1
                index.forget([oldest])
