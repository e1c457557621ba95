"""What the caller's own streams are asked for. torch is used where the caller has loaded it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["current_stream", "joined"]


def current_stream(gpu: int) -> int:
    """The caller's current stream on this GPU: torch's where torch uses GPUs, else legacy."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # where it is not, it has no streams yet
        return 0
    # The public function makes an object, which takes longer than all else that is asked here.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return int(torch.cuda.current_stream(gpu).cuda_stream if raw is None else raw(gpu))


def joined(tensor: Any, pieces: Sequence[slice], stream: int | None) -> Any:
    """Pieces of a one-dimensional tensor on a GPU, one behind another, copied in order with
    `stream` (its handle; None: the current one). The CPU waits for nothing.

    An index would be brought to the device first, for which torch waits for all in the stream.
    """
    torch = sys.modules["torch"]  # who has such a tensor has loaded it
    if stream is None:
        return torch.cat([tensor[piece] for piece in pieces])
    cuda = torch.cuda
    # 0 is the legacy default stream, which torch takes for no handle at all.
    chosen = (
        cuda.ExternalStream(stream, device=tensor.device)
        if stream
        else cuda.default_stream(tensor.device)
    )
    with cuda.stream(chosen):
        return torch.cat([tensor[piece] for piece in pieces])
