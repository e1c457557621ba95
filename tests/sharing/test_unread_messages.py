"""What a process leaves unread: nobody waits for it, and what is kept for it is bounded."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from tests.sharing.replica_rig import (
    PAGE,
    Keeper,
)

from kvferry.errors import RankError
from kvferry.sharing.channel import Channel, framed
from kvferry.sharing.messages import Hello

PROMPT = list(range(3 * PAGE))


def test_a_slow_reader_keeps_nobody_waiting() -> None:
    """Far more than a socket holds is sent, in order, while the keeper goes on."""
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sent = [Hello(rank, "g" * 300_000) for rank in range(20)]
    for message in sent:
        sender.send(framed(message))  # would wait for ever, if it waited
    got: list[Any] = []
    while len(got) < len(sent):
        receiver.wait(30)
        new = receiver.receive()
        assert not receiver.ended
        got += new
    assert got == sent
    last = Hello(1, "short")
    sender.send(framed(last))
    sender.close(timeout=30)
    while not receiver.ended:
        receiver.wait(30)
        got += receiver.receive()
    assert got[-1] == last
    receiver.close()
    receiver.close()


def test_a_close_does_not_wait_for_a_reader_that_is_stuck() -> None:
    """Its thread ends all the same."""
    ours, theirs = socket.socketpair()
    sender = Channel(ours)
    for _ in range(20):
        sender.send(framed(Hello(1, "g" * 300_000)))
    sender.close(timeout=0.01)
    assert not [one for one in threading.enumerate() if one.name == "kvferry-share"]
    theirs.close()


def test_a_reader_that_is_stuck_is_sent_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is beyond that is refused; a message that is longer alone goes, and all goes again."""
    monkeypatch.setattr("kvferry.sharing.channel._MAX_UNSENT_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sent = [Hello(0, "g" * (2 << 20))]
    assert sender.send(framed(sent[0]))
    assert not sender.send(framed(Hello(1, "refused")))
    got: list[Any] = []
    while len(got) < 2:
        receiver.wait(0.01)
        got += receiver.receive()
        if len(sent) < 2 and sender.send(framed(Hello(2, "short"))):
            sent.append(Hello(2, "short"))
    assert got == sent
    sender.close()
    assert sender.send(framed(sent[1]))  # nobody gets it, and that is no refusal
    receiver.close()


def _unsent(_channel: Channel, _frame: bytes) -> bool:
    """As `Channel.send` where the other end has left too much unread."""
    return False


def test_loads_of_a_peer_that_reads_nothing_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load that it was sent goes on; those it was not sent hold no pages and end."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    sent, _ = keeper.load(PROMPT, 5)
    with monkeypatch.context() as full:
        full.setattr(Channel, "send", _unsent)
        unsent, _ = keeper.load(PROMPT, 10)
        unsent.wait(30)
    assert "rank 1 (process" in unsent.error
    assert "does not read" in unsent.error
    assert unsent.usable_tokens == 0
    assert not sent.done
    assert keeper.host.peers()[0].num_loads == 1
    newer, _ = keeper.load(PROMPT, 15)  # it reads again
    for handle in (sent, newer):
        peer.load(handle.ticket).wait(30)
        handle.wait(30)
        assert not handle.error
    with pytest.raises(RankError, match="was not sent"):
        peer.load(unsent.ticket)
    peer.close()
    keeper.close()


def test_a_keeper_that_reads_no_answers_is_taken_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer cannot tell it of loads, and says so."""
    keeper = Keeper(num_peers=1)
    ((peer, _),) = keeper.join(1)
    keeper.store(PROMPT)
    handle, _ = keeper.load(PROMPT, 5)
    with monkeypatch.context() as full:
        full.setattr(Channel, "send", _unsent)
        peer.load(handle.ticket).wait(30)
    assert not peer.keeper_alive
    peer.close()
    keeper.cache.close(0.1)
    assert "closed before rank 1" in handle.error  # it ended for the keeper as well
