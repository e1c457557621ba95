"""Any operations in any order: the index says what a plain one says, and always adds up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from tests.index.plain_index import Page, PlainIndex

from kvferry.errors import PrefixIndexError
from kvferry.index import EvictionPolicyName, Lease, Namespace, PrefixIndex, page_keys
from kvferry.types import Tier

_STEPS = 20_000
_NAMESPACE = Namespace(model="m", revision="r", dtype="bfloat16", geometry="g")
_MAX_DEPTH = 5
_SLOTS = 12
_PRIORITIES = (-3, 0, 0, 0, 7)


class _Pair:
    """The index and the plain one, through the same operations."""

    def __init__(self, policy: str, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.index = PrefixIndex(policy=policy, clock=lambda: self.now)
        self.plain = PlainIndex(policy)
        self.tokens_of: dict[bytes, list[int]] = {}
        self.free = set(range(_SLOTS))
        self.free_states = set(range(_SLOTS))
        self.leases: list[Lease] = []
        self.ended: list[Lease] = []

    def step(self) -> None:
        """One operation, most often one that can be done."""
        operations: list[tuple[int, Callable[[], None]]] = [
            (8, self.insert), (6, self.touch), (8, self.set_host), (3, self.clear_host),
            (3, self.set_state), (2, self.clear_state), (3, self.set_stored), (3, self.lease),
            (3, self.release), (2, self.pass_time), (3, self.pin), (4, self.unpin),
            (6, self.evict), (3, self.evict_states), (2, self.spare), (4, self.forget),
            (3, self.misuse),
        ]  # fmt: skip
        if self.rng.random() < 0.002:
            self.reset()
            return
        weights, calls = zip(*operations, strict=True)
        self.rng.choices(calls, weights)[0]()

    def chain(self) -> list[bytes]:
        """A prompt of a small tree, with pages of one token."""
        depth = self.rng.randint(1, _MAX_DEPTH)
        tokens = [self.rng.randrange(2) for _ in range(depth)]
        keys = page_keys(_NAMESPACE, tokens, 1)
        for count, key in enumerate(keys, 1):
            self.tokens_of[key] = tokens[:count]
        return keys

    def some(self, pages: list[Page], limit: int = 4) -> list[bytes]:
        """A few of these, in any order."""
        chosen = self.rng.sample(pages, min(len(pages), self.rng.randint(0, limit)))
        return [page.key for page in chosen]

    def known(self) -> list[bytes]:
        """Leading known pages of a prompt, or pages from anywhere."""
        if self.rng.random() < 0.3:
            return self.some(list(self.plain.pages.values()))
        return [key for key in self.chain() if key in self.plain.pages]

    def nodes(self, keys: list[bytes]) -> list[int]:
        """Their numbers."""
        found = [self.index.node_of(key) for key in keys]
        assert None not in found
        return [node for node in found if node is not None]

    def insert(self) -> None:
        keys, priority = self.chain(), self.rng.choice(_PRIORITIES)
        known = self.index.match(keys).nodes
        start = self.rng.randint(0, len(known))
        parent = known[start - 1] if start else -1
        assert len(self.index.insert(keys[start:], first_parent=parent, priority=priority)) == (
            len(keys) - start
        )
        self.plain.insert(keys[start:], keys[start - 1] if start else None, priority)

    def touch(self) -> None:
        keys = self.known()
        self.index.touch(self.nodes(keys))
        self.plain.touch(keys)

    def set_host(self) -> None:
        keys = [key for key in self.known() if self.plain.pages[key].slot < 0][: len(self.free)]
        slots = [self.free.pop() for _ in keys]
        self.index.set_host(self.nodes(keys), slots)
        self.plain.set_host(keys, slots)

    def clear_host(self) -> None:
        self._clear(
            self.some(
                [
                    page
                    for page in self.plain.pages.values()
                    if page.slot >= 0 and not page.pins and not page.leases
                ],
                2,
            )
        )

    def _clear(self, keys: list[bytes]) -> None:
        slots = self.index.clear_host(self.nodes(keys))
        assert slots == self.plain.clear_host(keys)
        self.free.update(slots)

    def set_state(self) -> None:
        for key in self.known()[-1:]:
            if self.plain.pages[key].state < 0 and self.free_states:
                slot = self.free_states.pop()
                self.index.set_state(self.nodes([key])[0], slot)
                self.plain.pages[key].state = slot

    def clear_state(self) -> None:
        for key in self.some(
            [
                page
                for page in self.plain.pages.values()
                if page.state >= 0 and not page.pins and not page.leases
            ],
            1,
        ):
            slot = self.index.clear_state(*self.nodes([key]))
            assert slot == self.plain.clear_state(key)
            self.free_states.add(slot)

    def set_stored(self) -> None:
        keys, stored = self.known(), self.rng.random() < 0.6
        self.index.set_stored(self.nodes(keys), stored)
        for key in keys:
            self.plain.pages[key].stored = stored

    def lease(self) -> None:
        keys, seconds = self.known(), self.rng.choice((1.0, 3.0, 50.0))
        lease = self.index.lease(self.nodes(keys), seconds=seconds)
        self.leases.append(lease)
        self.plain.lease_ends[lease.generation] = self.now + seconds
        for key in keys:
            self.plain.pages[key].leases.add(lease.generation)

    def release(self) -> None:
        """Any that ever was: a second time, too late, or from before a reset, it is False."""
        if self.ended and self.rng.random() < 0.3:
            assert not self.index.release(self.rng.choice(self.ended))
        if self.leases:
            lease = self.leases.pop(self.rng.randrange(len(self.leases)))
            self.ended.append(lease)
            is_out = self.plain.lease_ends.get(lease.generation, self.now) > self.now
            assert self.index.holds(lease) == is_out
            assert self.index.release(lease) == is_out
            if is_out:
                self.plain.end_lease(lease.generation)

    def pass_time(self) -> None:
        self.now += self.rng.choice((0.5, 1.0, 2.0))
        due = self._due()
        assert {lease.generation for lease in self.index.expire()} == due
        self._end(due)

    def _due(self) -> set[int]:
        return {generation for generation, end in self.plain.lease_ends.items() if end <= self.now}

    def _end(self, generations: set[int]) -> None:
        for generation in generations:
            self.plain.end_lease(generation)

    def pin(self) -> None:
        keys = self.known()
        self.index.pin(self.nodes(keys))
        for key in keys:
            self.plain.pages[key].pins += 1

    def unpin(self) -> None:
        keys = self.some([page for page in self.plain.pages.values() if page.pins], 6)
        self.index.unpin(self.nodes(keys))
        for key in keys:
            self.plain.pages[key].pins -= 1

    def evict(self) -> None:
        if self.rng.random() < 0.3:
            self.now += 1.0  # leases may end by this, without anybody having said so
        asked = self.rng.randint(0, 4)
        victims = self.index.evict_host(asked)
        self._end(self._due())
        keys = [self.index.key_of(node) for node in victims]
        for key in keys:
            may = self.plain.may_leave()
            page = self.plain.pages[key]
            assert page in may
            assert self.plain.rank(page) == min(map(self.plain.rank, may))
            page.is_taken = True
        assert len(keys) == asked or not self.plain.may_leave()
        # Most go at once, some when they are written, some stay.
        if self.rng.random() < 0.7:
            self._clear(keys)
            if self.rng.random() < 0.7:
                self._forget(keys)

    def evict_states(self) -> None:
        asked = self.rng.randint(0, 2)
        victims = self.index.evict_states(asked)
        self._end(self._due())
        for node in victims:
            may = self.plain.states_may_leave()
            page = self.plain.pages[self.index.key_of(node)]
            assert page in may
            assert self.plain.rank(page) == min(map(self.plain.rank, may))
            page.is_state_taken = True
            if self.rng.random() < 0.7:
                slot = self.index.clear_state(node)
                assert slot == self.plain.clear_state(page.key)
                self.free_states.add(slot)
        assert len(victims) == asked or not self.plain.states_may_leave()

    def spare(self) -> None:
        taken = [page for page in self.plain.pages.values() if page.is_taken or page.is_state_taken]
        keys = self.some(taken) + self.some(list(self.plain.pages.values()), 1)
        self.index.spare(self.nodes(keys))
        for key in keys:
            self.plain.pages[key].is_taken = self.plain.pages[key].is_state_taken = False

    def forget(self) -> None:
        self._forget(self.known())

    def _forget(self, keys: list[bytes]) -> None:
        assert self.index.forget(self.nodes(keys)) == self.plain.forget(keys)

    def reset(self) -> None:
        dropped = self.index.reset()
        host, states = self.plain.reset()
        assert sorted(dropped.host_slots) == sorted(host)
        assert sorted(dropped.state_slots) == sorted(states)
        self.free.update(host)
        self.free_states.update(states)

    def misuse(self) -> None:
        """What must raise and change nothing; the comparison after it shows that it did not."""
        index, pages = self.index, list(self.plain.pages.values())
        chain = self.chain()
        if len(chain) > 1 and chain[1] in self.plain.pages:
            with pytest.raises(PrefixIndexError, match="key 0 is known behind"):
                index.insert(chain[1:])
        with pytest.raises(PrefixIndexError, match="does not exist"):
            index.touch([*self.nodes(self.some(pages)), 10_000])
        for page in self.rng.sample(pages, min(len(pages), 3)):
            node = self.nodes([page.key])
            if page.slot >= 0:
                with pytest.raises(PrefixIndexError, match="already"):
                    index.set_host(node, [99])
            else:
                with pytest.raises(PrefixIndexError, match="not on the host"):
                    index.clear_host([*self.nodes(self.some(pages)), *node][-1:])
            if page.slot >= 0 and page.pins:
                with pytest.raises(PrefixIndexError, match="in flight"):
                    index.clear_host(node, even_if_leased=True)
            with pytest.raises(PrefixIndexError, match="pins"):
                index.unpin(node * (page.pins + 1))

    def compare(self) -> None:
        """Every answer, for every page."""
        index, pages = self.index, self.plain.pages
        assert index.num_nodes == len(pages)
        assert index.num_on_host == sum(page.slot >= 0 for page in pages.values())
        assert index.num_states == sum(page.state >= 0 for page in pages.values())
        assert index.num_stored == sum(page.stored for page in pages.values())
        assert index.num_on_host + len(self.free) == _SLOTS
        assert index.num_states + len(self.free_states) == _SLOTS
        for key, page in pages.items():
            (node,) = self.nodes([key])
            parent = index.parent_of(node)
            assert (None if parent < 0 else index.key_of(parent)) == page.parent
            assert index.key_of(node) == key
            assert (index.host_slot(node), index.state_slot(node)) == (page.slot, page.state)
            assert index.is_stored(node) == page.stored
            assert (index.num_pinned(node), index.num_leased(node)) == (
                page.pins,
                len(page.leases),
            )
            assert index.hits_of(node) == page.hits
            path = []
            while node >= 0:
                path.append(index.key_of(node))
                node = index.parent_of(node)
            # The key is what hashing the prompt from its first token gives.
            assert path[::-1] == page_keys(_NAMESPACE, self.tokens_of[key], 1)

    def compare_prompt(self) -> None:
        """A prompt matches as far as the plain index knows it; keys are those of its tokens."""
        keys = self.chain()
        pages = self.plain.pages
        match = self.index.match(keys)
        length = next((at for at, key in enumerate(keys) if key not in pages), len(keys))
        assert [self.index.key_of(node) for node in match.nodes] == keys[:length]
        held = [pages[key].slot >= 0 or pages[key].stored for key in keys[:length]]
        on_host = [pages[key].slot >= 0 for key in keys[:length]]
        assert match.num_on_host == [*on_host, False].index(False)
        assert match.num_held == [*held, False].index(False)
        assert self.index.host_prefix(match.nodes) == match.num_on_host
        slots = self.index.host_slots(match.nodes)
        assert slots.tolist() == [pages[key].slot for key in keys[:length]]
        for node, key in zip(match.nodes, keys, strict=False):
            tiers = self.index.tiers_of(node)
            assert (Tier.HOST in tiers) == (pages[key].slot >= 0)
            assert (Tier.STORAGE in tiers) == pages[key].stored


@pytest.mark.soak
@pytest.mark.parametrize("policy", list(EvictionPolicyName))
def test_random_operations(policy: str, soak_factor: int) -> None:
    """20,000 steps on twelve slots; after each the index adds up and agrees with the plain one."""
    rng = random.Random(f"index {policy}")
    pair = _Pair(policy, rng)
    for step in range(_STEPS * soak_factor):
        pair.step()
        pair.index.check_integrity()
        pair.compare_prompt()
        if step % 8 == 0:
            pair.compare()
    assert pair.index.num_expired > 100


@pytest.mark.parametrize("policy", list(EvictionPolicyName))
def test_everything_is_given_back(policy: str) -> None:
    """After random operations, with nothing held, all pages can be evicted and forgotten."""
    pair = _Pair(policy, random.Random(f"all back {policy}"))
    for _ in range(2_000):
        pair.step()
    index = pair.index
    for key, page in list(pair.plain.pages.items()):
        index.unpin(pair.nodes([key]) * page.pins)
    pair.now += 1_000.0
    nodes = pair.nodes(list(pair.plain.pages))
    index.spare(nodes)
    victims = index.evict_host(_SLOTS + 1)
    assert len(victims) == index.num_on_host
    assert set(index.clear_host(victims)) | pair.free == set(range(_SLOTS))
    for node in index.evict_states(_SLOTS + 1):
        pair.free_states.add(index.clear_state(node))
    assert pair.free_states == set(range(_SLOTS))
    index.set_stored(nodes, False)
    index.forget(nodes)
    assert (index.num_nodes, index.num_leases) == (0, 0)
    index.check_integrity()
