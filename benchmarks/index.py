"""What page keys and the prefix index cost: hashing, matching, memory, eviction.

    python benchmarks/index.py --json benchmarks/results/index.json

Times are processor time, as no call waits for anything; each is the least of several repeats.
Memory is that of a fresh process which fills an index, as the system counts it; keys are in it, and
the prompts are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvferry.index import EvictionPolicyName, Namespace, PrefixIndex, page_keys

_TOKENS: Final = 131_072
_PAGE_SIZE: Final = 64
_EVICTED: Final = 100_000
_NAMESPACE: Final = Namespace(model="model", revision="1", dtype="bfloat16", geometry="g")

_LEGEND: Final = """\
shape   one: prompts of one page, so that every page is a leaf; chain: prompts of 100 pages;
        shared: prompts of one page behind 2,000 that all share, each used once more by itself
        evicting is choosing, clearing and forgetting, together"""


class _Figure(NamedTuple):
    name: str
    found: float
    unit: str
    at_most: float | None = None


def main() -> int:
    """Print the table; with --json write it as well."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pages", type=int, default=1_000_000, help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=20, help="(%(default)s)")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=list(EvictionPolicyName),
        default=list(EvictionPolicyName),
        help="whose evictions are measured (all)",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures too")
    # A fresh process measures the memory of one index.
    parser.add_argument("--memory-of", choices=list(_SHAPES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print(_memory(args.memory_of, args.pages))
        return 0
    print(f"{_machine()['cpu']}, Python {platform.python_version()}\n\n{_LEGEND}\n")
    print(f"{'what':<64} {'found':>10} {'target':>8}")
    figures = []
    for figure in _figures(args.pages, args.repeats, args.policies):
        figures.append(figure._asdict())
        target = "" if figure.at_most is None else f"<= {figure.at_most:g}"
        print(f"{figure.name:<64} {figure.found:>7.4g} {figure.unit:<2} {target:>8}", flush=True)
    if args.json:
        told = {"command": " ".join(sys.argv), "machine": _machine(), "figures": figures}
        args.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


def _figures(num_pages: int, repeats: int, policies: Sequence[str]) -> Iterator[_Figure]:
    yield from _prompt(repeats)
    for shape in _SHAPES:
        found = _in_child(shape, num_pages)
        yield _Figure(f"memory of a page, {num_pages} of them, {shape}", found, "B", 400)
    for policy in policies:
        for shape in _SHAPES:
            index = PrefixIndex(policy=policy)
            _SHAPES[shape](index, num_pages)
            yield _Figure(f"evicting {_EVICTED} of {num_pages}, {policy}, {shape}",
                          _evicting(index), "s", 0.5)  # fmt: skip
    for size in (10_000, num_pages):
        index = PrefixIndex()
        _chains(index, size)
        yield from _calls(index, size, repeats)


# ---------------------------------------------------------------------------------- one prompt


def _prompt(repeats: int) -> Iterator[_Figure]:
    ids = np.random.default_rng(0).integers(0, 150_000, _TOKENS)
    buffer, listed = ids.astype(np.uint32).data, ids.tolist()
    index = PrefixIndex()
    keys = page_keys(_NAMESPACE, listed, _PAGE_SIZE)
    nodes = index.insert(keys)
    index.set_host(nodes, range(len(nodes)))

    def found(tokens: Any) -> None:
        # Keys of their own each time, as those of a new request are.
        match = index.match(page_keys(_NAMESPACE, tokens, _PAGE_SIZE))
        assert match.num_on_host == _TOKENS // _PAGE_SIZE

    told = f"{_TOKENS} tokens, pages of {_PAGE_SIZE}"
    yield _Figure(f"hash and match, uint32, {told}", _ms(lambda: found(buffer), repeats), "ms", 4)
    yield _Figure(f"hash and match, list, {told}", _ms(lambda: found(listed), repeats), "ms", 6)
    yield _Figure(f"hash and match, int64, {told}", _ms(lambda: found(ids), repeats), "ms")
    for name, call in (
        ("match", lambda: index.match(keys)),
        ("touch", lambda: index.touch(nodes)),
        ("lease and release", lambda: index.release(index.lease(nodes, seconds=9.0))),
    ):
        yield _Figure(f"{name}, {len(nodes)} pages", _ms(call, repeats), "ms")


# ------------------------------------------------------------------------------ many prompts


def _prompt_keys(number: int, length: int) -> list[bytes]:
    """Keys that are as wide and as random as real ones, and quicker to have."""
    return [
        hashlib.blake2b(b"%d %d" % (number, at), digest_size=32).digest() for at in range(length)
    ]


def _chains(index: PrefixIndex, num_pages: int, length: int = 100) -> None:
    for number in range(num_pages // length):
        nodes = index.insert(_prompt_keys(number, length))
        index.set_host(nodes, range(number * length, (number + 1) * length))


def _ones(index: PrefixIndex, num_pages: int) -> None:
    _chains(index, num_pages, 1)


def _shared(index: PrefixIndex, num_pages: int, length: int = 2000) -> None:
    shared = index.insert(_prompt_keys(-1, length))
    index.set_host(shared, range(length))
    for number in range(length, num_pages):
        leaf = index.insert(_prompt_keys(number, 1), first_parent=shared[-1])
        index.set_host(leaf, [number])
        # All of the prompt is used; that the beginning is, is said every hundredth time.
        index.touch(leaf if number % 100 else shared + leaf)


_SHAPES: Final[dict[str, Callable[[PrefixIndex, int], None]]] = {
    "one": _ones,
    "chain": _chains,
    "shared": _shared,
}


def _in_child(shape: str, num_pages: int) -> float:
    command = [sys.executable, __file__, "--memory-of", shape, "--pages", str(num_pages)]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)  # noqa: S603
    return float(told.stdout)


def _memory(shape: str, num_pages: int) -> float:
    index = PrefixIndex()
    before = _resident_bytes()
    _SHAPES[shape](index, num_pages)
    return round((_resident_bytes() - before) / index.num_nodes, 1)


def _resident_bytes() -> int:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _evicting(index: PrefixIndex) -> float:
    """The least of three in a row."""
    return min(_evict_once(index) for _ in range(3))


def _evict_once(index: PrefixIndex) -> float:
    begun = time.process_time()
    victims = index.evict_host(_EVICTED)
    index.clear_host(victims)
    index.forget(victims)
    seconds = time.process_time() - begun
    assert len(victims) == _EVICTED
    return round(seconds, 4)


def _calls(index: PrefixIndex, size: int, repeats: int) -> Iterator[_Figure]:
    """Each call on 100 pages of an index of so many, in microseconds a page."""
    length = 100
    inserts, arrivals, matches, evictions = [], [], [], []
    for number in range(10 * repeats):
        keys = _prompt_keys(-2 - number, length)
        begun = time.process_time()
        nodes = index.insert(keys)
        inserted = time.process_time()
        index.set_host(nodes, range(2 * size + number * length, 2 * size + (number + 1) * length))
        arrived = time.process_time()
        index.match(keys)
        matched = time.process_time()
        victims = index.evict_host(length)
        index.clear_host(victims)
        index.forget(victims)
        evicted = time.process_time()
        inserts.append(inserted - begun)
        arrivals.append(arrived - inserted)
        matches.append(matched - arrived)
        evictions.append(evicted - matched)
    for name, times in (("insert", inserts), ("set_host", arrivals), ("match", matches),
                        ("evict, clear, forget", evictions)):  # fmt: skip
        middle = sorted(times)[len(times) // 2]
        yield _Figure(f"{name}, a page, median, of {size} pages", middle / length * 1e6, "us")
        yield _Figure(f"{name}, a page, worst, of {size} pages", max(times) / length * 1e6, "us")


# ------------------------------------------------------------------------------------- measuring


def _ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        call()
        times.append(time.process_time() - begun)
    return round(min(times) * 1e3, 3)


def _machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


if __name__ == "__main__":
    sys.exit(main())
