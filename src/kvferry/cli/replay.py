"""``kvferry replay``: what a cache of some size would have found of a recorded stream."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvferry.cli.geometry_options import add_geometry_options, read_geometry
from kvferry.cli.json_text import json_text
from kvferry.cli.whole_number import whole_number
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.index import EvictionPolicyName
    from kvferry.replay import ReplayResult

__all__ = ["add_parser", "run"]

_DEFAULT_PAGE_SIZE = 512


def add_parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
) -> argparse.ArgumentParser:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "replay",
        help="hit ratios of a cache of some size, for a trace of requests",
        description="Feed a trace of requests through the real prefix index, slot bookkeeping and "
        "policies, without bytes. A trace has JSON lines of timestamp, input_length, "
        "output_length and hash_ids, one id for each 512 tokens of a prompt.",
    )
    parser.add_argument("trace", metavar="TRACE", help="a file of JSON lines")
    add_geometry_options(
        parser,
        option="--geometry",
        page_size=f"tokens a page, a divisor of 512 ({_DEFAULT_PAGE_SIZE})",
    )
    parser.add_argument(
        "--host-bytes", metavar="SIZE", help="of the host tier, such as 64GiB (no limit)"
    )
    parser.add_argument(
        "--storage-bytes", metavar="SIZE", help="of the storage tier, 0 for none (no limit)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="NAME",
        help="which page leaves the host first (lru, lfu, slru, fifo, mru, priority), or when "
        "pages go to the host (write_through, write_through_selective, write_back); may be "
        "given once for each (lru, write_through)",
    )
    parser.add_argument(
        "--selective-hits",
        type=whole_number,
        metavar="N",
        help="requests that make write_through_selective store a page (store.selective_hits of the "
        "config)",
    )
    parser.add_argument("--plot", metavar="FILE", help="write a picture of the hits as SVG")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print what came out; the exit status."""
    from kvferry.replay import Replay, read_trace, text_plot, write_plot

    if args.page_size is None:
        args.page_size = _DEFAULT_PAGE_SIZE
    geometry, _ = read_geometry(args)
    slot_bytes = geometry.slot_bytes()
    if not slot_bytes:
        raise ConfigError("the geometry has no planes that follow the tokens: nothing to cache")
    eviction, store = _policies(args.policy)
    replay = Replay(
        page_size=geometry.page_size,
        page_bytes=slot_bytes,
        host_pages=_pages("--host-bytes", args.host_bytes, slot_bytes, least=1),
        storage_pages=_pages("--storage-bytes", args.storage_bytes, slot_bytes, least=0),
        eviction=eviction,
        store=store,
        selective_hits=_selective_hits(args.selective_hits),
    )
    result = replay.run(read_trace(args.trace))
    if args.plot:
        write_plot(result, args.plot)
    if args.json:
        print(json_text(result.to_dict()))
    else:
        _tell(result)
        print()
        print("\n".join(text_plot(result)))
    return 0


def _pages(name: str, text: str | None, slot_bytes: int, *, least: int) -> int | None:
    from kvferry.config import size_of

    if text is None:
        return None
    num_bytes = size_of(name, text)
    if num_bytes < slot_bytes and (num_bytes or least):
        raise ConfigError(
            f"{name} {text} holds no page: a page of this geometry takes {slot_bytes:,} bytes; "
            f"give more, or a smaller --page-size"
        )
    return num_bytes // slot_bytes


def _selective_hits(given: int | None) -> int:
    from kvferry.config import Config

    if given is None:
        return Config.resolve().config.store.selective_hits
    return Config.resolve(store={"selective_hits": given}).config.store.selective_hits


def _policies(given: list[str]) -> tuple[EvictionPolicyName, str]:
    from kvferry.index import EvictionPolicyName
    from kvferry.tiers import StorePolicy

    chosen = {"eviction": "lru", "store": "write_through"}
    known = {"eviction": tuple(map(str, EvictionPolicyName)), "store": tuple(map(str, StorePolicy))}
    told: set[str] = set()
    for name in given:
        kind = next((kind for kind, names in known.items() if name in names), None)
        if kind is None:
            every = ", ".join((*known["eviction"], *known["store"]))
            raise ConfigError(f"--policy {name!r} is none of {every}")
        if kind in told:
            raise ConfigError(f"--policy {name!r}: the {kind} policy was given already")
        told.add(kind)
        chosen[kind] = name
    return EvictionPolicyName(chosen["eviction"]), chosen["store"]


def _tell(result: ReplayResult) -> None:
    print(f"requests   {result.requests:,}, {result.pages:,} pages of {result.page_size} tokens")
    print(f"a page     {result.page_bytes:,} bytes")
    print(f"policies   {result.eviction} on the host; {result.store} to it")
    infinite = f"{result.hit_ratio_infinite:.4f} if nothing were dropped"
    print(f"hit ratio  {result.hit_ratio:.4f}; {infinite}")
    print()
    print(f"{'tier':<9}{'pages':>12}{'hits':>12}{'of all':>9}{'stored':>12}{'evicted':>12}")
    for name, tier in (("host", result.host), ("storage", result.storage)):
        capacity = "no limit" if tier.capacity_pages is None else f"{tier.capacity_pages:,}"
        share = tier.hit_pages / max(1, result.pages)
        print(
            f"{name:<9}{capacity:>12}{tier.hit_pages:>12,}{share:>9.1%}{tier.stored_pages:>12,}"
            f"{tier.evicted_pages:>12,}"
        )
    print()
    moved = result.to_dict()["moved_bytes"]
    print("moved      " + ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in moved.items()))
    print(f"seconds    {result.seconds:.1f}")
