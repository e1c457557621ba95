"""One run of the real engine, in a process of its own: a task in JSON in, results in JSON out.

    python -m tests.adapters.vllm.engine_run TASK RESULTS

A task has the engine's settings and a list of steps; see `Task`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TypedDict


class Step(TypedDict, total=False):
    """What to do next: one of these."""

    prompts: list[list[int]]
    """Generate for these at once."""

    max_tokens: int
    params: dict[str, Any]
    """`kv_transfer_params` of the step's requests."""

    salt: str
    abort_after: int
    """Abort all of the step's requests after so many engine steps."""

    call: str
    """``reset``: vLLM's own prefix cache; ``reset_all``: the connector's too."""

    flip: str
    """A folder: change a byte in the middle of every file in it."""


class Task(TypedDict):
    """One engine."""

    model: str
    engine: dict[str, Any]
    steps: list[Step]


def _generate(llm: Any, step: Step) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0,
        max_tokens=step.get("max_tokens", 8),
        ignore_eos=True,
        logprobs=1,
        detokenize=False,
        extra_args={"kv_transfer_params": step["params"]} if "params" in step else None,
    )
    prompts: list[dict[str, Any]] = [
        {"prompt_token_ids": prompt, **({"cache_salt": step["salt"]} if "salt" in step else {})}
        for prompt in step["prompts"]
    ]
    told = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        made = output.outputs[0]
        logprobs = [
            next(iter(at.values())).logprob if token not in at else at[token].logprob
            for token, at in zip(made.token_ids, made.logprobs, strict=True)
        ]
        told.append(
            {
                "tokens": list(made.token_ids),
                "logprobs": [value.hex() for value in map(float, logprobs)],
                "cached": output.num_cached_tokens,
            }
        )
    return told


def _core(llm: Any) -> Any:
    """The engine's core, where it runs in this process."""
    return getattr(llm.llm_engine.engine_core, "engine_core", None)


def _drain(llm: Any) -> None:
    """Step on until nothing is in flight, as an engine in a process of its own does."""
    core = _core(llm)
    if core is None:
        return
    deadline = time.monotonic() + 60
    while core.scheduler.has_requests():
        assert time.monotonic() < deadline, "the engine does not come to rest"
        core.step_fn()


def _abort(llm: Any, step: Step) -> list[dict[str, Any]]:
    from vllm import SamplingParams

    engine = llm.llm_engine
    names = []
    for number, prompt in enumerate(step["prompts"]):
        # vLLM adds to the name for itself; requests are aborted by what the caller called them.
        names.append(f"aborted-{time.monotonic_ns()}-{number}")
        engine.add_request(
            names[-1],
            {"prompt_token_ids": prompt},
            SamplingParams(max_tokens=64, ignore_eos=True, detokenize=False),
        )
    for _ in range(step["abort_after"]):
        engine.step()
    engine.abort_request(names)
    assert not engine.has_unfinished_requests()
    return []


def _flip(folder: str) -> int:
    changed = 0
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.stat().st_size > 4096:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 0x5A
            path.write_bytes(content)
            changed += 1
    return changed


def _tell(llm: Any) -> dict[str, Any]:
    """What the connector says of itself."""
    core = _core(llm)
    connector = None if core is None else core.scheduler.get_kv_connector()
    side = getattr(connector, "_scheduler", None)
    if side is None:
        return {}
    manager = side.manager
    manager.check_integrity()
    stats = manager.stats()
    return {
        "jobs": stats.jobs,
        "readers": stats.readers,
        "requests": len(side._requests),
        "slots": {str(state): n for states in stats.slots.values() for state, n in states.items()},
        "waiting_ranks": side._merge.num_waiting,
    }


def _count_preemptions() -> dict[str, int]:
    from vllm.v1.core.sched.scheduler import Scheduler

    counts = {"preemptions": 0}
    preempt = Scheduler._preempt_request

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        counts["preemptions"] += 1
        preempt(self, *args, **kwargs)

    Scheduler._preempt_request = counted
    return counts


def main(task_file: str, results_file: str) -> None:
    """Run a task."""
    task: Task = json.loads(Path(task_file).read_text())
    from vllm import LLM

    counts = _count_preemptions()
    llm = LLM(
        model=task["model"],
        skip_tokenizer_init=True,
        load_format="auto",
        max_model_len=1024,
        seed=0,
        **{"enforce_eager": True, "dtype": "float32", **task["engine"]},
    )
    results: list[Any] = []
    for step in task["steps"]:
        if "call" in step:
            done = llm.reset_prefix_cache(reset_connector=step["call"] == "reset_all")
            results.append(bool(done))
        elif "flip" in step:
            results.append(_flip(step["flip"]))
        elif "abort_after" in step:
            results.append(_abort(llm, step))
        else:
            results.append(_generate(llm, step))
        _drain(llm)
    told = _tell(llm)
    Path(results_file).write_text(json.dumps({"steps": results, "connector": told, **counts}))
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
