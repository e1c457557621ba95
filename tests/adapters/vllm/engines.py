"""Runs of the real engine for tests: each task once a session, in a process of its own."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import queue
import random
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.adapters.vllm.engine_run import Step
from tests.adapters.vllm.models import VOCABULARY, write_model

ROOT = Path(__file__).parents[3]
HERE = "tests.adapters.vllm.engine_connectors"
BLOCK = {"gqa": 128, "mla": 16}
_AT_ONCE = 2
_RUN_SECONDS = 400.0

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


def engine_environment() -> dict[str, str]:
    """For processes with an engine: one thread, nothing fetched, nothing reported."""
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


class _Server:
    """A process that has vLLM loaded, and runs one task after another.

    Args:
        log: Where it writes what it has to say of itself.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.adapters.vllm.engine_server"],
                cwd=ROOT,
                env=engine_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # with what it starts, so that all of it can be ended
            )

    def run(self, task: Any, at: Path, *, in_process: bool) -> Any:
        """Run a task, in files that begin with `at`."""
        files = [str(at.with_suffix(end)) for end in (".json", ".out", ".log")]
        Path(files[0]).write_text(json.dumps(task))
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps([*files, in_process]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], _RUN_SECONDS)
        if not ready:
            self.kill()
        status = process.stdout.readline().strip() if ready else "none in time"
        told = "".join(
            path.read_text(errors="replace")[-6000:]
            for path in (Path(files[2]), self._log)
            if path.exists()
        )
        assert status == "0", f"the engine's exit status: {status or 'none'}\n{told}"
        return json.loads(Path(files[1]).read_text())

    def kill(self) -> None:
        """End it and all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, between two tasks."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(30)
        self._process.stdout.close()


class Engines:
    """Runs tasks, two at a time: an engine has one thread. Two ranks run alone.

    Args:
        folder: For models, tasks and results.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._results: dict[str, Future[Any]] = {}
        self._numbers = itertools.count()
        self._idle: queue.SimpleQueue[_Server] = queue.SimpleQueue()
        self._servers: list[_Server] = []
        self._pool = ThreadPoolExecutor(_AT_ONCE)
        self._cores = threading.Semaphore(_AT_ONCE)
        self._gate = threading.Lock()

    def begin(
        self,
        kind: str,
        steps: list[Step],
        *,
        fresh: bool = False,
        in_process: bool = True,
        **engine: Any,
    ) -> Future[Any]:
        """Begin to run an engine, or give what it said when it ran before.

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
            self._results[name] = self._pool.submit(self._run, task, in_process=in_process)
        return self._results[name]

    def run(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The same, and wait for it."""
        found: dict[str, Any] = self.begin(*args, **kwargs).result()
        return found

    def _run(self, task: Any, *, in_process: bool) -> Any:
        at = self._folder / f"run{next(self._numbers)}"
        with self._room(2 if task["engine"].get("tensor_parallel_size", 1) > 1 else 1):
            try:
                server = self._idle.get_nowait()
            except queue.Empty:
                server = _Server(at.with_suffix(".server"))
                self._servers.append(server)
            done = server.run(task, at, in_process=in_process)
            self._idle.put(server)  # not one that failed: what is left of it, nobody knows
        return done

    @contextlib.contextmanager
    def _room(self, cores: int) -> Iterator[None]:
        with self._gate:
            for _ in range(cores):
                self._cores.acquire()
        try:
            yield
        finally:
            self._cores.release(cores)

    def close(self) -> None:
        """End all processes."""
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers:
            server.close()


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
