"""Imports vLLM once, and runs each task in a fork of itself: most of a run's start is the import.

A line of JSON in for each task, `[task, results, log, in_process]`; its exit status out.
Forks begin with one thread, as nothing has been computed before.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import traceback
from pathlib import Path

from tests.adapters.vllm.engine_run import main

# What an engine on the CPU comes to load, and what takes longest.
_LOADED = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "kvferry.adapters.vllm",
)


def _be_the_engine(task: str, results: str, log: str, *, in_process: bool) -> None:
    """In the fork: run, and never come back."""
    status = 1
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"
    try:
        main(task, results)
        status = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Until there are no more lines."""
    for name in _LOADED:
        importlib.import_module(name)
    assert threading.active_count() == 1, "a fork would lack these threads"
    for line in sys.stdin:
        task, results, log, in_process = json.loads(line)
        child = os.fork()
        if not child:
            _be_the_engine(task, results, log, in_process=in_process)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[3])
    serve()
