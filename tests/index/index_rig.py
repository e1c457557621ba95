"""Prompts of letters in an index, where a page is a letter; and the namespace of the tests."""

from __future__ import annotations

from kvferry.index import Namespace, PrefixIndex, page_keys

NAMESPACE = Namespace(model="m", revision="r", dtype="bfloat16", geometry="g")


class Clock:
    """It stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def keys_of(prompt: str) -> list[bytes]:
    """A key for each letter of a prompt."""
    return page_keys(NAMESPACE, [ord(letter) for letter in prompt], 1)


def names_of(index: PrefixIndex, nodes: list[int], *prompts: str) -> list[str]:
    """For each node the prompt that ends with it."""
    known = {
        key: prompt[:length] for prompt in prompts for length, key in enumerate(keys_of(prompt), 1)
    }
    return [known[index.key_of(node)] for node in nodes]


def put_on_host(index: PrefixIndex, prompt: str, *, priority: int = 0) -> list[int]:
    """Put what is not there yet of a prompt on the host."""
    nodes = index.insert(keys_of(prompt), priority=priority)
    new = [node for node in nodes if index.host_slot(node) < 0]
    used = {index.host_slot(node) for node in range(index.num_nodes)}
    free = [slot for slot in range(1000) if slot not in used]
    index.set_host(new, free[: len(new)])
    return nodes


def eight_bytes(value: int) -> bytes:
    """A number as keys have it."""
    return value.to_bytes(8, "little")
