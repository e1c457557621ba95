"""What the store's numbers mean, and which result each of them is."""

from __future__ import annotations

from kvferry.storage.base import ItemResult, ItemStatus

__all__ = [
    "EXISTS",
    "HAS_LEASE",
    "NOT_FOUND",
    "TRANSFER_FAILED",
    "is_gone",
    "is_size_unclear",
    "is_worth_another_try",
    "kind_of",
    "read_failure",
    "write_failure",
]

NO_ROOM = -200
BAD_PARAMETERS = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
HAS_LEASE = -706
LEASE_EXPIRED = -707
HAS_TASK = -708
TRANSFER_FAILED = -800
RPC_FAILED = -900
RPC_TIMED_OUT = -901

_KINDS = {
    -10: "buffer_overflow",
    -101: "segment_not_found",
    -103: "client_not_found",
    NO_ROOM: "no_room",
    BAD_PARAMETERS: "bad_parameters",
    -702: "bad_replica",
    NOT_READY: "not_ready",
    NOT_FOUND: "not_found",
    EXISTS: "exists",
    HAS_LEASE: "leased",
    LEASE_EXPIRED: "lease_expired",
    HAS_TASK: "being_copied",
    TRANSFER_FAILED: "transfer_failed",
    RPC_FAILED: "master_unreachable",
    RPC_TIMED_OUT: "master_timed_out",
}
_NEXT = {
    NO_ROOM: "there is no room for it: let clients give more memory (segment_bytes), or wait until "
    "the master has evicted something",
    TRANSFER_FAILED: "the memory it lies in, or should, cannot be reached: a client of the pool is "
    "gone, and the master forgets it after its client_ttl",
    RPC_FAILED: "the master cannot be reached: see to it that it runs",
    RPC_TIMED_OUT: "the master does not answer",
    LEASE_EXPIRED: "it took longer than the lease of the object",
}


def kind_of(code: int) -> str:
    """A word for `code`, by which it is counted."""
    return _KINDS.get(code, f"code_{-code}")


def is_worth_another_try(code: int, *, reads: bool) -> bool:
    """Whether the same call may go well a moment later.

    A put is given other memory each time. A read is not: its object lies where it lies, and waiting
    for a dead client outlasts the leases of all others in the batch, which then need another try.
    What has timed out inside the library already is not tried again: that took long enough.
    """
    return code == (LEASE_EXPIRED if reads else TRANSFER_FAILED)


def is_size_unclear(code: int) -> bool:
    """Whether a read may have failed as the object has another length than was asked for."""
    return code >= 0 or code in (BAD_PARAMETERS, TRANSFER_FAILED, -10)


def is_gone(code: int) -> bool:
    """Whether there is no such object, or none yet."""
    return code in (NOT_FOUND, NOT_READY, -712)


def read_failure(code: int) -> ItemResult:
    """The result of a read that ended with `code`."""
    if is_gone(code):
        return ItemResult(ItemStatus.MISS)
    return ItemResult(ItemStatus.FAILED, reason=_words(code))


def write_failure(code: int) -> ItemResult:
    """The result of a write that ended with `code`."""
    status = ItemStatus.REFUSED if code == NO_ROOM else ItemStatus.FAILED
    return ItemResult(status, reason=_words(code))


def _words(code: int) -> str:
    return f"the store said {code} ({kind_of(code)}); {_NEXT.get(code, 'see its documentation')}"
