"""Processes of a machine share what host memory is free."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import kvferry.cache.ferry
from kvferry.cache import HostPeer, KVFerry
from kvferry.errors import BudgetError
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.index import Namespace
from kvferry.memory import HostPool, MemoryReading
from kvferry.ranks import ThreadRanks
from kvferry.sharing import SharedHost

GEOMETRY = Geometry(
    planes=(
        Plane(name="k", num_layers=2, element_size=24),
        Plane(
            name="state", num_layers=2, element_size=72, rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
        ),
    ),
    page_size=4,
)  # fmt: skip
FREE = 1 << 20


def reading(available: int = FREE) -> MemoryReading:
    """A machine that has so much free, and no other limit."""
    return MemoryReading(
        total_bytes=1 << 30,
        available_bytes=available,
        cgroup_limit_bytes=None,
        cgroup_used_bytes=0,
        memlock_limit_bytes=None,
        memlock_used_bytes=0,
        huge_free_bytes=0,
        huge_page_bytes=2 << 20,
    )


def device_pool() -> PoolView:
    """An engine's tensors."""
    tensors = {
        "k": [np.zeros((40, 24), dtype=np.uint8) for _ in range(2)],
        "state": [np.zeros((4, 72), dtype=np.uint8) for _ in range(2)],
    }
    return PoolView.from_tensors(GEOMETRY, tensors)


def make(num_bytes: int, host: Mapping[str, Any], **given: Any) -> KVFerry:
    """A cache of so many bytes."""
    return KVFerry(
        GEOMETRY,
        device_pool(),
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint),
        host={"num_bytes": num_bytes, "reserve_bytes": 0, **host},
        **given,
    )


def host_of(rank: int, num_peers: int = 0) -> SharedHost:
    """A shared host copy, as a keeper makes it."""
    return SharedHost(f"test-processes-{os.getpid()}-{rank}", num_peers=num_peers)


def on_ranks(num_bytes: int, *, share: bool = False, **host: Any) -> list[str]:
    """What each of two ranks of this machine gets, in a word, or the error's text."""

    def run(ranks: ThreadRanks) -> str:
        try:
            with contextlib.ExitStack() as each:
                shared = each.enter_context(host_of(ranks.rank)) if share else None
                each.enter_context(make(num_bytes, host, ranks=ranks, shared=shared))
                return "made"
        except BudgetError as refused:
            return str(refused)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, ThreadRanks.make(2)))


def test_ranks_that_start_at_once_take_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two halves fit; more than a half is refused on both, though it would fit one of them."""
    monkeypatch.setattr(kvferry.cache.ferry, "read_memory", reading)
    assert on_ranks(FREE // 2) == ["made", "made"]
    for told in on_ranks(FREE // 2 + 4096):
        assert "asked for by each of 2 processes" in told
    assert on_ranks(FREE // 2 + 4096, processes=1) == ["made", "made"]  # the config's word wins


def test_every_rank_looks_before_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank looks late, and finds what there was at first: nobody took memory yet."""
    taken = threading.Event()
    turns = threading.Semaphore(1)
    make_pool = HostPool.__init__

    def slow_look() -> MemoryReading:
        if not turns.acquire(blocking=False):
            taken.wait(0.3)  # what must not happen is given the time to happen
        return reading(FREE - FREE // 2 * taken.is_set())

    def noted(pool: HostPool, *args: Any, **given: Any) -> None:
        taken.set()
        make_pool(pool, *args, **given)

    monkeypatch.setattr(kvferry.cache.ferry, "read_memory", slow_look)
    monkeypatch.setattr(HostPool, "__init__", noted)
    assert on_ranks(FREE // 2) == ["made", "made"]
    assert taken.is_set()


def test_the_config_says_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranks too, and for all pools of a cache."""
    monkeypatch.setattr("kvferry.memory.pool_sizes.read_memory", reading)
    monkeypatch.setattr("kvferry.memory.pool_mapping.read_memory", reading)
    with make(FREE, {}):
        pass
    with make(FREE // 8, {"processes": 8}) as cache:
        assert {pool._budget.processes for pool in cache._pools.values()} == {8}
    with pytest.raises(BudgetError, match="by each of 8 processes"):
        make(FREE // 8 + 4096, {"processes": 8})


def test_a_keeper_may_have_all_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers take no memory, so they have no share, and are not asked what is free."""
    monkeypatch.setattr("kvferry.memory.pool_sizes.read_memory", reading)
    monkeypatch.setattr("kvferry.memory.pool_mapping.read_memory", reading)
    shared = host_of(0, num_peers=2)
    with shared, make(FREE, {}, shared=shared) as cache, ThreadPoolExecutor(1) as own:
        assert {pool._budget.processes for pool in cache._pools.values()} == {1}
        monkeypatch.setattr("kvferry.memory.pool_mapping.read_memory", lambda: reading(0))
        for rank in (1, 2):
            joined = own.submit(HostPeer, shared.name, GEOMETRY, device_pool(), rank=rank)
            while rank in shared.missing_ranks():
                cache.wait(0.05)
                assert not joined.done() or joined.exception() is None
            joined.result(30).close()


def test_keepers_of_one_machine_take_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them, as of two pipeline stages, are two processes that take memory."""
    monkeypatch.setattr(kvferry.cache.ferry, "read_memory", reading)
    assert on_ranks(FREE // 2, share=True) == ["made", "made"]
    for told in on_ranks(FREE // 2 + 4096, share=True):
        assert "asked for by each of 2 processes" in told
