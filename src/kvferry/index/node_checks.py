"""What callers of the index may get wrong, found before anything is changed."""

from __future__ import annotations

import operator
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, SupportsIndex

from kvferry.errors import PrefixIndexError
from kvferry.index.nodes import NO_NODE, NO_SLOT, NodeTable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "MAX_INT32",
    "check_arriving",
    "check_chain",
    "check_leaving",
    "check_pinned",
    "checked_int32",
]

MAX_INT32: Final = (1 << 31) - 1


def checked_int32(what: str, value: SupportsIndex, low: int) -> int:
    """`value` as a plain int. Raises PrefixIndexError unless it lies between `low` and 2³¹ - 1."""
    try:
        number = operator.index(value)
    except TypeError as bad:
        raise PrefixIndexError(f"{what} is {value!r}; it must be a whole number") from bad
    if not low <= number <= MAX_INT32:
        raise PrefixIndexError(f"{what} is {number}; it must lie between {low} and {MAX_INT32}")
    return number


def check_chain(table: NodeTable, keys: Sequence[bytes], first_parent: int) -> list[int]:
    """The leading known nodes; PrefixIndexError where the keys are no chain behind `first_parent`.

    A key covers all pages before its own, so it is known behind one page at most, and not before
    that page is.
    """
    if first_parent != NO_NODE:
        table.check((first_parent,))
    chain = table.leading(keys)
    if [table.parents[node] for node in chain] != [first_parent, *chain][:-1]:
        before = first_parent
        for at, node in enumerate(chain):
            if table.parents[node] != before:
                raise PrefixIndexError(
                    f"key {at} is known behind node {table.parents[node]}, and was to be put "
                    f"behind node {before}: hash a prompt from its first token on, and pass "
                    f"neighbouring pages"
                )
            before = node
    new = keys[len(chain) :]
    for at, key in enumerate(new, len(chain)):
        if not isinstance(key, bytes):
            raise PrefixIndexError(f"key {at} is {key!r}; keys are bytes, from page_keys()")
        if key in table.node_of:
            raise PrefixIndexError(
                f"key {at} is known, but key {at - 1} before it is not: these keys are no chain"
            )
    if len(set(new)) != len(new):
        key, count = Counter(new).most_common(1)[0]
        raise PrefixIndexError(f"key {key.hex()} comes {count} times in a chain, which cannot be")
    return chain


def check_arriving(
    table: NodeTable,
    nodes: Sequence[int],
    slots: Sequence[int] | NDArray[np.int64],
    column: array[int],
    what: str,
) -> list[tuple[int, int]]:
    """Nodes with their new slots; PrefixIndexError unless each is free to get its own."""
    table.check(nodes)
    if len(nodes) != len(slots):
        raise PrefixIndexError(f"{len(nodes)} nodes and {len(slots)} slots; each needs its own")
    numbers = [checked_int32(f"slot {at}", slot, 0) for at, slot in enumerate(slots)]
    for values, which in ((nodes, "node"), (numbers, "slot")):
        _check_distinct(values, which)
    for node in nodes:
        if column[node] != NO_SLOT:
            raise PrefixIndexError(
                f"the {what} of node {node} is in slot {column[node]} already; clear it first, or "
                f"free the slot that was to be its second"
            )
    return list(zip(nodes, numbers, strict=True))


def check_leaving(
    table: NodeTable,
    nodes: Sequence[int],
    column: array[int],
    even_if_leased: bool,
    what: str,
) -> None:
    """Raises PrefixIndexError where there is no slot to give up, or somebody needs it."""
    table.check(nodes)
    _check_distinct(nodes, "node")
    for node in nodes:
        if column[node] == NO_SLOT:
            raise PrefixIndexError(f"the {what} of node {node} is not on the host")
        if table.pins[node]:
            raise PrefixIndexError(
                f"the {what} of node {node} is in flight ({table.pins[node]} pins); it may be "
                f"cleared when the last is taken"
            )
        if table.leases[node] and not even_if_leased:
            raise PrefixIndexError(
                f"the {what} of node {node} is leased ({table.leases[node]} leases): spare() it, "
                f"or pass even_if_leased where its bytes are bad"
            )


def check_pinned(table: NodeTable, nodes: Sequence[int]) -> None:
    """Raises PrefixIndexError where there are fewer pins than times a node is named."""
    for node, count in Counter(nodes).items():
        if table.pins[node] < count:
            raise PrefixIndexError(
                f"node {node} has {table.pins[node]} pins, and {count} were to be taken: each pin "
                f"is taken once, by the one who made it"
            )


def _check_distinct(numbers: Sequence[int], which: str) -> None:
    if len(set(numbers)) != len(numbers):
        number, count = Counter(numbers).most_common(1)[0]
        raise PrefixIndexError(f"{which} {number} is named {count} times in one call")
