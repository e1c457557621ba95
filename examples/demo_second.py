"""The demo's second process: it knows nothing of the first but a model and a folder of pages.

    python examples/demo_second.py JOB.json

It answers one prompt, loading what it finds in the folder, and leaves a report for the first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from demo_engine import DemoEngine, Restored
from demo_models import Answer, LayerTensors, Subject, load_saved
from kvferry.adapters.transformers import CacheShape

_DEADLINE_SECS = 300.0


class Report(NamedTuple):
    """What the second process did."""

    restored: Restored
    """Its cache is as it was after the load."""

    answer: Answer
    """Its cache is that of `restored`, and not what it became."""

    ready_secs: float
    """From the start of the process until the model was ready for a request."""


class SecondProcessError(Exception):
    """It ended without a report."""


def ask_second_process(
    subject: Subject,
    model: Path,
    storage: tuple[str, str],
    tokens: torch.Tensor,
    max_steps: int,
    folder: Path,
) -> Report:
    """Start a process over `model` and `storage`, have it answer `tokens`, and wait for its report.

    Args:
        subject: Makes caches of what comes back.
        model: As `Subject.save` left it.
        storage: The URL of where pages lie, and the run that they are of.
        tokens: Shape ``[1, T]``.
        max_steps: Tokens to generate, at most.
        folder: For what the two say to each other.
    """
    job, told = folder / "job.json", folder / "report.pt"
    job.write_text(
        json.dumps(
            {
                "name": subject.name,
                "model": str(model),
                "storage": list(storage),
                "tokens": tokens[0].tolist(),
                "end_tokens": sorted(subject.end_tokens),
                "max_steps": max_steps,
                "num_threads": torch.get_num_threads(),
                "started_at": time.time(),
                "report": str(told),
            }
        )
    )
    # This interpreter and this very file, with a path made here.
    ran = subprocess.run(  # noqa: S603
        [sys.executable, __file__, str(job)],
        capture_output=True,
        text=True,
        check=False,
        timeout=_DEADLINE_SECS,
        env={**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
    )
    if ran.returncode:
        raise SecondProcessError(f"the second process ended with {ran.returncode}\n{ran.stderr}")
    report: dict[str, Any] = torch.load(told, weights_only=True)
    layers: list[LayerTensors] = report["layers"]
    cache = subject.filled_cache(layers) if layers else subject.new_cache()
    return Report(
        restored=Restored(cache=cache, **report["restored"]),
        answer=Answer(report["tokens"], report["logits"], report["first_token_secs"], cache),
        ready_secs=report["ready_secs"],
    )


def main(argv: Sequence[str]) -> int:
    """Do what the file named first says."""
    job = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(job["num_threads"])
    subject = load_saved(Path(job["model"]), job["name"], job["end_tokens"])
    tokens = torch.tensor([job["tokens"]])
    with torch.inference_mode():
        # As engines do before they serve: it also tells what the model's cache is made of.
        warm = subject.prefill(tokens[:, :8])
        subject.compute(tokens[:, 8:16], warm)
        shape = CacheShape.of(warm)
        engine = DemoEngine(subject, shape, *job["storage"])
        ready_secs = time.time() - job["started_at"]
        with engine.cache:
            restored = engine.restore(tokens)
            layers = [
                (layer.keys.contiguous().clone(), layer.values.contiguous().clone())
                for layer in restored.cache.layers
                if restored.num_tokens
            ]
            rest = tokens[:, restored.num_tokens :]
            answer = subject.answer(rest, restored.cache, job["max_steps"])
    told = restored._asdict()
    del told["cache"]
    torch.save(
        {
            "restored": told,
            "layers": layers,
            "tokens": answer.tokens,
            "logits": answer.logits,
            "first_token_secs": answer.first_token_secs,
            "ready_secs": ready_secs,
        },
        job["report"],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
