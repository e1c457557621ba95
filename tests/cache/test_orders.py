"""Orders over the control socket, to a cache whose thread only polls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.cache.ferry_rig import TOKENS, Engine, equal

from kvferry import KVFerry
from kvferry.control import Answer, Order, ask
from kvferry.errors import ControlError
from kvferry.ranks import ThreadRanks
from kvferry.storage import Buffers, ItemResult, MemoryBackend
from kvferry.tiers import LinkState

_SECS = 60.0
_HERE = __name__


class Stuck(MemoryBackend):
    """Writes wait until they may go on."""

    may_write: ClassVar[threading.Event]
    writing: ClassVar[threading.Event]
    closed: ClassVar[threading.Event]

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        self.writing.set()
        assert self.may_write.wait(_SECS)
        return super().write_from(keys, buffers)

    def close(self) -> None:
        super().close()
        self.closed.set()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is stuck before a test, nor behind it."""
    Stuck.may_write, Stuck.writing, Stuck.closed = (threading.Event() for _ in range(3))
    yield
    Stuck.may_write.set()


class Ordered:
    """A cache that listens, and orders to it while it polls."""

    def __init__(self, cache: KVFerry, path: Path) -> None:
        self.cache, self.path = cache, path
        self._pool = ThreadPoolExecutor(1)

    def order(
        self,
        command: str,
        timeout: float = 30.0,
        meanwhile: Callable[[], object] = lambda: None,
        **options: Any,
    ) -> Answer:
        """What it says."""
        asked = self._pool.submit(ask, self.path, Order(command, options, timeout))
        while not asked.done():
            self.cache.wait(0.01)
            meanwhile()
        return asked.result()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a socket."""
    return tmp_path / "s"


@pytest.fixture
def ordered(path: Path) -> Iterator[Ordered]:
    """A cache without storage."""
    with Engine().cache(control={"socket": str(path)}) as cache:
        yield Ordered(cache, path)


def fill(cache: KVFerry, tokens: Sequence[int] = TOKENS) -> None:
    """A prompt on the host."""
    cache.store(tokens, device_slots=np.arange(len(tokens))).wait(_SECS)


def test_storage_that_comes_and_goes(ordered: Ordered, tmp_path: Path) -> None:
    """Attached, flushed to and detached from outside; a second cache finds every byte."""
    url = (tmp_path / "kv").as_uri()
    fill(ordered.cache)
    told = ordered.order("status")
    assert told.ok
    assert told.result["storage"] == "none"
    assert told.result["slots"]["page"]["resident"] == len(TOKENS) // 4
    told = ordered.order("attach", url=url)
    assert told.ok, told.error
    assert told.result["storage"] == "attached"
    told = ordered.order("attach", url=url)
    assert not told.ok
    assert "attached already" in told.error
    told = ordered.order("flush")
    assert told.result == {"complete": True, "num_left": 0, "num_unstored": 0, "num_holes": 0}
    told = ordered.order("detach")
    assert told.result["detached"] is True
    assert ordered.cache.stats().storage is LinkState.NONE
    assert ordered.order("detach").result["detached"] is True  # it is gone already

    engine = Engine(seed=1)
    whole = len(TOKENS) // 4 * 4
    was = Engine().rows(0, whole)
    other = tmp_path / "other"
    with engine.cache(control={"socket": str(other)}) as cache:
        second = Ordered(cache, other)
        assert second.order("attach", url=url).ok
        cache.prefetch(TOKENS).wait(_SECS)
        with cache.match(TOKENS) as found:
            loaded = cache.load(found, device_slots=np.arange(len(TOKENS)))
            loaded.wait(_SECS)
        assert loaded.usable_tokens == whole
        assert equal(engine.rows(0, whole), was)


def test_a_flush_that_cannot_end(ordered: Ordered) -> None:
    """What hangs is told at its deadline, and requests go on meanwhile."""
    cache = ordered.cache
    cache.attach_storage(f"{_HERE}:Stuck", probe=False)
    fill(cache)
    hits = []

    def use() -> None:
        with cache.match(TOKENS) as found:
            hits.append(found.num_tokens)

    told = ordered.order("flush", timeout=0.5, meanwhile=use)
    assert told.ok
    assert told.result["complete"] is False
    assert told.result["num_left"] > 0
    assert hits
    assert set(hits) == {len(TOKENS) // 4 * 4}

    told = ordered.order("detach", timeout=0.5)
    assert told.result["detached"] is False
    assert told.result["storage"] == "detaching"
    assert not Stuck.closed.is_set()
    Stuck.may_write.set()
    assert ordered.order("detach").result["detached"] is True
    assert Stuck.closed.is_set()
    cache.check_integrity()


def test_a_detach_by_force(ordered: Ordered) -> None:
    """What is not over in time is given up; its backend is closed when it comes back."""
    cache = ordered.cache
    cache.attach_storage(f"{_HERE}:Stuck", probe=False)
    fill(cache)
    told = ordered.order("flush", timeout=0.2)
    assert Stuck.writing.is_set()
    told = ordered.order("detach", timeout=0.2, force=True)
    assert told.result["detached"] is True
    assert told.result["storage"] == "none"
    assert ordered.order("attach", url="memory://").ok
    assert ordered.order("flush").result["complete"] is True
    Stuck.may_write.set()
    assert Stuck.closed.wait(_SECS)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("stop", {}, "'stop' is no command; these are: status, attach, detach, flush"),
        ("status", {"deep": True}, "status has no option 'deep'"),
        ("detach", {"force": 1}, "must be a bool"),
        ("attach", {}, "wants the URL"),
        ("attach", {"url": "/var/cache"}, "wants the URL"),
        ("attach", {"url": "nothing://x"}, "nothing"),
        ("attach", {"url": "file:///proc/kv"}, "/proc/kv"),
    ],
)
def test_orders_that_are_refused(
    ordered: Ordered, command: str, options: dict[str, Any], words: str
) -> None:
    """By their reason; the cache is as it was."""
    told = ordered.order(command, **options)
    assert not told.ok
    assert words in told.error
    assert ordered.order("status").result["storage"] == "none"


def test_an_order_whose_client_was_told_that_it_is_not_done(ordered: Ordered) -> None:
    """It is not done later, when the process polls again."""
    told = ask(ordered.path, Order("attach", {"url": "memory://"}, 0.05))  # nobody polls
    assert "not done in 0.05 s" in told.error
    for _ in range(3):
        ordered.cache.poll()
    assert ordered.cache.stats().storage is LinkState.NONE


def test_close_while_an_order_is_carried_out(path: Path) -> None:
    """The client is told; the path is free for the next cache."""
    cache = Engine().cache(control={"socket": str(path)})
    cache.attach_storage(f"{_HERE}:Stuck", probe=False)
    fill(cache)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, path, Order("flush", {}, 30.0))
        while not Stuck.writing.is_set() or cache._desk._current is None:  # type: ignore[union-attr]
            cache.wait(0.01)
        Stuck.may_write.set()
        cache.close()
        assert asked.result(_SECS).error == "the cache was closed"
    assert not path.exists()
    with Engine().cache(control={"socket": str(path)}):
        assert path.exists()


def test_two_caches_want_one_path(path: Path) -> None:
    """The second is refused, and gives back what it had; the first goes on."""
    with Engine().cache(control={"socket": str(path)}) as cache:
        threads = threading.active_count()
        with pytest.raises(ControlError, match="a path of its own"):
            Engine().cache(control={"socket": str(path)})
        assert threading.active_count() == threads
        assert Ordered(cache, path).order("status").ok


def test_nobody_listens_by_default() -> None:
    """There is no thread and no socket, unless a path was given."""
    with Engine().cache() as cache:
        assert cache._desk is None
        assert not [one for one in threading.enumerate() if one.name == "kvferry-control"]


def test_several_ranks_have_a_path_each(path: Path) -> None:
    """One config is enough for all of them."""

    def run(ranks: ThreadRanks) -> bool:
        with Engine().cache(control={"socket": str(path)}, ranks=ranks) as cache:
            own = path.with_name(f"{path.name}.{ranks.rank}")
            return Ordered(cache, own).order("status").ok

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, ThreadRanks.make(2))) == [True, True]
    assert list(path.parent.iterdir()) == []
