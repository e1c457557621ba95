"""Whether two caches, and two answers, are the same, bit for bit; and where they are not."""

from __future__ import annotations

from typing import Any

from demo_models import Answer
from kvferry.testing import first_difference


def differing_bytes(found: Any, expected: Any, when: str) -> list[str]:
    """The first byte of a cache that is another, if there is one."""
    if found.get_seq_length() != expected.get_seq_length():
        counts = (found.get_seq_length(), expected.get_seq_length())
        return [f"the cache {when} holds {counts[0]} tokens, expected {counts[1]}"]
    for number, (one, other) in enumerate(zip(found.layers, expected.layers, strict=True)):
        for name in ("keys", "values"):
            if not found.get_seq_length():
                continue
            pair = [getattr(layer, name).contiguous().numpy() for layer in (one, other)]
            if where := first_difference(*pair):
                _, head, token, byte = where
                at = f"layer {number}, head {head}, token {token}, byte {byte}"
                return [f"bytes of the cache {when}, first in {name} at {at}"]
    return []


def differing_tokens(found: Answer, expected: Answer) -> list[str]:
    """What was generated, and the logits of every step."""
    if found.tokens != expected.tokens:
        return [f"tokens {found.tokens}, expected {expected.tokens}"]
    if where := first_difference(found.logits.numpy(), expected.logits.numpy()):
        delta = largest_difference(found, expected)
        return [f"logits from step {where[0]} on, by up to {delta:.3g}"]
    return []


def differing_answers(found: Answer, expected: Answer) -> list[str]:
    """What was generated, and the caches afterwards."""
    told = differing_bytes(found.cache, expected.cache, "after the answer")
    return told + differing_tokens(found, expected)


def largest_difference(one: Answer, other: Answer) -> float:
    """Of a logit, over the steps that had the same tokens before them."""
    steps = min(len(one.tokens), len(other.tokens))
    while one.tokens[: steps - 1] != other.tokens[: steps - 1]:
        steps -= 1
    return float((one.logits[:steps] - other.logits[:steps]).abs().max())
