"""One layer of one plane of a plan, with everything a mover needs to carry it out."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView, Span

__all__ = ["SpanMove"]


@dataclasses.dataclass(frozen=True, eq=False)
class SpanMove:
    """N pages of one span. Spans share nothing that is written, so they may move in parallel."""

    span: Span
    device: LayerView
    host: LayerView
    device_rows: NDArray[np.int64]
    """Shape: ``[N, R]``."""

    host_slots: NDArray[np.int64]
    """Shape: ``[N]``."""

    page_seeds: NDArray[np.uint64]
    """Shape: ``[N]``."""

    digests: NDArray[np.uint64]
    """The host pool's column for this span. Shape: ``[slots]``."""
