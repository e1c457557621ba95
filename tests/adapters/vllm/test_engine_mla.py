"""The real engine on the CPU, latent attention, against a plain connector with the same hits.

vLLM itself has no hits there, and a hit takes another path through the code than a whole prompt. So
the comparison is with the simplest cache that there can be.
"""

from __future__ import annotations

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


def reference(engines: Engines) -> list[Any]:
    """Blocks in a dictionary."""
    run = engines.run("mla", STEPS, **POOL, kv_transfer_config=connector("PlainReference"))
    steps: list[Any] = run["steps"]
    return steps


def test_loads_give_what_a_plain_cache_gives(engines: Engines) -> None:
    """Tokens, logprobs and hits are those of the reference, to the bit."""
    told = connector(host=HOST)
    run = engines.run("mla", STEPS, **POOL, kv_transfer_config=told)
    expected = reference(engines)
    assert texts(run["steps"]) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), BLOCK["mla"])
    assert cached(run["steps"]) == cached(expected) == hits
    assert sum(hits) > 10_000


def test_wrong_bytes_would_be_seen(engines: Engines) -> None:
    """Control: with zeros in place of what was loaded, outputs differ."""
    told = connector("WrongBytes", host=HOST)
    run = engines.run("mla", STEPS, **POOL, kv_transfer_config=told)
    pairs = zip(texts(run["steps"]), texts(reference(engines)), cached(run["steps"]), strict=True)
    wrong = [one != other for one, other, hit in pairs if hit]
    assert sum(wrong) > 0.9 * len(wrong)


def test_storage_gives_the_same(engines: Engines, tmp_path: Path) -> None:
    """Through files and a host tier that holds little, in a second engine: the same tokens."""
    told = connector(
        host={"num_bytes": "8MiB"},
        prefetch={"policy": "wait_complete", "threshold_tokens": 0},
        storage={"enabled": True, "path": str(tmp_path)},
    )
    first = engines.run("mla", STEPS, fresh=True, **POOL, kv_transfer_config=told)
    assert cached(first["steps"]) == cached(reference(engines))
    assert texts(first["steps"]) == texts(reference(engines))
    again = engines.run("mla", STEPS, fresh=True, **POOL, kv_transfer_config=told)
    assert cached(again["steps"]) == [(len(prompt) - 1) // 16 * 16 for prompt in ASKED]
    # A hit of another length is another computation: so with a reference that knows it all, too.
    twice = engines.run("mla", STEPS * 2, **POOL, kv_transfer_config=connector("PlainReference"))
    known = twice["steps"][len(STEPS) :]
    assert cached(again["steps"]) == cached(known)
    assert texts(again["steps"]) == texts(known)
