"""Events of pages, told by the block hashes that vLLM's own events have."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvferry.events import PagesEvicted, PagesQuarantined, PagesStored
from kvferry.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvferry.events import Event

__all__ = ["BlockEvents", "BlocksGone", "BlocksKept"]

_MAX_PAGES = 1 << 17
_MEDIUM = {Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}


class BlocksKept(NamedTuple):
    """Blocks that a tier has now."""

    hashes: list[bytes]
    medium: str


class BlocksGone(NamedTuple):
    """Blocks that a tier has no more."""

    hashes: list[bytes]
    medium: str


class BlockEvents:
    """Knows which blocks a page is made of, for as many pages as fit; the oldest are forgotten."""

    def __init__(self, max_pages: int = _MAX_PAGES) -> None:
        self._max_pages = max_pages
        self._hashes: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def learn(self, keys: Sequence[bytes], hashes: Sequence[bytes]) -> None:
        """The pages `keys` of a prompt are made of the blocks `hashes`, the same number each."""
        if not keys or not hashes or len(hashes) % len(keys):
            return
        each = len(hashes) // len(keys)
        for at, key in enumerate(keys):
            self._hashes[key] = list(hashes[at * each : (at + 1) * each])
            self._hashes.move_to_end(key)
        while len(self._hashes) > self._max_pages:
            self._hashes.popitem(last=False)

    def tell(self, events: Iterable[Event]) -> Iterator[BlocksKept | BlocksGone]:
        """The same events by blocks; pages whose blocks were forgotten are left out."""
        for event in events:
            medium = _MEDIUM.get(event.tier)
            hashes = [one for key in event.keys for one in self._hashes.get(key, ())]
            if medium is None or not hashes:
                continue
            if isinstance(event, PagesStored):
                yield BlocksKept(hashes, medium)
            elif isinstance(event, PagesEvicted | PagesQuarantined):
                yield BlocksGone(hashes, medium)
