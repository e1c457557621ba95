"""What a cache is made with: sections that have the names of arguments, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cache import KVFerry
from kvferry.config import Config
from kvferry.errors import ConfigError, PageKeyError, PlanError, StorageError
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.index import ContentSpan, Namespace
from kvferry.memory import HostPool
from kvferry.metrics import Metrics
from kvferry.storage import MemoryBackend
from kvferry.tiers import LinkState, TierManager
from kvferry.transfer import TransferEngine
from kvferry.types import SlotKind

PAGE = 4
TOKENS = list(range(16))
GEOMETRY = Geometry(planes=(Plane(name="k", num_layers=2, element_size=24),), page_size=PAGE)


def make(**given: Any) -> KVFerry:
    """A cache over a pool of 40 rows."""
    pool = {"k": [np.zeros((40, 24), dtype=np.uint8) for _ in range(2)]}
    return KVFerry(
        GEOMETRY,
        PoolView.from_tensors(GEOMETRY, pool),
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint),
        host={"num_bytes": "64KiB"},
        load={"threshold_tokens": 1},
        **given,
    )


def test_sections_with_the_names_of_arguments(tmp_path: Path) -> None:
    """`storage` and `metrics` may be settings as well, and are checked as such."""
    section = {"enabled": True, "path": str(tmp_path)}
    with make(storage=section, metrics={"enabled": True, "max_events": 3}) as cache:
        assert cache.config.storage.path == tmp_path
        assert cache.config.metrics.max_events == 3
        assert isinstance(cache.metrics, Metrics)
        cache.store(TOKENS, device_slots=np.arange(16)).wait()
        assert cache.flush(20).complete
    assert len(list(tmp_path.glob("??/*.kvo"))) == 4
    with pytest.raises(ConfigError, match=r"storage\.pat"):
        make(storage={"pat": str(tmp_path)})


def test_storage_by_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an argument, as a setting, by the environment, and on a running cache."""
    url = f"file://{tmp_path}?num_threads=2"
    monkeypatch.setenv("KVFERRY_STORAGE_PATH", "/nowhere")  # an argument is instead of settings
    with make(storage=url) as cache:
        cache.store(TOKENS, device_slots=np.arange(16)).wait()
        assert cache.flush(20).complete
    assert len(list(tmp_path.glob("??/*.kvo"))) == 4
    monkeypatch.delenv("KVFERRY_STORAGE_PATH")
    with pytest.raises(ConfigError, match="fsync"):  # options beside the URL reach the backend
        make(storage={"enabled": True, "url": url, "options": {"fsync": "no"}})
    monkeypatch.setenv("KVFERRY_STORAGE_URL", url)
    monkeypatch.setenv("KVFERRY_STORAGE_ENABLED", "1")
    with make() as cache:
        assert cache.config.storage.url == url
        assert cache.stats().storage is LinkState.ATTACHED
        assert cache.detach_storage(20)
        with pytest.raises(ConfigError, match="num_threads is given twice"):
            cache.attach_storage(url, num_threads=3)
        cache.attach_storage(url, fsync="data")
        assert cache.stats().storage is LinkState.ATTACHED


def test_a_cache_that_is_not_made_keeps_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that cannot be opened is an error of the constructor, after all pools were made."""
    closed: list[HostPool] = []
    close = HostPool.close

    def noted(pool: HostPool) -> None:
        closed.append(pool)
        close(pool)

    monkeypatch.setattr(HostPool, "close", noted)
    with pytest.raises(StorageError):
        make(storage={"enabled": True, "path": str(tmp_path / "no" / "such")})
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("part", "at"),
    [("parts.HostPool", 2), ("parts.TransferEngine", 2), ("ferry.TierManager", 1)],
    ids=str,
)
def test_a_part_that_cannot_be_made_leaves_none_of_the_others(
    monkeypatch: pytest.MonkeyPatch, part: str, at: int
) -> None:
    """Of two pools and two engines, those before it are closed, engines before their pools."""
    made: list[Any] = []
    closed: list[Any] = []
    num_calls = itertools.count(1)

    def noted(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            if name == part and next(num_calls) == at:
                raise ConfigError("no more of these")
            one = make(*args, **given)
            close = one.close

            def closing() -> None:
                close()
                closed.append(one)

            monkeypatch.setattr(one, "close", closing)
            made.append(one)
            return one

        return call

    for name, make in (("parts.HostPool", HostPool), ("parts.TransferEngine", TransferEngine)):
        monkeypatch.setattr(f"kvferry.cache.{name}", noted(name, make))
    if part == "ferry.TierManager":
        monkeypatch.setattr("kvferry.cache.ferry.TierManager", noted(part, TierManager))
    state = Plane(
        name="state", num_layers=1, element_size=8, rows_per_page=1,
        hit_rule=HitRule.exact_boundary(),
    )  # fmt: skip
    geometry = Geometry(planes=(*GEOMETRY.planes, state), page_size=PAGE)
    pool = {
        "k": [np.zeros((40, 24), dtype=np.uint8) for _ in range(2)],
        "state": [np.zeros((2, 8), dtype=np.uint8)],
    }
    with pytest.raises(ConfigError, match="no more of these"):
        KVFerry(
            geometry,
            PoolView.from_tensors(geometry, pool),
            namespace=Namespace(model="m", revision="1", dtype="u8", geometry=geometry.fingerprint),
            host={"num_bytes": "64KiB"},
        )
    assert (
        len(made) == {"parts.HostPool": 1, "parts.TransferEngine": 3, "ferry.TierManager": 4}[part]
    )
    assert closed == made[::-1]


def test_what_storage_is_remembered_to_have_is_a_setting() -> None:
    """With room for few hints, most of what only storage has is forgotten."""
    backend = MemoryBackend()
    section = {"backend": "memory", "max_hints": 1}
    few = KVFerry(
        GEOMETRY,
        PoolView.from_tensors(GEOMETRY, {"k": [np.zeros((40, 24), np.uint8) for _ in range(2)]}),
        Config.resolve(environ={}, storage=section, host={"num_bytes": 20_000}).config,
        namespace=Namespace(model="m", revision="1", dtype="u8", geometry=GEOMETRY.fingerprint),
        storage=backend,
    )
    with few as cache:
        num_slots = cache._manager._control.tiers[SlotKind.PAGE].num_slots
        for prompt in range(5 * num_slots):
            cache.store([prompt] * PAGE, device_slots=np.arange(PAGE)).wait()
            assert cache.flush(20).num_left == 0
        assert backend.stats().objects == 5 * num_slots
        assert cache._manager._control.index.num_stored <= 2 * num_slots


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1, -0.001, 86_401, "5", None, True])
def test_times_that_are_none_are_refused(seconds: Any) -> None:
    """Every wait says which value it cannot take, and what it can; and nothing has begun."""
    with make(storage=MemoryBackend()) as cache:
        stored = cache.store(TOKENS, device_slots=np.arange(16))
        waits: dict[str, Callable[[], Any]] = {
            "detach_storage": lambda: cache.detach_storage(timeout=seconds),
            "forced": lambda: cache.detach_storage(timeout=seconds, force=True),
            "wait": lambda: cache.wait(seconds),
            "flush": lambda: cache.flush(seconds),
            "close": lambda: cache.close(seconds),
            "handle": lambda: stored.wait(seconds),
            "explain": lambda: cache.explain(TOKENS, storage_timeout=seconds),
        }
        for wait in waits.values():
            with pytest.raises(ConfigError, match=rf"timeout={seconds!r}.* 0 to 86400"):
                wait()
        stored.wait(0)  # no time is enough for what is over
        assert cache.flush(20).complete  # storage is there still


@pytest.mark.parametrize("tokens", [None, 5, object(), iter([1, 2])])
def test_what_is_no_prompt_is_refused(tokens: Any) -> None:
    """By every call that takes one, in words."""
    with make() as cache:
        for call in (cache.match, cache.store, cache.evicting, cache.prefetch, cache.explain):
            with pytest.raises(PageKeyError, match=r"tokens .*; pass"):
                call(tokens)
        with pytest.raises(PlanError, match="valid_tokens is -1; give 0 or at most 16"):
            cache.store(TOKENS, device_slots=np.arange(16), valid_tokens=-1)
        cache.check_integrity()


def test_a_prompt_that_can_be_gone_through_once() -> None:
    """Spans of content may come from an iterator, also where only some tokens are filled."""
    spans = [ContentSpan(0, 2, b"a picture")]
    with make() as cache:
        cache.store(TOKENS, device_slots=np.arange(16), valid_tokens=12, content=iter(spans)).wait()
        assert cache.match(TOKENS, content=iter(spans)).num_tokens == 12
        assert cache.match(TOKENS).num_tokens == 0


def test_slots_of_a_plane_that_is_not_there_are_refused() -> None:
    """A plane's name with a slip would otherwise be rows that nobody moves."""
    with make() as cache, pytest.raises(PlanError, match=r"'kk'.*has: k"):
        cache.store(TOKENS, device_slots=np.arange(16), plane_slots={"kk": [1]})
