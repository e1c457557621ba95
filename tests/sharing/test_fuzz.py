"""Requests, slow ranks, damage, resets and storage that fails, at random: never a wrong byte."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.sharing.replica_rig import PAGE, Device, Keeper

from kvferry.cache import HostPeer
from kvferry.storage import MemoryBackend
from kvferry.testing import FaultKind, FaultyBackend, flip_host_bit
from kvferry.tiers import LoadHandle, PageState
from kvferry.types import SlotKind

_REGIONS = 4
_REGION_PAGES = 5


class _Request:
    """A load in a region of the device pools that is its own until it is over."""

    def __init__(self, handle: LoadHandle, keys: list[bytes], first: int, ranks: set[int]) -> None:
        self.handle = handle
        self.keys = keys
        self.first = first
        self.left = ranks
        """Ranks that have yet to begin."""

        self.devices: list[Device] = []
        """Of those that have begun."""

        self.lost = False
        """Whether a rank closed before it began."""


class _Fuzz:
    """A keeper and three peers, one step of a random kind at a time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.backend = FaultyBackend(MemoryBackend())
        self.keeper = Keeper(num_peers=3, num_slots=7, storage=self.backend)
        self.peers: dict[int, tuple[HostPeer, Device]] = dict(
            zip((1, 2, 3), self.keeper.join(1, 2, 3), strict=True)
        )
        self.regions = [number * _REGION_PAGES for number in range(_REGIONS)]
        self.running: list[_Request] = []
        self.whole = self.failed = self.damaged = 0

    def prompt(self) -> list[int]:
        """Pages that are each one of two."""
        pages = range(self.rng.randint(1, _REGION_PAGES))
        return [token for _ in pages for token in [self.rng.randrange(2)] * PAGE]

    def store(self) -> None:
        """From rows of the keeper that no load is using."""
        if not self.regions:
            return
        prompt = self.prompt()
        keys, first = self.keeper.cache.keys(prompt), self.regions[0]
        self.keeper.device.compute(keys, first)
        self.keeper.cache.store(
            prompt, device_slots=self.keeper.device.slots(first, len(keys))
        ).wait(30)

    def load(self) -> None:
        """Begin one, of which the peers hear when they like."""
        if not self.regions:
            return
        first = self.regions.pop()
        prompt = self.prompt()
        if self.rng.random() < 0.3:
            self.keeper.cache.prefetch(prompt).wait(30)
        handle, keys = self.keeper.load(prompt, first)
        if not keys:
            self.regions.append(first)
            return
        self.running.append(_Request(handle, keys, first, {1, 2, 3}))

    def begin(self) -> None:
        """A rank begins what it is told, in no order."""
        waiting = [(one, rank) for one in self.running for rank in sorted(one.left)]
        if waiting:
            one, rank = self.rng.choice(waiting)
            one.left.discard(rank)
            peer, device = self.peers[rank]
            peer.load(one.handle.ticket).wait(30)
            one.devices.append(device)

    def damage(self) -> None:
        """A bit of some page on the host."""
        prompt = self.prompt()
        with self.keeper.cache.match(prompt) as found:
            if found.num_tokens:
                flip_host_bit(self.keeper.cache, self.keeper.cache.keys(prompt)[0])
                self.damaged += 1

    def reset(self) -> None:
        """Forget all pages, those too that are being read."""
        self.keeper.cache.reset()

    def replace(self) -> None:
        """A rank closes, and another comes in its place."""
        rank = self.rng.choice([1, 2, 3])
        for one in self.running:
            one.lost |= rank in one.left
            one.left.discard(rank)
        self.peers[rank][0].close()
        (self.peers[rank],) = self.keeper.join(rank)

    def storage(self) -> None:
        """A read or a write that fails, or has a wrong bit, or keeps nothing."""
        kind = self.rng.choice([FaultKind.STATUS, FaultKind.WRONG_BYTES, FaultKind.SILENT])
        self.backend.script(self.rng.choice(["read_into", "write_from"]), None, kind)

    def look(self) -> None:
        """What is over must be right, on every rank; nothing else is over."""
        self.keeper.cache.poll()
        self.keeper.cache.check_integrity()
        for one in list(self.running):
            if one.left:
                assert not one.handle.done
                continue
            one.handle.wait(30)
            self.running.remove(one)
            self.regions.append(one.first)
            usable = one.handle.usable_tokens // PAGE
            assert usable == 0 or not one.lost
            for device in (self.keeper.device, *one.devices):
                assert device.wrong(one.keys[:usable], one.first) == []
            self.whole += usable == len(one.keys)
            self.failed += one.lost
            one.devices.clear()

    def end(self) -> None:
        """Let everything end; nothing may be held."""
        while self.running:
            self.begin()
            self.look()
        self.keeper.cache.reset()
        slots: Any = self.keeper.cache.stats().slots[SlotKind.PAGE]
        self.keeper.until(
            lambda: (
                self.keeper.cache.stats().slots[SlotKind.PAGE][PageState.ABSENT]
                == sum(slots.values())
            ),
            "all slots free",
        )
        assert [state.num_loads for state in self.keeper.host.peers()] == [0, 0, 0]
        for peer, _ in self.peers.values():
            peer.close()
        self.keeper.close()


@pytest.mark.soak
def test_anything_at_any_time(soak_factor: int) -> None:
    """Thousands of steps: loads that are usable are whole on all ranks, others are not usable."""
    whole = failed = damaged = 0
    for seed in range(3 * soak_factor):
        fuzz = _Fuzz(seed)
        steps = {
            fuzz.store: 20, fuzz.load: 20, fuzz.begin: 60, fuzz.damage: 4, fuzz.reset: 1,
            fuzz.replace: 1, fuzz.storage: 2,
        }  # fmt: skip
        for _ in range(1000):
            fuzz.rng.choices(list(steps), list(steps.values()))[0]()
            fuzz.look()
        fuzz.end()
        whole, failed, damaged = whole + fuzz.whole, failed + fuzz.failed, damaged + fuzz.damaged
    assert whole > 100
    assert failed > 0
    assert damaged > 10
