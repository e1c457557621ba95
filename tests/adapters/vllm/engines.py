"""Runs of the real engine for tests: each task once a session, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.vllm.engine_run import Step
from tests.adapters.vllm.models import VOCABULARY, write_model

ROOT = Path(__file__).parents[3]
HERE = "tests.adapters.vllm.engine_connectors"
BLOCK = {"gqa": 128, "mla": 16}

needs_vllm = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed here; `make test-vllm` has an environment with it",
    ),
    # An engine takes half a minute to start and to stop, and a test may need three of them.
    pytest.mark.timeout(900),
]


def prompts(number: int = 50, *, seed: int = 5) -> list[list[int]]:
    """Prompts that share prefixes, in a shuffled order."""
    rng = random.Random(seed)

    def text(length: int) -> list[int]:
        return [rng.randrange(2, VOCABULARY) for _ in range(length)]

    shared = [text(length) for length in (130, 300, 390, 520)]
    made = [shared[at % len(shared)] + text(rng.randrange(5, 150)) for at in range(number)]
    rng.shuffle(made)
    return made


def expected_hits(asked: list[list[int]], answers: list[list[int]], block: int) -> list[int]:
    """How many tokens of each prompt were computed by those before, in whole blocks.

    The last token of a prompt is always computed; the last one of an answer never was.
    """
    known: set[tuple[int, ...]] = set()
    hits = []
    for prompt, answer in zip(asked, answers, strict=True):
        found = 0
        while found + block < len(prompt) and tuple(prompt[: found + block]) in known:
            found += block
        hits.append(found)
        computed = [*prompt, *answer[:-1]]
        for end in range(block, len(computed) + 1, block):
            known.add(tuple(computed[:end]))
    return hits


def connector(
    name: str = "KVFerryConnector", *, policy: str = "recompute", **sections: Any
) -> dict[str, Any]:
    """`kv_transfer_config` for a connector of ours."""
    told: dict[str, Any] = {
        "kv_connector": name,
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": sections,
    }
    if name != "KVFerryConnector":  # that one is known by its entry point
        told["kv_connector_module_path"] = HERE
    return told


class Engines:
    """Runs tasks.

    Args:
        folder: For models, tasks and results.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[str, Any] = {}

    def run(
        self,
        kind: str,
        steps: list[Step],
        *,
        fresh: bool = False,
        in_process: bool = True,
        **engine: Any,
    ) -> dict[str, Any]:
        """Run an engine, or tell what it said when it ran before.

        Args:
            kind: The model.
            steps: What to do.
            fresh: Run it in any case.
            in_process: The engine's core is in the child itself, and can be asked.
            engine: Settings of the engine.
        """
        model = self._folder / kind
        if not model.exists():
            write_model(model, kind)
        task = {"model": str(model), "engine": engine, "steps": steps}
        name = json.dumps([task, in_process], sort_keys=True)
        if fresh or name not in self._results:
            self._results[name] = self._run(task, in_process=in_process)
        found: dict[str, Any] = self._results[name]
        return found

    def _run(self, task: Any, *, in_process: bool) -> Any:
        at = self._folder / f"run{len(list(self._folder.glob('run*.json')))}"
        task_file, results = at.with_suffix(".json"), at.with_suffix(".out")
        task_file.write_text(json.dumps(task))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.adapters.vllm.engine_run"]
        command += [str(task_file), str(results)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return json.loads(results.read_text())


def answers(steps: list[Any]) -> list[Any]:
    """What was generated, request by request."""
    return [request for step in steps if isinstance(step, list) for request in step]


def texts(steps: list[Any]) -> list[tuple[list[int], list[str]]]:
    """Tokens and logprobs, bit by bit."""
    return [(one["tokens"], one["logprobs"]) for one in answers(steps)]


def tokens(steps: list[Any]) -> list[list[int]]:
    """Tokens alone."""
    return [one["tokens"] for one in answers(steps)]


def cached(steps: list[Any]) -> list[int]:
    """How many tokens of each prompt were not computed."""
    return [one["cached"] for one in answers(steps)]


def one_by_one(asked: list[list[int]], *, reset: bool, max_tokens: int = 4) -> list[Step]:
    """Steps that generate for one prompt after another; `reset`: vLLM itself remembers nothing."""
    steps: list[Step] = []
    for prompt in asked:
        steps.append({"prompts": [prompt], "max_tokens": max_tokens})
        if reset:
            steps.append({"call": "reset"})
    return steps
