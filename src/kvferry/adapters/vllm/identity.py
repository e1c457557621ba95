"""What tells the KV of one model in one engine from that of all others."""

from __future__ import annotations

import hashlib
import json
import pathlib
from typing import Any

from kvferry.index import ContentSpan

__all__ = ["content_of", "lora_of", "weights_revision"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def weights_revision(model: str, revision: str | None, commit: str | None) -> str:
    """Which state of the weights: the commit, where it is known; of a folder, what is in it.

    The time of a file stands for its content, which would take too long to read. A copy of the
    folder is then another model: its pages are computed once more, never taken for others.
    """
    folder = pathlib.Path(model)
    if folder.is_dir():
        files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)
        told = []
        for path in files:
            stat = path.stat()
            told.append([path.name, stat.st_size, stat.st_mtime_ns])
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()
    return commit or revision or "main"


def lora_of(request: Any) -> str:
    """The adapter of a request, by all that vLLM knows it by; empty: none."""
    lora = getattr(request, "lora_request", None)
    if lora is None:
        return ""
    path = str(getattr(lora, "lora_path", ""))
    state = weights_revision(path, None, None) if path else ""
    return json.dumps([str(lora.lora_name), path, state])


def content_of(request: Any) -> tuple[ContentSpan, ...]:
    """Images and the like in a request's prompt."""
    spans = []
    for feature in getattr(request, "mm_features", None) or ():
        at = feature.mm_position
        spans.append(ContentSpan(at.offset, at.length, str(feature.identifier).encode()))
    return tuple(spans)
