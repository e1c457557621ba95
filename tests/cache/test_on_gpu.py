"""`KVFerry` over a pool on a GPU: what it asks of the driver, and what it tells of the link.

The GPU is the fake one of the tests of transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.transfer.device_rig import DeviceRig
from tests.transfer.fake_gpu import CALLER, FakeGpu, Status
from tests.transfer.fake_time import Work

from kvferry.cache import KVFerry, parts
from kvferry.errors import DriverError
from kvferry.index import Namespace
from kvferry.memory import HostPool
from kvferry.metrics import NullMetrics
from kvferry.storage import MemoryBackend
from kvferry.tiers import Reason
from kvferry.types import Direction, SlotKind, Tier

PAGES = 4
BYTES_PER_SEC = 2e9


class Told(NullMetrics):
    """Metrics that are on, as a list of what they were told."""

    enabled = True

    def __init__(self) -> None:
        self.transfers: list[dict[str, Any]] = []
        self.routes: list[tuple[Direction, str, str]] = []
        self.links: list[tuple[Direction, float, float]] = []
        self.failures: list[tuple[Tier, int]] = []

    def transferred(self, direction: Direction, path: str, **told: Any) -> None:
        self.transfers.append({"direction": direction, "path": path, **told})

    def routed(self, direction: Direction, mover: str, reason: str) -> None:
        self.routes.append((direction, mover, reason))

    def link(self, direction: Direction, gigabytes_per_second: float, busy_fraction: float) -> None:
        self.links.append((direction, gigabytes_per_second, busy_fraction))

    def digest_failed(self, tier: Tier, pages: int) -> None:
        self.failures.append((tier, pages))


class Clock:
    """Seconds as the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """An engine's pool on the fake GPU, and caches over it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.rig = DeviceRig(gpu)
        self.rig.host.close()  # the caches have their own
        self.page = self.rig.page
        self.tokens = list(range(PAGES * self.page))
        self.metrics = Told()
        self.clock = Clock()
        self.name = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.rig.geometry.fingerprint
        )

    def cache(self, **given: Any) -> KVFerry:
        """A cache that stages a page or two at a time."""
        page = -(-self.rig.geometry.slot_bytes() // 4096) * 4096
        sections: dict[str, dict[str, Any]] = {
            "host": {"num_bytes": 12 * page},
            "load": {"threshold_tokens": 1},
            "prefetch": {"threshold_tokens": 1},
            "transfer": {"mover": self.gpu.mover, "staging_bytes": 3 * page},
        }
        for section, values in sections.items():
            given[section] = {**values, **given.get(section, {})}
        return KVFerry(
            self.rig.geometry, self.rig.device, namespace=self.name, clock=self.clock, **given
        )

    def rows(self, first_page: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Device rows of the prompt, from some page of the device on."""
        return np.arange(first_page * self.page, (first_page + PAGES) * self.page)

    def round_trip(self, cache: KVFerry, *, to_page: int = 20) -> Any:
        """Store the prompt, load it elsewhere, compare; the load's handle."""
        cache.store(self.tokens, device_slots=self.rows(0), stream=CALLER).wait()
        with cache.match(self.tokens) as found:
            loaded = cache.load(found, device_slots=self.rows(to_page), stream=CALLER)
            loaded.wait()
        assert loaded.verified_pages == PAGES
        for tensor in self.rig.tensors.values():
            assert np.array_equal(tensor[:, self.rows(to_page)], tensor[:, self.rows(0)])
        return loaded


@pytest.fixture
def scene(gpu: FakeGpu) -> Iterator[Scene]:
    """It is left with nothing of the GPU held."""
    made = Scene(gpu)
    yield made
    assert set(gpu.holdings.values()) == {0}
    assert gpu.registered == {}


def test_transfers_are_told_by_the_clock_of_the_gpu(scene: Scene) -> None:
    """Seconds, speed and busy fraction are those of the bytes, whatever the machine takes."""
    gpu, metrics = scene.gpu, scene.metrics
    crossing = ("flat", "realign") if gpu.mover == "direct" else ("rows",)

    def cost(work: Work) -> float:
        return work.num_bytes / BYTES_PER_SEC if work.kind in crossing else 0.0

    gpu.time.cost = cost
    with scene.cache(metrics=metrics) as cache:
        scene.round_trip(cache)
        num_bytes = PAGES * scene.rig.geometry.page_bytes
        assert [told["direction"] for told in metrics.transfers] == ["store", "load"]
        for told in metrics.transfers:
            assert (told["pages"], told["num_bytes"], told["ok"]) == (PAGES, num_bytes, True)
            assert told["tokens"] == len(scene.tokens)
            assert told["seconds"] == pytest.approx(num_bytes / BYTES_PER_SEC, rel=1e-3)
            assert told["path"].startswith("staged") is (gpu.mover == "staged")
        assert [route[:2] for route in metrics.routes] == [
            ("store", gpu.mover), ("load", gpu.mover),
        ]  # fmt: skip
        assert all(reason for *_, reason in metrics.routes)
        # The link was busy all the time that there was; then it rests, and still was as fast.
        scene.clock.now += 1
        cache.poll()
        took = num_bytes / BYTES_PER_SEC
        speeds = {direction: (speed, busy) for direction, speed, busy in metrics.links[-2:]}
        for direction in Direction:
            speed, busy = speeds[direction]
            assert speed == pytest.approx(BYTES_PER_SEC / 1e9, rel=1e-3)
            assert busy == pytest.approx(took / (1 + 2 * took), rel=1e-2)
        scene.clock.now += 60
        cache.poll()
        assert [busy for *_, busy in metrics.links[-2:]] == [0.0, 0.0]


def test_the_link_is_not_read_at_every_poll(scene: Scene) -> None:
    """A reading walks over many transfers: twenty a window are enough."""
    with scene.cache(metrics=scene.metrics) as cache:
        assert scene.metrics.links == []
        scene.round_trip(cache)
        told = len(scene.metrics.links)
        for _ in range(50):
            cache.poll()
        assert len(scene.metrics.links) == told
        scene.clock.now += 0.5
        cache.poll()
        assert len(scene.metrics.links) == told + 2


def test_metrics_that_are_off_time_nothing(scene: Scene) -> None:
    """No event takes the time, and nobody asks for one."""
    flags: list[int] = []
    scene.gpu.hooks["cuEventCreate"] = flags.append
    with scene.cache() as cache:
        scene.round_trip(cache)
    assert flags
    assert scene.gpu.CUevent_flags.CU_EVENT_DEFAULT not in flags
    assert "cuEventElapsedTime" not in scene.gpu.calls


def test_a_failed_transfer_is_counted_and_not_timed(scene: Scene) -> None:
    """It is a failure on its path, and no part of the speed."""
    with scene.cache(metrics=scene.metrics) as cache:
        scene.round_trip(cache)
        links = cache._manager._control._device_link
        assert links is not None
        before = links._meter.read(Direction.STORE)
        with scene.gpu.failing("cuLaunchKernel", Status.CUDA_ERROR_LAUNCH_FAILED):
            other = [token + 1 for token in scene.tokens]
            failed = cache.store(other, device_slots=scene.rows(0), stream=CALLER)
            failed.wait()
        assert failed.reason is Reason.TRANSFER_FAILED
        assert [told["ok"] for told in scene.metrics.transfers] == [True, True, False]
        assert links._meter.read(Direction.STORE) == before


@pytest.mark.parametrize(("numa", "wanted"), [("auto", ("auto", "0000:ab:00.0")), ("off", None)])
@pytest.mark.parametrize(("word", "huge"), [("off", "never"), ("auto", "auto")])
def test_host_memory_is_asked_for_as_configured(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, numa: str, wanted: Any, word: str, huge: str
) -> None:
    """Near to the GPU, by the address that its driver tells; and in huge pages or not."""
    asked: list[dict[str, Any]] = []

    def pool(*given: Any, **options: Any) -> HostPool:
        asked.append(options)
        return HostPool(*given, **options)

    monkeypatch.setattr(parts, "HostPool", pool)
    with scene.cache(host={"numa": numa, "huge_pages": word}) as cache:
        scene.round_trip(cache)
    (options,) = asked
    assert (options["numa_node"], options["device_bus_id"]) == (wanted or (None, None))
    assert options["huge_pages"] == huge


def test_a_pool_that_is_pinned_in_chunks_serves(scene: Scene) -> None:
    """Where the driver takes small pieces only, no copy crosses from one into the next."""
    largest = 17 << 20

    def too_large(_: int, num_bytes: int, __: int) -> bool:
        return num_bytes > largest

    with scene.gpu.failing("cuMemHostRegister", when=too_large) as refused:
        cache = scene.cache(host={"num_bytes": 3 * largest})
    assert refused
    assert len(scene.gpu.registered) >= 3
    for number in range(40):  # so many prompts that all chunks are used
        scene.tokens = list(range(1000 * number, 1000 * number + PAGES * scene.page))
        scene.round_trip(cache)
    assert cache.close().clean


def test_a_producer_and_a_reader_that_are_late(scene: Scene) -> None:
    """A store comes after what its stream holds, a load too, and neither is done before."""
    gpu, rig = scene.gpu, scene.rig
    own = gpu.new_stream()
    new = rig.images()["latent"][:, scene.rows(0)] ^ 0x5A

    def produce() -> None:
        rig.tensors["latent"][:, scene.rows(0)] = new

    with scene.cache() as cache:
        gpu.hold(own)
        gpu.enqueue(own, produce)
        stored = cache.store(scene.tokens, device_slots=scene.rows(0), stream=own)
        cache.poll()
        assert not stored.done
        assert cache.match(scene.tokens).num_tokens == 0
        gpu.release()
        stored.wait()
        read = []

        def consume() -> None:
            read.append(rig.tensors["latent"][:, scene.rows(20)].copy())

        before = rig.tensors["latent"][:, scene.rows(20)].copy()
        gpu.hold(own)
        gpu.enqueue(own, consume)
        found = cache.match(scene.tokens)
        loaded = cache.load(found, device_slots=scene.rows(20), stream=own)
        cache.poll()
        assert not loaded.done
        gpu.release()
        loaded.wait()
        assert loaded.verified_pages == PAGES
        assert np.array_equal(read[0], before)
        assert np.array_equal(rig.tensors["latent"][:, scene.rows(20)], new)


def test_rows_that_are_evicted_may_be_written_behind_the_store(scene: Scene) -> None:
    """Under write_back, a stream that waited for the eviction overwrites them in order."""
    gpu, rig = scene.gpu, scene.rig
    was = rig.images()["latent"][:, scene.rows(0)]
    with scene.cache(store={"policy": "write_back"}) as cache:
        assert cache.store(scene.tokens, device_slots=scene.rows(0), stream=CALLER).done
        other = gpu.new_stream()
        gpu.hold(CALLER)
        gpu.enqueue(CALLER, lambda: None)
        evicted = cache.evicting(scene.tokens, device_slots=scene.rows(0), stream=CALLER)
        evicted.wait_all(other)
        gpu.enqueue(other, lambda: rig.tensors["latent"].fill(0))
        assert rig.tensors["latent"].any()
        gpu.release()
        evicted.wait()
        assert not rig.tensors["latent"].any()
        loaded = cache.load(cache.match(scene.tokens), device_slots=scene.rows(20), stream=CALLER)
        loaded.wait()
        assert loaded.verified_pages == PAGES
        assert np.array_equal(rig.tensors["latent"][:, scene.rows(20)], was)


def test_a_bad_page_is_a_miss_and_counted(scene: Scene) -> None:
    """The prefix before it is served; it is thrown out, and storage has it still."""
    with scene.cache(metrics=scene.metrics, storage=MemoryBackend()) as cache:
        scene.round_trip(cache)
        assert cache.flush(20).complete
        control = cache._manager._control
        node = control.chain_nodes(cache.keys(scene.tokens))[2]
        slot = control.tiers[SlotKind.PAGE].slot_of(node)
        with cache._pools[SlotKind.PAGE].slot_view(slot) as page:
            page[5] ^= 1
        loaded = cache.load(cache.match(scene.tokens), device_slots=scene.rows(30), stream=CALLER)
        loaded.wait()
        assert (loaded.usable_tokens, loaded.bad_pages) == (2 * scene.page, (2,))
        assert scene.metrics.failures == [(Tier.HOST, 1)]
        cache.poll()
        assert cache.match(scene.tokens).num_tokens == 2 * scene.page
        cache.check_integrity()


def test_close_waits_for_what_a_gpu_still_does(scene: Scene) -> None:
    """What is held up ends, on another thread's word, before memory is given back."""
    cache = scene.cache()
    scene.round_trip(cache)
    scene.gpu.hold(CALLER)
    scene.gpu.enqueue(CALLER, lambda: None)
    other = [token + 5 for token in scene.tokens]
    stored = cache.store(other, device_slots=scene.rows(0), stream=CALLER)
    assert not cache.close(timeout=0.01).clean
    assert scene.gpu.registered
    release = threading.Thread(target=scene.gpu.release)
    release.start()
    assert cache.close(timeout=20).clean
    release.join(20)
    assert stored.done


def test_a_gpu_that_cannot_be_asked_refuses_the_cache(scene: Scene) -> None:
    """Nothing is left of a cache whose GPU does not say where it is."""
    refused = scene.gpu.failing("cuDeviceGetPCIBusId", Status.CUDA_ERROR_INVALID_VALUE)
    with refused, pytest.raises(DriverError, match="cuDeviceGetPCIBusId"):
        scene.cache()
