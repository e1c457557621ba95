"""Slot owners: one owner each, whatever is asked, and nothing done by halves."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.memory.counted_tables import count_touches

from kvferry.errors import SlotOwnershipError
from kvferry.memory import SlotOwner, SlotOwners, SlotRun

FREE, INDEX, TRANSFER = SlotOwner


def _owners_of(owners: SlotOwners) -> list[SlotOwner]:
    return [owners.owner_of(slot) for slot in range(owners.num_slots)]


def test_life_of_a_slot() -> None:
    """Free, in flight, in the index, in flight again, free: each step counted."""
    owners = SlotOwners(4)
    runs = owners.allocate(3, TRANSFER)
    assert runs == (SlotRun(0, 3),)
    assert _owners_of(owners) == [TRANSFER, TRANSFER, TRANSFER, FREE]
    owners.hand_over(runs, TRANSFER, INDEX)
    assert _owners_of(owners) == [INDEX, INDEX, INDEX, FREE]
    owners.hand_over([1], INDEX, TRANSFER)
    assert [owners.num_owned(owner) for owner in SlotOwner] == [1, 2, 1]
    owners.free([1], TRANSFER)
    owners.free([0, 2], INDEX)
    assert _owners_of(owners) == [FREE] * 4
    owners.check_integrity()


def test_tail_freed_in_two_places_raises() -> None:
    """8 pages, of which 5 were used: the tail's second free raises, and all 8 ids stay distinct."""
    owners = SlotOwners(8)
    runs = owners.allocate(8, TRANSFER)
    assert runs is not None
    owners.hand_over([0, 1, 2, 3, 4], TRANSFER, INDEX)
    owners.free([5, 6, 7], TRANSFER)
    with pytest.raises(SlotOwnershipError, match="slot 5 belongs to free, not to transfer"):
        owners.free([5, 6, 7], TRANSFER)
    taken = [owners.allocate(1, TRANSFER) for _ in range(3)]
    assert owners.allocate(1, TRANSFER) is None
    slots = {run.start for runs in taken if runs is not None for run in runs}
    assert slots == {5, 6, 7}
    owners.check_integrity()


@pytest.mark.parametrize(
    ("slots", "owner", "named"),
    [
        ([0, 3], INDEX, "slot 3 belongs to transfer, not to index"),
        ([SlotRun(0, 8)], INDEX, "slot 3 belongs to transfer"),
        ([SlotRun(4, 4)], TRANSFER, "slot 6 belongs to free, not to transfer"),
        ([0, 8], INDEX, r"slots 0 to 7"),
        ([0, -1], INDEX, r"slots 0 to 7"),
        ([0, 1, 0], INDEX, "slot 0 is named twice"),
        ([7], FREE, "the free list"),
        ([0], "mine", "'mine' is no owner"),
        ([0, "1"], INDEX, "'1' is neither"),
    ],
)
def test_refused_calls_change_nothing(slots: list[int], owner: SlotOwner, named: str) -> None:
    """free and hand_over name the slot and its owner, and leave every table as it was."""
    owners = SlotOwners(8)
    owners.allocate(3, INDEX)
    owners.allocate(3, TRANSFER)
    before = _owners_of(owners)
    for new_owner in SlotOwner:
        with pytest.raises(SlotOwnershipError):
            owners.hand_over(slots, owner, new_owner)
    with pytest.raises(SlotOwnershipError, match=named):
        owners.free(slots, owner)
    with pytest.raises(SlotOwnershipError, match=named):
        owners.hand_over(slots, owner, INDEX)
    assert _owners_of(owners) == before
    assert [owners.num_owned(owner) for owner in SlotOwner] == [2, 3, 3]
    owners.check_integrity()


def test_free_list_is_no_owner_to_allocate_for() -> None:
    """Slots cannot be taken from the free list for the free list, nor handed over to it."""
    owners = SlotOwners(8)
    with pytest.raises(SlotOwnershipError, match="the free list"):
        owners.allocate(1, FREE)
    owners.allocate(1, INDEX)
    with pytest.raises(SlotOwnershipError, match="the free list"):
        owners.hand_over([0], INDEX, FREE)
    assert owners.num_owned(FREE) == 7


@pytest.mark.parametrize("slot", [-1, 8, 1 << 40])
def test_owner_of_unknown_slot(slot: int) -> None:
    """A slot out of range is an error, never a wrapped index."""
    with pytest.raises(SlotOwnershipError, match=f"slot {slot} does not exist"):
        SlotOwners(8).owner_of(slot)


def test_fuzz_against_a_plain_dict() -> None:
    """20,000 random calls, right and wrong ones, agree with a dict of owners after each."""
    rng = random.Random(11)
    num_slots = 40
    owners = SlotOwners(num_slots)
    oracle = dict.fromkeys(range(num_slots), FREE)
    outcomes: Counter[str] = Counter()

    for _ in range(20_000):
        action = rng.choice(["allocate", "free", "hand_over"])
        count, free, slots = 0, 0, list[int]()
        owner, new_owner = rng.choices(list(SlotOwner), [1, 8, 8], k=2)
        if action == "allocate":
            count = rng.randint(0, 10)
            legal = owner is not FREE
            free = sum(1 for who in oracle.values() if who is FREE)
        else:
            mine = [slot for slot, who in oracle.items() if who is owner]
            slots = rng.sample(mine, min(len(mine), rng.randint(0, 8)))
            if rng.random() < 0.2:
                slots.insert(rng.randrange(len(slots) + 1), rng.randint(-1, num_slots))
            legal = owner is not FREE and (action == "free" or new_owner is not FREE)
            legal = legal and len(set(slots)) == len(slots)
            legal = legal and all(oracle.get(slot) is owner for slot in slots)
        try:
            if action == "allocate":
                runs = owners.allocate(count, owner)
                assert (runs is None) == (count > free)
                given = [slot for run in runs or () for slot in run.slots]
                assert runs is None or len(given) == count
                assert all(oracle[slot] is FREE for slot in given)
                oracle.update(dict.fromkeys(given, owner))
            elif action == "free":
                owners.free(slots, owner)
                oracle.update(dict.fromkeys(slots, FREE))
            else:
                owners.hand_over(slots, owner, new_owner)
                oracle.update(dict.fromkeys(slots, new_owner))
            assert legal
        except SlotOwnershipError:
            assert not legal
        outcomes[f"{action} {'done' if legal else 'refused'}"] += 1

        owners.check_integrity()
        assert _owners_of(owners) == list(oracle.values())
        counts = Counter(oracle.values())
        assert all(owners.num_owned(who) == counts[who] for who in SlotOwner)
        assert sum(owners.num_owned(who) for who in SlotOwner) == num_slots

    assert min(outcomes.values()) > 200, outcomes
    assert len(outcomes) == 6


@pytest.mark.parametrize("num_slots", [1_000, 100_000])
def test_a_call_touches_few_elements_in_any_pool(num_slots: int) -> None:
    """Taking, handing over and freeing look at no more than 60 table elements a slot."""
    owners = SlotOwners(num_slots)
    # Free slots singly, so that each is a run of its own, which costs the most.
    assert owners.allocate(num_slots, INDEX) is not None
    owners.free(range(0, num_slots, 2), INDEX)
    touches = count_touches(owners, owners._allocator)
    for count in range(1, 65):
        before = touches()
        runs = owners.allocate(count, TRANSFER)
        assert runs is not None
        assert len(runs) == count
        owners.hand_over(runs, TRANSFER, INDEX)
        owners.free(runs, INDEX)
        assert touches() - before <= 60 * count


def test_integrity_check_sees_an_owner_changed_behind_it() -> None:
    """A slot that is owned and free at once, and a wrong count, are both found and named."""
    owners = SlotOwners(6)
    owners.allocate(2, INDEX)
    owners._allocator.free([1])
    with pytest.raises(SlotOwnershipError, match=r"slot 1 belongs to index .* on the free list"):
        owners.check_integrity()

    owners = SlotOwners(6)
    owners._allocator.allocate(1)
    with pytest.raises(SlotOwnershipError, match=r"slot 0 belongs to free .* not on"):
        owners.check_integrity()

    owners = SlotOwners(6)
    owners.allocate(2, INDEX)
    owners._num_owned[INDEX] = 3
    with pytest.raises(SlotOwnershipError, match="2 slots belong to index, but 3"):
        owners.check_integrity()
