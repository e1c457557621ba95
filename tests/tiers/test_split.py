"""Control plane and data plane in two processes, with nothing but pickled messages between."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.tiers import data_process
from tests.tiers.rig import FAST, PAGE, K, Rig, V

from kvferry.errors import CacheError
from kvferry.geometry import Geometry
from kvferry.index import Namespace, PrefixIndex, page_keys
from kvferry.memory import SlotOwners
from kvferry.tiers import (
    CommandQueue,
    Completion,
    DeviceSlots,
    Found,
    LinkState,
    MovePages,
    Reason,
    TierManager,
    TierOptions,
)
from kvferry.types import Direction, SlotKind

NUM_SLOTS = 8
ROWS = 40 * PAGE
TOKENS = list(range(5 * PAGE))


class TwoProcesses:
    """The control plane here, the data plane in a child."""

    def __init__(self) -> None:
        self.geometry = Geometry(planes=(K, V), page_size=PAGE)
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.child = context.Process(
            target=data_process.serve,
            args=(theirs, self.geometry.to_dict(), NUM_SLOTS, ROWS),
            daemon=True,
        )
        self.child.start()
        theirs.close()
        self.queue = CommandQueue()
        self.pool = SlotOwners(NUM_SLOTS)
        self.manager = TierManager(
            self.geometry,
            PrefixIndex(),
            {SlotKind.PAGE: self.pool},
            self.queue,
            options=TierOptions(**FAST),  # type: ignore[arg-type]
            pump=self.pump,
        )
        self.namespace = Namespace(
            model="m", revision="1", dtype="u8", geometry=self.geometry.fingerprint
        )

    def pump(self, timeout: float) -> None:
        """Carry messages, then poll."""
        commands = self.queue.take()
        if commands:
            self.pipe.send(("commands", pickle.loads(pickle.dumps(commands))))  # noqa: S301  our own
        if self.pipe.poll(min(timeout, 0.05)):
            what, given = self.pipe.recv()
            assert what == "completions"
            self.queue.deliver(given)
        self.manager.poll()

    def until(self, condition: Callable[[], bool]) -> None:
        """Carry messages until `condition` holds."""
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            self.pump(0.05)

    def keys(self, tokens: list[int]) -> list[bytes]:
        """Of a prompt."""
        return page_keys(self.namespace, tokens, PAGE)

    def slots(self, first: int, pages: int) -> DeviceSlots:
        """Device pages from `first` on."""
        return DeviceSlots(self.geometry, np.arange(first * PAGE, (first + pages) * PAGE))

    def rows(self, first: int, pages: int) -> dict[str, Any]:
        """What the child's device pages hold."""
        self.pump(0)
        self.pipe.send(("rows", slice(first * PAGE, (first + pages) * PAGE)))
        what, given = self.pipe.recv()
        assert what == "rows"
        found: dict[str, Any] = given
        return found

    def close(self) -> None:
        """End the child, which checks that it holds nothing."""
        self.until(lambda: not self.manager.num_jobs)
        self.pipe.send(None)
        while self.pipe.recv()[0] != "closed":
            pass
        self.child.join(20)
        assert self.child.exitcode == 0


@pytest.fixture
def two() -> Iterator[TwoProcesses]:
    """Two processes; the child is ended."""
    made = TwoProcesses()
    yield made
    if made.child.is_alive():
        made.child.kill()
        made.child.join(20)


def same(one: dict[str, Any], other: dict[str, Any], pages: int) -> bool:
    """Whether rows are equal in the first pages."""
    return all(
        (a[: pages * PAGE] == b[: pages * PAGE]).all()
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )


def test_a_prompt_goes_all_the_way_and_back(two: TwoProcesses) -> None:
    """Store, load, write to storage, forget, prefetch, load, with a flipped bit at the end."""
    keys = two.keys(TOKENS)
    was = two.rows(0, 5)
    stored = two.manager.store(keys, two.slots(0, 5))
    assert not stored.done  # nothing happens on this side
    stored.wait(30)
    assert stored.num_stored == 5
    loaded = two.manager.load(two.manager.match(keys), two.slots(10, 5))
    with pytest.raises(CacheError, match="process that has the data plane"):
        loaded.wait_layer(0)
    loaded.wait(30)
    assert loaded.verified_pages == 5
    assert same(two.rows(10, 5), was, 5)

    two.pipe.send(("attach", two.manager.new_generation()))
    two.until(lambda: two.manager.storage_state is LinkState.ATTACHED)
    two.until(lambda: not two.manager.offer_all())
    two.manager.reset()
    fetch = two.manager.prefetch(keys)
    fetch.wait(30)
    assert fetch.result().num_tokens == 5 * PAGE

    slot = two.manager._control.tiers[SlotKind.PAGE].slot_of(
        two.manager._control.chain_nodes(keys)[3]
    )
    two.pipe.send(("flip", (slot, 7)))
    loaded = two.manager.load(two.manager.match(keys), two.slots(20, 5))
    loaded.wait(30)
    assert (loaded.usable_tokens, loaded.reason) == (3 * PAGE, Reason.BAD_PAGES)
    assert same(two.rows(20, 5), was, 3)
    two.until(lambda: not two.manager.num_jobs)
    assert two.manager.match(keys).num_tokens == 3 * PAGE
    assert not two.manager.detach_storage()
    two.until(lambda: two.manager.storage_state is LinkState.NONE)
    two.manager.check_integrity()
    two.close()


def test_what_the_data_plane_refuses_is_a_failed_transfer(two: TwoProcesses) -> None:
    """Rows outside the pool over there are an error here, and give everything back."""
    keys = two.keys(TOKENS)
    stored = two.manager.store(keys, two.slots(1000, 5))
    stored.wait(30)
    assert (stored.num_stored, stored.reason) == (0, Reason.TRANSFER_FAILED)
    assert "PlanError" in stored.error
    assert two.manager.match(keys).num_tokens == 0
    two.manager.check_integrity()
    two.close()


def test_commands_can_be_pickled() -> None:
    """A command is numbers, bytes and arrays."""
    command = MovePages(
        job=1,
        direction=Direction.LOAD,
        kind=SlotKind.PAGE,
        keys=(b"a",),
        host_slots=(3,),
        device_slots=np.arange(4).reshape(1, 4),
    )
    back = pickle.loads(pickle.dumps(command))  # noqa: S301  our own
    assert back.host_slots == (3,)
    assert (back.device_slots == command.device_slots).all()


def test_an_answer_that_raises_takes_no_other_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers behind it are taken at the next poll, and their handles end."""
    rig = Rig()
    keys = [rig.keys([number] * PAGE) for number in range(2)]
    first, second = (rig.manager.store(one, rig.slots(at, 1)) for at, one in enumerate(keys))
    take = rig.data.poll

    def poll() -> list[Completion]:
        return [Found(1, ()) if getattr(one, "job", 0) == 1 else one for one in take()]

    monkeypatch.setattr(rig.data, "poll", poll)
    with pytest.raises(CacheError, match="one version of kvferry"):
        rig.manager.poll()
    rig.manager.poll()
    assert (first.done, second.done) == (False, True)
    assert rig.match([1] * PAGE).num_tokens == PAGE
