"""`KVFerry` over a pool on a GPU, host memory and disk: every byte, with streams.

What is stored looks like a model's: products of random activations and random weights, another for
each token, layer and plane. tests/cache/test_on_gpu.py has what needs no real GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from gpu_rig import DEVICE, GuardedTensor, new_stream, scattered

from kvferry import Geometry, HostPool, KVFerry, Namespace, Plane, PoolView
from kvferry.metrics import NullMetrics
from kvferry.testing import POISON
from kvferry.tiers import LoadHandle, PageState, Reason
from kvferry.types import Direction, SlotKind, Tier

pytestmark = pytest.mark.gpu

needs_xxhash = pytest.mark.skipif(
    importlib.util.find_spec("xxhash") is None,
    reason="xxhash is not installed, and storage checks every page by it",
)

PAGE = 64
PLANES = {
    "mla": (Plane(name="latent", num_layers=61, element_size=576),),
    "k_and_v": tuple(Plane(name=name, num_layers=32, element_size=1024) for name in ("k", "v")),
}
_HIDDEN = 32
_LONGEST = 12 * PAGE
_ROWS = 48 * PAGE

_Slow = Callable[[Any], None]


class Told(NullMetrics):
    """Metrics that are on, as lists of what they were told."""

    enabled = True

    def __init__(self) -> None:
        self.transfers: list[dict[str, Any]] = []
        self.routes: list[tuple[Direction, str, str]] = []
        self.links: list[tuple[Direction, float, float]] = []
        self.failures: list[tuple[Tier, int]] = []
        self.evictions = 0

    def transferred(self, direction: Direction, path: str, **told: Any) -> None:
        """Kept."""
        self.transfers.append({"direction": direction, "path": path, **told})

    def routed(self, direction: Direction, mover: str, reason: str) -> None:
        """Kept."""
        self.routes.append((direction, mover, reason))

    def link(self, direction: Direction, gigabytes_per_second: float, busy_fraction: float) -> None:
        """Kept."""
        self.links.append((direction, gigabytes_per_second, busy_fraction))

    def digest_failed(self, tier: Tier, pages: int) -> None:
        """Kept."""
        self.failures.append((tier, pages))

    def evicted(self, tier: Tier, pages: int) -> None:  # noqa: ARG002
        """Counted."""
        self.evictions += pages


class Model:
    """Weights of a model, the engine's pool with guards, and caches over it."""

    def __init__(self, planes: tuple[Plane, ...], mover: str = "auto") -> None:
        self.mover = mover
        self.planes = planes
        self.geometry = Geometry(planes=planes, page_size=PAGE)
        generator = torch.Generator(device=DEVICE).manual_seed(7)
        self.weights = {
            plane.name: torch.randn(
                plane.num_layers, _HIDDEN, plane.element_size // 2,
                device=DEVICE, dtype=torch.bfloat16, generator=generator,
            )
            for plane in planes
        }  # fmt: skip
        self.memory = {
            plane.name: GuardedTensor(plane.num_layers, _ROWS, plane.element_size)
            for plane in planes
        }
        self.tensors = {name: memory.inside for name, memory in self.memory.items()}
        self.view = PoolView.from_tensors(self.geometry, self.tensors)
        self.name = Namespace(
            model="random", revision="1", dtype="bf16", geometry=self.geometry.fingerprint
        )
        self.caches: list[KVFerry] = []

    def cache(self, **given: Any) -> KVFerry:
        """Closed with the model. Staging has room for few pages, so transfers have many pieces."""
        sections: dict[str, dict[str, Any]] = {
            "host": {"num_bytes": 80 * self.geometry.page_bytes},
            "load": {"threshold_tokens": 1},
            "prefetch": {"threshold_tokens": 1, "policy": "wait_complete"},
            "transfer": {"mover": self.mover, "staging_bytes": 8 << 20},
        }
        for section, values in sections.items():
            given[section] = {**values, **given.get(section, {})}
        self.caches.append(KVFerry(self.geometry, self.view, namespace=self.name, **given))
        return self.caches[-1]

    def kv(self, prompt: list[int]) -> dict[str, torch.Tensor]:
        """What the model computes for each token; it depends on all tokens before. By plane
        ``[layers, tokens, bytes]``."""
        # Sums of whole numbers, and products of one shape: rounded alike in every run.
        padded = [*prompt, *[0] * (_LONGEST - len(prompt))]
        tokens = torch.tensor(padded, device=DEVICE, dtype=torch.int64)
        seen = (torch.cumsum(tokens, 0) % 9973).to(torch.float32)[:, None]
        steps = torch.arange(1, _HIDDEN + 1, device=DEVICE, dtype=torch.float32)[None]
        hidden = torch.sin(seen * steps * 0.37 + steps).to(torch.bfloat16)
        return {
            name: torch.matmul(hidden[None], weights)[:, : len(prompt)]
            .contiguous()
            .view(torch.uint8)
            for name, weights in self.weights.items()
        }

    @staticmethod
    def at(rows: np.ndarray[Any, Any]) -> torch.Tensor:
        """Rows as an index on the device; the CPU waits for the current stream."""
        return torch.from_numpy(rows.reshape(-1)).to(DEVICE)

    def fill(self, at: torch.Tensor, kv: dict[str, torch.Tensor]) -> None:
        """Write it into the device rows `at`, in the current stream; waits for nothing."""
        for name, values in kv.items():
            self.tensors[name].index_copy_(1, at, values)

    def prompt(self, seed: int, pages: int) -> list[int]:
        """Random tokens."""
        rng = np.random.default_rng(seed)
        return [int(token) for token in rng.integers(0, 32_000, pages * PAGE)]

    def rows(self, seed: int, pages: int) -> np.ndarray[Any, Any]:
        """Token slots that lie anywhere."""
        return scattered(seed, pages, PAGE, _ROWS).reshape(-1)

    def poison(self) -> None:
        """In every device row."""
        for tensor in self.tensors.values():
            tensor.fill_(POISON)

    def check(self, rows: np.ndarray[Any, Any], kv: dict[str, torch.Tensor], what: str) -> None:
        """All of `rows` hold `kv`, all other rows are poison, and the guards are whole."""
        at = self.at(rows)
        for name, memory in self.memory.items():
            expected = torch.full_like(memory.inside, POISON)
            expected.index_copy_(1, at, kv[name][:, : len(at)])
            memory.check(expected, f"{what}, plane {name}")

    def keep(self, cache: KVFerry, prompt: list[int], seed: int = 1) -> dict[str, torch.Tensor]:
        """Compute a prompt, store it, and wipe the device; what was stored."""
        kv, rows = self.kv(prompt), self.rows(seed, len(prompt) // PAGE)
        self.fill(self.at(rows), kv)
        torch.cuda.synchronize()
        stored = cache.store(prompt, device_slots=rows)
        stored.wait()
        assert stored.num_stored + stored.num_already == len(prompt) // PAGE, stored
        self.poison()
        return kv

    def load_and_check(
        self, cache: KVFerry, prompt: list[int], kv: dict[str, torch.Tensor], seed: int = 2
    ) -> LoadHandle:
        """Load all of a prompt into poisoned rows, layer by layer, and compare every byte."""
        rows = self.rows(seed, len(prompt) // PAGE)
        with cache.match(prompt) as found:
            assert found.num_tokens == len(prompt)
            loaded = cache.load(found, device_slots=rows)
            for layer in range(self.planes[0].num_layers):
                loaded.wait_layer(layer)
            loaded.wait()
        assert loaded.usable_tokens == len(prompt)
        assert loaded.verified_pages == len(prompt) // PAGE
        self.check(rows, kv, "after a load")
        self.poison()
        return loaded

    def warm_cache(self, pages: int, **given: Any) -> KVFerry:
        """A cache that has stored and loaded as much: its kernels, tables and buffers are there."""
        cache = self.cache(**given)
        prompt = self.prompt(99, pages)
        kv, rows = self.kv(prompt), self.rows(1, pages)
        self.fill(self.at(rows), kv)
        cache.evicting(prompt, device_slots=rows).wait()
        self.poison()
        self.load_and_check(cache, prompt, kv)
        return cache

    def slot_of(self, cache: KVFerry, prompt: list[int], page: int) -> tuple[HostPool, int]:
        """Where a page of a prompt lies on the host."""
        control = cache._manager._control
        node = control.chain_nodes(cache.keys(prompt))[page]
        slot = control.tiers[SlotKind.PAGE].slot_of(node)
        return cache._pools[SlotKind.PAGE], slot

    def flip(self, cache: KVFerry, prompt: list[int], page: int, byte: int = 100) -> None:
        """Change one bit of a page on the host."""
        pool, slot = self.slot_of(cache, prompt, page)
        with pool.slot_view(slot) as memory:
            memory[byte] ^= 4

    def close(self) -> None:
        """Everything must come back."""
        torch.cuda.synchronize()
        for cache in self.caches:
            cache.check_integrity()
            assert cache.close().clean


@pytest.fixture(params=["direct", "staged"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Model]]:
    """Makes models, with each mover."""
    made: list[Model] = []

    def build(planes: str = "mla") -> Model:
        made.append(Model(PLANES[planes], request.param))
        return made[-1]

    yield build
    for model in made:
        model.close()


@pytest.fixture
def model(make: Callable[[str], Model]) -> Model:
    """Latents of 61 layers."""
    return make("mla")


# ------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("planes", sorted(PLANES))
def test_every_page_comes_back_from_the_host(make: Callable[[str], Model], planes: str) -> None:
    """Several prompts, two with the same beginning, into other rows; nothing beside is written."""
    model = make(planes)
    cache = model.cache()
    first = model.prompt(1, 12)
    prompts = [first, [*first[: 5 * PAGE], *model.prompt(2, 6)], model.prompt(3, 1)]
    kept = [model.keep(cache, prompt, seed) for seed, prompt in enumerate(prompts)]
    assert cache.stats().slots[SlotKind.PAGE][PageState.RESIDENT] == 12 + 6 + 1
    for seed, (prompt, kv) in enumerate(zip(prompts, kept, strict=True)):
        model.load_and_check(cache, prompt, kv, 50 + seed)


@needs_xxhash
@pytest.mark.parametrize("planes", sorted(PLANES))
def test_every_page_comes_back_from_disk(
    make: Callable[[str], Model], planes: str, tmp_path: pathlib.Path
) -> None:
    """Written from the host, forgotten there, prefetched and loaded: the same bytes."""
    model = make(planes)
    storage = {"enabled": True, "backend": "file", "path": str(tmp_path)}
    cache = model.cache(storage=None, **_config(storage))
    prompts = [model.prompt(seed, 7) for seed in (1, 2)]
    kept = [model.keep(cache, prompt, seed) for seed, prompt in enumerate(prompts)]
    assert cache.flush(60).complete
    cache.reset()
    for prompt, kv in zip(prompts, kept, strict=True):
        assert cache.match(prompt).num_tokens == 0
        fetch = cache.prefetch(prompt)
        fetch.wait()
        assert fetch.result().num_tokens == len(prompt), fetch.result()
        model.load_and_check(cache, prompt, kv)


def _config(storage: dict[str, Any]) -> dict[str, Any]:
    """The argument `storage` is a backend; settings of that name go by a config."""
    from kvferry.config import Config

    return {"config": Config.resolve(None, {}, storage=storage).config}


_SECOND_PROCESS = """
import sys
sys.path[:0] = {paths!r}
import torch
from test_cache import PLANES, Model, _config

model = Model(PLANES["mla"], {mover!r})
cache = model.cache(storage=None, **_config({storage!r}))
prompt = model.prompt(1, 7)
fetch = cache.prefetch(prompt)
fetch.wait()
assert fetch.result().num_tokens == len(prompt), fetch.result()
model.poison()
loaded = model.load_and_check(cache, prompt, model.kv(prompt))
model.close()
print("verified", loaded.verified_pages)
"""


@needs_xxhash
def test_a_second_process_finds_what_the_first_stored(model: Model, tmp_path: pathlib.Path) -> None:
    """The same weights compute the same bytes there, which are those that come from disk."""
    storage = {"enabled": True, "backend": "file", "path": str(tmp_path)}
    cache = model.cache(storage=None, **_config(storage))
    model.keep(cache, model.prompt(1, 7))
    assert cache.flush(60).complete
    assert cache.close().clean
    model.caches.clear()
    code = _SECOND_PROCESS.format(
        paths=[str(pathlib.Path(__file__).parent), *sys.path], mover=model.mover, storage=storage
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "verified 7\n"


# ---------------------------------------------------------------------------- streams


def test_a_store_comes_after_its_producer(model: Model, slow: _Slow) -> None:
    """Rows that a slow stream has yet to write are stored as it writes them."""
    cache = model.warm_cache(5)
    prompt = model.prompt(1, 5)
    kv, rows = model.kv(prompt), model.rows(1, 5)
    at, producer = model.at(rows), new_stream()
    torch.cuda.synchronize()
    slow(producer)
    with torch.cuda.stream(producer):
        model.fill(at, kv)
    stored = cache.store(prompt, device_slots=rows, stream=producer.cuda_stream)
    cache.poll()
    assert not stored.done
    assert cache.match(prompt).num_tokens == 0
    stored.wait()
    torch.cuda.synchronize()
    model.poison()
    model.load_and_check(cache, prompt, kv)


def test_without_that_order_the_store_takes_what_was_there(model: Model, slow: _Slow) -> None:
    """Control: behind an idle stream, the store overtakes the producer."""
    cache = model.warm_cache(5)
    prompt = model.prompt(1, 5)
    kv, rows = model.kv(prompt), model.rows(1, 5)
    model.poison()
    at, producer, idle = model.at(rows), new_stream(), new_stream()
    torch.cuda.synchronize()
    slow(producer)
    with torch.cuda.stream(producer):
        model.fill(at, kv)
    cache.store(prompt, device_slots=rows, stream=idle.cuda_stream).wait()
    torch.cuda.synchronize()
    pool, slot = model.slot_of(cache, prompt, 0)
    with pool.slot_view(slot) as memory:
        assert memory[0] == POISON


def _read_and_load(model: Model, slow: _Slow, *, ordered: bool) -> tuple[Any, Any]:
    """Read rows late in a stream, load over them meanwhile; what was seen, and before."""
    cache = model.warm_cache(5)
    prompt = model.prompt(1, 5)
    kv, rows = model.keep(cache, prompt), model.rows(2, 5)
    name = model.planes[0].name
    before, reader, idle = model.tensors[name].clone(), new_stream(), new_stream()
    seen = torch.zeros_like(before)
    torch.cuda.synchronize()
    slow(reader)
    with torch.cuda.stream(reader):
        seen.copy_(model.tensors[name])
    behind = reader if ordered else idle
    with cache.match(prompt) as found:
        loaded = cache.load(found, device_slots=rows, stream=behind.cuda_stream)
        loaded.wait()
    torch.cuda.synchronize()
    assert loaded.verified_pages == 5
    model.check(rows, kv, "after the load")
    return seen, before


def test_a_load_comes_after_the_readers(model: Model, slow: _Slow) -> None:
    """What a slow stream still reads is overwritten only after it was read."""
    seen, before = _read_and_load(model, slow, ordered=True)
    assert torch.equal(seen, before)


def test_without_that_order_a_reader_sees_the_load(model: Model, slow: _Slow) -> None:
    """Control: behind an idle stream, the load overtakes the reader."""
    seen, before = _read_and_load(model, slow, ordered=False)
    assert not torch.equal(seen, before)


def test_a_consumer_takes_layer_after_layer(model: Model, slow: _Slow) -> None:
    """A stream that waits for a layer finds its bytes, though the load begins late."""
    cache = model.warm_cache(5)
    prompt = model.prompt(1, 5)
    kv, rows = model.keep(cache, prompt), model.rows(2, 5)
    work, consumer = new_stream(), new_stream()
    at, seen = model.at(rows), torch.zeros_like(kv["latent"])
    torch.cuda.synchronize()
    slow(work)
    found = cache.match(prompt)
    loaded = cache.load(found, device_slots=rows, stream=work.cuda_stream)
    with torch.cuda.stream(consumer):
        for layer in range(model.planes[0].num_layers):
            loaded.wait_layer(layer, consumer.cuda_stream)
            seen[layer] = model.tensors["latent"][layer, at]
    assert not loaded.done
    consumer.synchronize()
    assert torch.equal(seen, kv["latent"])
    loaded.wait()
    assert loaded.verified_pages == 5
    found.release()


def test_indices_on_the_device_with_gaps(model: Model, slow: _Slow) -> None:
    """Pages 1 and 3 are stored anew, by indices that a slow stream has yet to write."""
    cache = model.warm_cache(5)
    prompt = model.prompt(1, 5)
    kv, rows = model.keep(cache, prompt), model.rows(3, 5)
    for page in (1, 3):
        model.flip(cache, prompt, page)
    with cache.match(prompt) as found:
        bad = cache.load(found, device_slots=model.rows(2, 5))
        bad.wait()
    assert (bad.usable_tokens, bad.bad_pages) == (PAGE, (1, 3))
    cache.poll()
    producer, ready = new_stream(), model.at(rows)
    late = torch.zeros_like(ready)
    torch.cat([ready, ready])
    for seed, pages in ((97, 5), (98, 2)):  # buffers for indices on the device
        cache.store(model.prompt(seed, pages), device_slots=ready[: pages * PAGE]).wait()
    model.poison()
    torch.cuda.synchronize()
    slow(producer)
    with torch.cuda.stream(producer):
        model.fill(ready, kv)
        late.copy_(ready)
    stored = cache.store(prompt, device_slots=late, stream=producer.cuda_stream)
    with torch.cuda.stream(producer):
        late.zero_()  # it may be written again at once
    assert not stored.done, "the call waited for the stream"
    stored.wait()
    assert stored.num_stored == 2
    torch.cuda.synchronize()
    model.poison()
    model.load_and_check(cache, prompt, kv)


def test_what_is_evicted_is_stored_before_it_is_overwritten(model: Model, slow: _Slow) -> None:
    """Under write_back: a stream that waited for the eviction may write the rows at once."""
    cache = model.warm_cache(6, store={"policy": "write_back"})
    prompt = model.prompt(1, 6)
    kv, rows = model.kv(prompt), model.rows(1, 6)
    later = new_stream()
    model.fill(model.at(rows), kv)
    torch.cuda.synchronize()
    assert cache.store(prompt, device_slots=rows).reason is Reason.NOT_WRITTEN_BACK
    work = new_stream()
    torch.cuda.synchronize()
    slow(work)
    evicted = cache.evicting(prompt, device_slots=rows, stream=work.cuda_stream)
    evicted.wait_all(later.cuda_stream)
    with torch.cuda.stream(later):
        model.poison()
    assert not evicted.done
    evicted.wait()
    later.synchronize()
    assert evicted.num_stored == 6
    model.load_and_check(cache, prompt, kv)


# --------------------------------------------------------------------- pressure, damage


def test_a_host_that_is_too_small_keeps_the_latest(model: Model) -> None:
    """Twelve prompts through room for four: what is found is whole and right, the rest a miss."""
    metrics = Told()
    cache = model.cache(
        host={"num_bytes": int(4 * 6.5 * model.geometry.page_bytes)}, metrics=metrics
    )
    prompts = [model.prompt(seed, 6) for seed in range(12)]
    for turn in range(2):
        for seed, prompt in enumerate(prompts):
            kv = model.keep(cache, prompt, seed)
            model.load_and_check(cache, prompt, kv, 90 + turn)
    assert metrics.evictions >= 2 * 8 * 6 - 12
    found = [cache.match(prompt) for prompt in prompts]
    for prompt, one in zip(prompts, found, strict=True):
        pages = one.num_tokens // PAGE
        if pages:
            rows = model.rows(5, pages)
            loaded = cache.load(one, device_slots=rows)
            loaded.wait()
            assert loaded.verified_pages == pages
            model.check(rows, {n: kv[:, : pages * PAGE] for n, kv in model.kv(prompt).items()}, "")
            model.poison()
        one.release()
    assert found[-1].num_tokens == 6 * PAGE
    assert found[0].num_tokens == 0


@pytest.mark.parametrize("page", [0, 4])
def test_a_bad_page_on_the_host_is_a_miss(model: Model, page: int) -> None:
    """One bit: the pages before it are served, it is counted and thrown out, and stored anew."""
    metrics = Told()
    cache = model.cache(metrics=metrics)
    prompt = model.prompt(1, 6)
    kv = model.keep(cache, prompt)
    model.flip(cache, prompt, page, byte=model.geometry.page_bytes - 1)
    rows = model.rows(2, 6)
    with cache.match(prompt) as found:
        loaded = cache.load(found, device_slots=rows)
        loaded.wait()
    assert (loaded.usable_tokens, loaded.verified_pages) == (page * PAGE, page)
    assert loaded.bad_pages == (page,)
    assert metrics.failures == [(Tier.HOST, 1)]
    cache.poll()
    assert cache.match(prompt).num_tokens == page * PAGE
    model.poison()
    model.keep(cache, prompt)
    model.load_and_check(cache, prompt, kv)


@needs_xxhash
def test_a_bad_page_on_disk_is_a_miss(model: Model, tmp_path: pathlib.Path) -> None:
    """One byte of a file: the pages before it come back, and nothing wrong does."""
    storage = {"enabled": True, "backend": "file", "path": str(tmp_path)}
    cache = model.cache(storage=None, **_config(storage))
    prompt = model.prompt(1, 5)
    kv = model.keep(cache, prompt)
    assert cache.flush(60).complete
    cache.reset()
    key = cache.keys(prompt)[3].hex()
    (file,) = [one for one in tmp_path.rglob("*") if one.is_file() and key in one.name]
    with file.open("r+b") as opened:
        opened.seek(-1000, 2)
        byte = opened.read(1)
        opened.seek(-1000, 2)
        opened.write(bytes([byte[0] ^ 1]))
    fetch = cache.prefetch(prompt)
    fetch.wait()
    assert fetch.result().num_tokens == 3 * PAGE
    rows = model.rows(2, 3)
    with cache.match(prompt) as found:
        loaded = cache.load(found, device_slots=rows)
        loaded.wait()
    assert loaded.verified_pages == 3
    model.check(rows, {name: values[:, : 3 * PAGE] for name, values in kv.items()}, "three pages")
    model.poison()


# ---------------------------------------------------------------------------- telling


def test_the_link_is_told_by_the_clock_of_the_gpu(model: Model, slow: _Slow) -> None:
    """A stream that keeps a transfer waiting is in no figure: seconds are those of its bytes."""
    metrics = Told()
    cache = model.cache(metrics=metrics)
    prompt = model.prompt(1, 12)
    rows = model.rows(1, 12)
    model.fill(model.at(rows), model.kv(prompt))
    work = new_stream()
    torch.cuda.synchronize()
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    started.record(work)
    slow(work)
    stored = cache.store(prompt, device_slots=rows, stream=work.cuda_stream)
    stored.wait_all(work.cuda_stream)
    ended.record(work)
    stored.wait()
    work.synchronize()
    (told,) = metrics.transfers
    waited = started.elapsed_time(ended) / 1e3
    assert 0 < told["seconds"] < waited
    # Neither faster than any link, nor with the time in which it waited.
    assert 1e9 < told["num_bytes"] / told["seconds"] < 1e12
    assert metrics.routes == [(Direction.STORE, model.mover, metrics.routes[0][2])]
    cache.poll()
    speeds = {direction: speed for direction, speed, _ in metrics.links}
    assert speeds[Direction.STORE] == pytest.approx(
        told["num_bytes"] / told["seconds"] / 1e9, rel=1e-6
    )
    model.poison()


@pytest.mark.parametrize("huge_pages", ["off", "auto"])
def test_host_memory_near_to_the_gpu(model: Model, huge_pages: str) -> None:
    """It serves whatever memory came, and says which."""
    cache = model.cache(host={"huge_pages": huge_pages, "numa": "auto"})
    prompt = model.prompt(1, 4)
    kv = model.keep(cache, prompt)
    model.load_and_check(cache, prompt, kv)
    backing = cache._pools[SlotKind.PAGE].backing
    assert dataclasses.is_dataclass(backing)
    assert not any("no device was named" in note for note in backing.notes)
