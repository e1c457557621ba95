"""Keeper and peer over pools on a GPU, the fake one of the tests of transfers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tests.sharing.replica_rig import new_name
from tests.transfer.device_rig import DeviceRig
from tests.transfer.fake_gpu import CALLER, FakeGpu

from kvferry.cache import HostPeer, KVFerry
from kvferry.index import Namespace
from kvferry.sharing import SharedHost

PAGES = 4


def test_each_rank_pins_the_memory_and_loads_by_its_own_transfers(gpu: FakeGpu) -> None:
    """Registered once by each, at an address of its own; a load is over when both GPUs say so."""
    ours, theirs = DeviceRig(gpu), DeviceRig(gpu)
    for rig in (ours, theirs):
        rig.host.close()  # the host copy is the keeper's
    page = -(-ours.geometry.slot_bytes() // 4096) * 4096
    transfer = {"mover": gpu.mover, "staging_bytes": 3 * page}
    before = dict(gpu.registered)
    host = SharedHost(new_name(), num_peers=1)
    cache = KVFerry(
        ours.geometry,
        ours.device,
        namespace=Namespace(
            model="m", revision="1", dtype="u8", geometry=ours.geometry.fingerprint
        ),
        shared=host,
        host={"num_bytes": 12 * page},
        load={"threshold_tokens": 1},
        transfer=transfer,
    )
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(
            HostPeer, host.name, theirs.geometry, theirs.device, rank=1, timeout=60,
            transfer=transfer,
        )  # fmt: skip
        host.wait_for_peers(60)
        peer = made.result(60)
    tokens = list(range(PAGES * ours.page))
    rows = np.arange(len(tokens))
    cache.store(tokens, device_slots=rows, stream=CALLER).wait()
    with cache.match(tokens) as found:
        loaded = cache.load(found, device_slots=rows + 20 * ours.page, stream=CALLER)
    deadline = time.monotonic() + 60
    while not peer._host._waiting and time.monotonic() < deadline:
        peer._host.wait(1)
        peer._host.hear()
    # The keeper's stream is nothing in another process.
    assert [command.stream for command in peer._host._waiting.values()] == [None]
    load = peer.load(loaded.ticket)
    for layer in range(2):
        load.wait_layer(layer)
    load.wait_all()
    load.wait(60)
    loaded.wait(60)
    assert loaded.verified_pages == PAGES
    for name, tensor in theirs.tensors.items():
        stored = ours.tensors[name][:, rows]
        assert np.array_equal(tensor[:, rows + 20 * ours.page], stored)
        assert np.array_equal(ours.tensors[name][:, rows + 20 * ours.page], stored)
    (pool,) = cache._pools.values()
    pinned = {at: size for at, size in gpu.registered.items() if at not in before}
    assert list(pinned.values()) == [pool.num_bytes] * 2
    assert pool.address in pinned
    peer.close()
    assert [at for at in gpu.registered if at not in before] == [pool.address]
    assert cache.close().clean
    assert gpu.registered == before
