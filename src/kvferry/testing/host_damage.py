"""Damage on purpose: what an engine does about a bad page can only be tried with a bad page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.errors import CacheError
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from kvferry.cache import KVFerry

__all__ = ["flip_host_bit"]


def flip_host_bit(
    cache: KVFerry, key: bytes, *, byte: int = 0, kind: SlotKind = SlotKind.PAGE
) -> None:
    """Flip the lowest bit of one byte of a page of the host, as failing memory would.

    Args:
        cache: Nothing in it notices by itself.
        key: From `KVFerry.keys`.
        byte: Of the slot, 0 to ``geometry.page_bytes - 1`` for bytes that every load moves.
        kind: A page, or the checkpoint at its end.

    Raises CacheError where the host does not have the page, or it is not so long.
    """
    control = cache._manager._control
    tier = control.tiers.get(kind)
    node = control.index.node_of(key)
    if tier is None or node is None or not tier.is_readable(node):
        raise CacheError(f"the host has no {kind} {key.hex()}: store it and wait for it first")
    num_bytes = cache.geometry.slot_bytes(kind)
    if not 0 <= byte < num_bytes:
        raise CacheError(f"byte {byte} is not in a slot: give one from 0 to {num_bytes - 1}")
    with cache._pools[kind].slot_view(tier.slot_of(node)) as slot:
        slot[byte] ^= 1
