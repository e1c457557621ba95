"""Scheduler's side and workers' sides without an engine: what moves, is told, and is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.vllm.two_sides import Request, TwoSides, told

from kvferry.adapters.vllm.block_events import BlocksGone, BlocksKept
from kvferry.adapters.vllm.scheduler_side import SchedulerSide
from kvferry.errors import ConfigError
from kvferry.tiers import Command, MovePages, ProbeStorage
from kvferry.types import Direction, SlotKind, Tier

TOKENS = list(range(100, 122))  # five whole blocks and two tokens
FIRST = [7, 2, 9, 4, 1, 8]
OTHER = [20, 33, 21, 40, 22, 50]

Make = Callable[..., TwoSides]


@pytest.fixture
def make() -> Iterator[Make]:
    """Both sides, closed in the end."""
    made: list[TwoSides] = []

    def make(*args: Any, **kwargs: Any) -> TwoSides:
        made.append(TwoSides(*args, **kwargs))
        return made[-1]

    yield make
    for sides in made:
        sides.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("between_steps", [True, False])
def test_what_was_computed_comes_back_in_other_blocks(
    make: Make, ranks: int, *, between_steps: bool
) -> None:
    """Every rank has its own bytes again; nothing beside them was written."""
    sides = make(ranks=ranks, between_steps=between_steps)
    sides.compute(Request("a", TOKENS), FIRST)
    kept = sides.wipe(FIRST)
    sides.wipe(OTHER)
    request = Request("b", TOKENS)
    assert sides.look_up(request) == 20
    sides.scheduler.allocated(request, [OTHER], 20)
    assert sides.scheduler.tokens_by_tier(request, 20) == {Tier.HOST: 20}
    sides.step(*() if between_steps else (("b", 20, 2),))
    assert sides.loaded == ({"b"} if between_steps else set())
    assert not sides.lost
    assert sides.holds(OTHER, kept, range(5))
    assert all(not cache[OTHER[5]].any() for caches in sides.caches for cache in caches.values())
    sides.scheduler.finished("b")
    sides.rest()
    counts = sides.scheduler.counts.take()
    assert (counts["loaded_tokens"], counts["stored_tokens"]) == (20, 20)


def test_the_last_token_is_left_to_compute(make: Make) -> None:
    """A prompt of whole pages hits one page less."""
    sides = make()
    sides.compute(Request("a", TOKENS), FIRST)
    assert sides.look_up(Request("b", TOKENS[:20])) == 16
    assert sides.look_up(Request("c", TOKENS[:21]), num_computed=8) == 12
    assert sides.look_up(Request("d", TOKENS[:21]), num_computed=6) == 0  # inside of a page


def test_only_filled_pages_are_stored(make: Make) -> None:
    """A prompt in chunks is stored as far as it was computed, and no page twice."""
    sides = make()
    request = Request("a", TOKENS)
    sides.look_up(request)
    sides.scheduler.allocated(request, [FIRST[:3]], 0)
    stored = []
    for num_computed, num_new, blocks in (
        (0, 10, None),
        (10, 5, [FIRST[3:4]]),
        (15, 7, [FIRST[4:]]),
    ):
        sides.scheduler.new_blocks("a", blocks, replaces=False)
        meta = sides.step(("a", num_computed, num_new))
        stored.append([len(one.keys) for one in meta.commands if isinstance(one, MovePages)])
    assert stored == [[2], [1], [2]]


def test_tokens_that_are_not_known_yet_name_no_page(make: Make) -> None:
    """A step that runs ahead of its tokens stores what is known, and the rest later."""
    sides = make()
    request = Request("a", TOKENS[:8])
    sides.look_up(request)
    sides.scheduler.allocated(request, [FIRST], 0)
    sides.step(("a", 0, 8))
    meta = sides.step(("a", 8, 4))  # four tokens more than anybody has seen
    assert not [one for one in meta.commands if isinstance(one, MovePages)]
    request.all_token_ids = TOKENS[:13]
    meta = sides.step(("a", 12, 1))
    assert [len(one.keys) for one in meta.commands if isinstance(one, MovePages)] == [1]


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_page_that_one_rank_lost_is_lost(make: Make, bad_rank: int) -> None:
    """Its blocks are told, pages before it count, and it is not offered again."""
    sides = make(ranks=2)
    sides.compute(Request("a", TOKENS), FIRST)
    request = Request("b", TOKENS)
    assert sides.look_up(request) == 20
    sides.scheduler.allocated(request, [OTHER], 20)
    (load,) = [
        one
        for one in sides.scheduler._meta.commands
        if isinstance(one, MovePages) and one.direction is Direction.LOAD
    ]
    pool = sides.workers[bad_rank]._pools[SlotKind.PAGE]
    with pool.slot_view(load.host_slots[3]) as page:
        page[5] ^= 1
    sides.step()
    assert sides.loaded == {"b"}
    assert sides.lost == {OTHER[3]}
    sides.scheduler.finished("b")
    sides.rest()
    assert sides.look_up(Request("c", TOKENS)) == 12
    assert sides.scheduler.counts.take()["bad_pages"] == 1


def test_what_was_computed_beside_a_bad_load_is_not_stored(make: Make) -> None:
    """Layer by layer, a step computes on pages that are known to be bad only at its end."""
    sides = make(between_steps=False)
    sides.compute(Request("a", TOKENS), FIRST)
    longer = Request("b", [*TOKENS, *range(10)])
    assert sides.look_up(longer) == 20
    sides.scheduler.allocated(longer, [[*OTHER, 51, 52]], 20)
    (load,) = sides.scheduler._meta.commands
    assert isinstance(load, MovePages)
    pool = sides.workers[0]._pools[SlotKind.PAGE]
    with pool.slot_view(load.host_slots[0]) as page:
        page[5] ^= 1
    sides.step(("b", 20, 12))
    assert sides.lost == {OTHER[0]}
    sides.rest()
    # vLLM computes it again from the first bad block on; now it is stored.
    sides.step(("b", 0, 32))
    sides.scheduler.finished("b")
    sides.rest()
    assert sides.look_up(Request("c", [*TOKENS, *range(10), 5])) == 32
    assert sides.scheduler.counts.take()["failed_transfers"] == 1


def test_storage_is_asked_and_read_without_waiting(make: Make, tmp_path: Path) -> None:
    """What another run wrote is found; the look-up says None while it is being brought."""
    sections = {"storage": {"enabled": True, "path": str(tmp_path)}}
    one = make(sections, ranks=2)
    one.compute(Request("a", TOKENS), FIRST)
    kept = one.wipe(FIRST)
    two = make({"storage": {"enabled": True, "url": f"file://{tmp_path}?num_threads=2"}}, ranks=2)
    request = Request("b", TOKENS)
    assert two.scheduler.look_up(request, 0) == (None, False)
    assert two.look_up(request) == 20
    two.scheduler.allocated(request, [OTHER], 20)
    assert two.scheduler.tokens_by_tier(request, 20) == {Tier.STORAGE: 20}
    two.step()
    assert two.loaded == {"b"}
    assert two.holds(OTHER, kept, range(5))


def test_the_same_bytes_are_written_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of ranks with the same bytes one writes, and all of them read; others write each its own."""
    sections = {"storage": {"enabled": True, "path": str(tmp_path / "same")}}
    sides = make(sections, ranks=2, replicated=True)
    done: list[Command] = []
    follower = sides.workers[1].data

    def noted(command: Command) -> Any:
        done.append(command)
        return follower.submit(command)

    monkeypatch.setattr(follower, "execute", noted)
    sides.compute(Request("a", TOKENS), FIRST)
    assert [type(one) for one in done] == [ProbeStorage, MovePages]  # and nothing is written
    assert sides.scheduler.counts.take()["written_pages"] == 5
    objects = [path for path in (tmp_path / "same").rglob("*") if path.stat().st_size > 500]
    sections = {"storage": {"enabled": True, "path": str(tmp_path / "own")}}
    make(sections, ranks=2).compute(Request("a", TOKENS), FIRST)
    own = [path for path in (tmp_path / "own").rglob("*") if path.stat().st_size > 500]
    assert len([path for path in own if path.is_file()]) == 2 * len(
        [path for path in objects if path.is_file()]
    )
    again = make({"storage": {"enabled": True, "path": str(tmp_path / "same")}}, ranks=2,
                 replicated=True)  # fmt: skip
    assert again.look_up(Request("b", TOKENS)) == 20


def test_an_end_at_any_time_leaves_nothing(make: Make, tmp_path: Path) -> None:
    """After a look-up, during a prefetch, with a load on its way: all slots come back."""
    sides = make({"storage": {"enabled": True, "path": str(tmp_path)}})
    sides.compute(Request("a", TOKENS), FIRST)
    sides.look_up(Request("b", TOKENS))
    sides.scheduler.finished("b")
    request = Request("c", TOKENS)
    sides.look_up(request)
    sides.scheduler.allocated(request, [OTHER], 20)
    sides.scheduler.finished("c")
    sides.step()
    assert sides.loaded == {"c"}  # vLLM keeps the blocks until it is told
    sides.scheduler.reset()
    sides.scheduler.look_up(Request("d", TOKENS), 0)
    sides.scheduler.finished("d")
    sides.rest()
    stats = sides.scheduler.manager.stats()
    assert (stats.readers, stats.prefetches) == (0, 0)
    assert not sides.scheduler._requests


def test_namespaces_do_not_meet(make: Make, tmp_path: Path) -> None:
    """Salt, adapter, and a reset: nobody finds what another one stored."""

    class Adapter:
        lora_name, lora_path = "x", "/nowhere"

    sides = make({"storage": {"enabled": True, "path": str(tmp_path)}})
    sides.compute(Request("a", TOKENS), FIRST)
    others: tuple[dict[str, Any], ...] = (
        {"cache_salt": "x"},
        {"lora_request": Adapter()},
        {"kv_transfer_params": {"kvferry": {"skip_load": True}}},
    )
    for number, other in enumerate(others):
        assert sides.look_up(Request(f"b{number}", TOKENS, **other)) == 0
    running = Request("c", TOKENS)
    assert sides.look_up(running) == 20
    sides.scheduler.reset()
    assert sides.look_up(running) == 0
    assert sides.look_up(Request("d", TOKENS)) == 0
    with pytest.raises(ConfigError, match="skip_reading"):
        sides.look_up(Request("e", TOKENS, kv_transfer_params={"kvferry": {"skip_reading": True}}))


def test_events_have_the_hashes_of_the_engine(make: Make) -> None:
    """A page is told by what vLLM calls its blocks."""
    sides = make()
    hashes = tuple(bytes([number]) * 32 for number in range(5))
    sides.compute(Request("a", TOKENS, block_hashes=hashes), FIRST)
    assert sides.scheduler.take_events() == [BlocksKept(list(hashes), "CPU")]
    sides.scheduler.reset()
    (gone,) = sides.scheduler.take_events()
    assert isinstance(gone, BlocksGone)
    assert sorted(gone.hashes) == sorted(hashes)


def test_write_back_is_refused() -> None:
    """vLLM does not say when it evicts."""
    with pytest.raises(ConfigError, match="write_back"):
        SchedulerSide(told({"store": {"policy": "write_back"}}), {})
