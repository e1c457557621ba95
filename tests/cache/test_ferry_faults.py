"""`KVFerry` given what it should not be given, and backends that do what none may."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.cache.ferry_rig import PAGE, STATE, TOKENS, Engine, K, equal

from kvferry.errors import BackendInterfaceError, ConfigError, PlanError, StorageError
from kvferry.geometry import HitRule, Plane
from kvferry.ranks import ThreadRanks
from kvferry.storage import Buffers, ItemResult, ItemStatus, MemoryBackend
from kvferry.testing.faulty_backend import Fault, FaultKind, FaultyBackend
from kvferry.tiers import Reason
from kvferry.tiers.state import Actor
from kvferry.types import SlotKind

WINDOW = Plane(name="window", num_layers=2, element_size=16, hit_rule=HitRule.last(6))


@pytest.mark.parametrize("skip", [-PAGE, -1, 4.0, "4", None], ids=repr)
def test_skip_tokens_that_are_no_count_are_refused(skip: Any) -> None:
    """A page before the first would be the last, counted from the end: nothing moves."""
    engine = Engine()
    with engine.cache() as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        was = engine.rows(0, 160)
        with pytest.raises(PlanError, match="skip_tokens"):
            cache.load(cache.match(TOKENS), device_slots=np.arange(100, 130), skip_tokens=skip)
        assert equal(engine.rows(0, 160), was)


@pytest.mark.parametrize("valid", [-1, 19, 7.5, "4"], ids=repr)
def test_valid_tokens_that_are_no_count_are_refused(valid: Any) -> None:
    """Counted from the end, rows that are not filled would be stored."""
    with Engine().cache() as cache:
        with pytest.raises(PlanError, match="valid_tokens"):
            cache.store(TOKENS, device_slots=np.arange(18), valid_tokens=valid)
        assert cache.match(TOKENS).num_tokens == 0


def test_the_rows_of_a_checkpoint_that_are_refused() -> None:
    """Pages that are read or written already belong to a handle, which says what was refused."""
    engine = Engine((K, STATE))
    with engine.cache() as cache:
        given: dict[str, Any] = {"valid_tokens": 16, "device_slots": np.arange(18)}
        bad, good = {"state": [10**6]}, {"state": [7]}
        stored = cache.store(TOKENS, plane_slots=bad, has_state=True, **given)
        stored.wait()
        assert (stored.num_stored, stored.reason) == (4, Reason.TRANSFER_FAILED)
        assert "PlanError" in stored.error
        cache.check_integrity()
        cache.store(TOKENS, plane_slots=good, has_state=True, **given).wait()
        found = cache.match(TOKENS)
        assert found.num_tokens == 16
        loaded = cache.load(found, device_slots=np.arange(100, 116), plane_slots=bad)
        loaded.wait()
        assert (loaded.usable_tokens, loaded.reason) == (0, Reason.TRANSFER_FAILED)
        assert "PlanError" in loaded.error
        assert loaded.verified_pages == 0
        cache.check_integrity()


def test_rows_that_two_transfers_of_a_load_would_share() -> None:
    """A window is loaded by a transfer of its own: slots are looked at over both."""
    engine = Engine((K, WINDOW))
    with engine.cache() as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        was = engine.rows(100, 16)
        slots = np.arange(100, 116)
        slots[15] = slots[0]
        with pytest.raises(PlanError, match="100 twice"):
            cache.load(cache.match(TOKENS), device_slots=slots)
        assert equal(engine.rows(100, 16), was)
        loaded = cache.load(cache.match(TOKENS), device_slots=np.arange(100, 116))
        loaded.wait()
        assert loaded.usable_tokens == 16


class _Bad(MemoryBackend):
    """Raises or returns what no backend may."""

    def __init__(self, answer: Any = None, closing: BaseException | None = None) -> None:
        super().__init__()
        self.answer = answer
        self.closing = closing
        self.num_closed = 0

    def write_from(self, keys: Sequence[bytes], buffers: Sequence[Buffers]) -> list[ItemResult]:
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            return self.answer  # type: ignore[no-any-return]
        return super().write_from(keys, buffers)

    def close(self) -> None:
        self.num_closed += 1
        if self.closing is not None:
            raise self.closing
        super().close()


opened: list[_Bad] = []


class Listed(_Bad):
    """Opened by name; noted in `opened`."""

    def __init__(self) -> None:
        super().__init__(OSError(5, "as told"))
        opened.append(self)


@pytest.mark.parametrize(
    "answer", [RuntimeError("as told"), [], [None], "yes", [ItemResult] * 2], ids=repr
)
def test_a_probe_makes_one_error_of_all_that_a_backend_does(answer: Any) -> None:
    """What is raised is kvferry's, and says which step of the probe it was."""
    with Engine().cache() as cache:
        with pytest.raises(StorageError, match="write of a probe"):
            cache.attach_storage(_Bad(answer))
        cache.attach_storage("memory")


def test_a_backend_that_was_opened_and_not_attached_is_closed() -> None:
    """Nobody else has it."""
    with Engine().cache() as cache:
        with pytest.raises(StorageError, match="as told"):
            cache.attach_storage(f"{__name__}:Listed")
        assert opened.pop().num_closed == 1


@pytest.mark.parametrize("given", [7, MemoryBackend], ids=repr)
def test_what_is_no_backend_is_refused_by_name(given: Any) -> None:
    """A class too: nobody opened it."""
    with pytest.raises(BackendInterfaceError, match="storage="):
        Engine().cache(storage=given)


def test_options_are_for_a_backend_that_is_opened_here() -> None:
    """They would be passed over."""
    with Engine().cache() as cache, pytest.raises(ConfigError, match="capacity_bytes"):
        cache.attach_storage(MemoryBackend(), capacity_bytes=1)


@pytest.mark.parametrize("closing", [OSError(5, "as told"), SystemExit(1), KeyboardInterrupt()])
def test_a_backend_that_raises_as_it_is_closed(closing: BaseException) -> None:
    """It is gone all the same, and the cache ends."""
    cache = Engine().cache(storage=_Bad(closing=closing))
    assert cache.detach_storage(20)
    assert cache.close(20).clean


def test_flush_asks_storage_what_it_kept() -> None:
    """Pages that made room for others are not stored, whatever was answered when they were."""
    backend = MemoryBackend(capacity_bytes=3 * 8192)
    with Engine().cache(storage=backend) as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        report = cache.flush(20)
        assert backend.stats().objects == 3
        assert (report.complete, report.num_unstored) == (False, 1)


def test_flush_does_not_hammer_a_storage_that_refuses() -> None:
    """A few tries, and it says what is not stored."""
    backend = FaultyBackend()
    refused = Fault(FaultKind.STATUS, result=ItemResult(ItemStatus.REFUSED))
    backend.script("write_from", None, refused, always=True)
    with Engine().cache() as cache:
        cache.attach_storage(backend, probe=False)
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        report = cache.flush(60)
        assert (report.complete, report.num_left, report.num_unstored) == (False, 0, 4)
        assert backend.count("write_from", cache.keys(TOKENS)[0]) < 10


def test_flush_writes_again_what_storage_lost() -> None:
    """As when somebody else emptied it."""
    backend = MemoryBackend()
    with Engine().cache(storage=backend) as cache:
        cache.store(TOKENS, device_slots=np.arange(18)).wait()
        assert cache.flush(20).complete
        assert all(one.ok for one in backend.delete(cache.keys(TOKENS)))
        assert cache.flush(20).complete
        assert backend.stats().objects == 4


def _run_ranks(planes: tuple[Plane, ...], lost: Any, plane_slots: dict[str, Any]) -> dict[int, Any]:
    """Both ranks have prefixes of 8 and 16 tokens; rank 1 loses `lost` between match and load."""
    ranks = ThreadRanks.make(2)
    told: dict[int, Any] = {}

    def run(number: int) -> None:
        engine = Engine(planes)
        with engine.cache(ranks=ranks[number]) as cache:
            for valid in (8, 16):
                cache.store(
                    TOKENS,
                    valid_tokens=valid,
                    device_slots=np.arange(18),
                    plane_slots={name: [valid] for name in plane_slots},
                    has_state=bool(plane_slots),
                ).wait()
            found = cache.match(TOKENS)
            if number == 1:
                control = cache._manager._control
                for kind, page in lost:
                    node = control.chain_nodes(cache.keys(TOKENS))[page]
                    control.tiers[kind].drop(node, Actor.INTEGRITY)
            loaded = cache.load(found, device_slots=np.arange(100, 116), plane_slots=plane_slots)
            loaded.wait()
            told[number] = (loaded.usable_tokens, loaded.agreed_tokens(20))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return told


def test_ranks_never_agree_on_a_prefix_that_one_has_no_state_of() -> None:
    """Rank 0 has the state after 16 tokens in its rows: 8 tokens are of no use there."""
    told = _run_ranks((K, STATE), [(SlotKind.STATE, 3)], {"state": [90]})
    assert told == {0: (16, 0), 1: (8, 0)}


def test_ranks_never_agree_on_a_prefix_that_one_has_no_window_of() -> None:
    """Rank 0 loaded the window at the end of 16 tokens alone."""
    told = _run_ranks((K, WINDOW), [(SlotKind.PAGE, 3)], {})
    assert told == {0: (16, 0), 1: (12, 0)}


def test_ranks_agree_on_the_shorter_of_two_plain_prefixes() -> None:
    """Where every shorter prefix will do, the smaller number does."""
    told = _run_ranks((K,), [(SlotKind.PAGE, 3)], {})
    assert told == {0: (16, 12), 1: (12, 12)}
