"""Why a prompt hits as far as it does, tier by tier."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvferry.cache.reports import Explanation
from kvferry.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvferry.index import Namespace
    from kvferry.tiers import TierManager

__all__ = ["explain"]


def explain(
    manager: TierManager,
    namespace: Namespace,
    keys: Sequence[bytes],
    num_tokens: int,
    page_size: int,
    storage_timeout: float,
) -> Explanation:
    """What `KVFerry.explain` tells; asks storage if there is time for it."""
    host = manager.look_up(keys)
    stops = {Tier.HOST: _host_stop(manager, keys, host.usable, num_tokens, page_size)}
    in_storage = host.stored_hint
    if in_storage == len(keys):
        stops[Tier.STORAGE] = "all of it, as far as is known"
    else:
        stops[Tier.STORAGE] = "no more that is known of; it was not asked"
    refusal = manager.storage_refusal()
    if refusal:
        trouble = manager.stats().storage_trouble
        in_storage = 0
        stops[Tier.STORAGE] = f"not in use: {refusal}" + (f" ({trouble})" if trouble else "")
    elif storage_timeout > 0 and keys:
        in_storage, stops[Tier.STORAGE] = _ask(manager, keys, storage_timeout)
    return Explanation(
        namespace=namespace,
        num_pages=len(keys),
        tokens_by_tier={
            Tier.HOST: host.usable * page_size,
            Tier.STORAGE: in_storage * page_size,
        },
        first_missing_key="" if host.present == len(keys) else keys[host.present].hex(),
        stops=stops,
    )


def _host_stop(
    manager: TierManager, keys: Sequence[bytes], usable: int, num_tokens: int, page_size: int
) -> str:
    if not keys:
        return f"{num_tokens} tokens are less than a page of {page_size}"
    present = manager.look_up(keys).present
    if usable == len(keys):
        threshold = manager.options.load_threshold_tokens
        if not manager.switches.load:
            return "all of it, but loading is switched off"
        if usable * page_size < threshold:
            return f"all of it, but loads begin at {threshold} tokens"
        return "all of it"
    if present > usable:
        return (
            f"page {usable} cannot end a prefix: pages up to {present} are here, but a plane "
            f"needs a checkpoint, or a window, that is not"
        )
    node = manager.look_up(keys).first_unknown
    if present < node:
        return f"page {present} is known, and not on the host: evicted, or bad"
    return f"page {present} is not known: never stored, evicted since, or in another namespace"


def _ask(manager: TierManager, keys: Sequence[bytes], timeout: float) -> tuple[int, str]:
    handle = manager.probe(keys)
    deadline = time.monotonic() + timeout
    while not handle.done:
        left = deadline - time.monotonic()
        if left <= 0:
            return 0, f"it did not answer within {timeout} s"
        handle.pass_time(left)
    if handle.reason:
        return 0, f"it could not say: {handle.reason} {handle.error}".rstrip()
    found = next((page for page, there in enumerate(handle.found) if not there), len(keys))
    if found == len(keys):
        return found, "all of it"
    return found, f"it says that it does not have page {found}"
