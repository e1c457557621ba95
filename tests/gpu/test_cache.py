"""`KVFerry` over a pool on a GPU: the same code, with streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry import Geometry, Namespace, Plane, PoolView
from kvferry.types import SlotKind

pytest.importorskip("xxhash")
pytestmark = pytest.mark.gpu

PAGE = 16
PLANE = Plane(name="latent", num_layers=4, element_size=576)
TOKENS = list(range(8 * PAGE))


def test_store_load_storage_and_a_flipped_bit(slow: Callable[[Any], None]) -> None:
    """A producer that is late, a load by layers on another stream, storage, a bad page."""
    from kvferry.cache import KVFerry
    from kvferry.storage import MemoryBackend

    geometry = Geometry(planes=(PLANE,), page_size=PAGE)
    rows = 64 * PAGE
    layers = [
        torch.randint(0, 256, (rows, 576), dtype=torch.uint8, device="cuda") for _ in range(4)
    ]
    pool = PoolView.from_tensors(geometry, {"latent": layers})
    name = Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint)
    cache = KVFerry(
        geometry,
        pool,
        namespace=name,
        storage=MemoryBackend(),
        host={"num_bytes": "16MiB"},
        load={"threshold_tokens": 1},
        prefetch={"threshold_tokens": 1},
    )
    producer: Any
    consumer: Any
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    new = [torch.randint_like(layer[: len(TOKENS)], 0, 256) for layer in layers]
    torch.cuda.synchronize()
    slow(producer)
    with torch.cuda.stream(producer):
        for layer, fresh in zip(layers, new, strict=True):
            layer[: len(TOKENS)] = fresh
    stored = cache.store(
        TOKENS, device_slots=torch.arange(len(TOKENS)), stream=producer.cuda_stream
    )
    assert not stored.done
    stored.wait()
    assert stored.num_stored == 8
    first = 32 * PAGE
    slots = torch.arange(first, first + len(TOKENS), device="cuda")
    with cache.match(TOKENS) as found:
        loaded = cache.load(found, device_slots=slots, stream=consumer.cuda_stream)
    with torch.cuda.stream(consumer):
        for number, layer in enumerate(layers):
            loaded.wait_layer(number, consumer.cuda_stream)
            assert torch.equal(layer[first : first + len(TOKENS)], new[number])
    loaded.wait()
    assert loaded.verified_pages == 8
    assert cache.flush(20).complete
    cache.reset()
    cache.prefetch(TOKENS).wait()
    manager = cache._manager
    node = manager._control.chain_nodes(cache.keys(TOKENS))[5]
    with cache._pools[SlotKind.PAGE].slot_view(
        manager._control.tiers[SlotKind.PAGE].slot_of(node)
    ) as page:
        page[3] ^= 1
    loaded = cache.load(cache.match(TOKENS), device_slots=slots)
    loaded.wait()
    assert loaded.usable_tokens == 5 * PAGE
    report = cache.close()
    assert report.clean
