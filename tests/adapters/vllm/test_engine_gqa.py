"""The real engine on the CPU, grouped-query attention: what the connector may change, and what not.

Each test that says that outputs are equal has a control, or a line, in which they must not be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.adapters.vllm.engines import (
    BLOCK,
    Engines,
    answers,
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
ROOMY: dict[str, Any] = {"num_gpu_blocks_override": 512}
TINY: dict[str, Any] = {"num_gpu_blocks_override": 14, "max_num_seqs": 4}
HOST = {"num_bytes": "96MiB"}
PREFETCH = {"policy": "wait_complete", "threshold_tokens": 0}


def plain(engines: Engines) -> list[Any]:
    """The engine alone: its own prefix cache has the hits."""
    steps: list[Any] = engines.run("gqa", one_by_one(ASKED, reset=False), **ROOMY)["steps"]
    return steps


def storage(folder: Path) -> dict[str, Any]:
    """Settings of a disk tier."""
    return {"enabled": True, "path": str(folder)}


def at_rest(told: dict[str, Any]) -> None:
    """Nothing is in flight, kept or forgotten."""
    slots = told["slots"]
    assert (told["jobs"], told["readers"], told["requests"], told["waiting_ranks"]) == (0, 0, 0, 0)
    assert sum(slots.values()) == slots["absent"] + slots["resident"]


def test_loads_give_what_the_engine_would_have_computed(engines: Engines) -> None:
    """Tokens and logprobs are those of the engine's own cache, to the bit, with the same hits."""
    run = engines.run(
        "gqa", one_by_one(ASKED, reset=True), **ROOMY, kv_transfer_config=connector(host=HOST)
    )
    expected = plain(engines)
    assert texts(run["steps"]) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), BLOCK["gqa"])
    assert cached(run["steps"]) == cached(expected) == hits
    assert sum(hits) > 10_000
    at_rest(run["connector"])


def test_wrong_bytes_would_be_seen(engines: Engines) -> None:
    """Control: with zeros in place of what was loaded, hits are the same and outputs are not."""
    run = engines.run(
        "gqa",
        one_by_one(ASKED, reset=True),
        **ROOMY,
        kv_transfer_config=connector("WrongBytes", host=HOST),
    )
    expected = plain(engines)
    wrong = [
        one != other
        for one, other, hit in zip(
            texts(run["steps"]), texts(expected), cached(expected), strict=True
        )
        if hit
    ]
    assert sum(wrong) > 0.9 * len(wrong)
