"""The real engine on the CPU, sliding windows in some of the layers."""

from __future__ import annotations

from typing import Any

from tests.adapters.vllm.engines import (
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

ASKED = prompts(20)
POOL: dict[str, Any] = {"num_gpu_blocks_override": 512}
HOST = {"num_bytes": "64MiB"}


def test_layers_with_windows_are_carried(engines: Engines) -> None:
    """Given the connector alone, vLLM keeps all tokens; answers are those of its own cache then."""
    steps = one_by_one(ASKED, reset=True)
    runs = [
        engines.begin("window", steps, **POOL, kv_transfer_config=connector(name, host=HOST))
        for name in ("KVFerryConnector", "WrongBytes")
    ]
    alone = engines.begin(
        "window", one_by_one(ASKED, reset=False), disable_hybrid_kv_cache_manager=True, **POOL
    )
    given, wrong, expected = (run.result()["steps"] for run in (*runs, alone))
    assert texts(given) == texts(expected)
    hits = expected_hits(ASKED, tokens(expected), 128)
    assert cached(given) == cached(expected) == hits
    assert sum(hits) > 2000
    # Control: with zeros in place of what was loaded.
    assert cached(wrong) == hits
    differ = [
        one != other
        for one, other, hit in zip(texts(wrong), texts(given), hits, strict=True)
        if hit
    ]
    assert all(differ)


def test_windows_matter(engines: Engines) -> None:
    """The model is another one without its windows: the test above would be for nothing."""
    steps = one_by_one(ASKED[:6], reset=False)
    windows = engines.begin("window", steps, disable_hybrid_kv_cache_manager=True, **POOL)
    full = engines.begin("gqa", steps, **POOL)
    assert tokens(windows.result()["steps"]) != tokens(full.result()["steps"])
