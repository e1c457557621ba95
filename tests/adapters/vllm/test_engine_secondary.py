"""kvferry's storage behind vLLM's own host tier, in the real engine."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.vllm.engines import Engines, cached, needs_vllm, one_by_one, prompts, tokens

pytestmark = needs_vllm

ASKED = prompts(20)
POOL: dict[str, Any] = {"num_gpu_blocks_override": 300}
STEPS = one_by_one(ASKED, reset=True)


@pytest.fixture
def engine_id() -> Iterator[str]:
    """A name of its own for what vLLM leaves in shared memory; removed."""
    name = f"kvferry{uuid.uuid4().hex}"
    yield name
    for left in Path("/dev/shm").glob(f"*{name}*"):  # noqa: S108  where vLLM puts it
        left.unlink()


def tiering(engine_id: str, folder: Path, **more: Any) -> dict[str, Any]:
    """vLLM's tiering with a host tier of few chunks, and ours below it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_connector_extra_config": {
            "spec_name": "CpuTiering",
            "spec_module_path": "tests.adapters.vllm.engine_offload",
            "cpu_bytes_to_use": 8 << 20,
            "secondary_tiers": [
                {
                    "type": "KVFerryTier",
                    "module_path": "kvferry.adapters.vllm.secondary",
                    "storage": {"path": str(folder)},
                }
            ],
            **more,
        },
    }


def test_chunks_outlive_the_engine(engines: Engines, engine_id: str, tmp_path: Path) -> None:
    """A second engine finds them; damaged ones are not served; wrong ones would be seen."""

    def run(*before: Any, **more: Any) -> Future[Any]:
        # One at a time for each name: vLLM's host tier is a file in shared memory.
        told = tiering(engine_id, tmp_path, **more)
        return engines.begin("gqa", [*before, *STEPS], fresh=True, **POOL, kv_transfer_config=told)

    alone = engines.begin("gqa", STEPS, **POOL)
    first = run().result()["steps"]
    plain = alone.result()["steps"]
    assert tokens(first) == tokens(plain)
    again = run().result()["steps"]
    assert tokens(again) == tokens(plain)
    # vLLM's own connector takes a prompt of whole blocks as a whole, and computes its end again.
    assert cached(again) == [len(prompt) // 128 * 128 for prompt in ASKED]
    assert sum(cached(again)) > sum(cached(first))

    spoiled = run(wrong=True).result()["steps"]
    assert tokens(spoiled) != tokens(plain)

    damaged = run({"flip": str(tmp_path)}).result()["steps"]
    assert damaged[0] > 10
    assert tokens(damaged) == tokens(plain)
    assert sum(cached(damaged)) < sum(cached(again))
