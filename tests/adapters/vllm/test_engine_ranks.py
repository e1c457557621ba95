"""Two tensor-parallel ranks in processes of their own: one page, two shares, one outcome."""

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

ASKED = prompts(16)
STEPS = one_by_one(ASKED, reset=True)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
POOL: dict[str, dict[str, Any]] = {
    "gqa": {"num_gpu_blocks_override": 300},
    "mla": {"num_gpu_blocks_override": 400},
}
PREFETCH = {"policy": "wait_complete", "threshold_tokens": 0}


def two_ranks(
    engines: Engines, kind: str, name: str, *, fresh: bool = False, **sections: Any
) -> list[Any]:
    """What two ranks say with a connector."""
    run = engines.run(
        kind,
        STEPS,
        in_process=False,
        fresh=fresh,
        **TWO,
        **POOL[kind],
        kv_transfer_config=connector(name, **sections),
    )
    steps: list[Any] = run["steps"]
    return steps


def all_differ(steps: list[Any], expected: list[Any]) -> bool:
    """Whether each request with a hit has another text."""
    pairs = zip(texts(steps), texts(expected), cached(expected), strict=True)
    return all(one != other for one, other, hit in pairs if hit)


def test_two_ranks_load_what_two_ranks_computed(engines: Engines, tmp_path: Path) -> None:
    """Outputs are those of two ranks without connector, to the bit, and storage outlives them."""
    alone = engines.run(
        "gqa", one_by_one(ASKED, reset=False), in_process=False, **TWO, **POOL["gqa"]
    )["steps"]
    told: dict[str, Any] = {
        "host": {"num_bytes": "48MiB"},
        "prefetch": PREFETCH,
        "storage": {"enabled": True, "path": str(tmp_path)},
    }
    first = two_ranks(engines, "gqa", "KVFerryConnector", fresh=True, **told)
    assert texts(first) == texts(alone)
    hits = expected_hits(ASKED, tokens(alone), BLOCK["gqa"])
    assert cached(first) == hits
    assert sum(hits) > 1000
    again = two_ranks(engines, "gqa", "KVFerryConnector", fresh=True, **told)
    assert cached(again) == [(len(prompt) - 1) // 128 * 128 for prompt in ASKED]
    assert tokens(again) == tokens(alone)
    # Control: with zeros in place of what was loaded, outputs differ.
    wrong = two_ranks(engines, "gqa", "WrongBytes", fresh=True, **told)
    assert cached(wrong) == cached(again)
    assert all_differ(wrong, again)


def test_two_ranks_load_the_latents_that_they_computed(engines: Engines) -> None:
    """Outputs are those of a plain cache on two ranks, to the bit, with the same hits."""
    host = {"num_bytes": "48MiB"}
    expected = two_ranks(engines, "mla", "PlainReference")
    steps = two_ranks(engines, "mla", "KVFerryConnector", host=host)
    assert texts(steps) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), BLOCK["mla"])
    assert cached(steps) == cached(expected) == hits
    assert sum(hits) > 1000
    # Control: with zeros in place of what was loaded, outputs differ.
    wrong = two_ranks(engines, "mla", "WrongBytes", host=host)
    assert cached(wrong) == hits
    assert all_differ(wrong, expected)


def test_latents_are_written_once_and_read_by_any_number_of_ranks(
    engines: Engines, tmp_path: Path
) -> None:
    """What the first of two ranks stored, two ranks and one find, and outputs are the reference's.

    So all ranks have the same bytes. Two ranks round otherwise than one does: the reference that
    one rank is compared with was filled by two.
    """
    folder = tmp_path / "reference"
    folder.mkdir()
    told: dict[str, Any] = {
        "host": {"num_bytes": "16MiB"},
        "prefetch": PREFETCH,
        "storage": {"enabled": True, "path": str(tmp_path / "kvferry")},
    }
    expected = two_ranks(engines, "mla", "PlainReference", fresh=True, folder=str(folder))
    two = two_ranks(engines, "mla", "KVFerryConnector", fresh=True, **told)
    assert texts(two) == texts(expected)
    assert cached(two) == expected_hits(ASKED, tokens(two), BLOCK["mla"])
    hits = [(len(prompt) - 1) // 16 * 16 for prompt in ASKED]

    expected = two_ranks(engines, "mla", "PlainReference", fresh=True, folder=str(folder))
    two = two_ranks(engines, "mla", "KVFerryConnector", fresh=True, **told)
    assert cached(two) == cached(expected) == hits
    assert texts(two) == texts(expected)

    def one_rank(name: str, **sections: Any) -> Future[Any]:
        config = connector(name, **sections)
        return engines.begin("mla", STEPS, fresh=True, **POOL["mla"], kv_transfer_config=config)

    runs = (
        one_rank("PlainReference", folder=str(folder)),
        one_rank("KVFerryConnector", **told),
        one_rank("WrongBytes", **told),
    )
    expected, one, wrong = (run.result()["steps"] for run in runs)
    assert cached(one) == cached(expected) == hits
    assert texts(one) == texts(expected)
    assert all_differ(wrong, expected)  # control
