"""The real engine on the CPU, grouped-query attention: what the connector may change, and what not.

Each test that says that outputs are equal has a control, or a line, in which they must not be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def test_layer_by_layer(engines: Engines) -> None:
    """Steps that begin with their loads give the same, and so they do with bad pages."""
    asked = ASKED[:20]
    roomy = {**ROOMY, "async_scheduling": False}
    expected = engines.run("gqa", one_by_one(asked, reset=False), **roomy)["steps"]
    steps = one_by_one(asked, reset=True)
    told: dict[str, Any] = {"host": HOST, "vllm": {"layerwise": True}}
    good = engines.run("gqa", steps, **roomy, kv_transfer_config=connector(**told))
    assert texts(good["steps"]) == texts(expected)
    assert cached(good["steps"]) == cached(expected)
    at_rest(good["connector"])
    bad = engines.run("gqa", steps, **roomy, kv_transfer_config=connector("BadHostPages", **told))
    assert tokens(bad["steps"]) == tokens(expected)
    at_rest(bad["connector"])


def test_storage_outlives_the_engine(engines: Engines, tmp_path: Path) -> None:
    """A second engine finds what the first one wrote, through a host tier that holds little."""
    steps = one_by_one(ASKED, reset=True)
    small = connector(host={"num_bytes": "6MiB"}, prefetch=PREFETCH, storage=storage(tmp_path))
    expected = plain(engines)
    first = engines.run("gqa", steps, fresh=True, **ROOMY, kv_transfer_config=small)
    assert texts(first["steps"]) == texts(expected)
    assert cached(first["steps"]) == cached(expected)
    at_rest(first["connector"])
    assert first["connector"]["slots"]["resident"] < 20  # the rest was evicted, and came back

    again = engines.run("gqa", steps, fresh=True, **ROOMY, kv_transfer_config=small)
    # Everything is known now: whole blocks, but for the one with the last token.
    assert cached(again["steps"]) == [(len(prompt) - 1) // 128 * 128 for prompt in ASKED]
    assert tokens(again["steps"]) == tokens(expected)
    at_rest(again["connector"])

    # A byte of every file is changed: there are fewer hits, and the same answers.
    damaged = engines.run(
        "gqa", [{"flip": str(tmp_path)}, *steps], fresh=True, **ROOMY, kv_transfer_config=small
    )
    assert damaged["steps"][0] > 20
    assert sum(cached(damaged["steps"])) < sum(cached(again["steps"]))
    assert tokens(damaged["steps"]) == tokens(expected)
    at_rest(damaged["connector"])


def test_many_requests_in_a_tiny_pool(engines: Engines) -> None:
    """Fifty at once, four of them running: tokens are those of one at a time."""
    steps: list[Any] = [{"prompts": ASKED, "max_tokens": 4}, {"call": "reset"}] * 2
    run = engines.run("gqa", steps, **TINY, kv_transfer_config=connector(host=HOST))
    expected = tokens(plain(engines))
    assert tokens(run["steps"]) == expected * 2
    assert sum(cached(run["steps"][2:])) > sum(cached(plain(engines)))
    at_rest(run["connector"])
    spoiled = engines.run(
        "gqa", steps, **TINY, kv_transfer_config=connector("WrongBytes", host=HOST)
    )
    assert tokens(spoiled["steps"]) != expected * 2


def test_preempted_requests_come_back(engines: Engines) -> None:
    """Requests that outgrow the pool lose their blocks and load them again."""
    steps: list[Any] = [{"prompts": ASKED[:6], "max_tokens": 140}]
    run = engines.run("gqa", steps, **TINY, kv_transfer_config=connector(host=HOST))
    assert run["preemptions"] > 0
    assert tokens(run["steps"]) == tokens(engines.run("gqa", steps, **ROOMY)["steps"])
    at_rest(run["connector"])


def test_bad_pages_are_computed_again(engines: Engines) -> None:
    """A page that is not what was stored is told by its blocks, and costs time alone."""
    steps = one_by_one(ASKED[:20], reset=True)
    run = engines.run(
        "gqa", steps, **ROOMY, kv_transfer_config=connector("BadHostPages", host=HOST)
    )
    assert tokens(run["steps"]) == tokens(plain(engines))[:20]
    at_rest(run["connector"])


def test_aborts_and_resets_leave_nothing_behind(engines: Engines, tmp_path: Path) -> None:
    """Requests are aborted at every stage, with storage attached; answers stay what they are."""
    steps: list[Any] = []
    for number in range(6):
        steps.append({"prompts": ASKED[4 * number : 4 * number + 4], "abort_after": number})
        steps.append({"call": "reset_all" if number == 3 else "reset"})
    steps += one_by_one(ASKED[:20], reset=True)
    told = connector(host={"num_bytes": "12MiB"}, prefetch=PREFETCH, storage=storage(tmp_path))
    run = engines.run("gqa", steps, fresh=True, **TINY, kv_transfer_config=told)
    assert tokens(run["steps"]) == tokens(plain(engines))[:20]
    at_rest(run["connector"])


def test_a_reset_makes_all_pages_unreachable(engines: Engines, tmp_path: Path) -> None:
    """After a reset of the connector nothing is found, in storage neither."""
    steps: list[Any] = [
        *one_by_one(ASKED[:3], reset=True),
        {"call": "reset_all"},
        {"prompts": [ASKED[0]], "max_tokens": 4},
        {"call": "reset"},
        {"prompts": [ASKED[0]], "max_tokens": 4, "salt": "somebody else"},
        {"call": "reset"},
        {"prompts": [ASKED[0]], "max_tokens": 4, "params": {"kvferry": {"skip_load": True}}},
        {"call": "reset"},
        {"prompts": [ASKED[0]], "max_tokens": 4},
    ]
    told = connector(host=HOST, prefetch=PREFETCH, storage=storage(tmp_path))
    run = engines.run("gqa", steps, fresh=True, **ROOMY, kv_transfer_config=told)
    whole = (len(ASKED[0]) - 1) // 128 * 128
    assert cached(run["steps"])[3:] == [0, 0, 0, whole]
    assert len({tuple(one["tokens"]) for one in answers(run["steps"])[3:]}) == 1
