"""The real engine on the CPU, latent attention, against a plain connector with the same hits.

vLLM itself has no hits there, and a hit takes another path through the code than a whole prompt. So
the comparison is with the simplest cache that there can be.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tests.adapters.vllm.engines import (
    BLOCK,
    Engines,
    cached,
    connector,
    expected_hits,
    needs_vllm,
    one_by_one,
    prompts,
    texts,
    tokens,
)

pytestmark = needs_vllm

ASKED = prompts()
POOL: dict[str, Any] = {"num_gpu_blocks_override": 400}
HOST = {"num_bytes": "96MiB"}
STEPS = one_by_one(ASKED, reset=True)


def begin(engines: Engines, name: str, **sections: Any) -> Future[Any]:
    """Begin with a connector; of the reference, once a session."""
    return engines.begin("mla", STEPS, **POOL, kv_transfer_config=connector(name, **sections))


def reference(engines: Engines) -> list[Any]:
    """Blocks in a dictionary."""
    steps: list[Any] = begin(engines, "PlainReference").result()["steps"]
    return steps


def share_of_differing(steps: list[Any], expected: list[Any], hits: list[int]) -> float:
    """Of the requests with hits: how many have another text."""
    pairs = zip(texts(steps), texts(expected), hits, strict=True)
    differ = [one != other for one, other, hit in pairs if hit]
    return sum(differ) / len(differ)


def test_loads_give_what_a_plain_cache_gives(engines: Engines) -> None:
    """Tokens, logprobs and hits are those of the reference, to the bit."""
    run = begin(engines, "KVFerryConnector", host=HOST)
    begin(engines, "PlainReference")
    wrong = begin(engines, "WrongBytes", host=HOST)
    expected, steps = reference(engines), run.result()["steps"]
    assert texts(steps) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), BLOCK["mla"])
    assert cached(steps) == cached(expected) == hits
    assert sum(hits) > 10_000
    # Control: with zeros in place of what was loaded, hits are the same and outputs are not.
    assert cached(wrong.result()["steps"]) == hits
    assert share_of_differing(wrong.result()["steps"], expected, hits) > 0.9


def test_storage_gives_the_same(engines: Engines, tmp_path: Path) -> None:
    """Through files and a host tier that holds little, in a second engine: the same tokens."""

    def run(name: str) -> Future[Any]:
        told = connector(
            name,
            host={"num_bytes": "8MiB"},
            prefetch={"policy": "wait_complete", "threshold_tokens": 0},
            storage={"enabled": True, "path": str(tmp_path)},
        )
        return engines.begin("mla", STEPS, fresh=True, **POOL, kv_transfer_config=told)

    # A hit of another length is another computation: so with a reference that knows it all, too.
    twice = engines.begin("mla", STEPS * 2, **POOL, kv_transfer_config=connector("PlainReference"))
    first = run("KVFerryConnector").result()
    assert cached(first["steps"]) == cached(reference(engines))
    assert texts(first["steps"]) == texts(reference(engines))
    again = run("KVFerryConnector").result()
    hits = [(len(prompt) - 1) // 16 * 16 for prompt in ASKED]
    assert cached(again["steps"]) == hits
    known = twice.result()["steps"][len(STEPS) :]
    assert cached(again["steps"]) == cached(known)
    assert texts(again["steps"]) == texts(known)
    # Control.
    assert share_of_differing(run("WrongBytes").result()["steps"], known, hits) > 0.9
