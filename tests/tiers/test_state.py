"""The table of transitions, and the ledger that holds to it."""

from __future__ import annotations

import itertools

import pytest

from kvferry.errors import PageStateError
from kvferry.index import PrefixIndex
from kvferry.memory import SlotOwner, SlotOwners
from kvferry.tiers import TRANSITIONS, Actor, HostTier, PageState, SlotLedger
from kvferry.tiers.state import OWNER_OF
from kvferry.types import SlotKind

WAY_TO = {
    PageState.ABSENT: [],
    PageState.STORING: [(PageState.STORING, Actor.CALLER)],
    PageState.FETCHING: [(PageState.FETCHING, Actor.CALLER)],
    PageState.RESIDENT: [
        (PageState.STORING, Actor.CALLER),
        (PageState.RESIDENT, Actor.TRANSFER),
    ],
    PageState.PARKED: [(PageState.FETCHING, Actor.CALLER), (PageState.PARKED, Actor.ABORT)],
    PageState.CONDEMNED: [
        (PageState.STORING, Actor.CALLER),
        (PageState.RESIDENT, Actor.TRANSFER),
        (PageState.CONDEMNED, Actor.INTEGRITY),
    ],
}


def ledger_in(state: PageState) -> SlotLedger:
    """A ledger whose slot 0 is in `state`."""
    ledger = SlotLedger(2)
    for step, actor in WAY_TO[state]:
        ledger.move(0, step, actor, node=7 if step is not PageState.PARKED else None)
    return ledger


@pytest.mark.parametrize(
    ("before", "after", "actor"), list(itertools.product(PageState, PageState, Actor))
)
def test_what_the_table_has_and_nothing_else(
    before: PageState, after: PageState, actor: Actor
) -> None:
    """Every other change raises, names what is allowed, and changes nothing."""
    ledger = ledger_in(before)
    allowed = TRANSITIONS.get((before, after), frozenset())
    if actor in allowed:
        ledger.move(0, after, actor)
        assert ledger.state(0) is after
    else:
        with pytest.raises(PageStateError, match=f"{'|'.join(allowed) or 'becomes'}"):
            ledger.move(0, after, actor)
        assert ledger.state(0) is before
    ledger.check_integrity()


def test_a_parked_page_never_becomes_whole() -> None:
    """What comes late is thrown away: parked ends in absent alone, and every state has an end."""
    ends = {
        before: {after for start, after in TRANSITIONS if start is before} for before in OWNER_OF
    }
    assert ends[PageState.PARKED] == ends[PageState.CONDEMNED] == {PageState.ABSENT}
    assert all(ends.values())
    assert OWNER_OF[PageState.ABSENT] is SlotOwner.FREE


def test_only_whole_pages_are_read_and_readers_are_balanced() -> None:
    """Reading what is not resident raises; so does a reader that is done twice."""
    ledger = ledger_in(PageState.FETCHING)
    with pytest.raises(PageStateError, match="only a resident page"):
        ledger.add_readers([0])
    ledger = ledger_in(PageState.RESIDENT)
    ledger.add_readers([0])
    ledger.add_readers([0])
    with pytest.raises(PageStateError, match="2 readers"):
        ledger.move(0, PageState.ABSENT, Actor.EVICTION)
    ledger.move(0, PageState.CONDEMNED, Actor.INTEGRITY)
    assert not ledger.drop_reader(0)
    assert ledger.drop_reader(0)
    with pytest.raises(PageStateError, match="done twice"):
        ledger.drop_reader(0)


def test_the_three_books_are_compared() -> None:
    """A slot that one book has otherwise than the others is found."""
    index, pool = PrefixIndex(), SlotOwners(4)
    tier = HostTier(SlotKind.PAGE, pool, index)
    nodes = index.insert([bytes(32), bytes([1]) * 32])
    slots = tier.reserve(nodes, PageState.STORING)
    with pytest.raises(PageStateError, match="is_filling"):
        tier.reserve(nodes[:1], PageState.STORING)
    tier.check_integrity()
    pool.free(slots[:1], SlotOwner.TRANSFER)
    with pytest.raises(PageStateError):
        tier.check_integrity()
    tier = HostTier(SlotKind.PAGE, SlotOwners(4), index := PrefixIndex())
    slots = tier.reserve(index.insert([bytes(32)]), PageState.STORING)
    tier.publish(slots[:1], Actor.TRANSFER)
    tier.check_integrity()
    index.clear_host([0])
    with pytest.raises(PageStateError, match="resident as node"):
        tier.check_integrity()
