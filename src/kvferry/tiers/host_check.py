"""Digests of host pages, worked out on the CPU: for the second look at a page that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvferry.kernels import digest_spans, page_seed, span_seeds

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvferry.geometry import Geometry
    from kvferry.memory import HostPool
    from kvferry.types import SlotKind

__all__ = ["bytes_digests", "page_digests"]


def page_digests(
    pool: HostPool, geometry: Geometry, kind: SlotKind, slot: int, key: bytes
) -> NDArray[np.uint64]:
    """The digests that the bytes in `slot` have, as the page called `key`. Shape ``[spans]``."""
    return bytes_digests(pool.slot_view(slot), geometry, kind, key)


def bytes_digests(
    slot: memoryview, geometry: Geometry, kind: SlotKind, key: bytes
) -> NDArray[np.uint64]:
    """The same for the bytes of a slot that is in no pool."""
    spans = geometry.spans(kind)
    seed = np.array([page_seed(key)], dtype=np.uint64)
    found = np.empty(len(spans), dtype=np.uint64)
    page = np.frombuffer(slot, dtype=np.uint8)
    for span in spans:
        rows = page[span.offset : span.offset + span.num_bytes].reshape(1, -1)
        seeds = span_seeds(
            seed, plane_index=span.plane_index, layer=span.layer, num_bytes=span.num_bytes
        )
        found[span.index] = digest_spans(rows, seeds)[0]
    return found
