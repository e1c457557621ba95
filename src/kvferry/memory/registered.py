"""An engine's own host tensors as a pool of page slots, in the layout they already have."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry.errors import HostMemoryError, PoolClosedError, PoolInUseError, ViewError
from kvferry.geometry import Geometry, PoolView, SlotDims
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

__all__ = ["RegisteredHostPool"]


class RegisteredHostPool:
    """Host memory that an engine allocated and owns: layer_first, token_major or page_major.

    kvferry keeps a digest of every span beside it, and nothing else. Its slots have no owners here:
    which of them are in use is the engine's business, and a transfer may name any of them.

    Args:
        geometry: The planes.
        view: Where their rows lie, on the CPU; see `PoolView.from_tensors`. Page slot s of a plane
            with R rows a page is its rows ``[s·R, (s+1)·R)``.
        kind: Whether the tensors keep pages or checkpoints.

    Raises:
        ViewError: A plane is missing, lies on a device, or has rows that are no whole number of
            pages, or planes differ in their number of pages.
    """

    def __init__(
        self, geometry: Geometry, view: PoolView, *, kind: SlotKind = SlotKind.PAGE
    ) -> None:
        planes = {span.plane.name: span.plane for span in geometry.spans(kind)}
        missing = sorted(set(planes) - set(view.layers))
        if missing:
            raise ViewError(
                f"a host pool of {kind.value} slots needs planes {', '.join(missing)} too"
            )
        if view.device != "cpu":
            raise ViewError(
                f"a host pool lies in host memory, not on {view.device}; pass CPU tensors"
            )
        pages: dict[str, int] = {}
        for name, plane in planes.items():
            per_page = geometry.rows_per_page(plane)
            pages[name], rest = divmod(view.num_rows(name), per_page)
            if rest:
                raise ViewError(
                    f"plane {name!r}: {view.num_rows(name)} rows are no whole number of pages of "
                    f"{per_page} rows; make the tensor a multiple, or change page_size"
                )
        if len(set(pages.values())) > 1:
            raise ViewError(f"planes differ in their number of page slots: {pages}")
        self.geometry = geometry
        self.kind = kind
        self.view = view
        self.num_slots = next(iter(pages.values()))
        self.digests: NDArray[np.uint64] = np.zeros(
            (self.num_slots, len(geometry.spans(kind))), dtype=np.uint64
        )
        self._lock = threading.Lock()
        self._leases = 0
        self._closed = False

    @classmethod
    def from_tensors(
        cls,
        geometry: Geometry,
        tensors: Mapping[str, Any],
        *,
        slot_dims: SlotDims | Mapping[str, SlotDims] = (0,),
        layer_dim: int = 0,
        kind: SlotKind = SlotKind.PAGE,
    ) -> RegisteredHostPool:
        """A pool over an engine's tensors; arguments as for `PoolView.from_tensors`.

        With one tensor a plane: layer_first ``[L, tokens, *element]`` is the default, token_major
        ``[tokens, L, *element]`` is ``layer_dim=1``, page_major ``[pages, L, P, *element]`` is
        ``layer_dim=1, slot_dims=(0, 1)``.
        """
        view = PoolView.from_tensors(geometry, tensors, slot_dims=slot_dims, layer_dim=layer_dim)
        return cls(geometry, view, kind=kind)

    def check_slots(self, slots: NDArray[np.int64]) -> None:
        """Nothing: slots of an engine have no owners here."""

    def __repr__(self) -> str:
        return f"RegisteredHostPool({self.kind.value} slots: {self.num_slots}, {self.view!r})"

    def acquire(self) -> None:
        """Keep the pool open; raises PoolClosedError if it is closed."""
        with self._lock:
            if self._closed:
                raise PoolClosedError(
                    "this registered host pool is closed; register its tensors anew"
                )
            self._leases += 1

    def release(self) -> None:
        """Give back one `acquire`. Raises HostMemoryError when none is out."""
        with self._lock:
            if self._leases == 0:
                raise HostMemoryError(
                    "release() was called with 0 leases out: call it once for each acquire()"
                )
            self._leases -= 1

    def close(self) -> None:
        """Forget the tensors. Raises PoolInUseError while a transfer uses them; may be repeated."""
        with self._lock:
            if self._leases:
                raise PoolInUseError(
                    f"{self._leases} transfers still use this host pool; wait for them, then close"
                )
            self._closed = True
