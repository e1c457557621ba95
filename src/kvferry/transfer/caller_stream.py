"""The stream that a caller works in."""

from __future__ import annotations

import sys

__all__ = ["caller_stream"]


def caller_stream(gpu: int) -> int:
    """The caller's current stream on this GPU: torch's where torch is loaded, else legacy."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():  # a build for the CPU has no streams
        return 0
    return int(torch.cuda.current_stream(gpu).cuda_stream)
