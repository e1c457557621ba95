"""The real engine on the CPU, grouped-query attention: what the connector may change, and what not.

Each test that says that outputs are equal has a control, or a line, in which they must not be.
"""

from __future__ import annotations

from concurrent.futures import Future
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


def begin_plain(engines: Engines) -> Future[Any]:
    """The engine alone: its own prefix cache has the hits."""
    return engines.begin("gqa", one_by_one(ASKED, reset=False), **ROOMY)


def plain(engines: Engines) -> list[Any]:
    """What it said."""
    steps: list[Any] = begin_plain(engines).result()["steps"]
    return steps


def share_of_differing(steps: list[Any], expected: list[Any], hits: list[int]) -> float:
    """Of the requests with hits: how many have another text."""
    pairs = zip(texts(steps), texts(expected), hits, strict=True)
    differ = [one != other for one, other, hit in pairs if hit]
    return sum(differ) / len(differ)


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
    begin_plain(engines)
    run, wrong = (
        engines.begin(
            "gqa",
            one_by_one(ASKED, reset=True),
            **ROOMY,
            kv_transfer_config=connector(name, host=HOST),
        )
        for name in ("KVFerryConnector", "WrongBytes")
    )
    expected, given = plain(engines), run.result()
    assert texts(given["steps"]) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), BLOCK["gqa"])
    assert cached(given["steps"]) == cached(expected) == hits
    assert sum(hits) > 10_000
    at_rest(given["connector"])
    # Control: with zeros in place of what was loaded, hits are the same and outputs are not.
    assert cached(wrong.result()["steps"]) == hits
    assert share_of_differing(wrong.result()["steps"], expected, hits) > 0.9


def test_layer_by_layer(engines: Engines) -> None:
    """Steps that begin with their loads give the same, and so they do with bad pages."""
    asked = ASKED[:20]
    roomy = {**ROOMY, "async_scheduling": False}
    steps = one_by_one(asked, reset=True)
    told: dict[str, Any] = {"host": HOST, "vllm": {"layerwise": True}}
    unchecked = {**told, "integrity": {"verify": "storage"}}
    alone = engines.begin("gqa", one_by_one(asked, reset=False), **roomy)
    good, wrong, bad, taken = (
        engines.begin("gqa", steps, **roomy, kv_transfer_config=connector(name, **sections))
        for name, sections in (
            ("KVFerryConnector", told),
            ("WrongBytes", told),
            ("BadHostPages", told),
            ("BadHostPages", unchecked),
        )
    )
    expected = alone.result()["steps"]
    assert texts(good.result()["steps"]) == texts(expected)
    assert cached(good.result()["steps"]) == cached(expected)
    at_rest(good.result()["connector"])
    assert share_of_differing(wrong.result()["steps"], expected, cached(expected)) > 0.9
    assert tokens(bad.result()["steps"]) == tokens(expected)
    at_rest(bad.result()["connector"])
    assert tokens(taken.result()["steps"]) != tokens(expected)


def test_storage_outlives_the_engine(engines: Engines, tmp_path: Path) -> None:
    """A second engine finds what the first one wrote, through a host tier that holds little."""
    steps = one_by_one(ASKED, reset=True)
    told: dict[str, Any] = {"host": {"num_bytes": "6MiB"}, "prefetch": PREFETCH}
    told["storage"] = storage(tmp_path)

    def run(name: str = "KVFerryConnector", *before: Any) -> Future[Any]:
        config = connector(name, **told)
        return engines.begin(
            "gqa", [*before, *steps], fresh=True, **ROOMY, kv_transfer_config=config
        )

    begin_plain(engines)
    first = run().result()
    expected = plain(engines)
    assert texts(first["steps"]) == texts(expected)
    assert cached(first["steps"]) == cached(expected)
    at_rest(first["connector"])
    assert first["connector"]["slots"]["resident"] < 20  # the rest was evicted, and came back

    again, wrong = run(), run("WrongBytes")
    # Everything is known now: whole blocks, but for the one with the last token.
    hits = [(len(prompt) - 1) // 128 * 128 for prompt in ASKED]
    assert cached(again.result()["steps"]) == hits
    assert tokens(again.result()["steps"]) == tokens(expected)
    at_rest(again.result()["connector"])
    # Control. What it computes from wrong bytes, it stores behind them.
    assert tokens(wrong.result()["steps"]) != tokens(expected)

    # A byte of every file is changed: there are fewer hits, and the same answers.
    damaged = run("KVFerryConnector", {"flip": str(tmp_path)}).result()
    assert damaged["steps"][0] > 20
    assert sum(cached(damaged["steps"])) < sum(hits)
    assert tokens(damaged["steps"]) == tokens(expected)
    at_rest(damaged["connector"])


def test_many_requests_in_a_tiny_pool(engines: Engines) -> None:
    """Fifty at once, four of them running: tokens are those of one at a time."""
    steps: list[Any] = [{"prompts": ASKED, "max_tokens": 4}, {"call": "reset"}] * 2
    begin_plain(engines)
    run, wrong = (
        engines.begin("gqa", steps, **TINY, kv_transfer_config=connector(name, host=HOST))
        for name in ("KVFerryConnector", "WrongBytes")
    )
    expected = tokens(plain(engines))
    assert tokens(run.result()["steps"]) == expected * 2
    assert sum(cached(run.result()["steps"][2:])) > sum(cached(plain(engines)))
    at_rest(run.result()["connector"])
    assert tokens(wrong.result()["steps"]) != expected * 2


def test_preempted_requests_come_back(engines: Engines) -> None:
    """Requests that outgrow the pool lose their blocks and load them again."""
    steps: list[Any] = [{"prompts": ASKED[:6], "max_tokens": 140}]
    alone = engines.begin("gqa", steps, **ROOMY)
    run, wrong = (
        engines.begin("gqa", steps, **TINY, kv_transfer_config=connector(name, host=HOST))
        for name in ("KVFerryConnector", "WrongBytes")
    )
    assert run.result()["preemptions"] > 0
    assert tokens(run.result()["steps"]) == tokens(alone.result()["steps"])
    at_rest(run.result()["connector"])
    assert wrong.result()["preemptions"] > 0
    assert tokens(wrong.result()["steps"]) != tokens(alone.result()["steps"])


def test_bad_pages_are_computed_again(engines: Engines) -> None:
    """A page that is not what was stored is told by its blocks, and costs time alone."""
    steps = one_by_one(ASKED[:20], reset=True)
    begin_plain(engines)
    checked, unchecked = (
        engines.begin(
            "gqa",
            steps,
            **ROOMY,
            kv_transfer_config=connector("BadHostPages", host=HOST, integrity={"verify": verify}),
        )
        for verify in ("always", "storage")
    )
    expected = tokens(plain(engines))[:20]
    assert tokens(checked.result()["steps"]) == expected
    at_rest(checked.result()["connector"])
    assert tokens(unchecked.result()["steps"]) != expected  # control: nobody looks


def test_aborts_and_resets_leave_nothing_behind(engines: Engines, tmp_path: Path) -> None:
    """Requests are aborted at every stage, with storage attached; answers stay what they are."""
    steps: list[Any] = []
    for number in range(6):
        steps.append({"prompts": ASKED[4 * number : 4 * number + 4], "abort_after": number})
        steps.append({"call": "reset_all" if number == 3 else "reset"})
    steps += one_by_one(ASKED[:20], reset=True)
    begin_plain(engines)
    run, wrong = (
        engines.begin(
            "gqa",
            steps,
            fresh=True,
            **TINY,
            kv_transfer_config=connector(
                name,
                host={"num_bytes": "12MiB"},
                prefetch=PREFETCH,
                storage=storage(tmp_path / name),
            ),
        )
        for name in ("KVFerryConnector", "WrongBytes")
    )
    expected = tokens(plain(engines))[:20]
    assert tokens(run.result()["steps"]) == expected
    at_rest(run.result()["connector"])
    assert tokens(wrong.result()["steps"]) != expected


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

    def begin(name: str) -> Future[Any]:
        told = connector(name, host=HOST, prefetch=PREFETCH, storage=storage(tmp_path / name))
        return engines.begin("gqa", steps, fresh=True, **ROOMY, kv_transfer_config=told)

    run, wrong = begin("KVFerryConnector"), begin("WrongBytes")
    whole = (len(ASKED[0]) - 1) // 128 * 128
    for one, different in ((run.result(), 1), (wrong.result(), 2)):
        assert cached(one["steps"])[3:] == [0, 0, 0, whole]
        assert len({tuple(each["tokens"]) for each in answers(one["steps"])[3:]}) == different
