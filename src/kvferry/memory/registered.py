"""An engine's own host tensors as a pool of page slots, in the layout they already have."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

from kvferry.errors import PoolInUseError, ViewError
from kvferry.geometry import Geometry, LayerView, PoolView, SlotDims
from kvferry.memory.mapping import HostMapping
from kvferry.memory.pin_driver import ContextPinDriver
from kvferry.memory.pinned import look_up, register
from kvferry.memory.pool_memory import PoolMemory
from kvferry.memory.registration import PinDriver, Registration
from kvferry.types import SlotKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from kvferry.kernels.jit import Context

__all__ = ["RegisteredHostPool"]

_DIGEST_BYTES = 8


class RegisteredHostPool(PoolMemory):
    """Host memory that an engine allocated and owns: layer_first, token_major or page_major.

    kvferry keeps a digest of every span beside it, and nothing else. Its slots have no owners here:
    which of them are in use is the engine's business, and a transfer may name any of them.

    Args:
        geometry: The planes.
        view: Where their rows lie, on the CPU; see `PoolView.from_tensors`. Page slot s of a plane
            with R rows a page is its rows ``[s·R, (s+1)·R)``.
        kind: Whether the tensors keep pages or checkpoints.
        pin_tensors: Register the tensors' memory where a GPU engine is made over the pool. Without
            it they must be pinned already.

    Raises:
        ViewError: A plane is missing, lies on a device, or has rows that are no whole number of
            pages, or planes differ in their number of pages.
        BudgetError: There is no memory for the digests.
    """

    def __init__(
        self,
        geometry: Geometry,
        view: PoolView,
        *,
        kind: SlotKind = SlotKind.PAGE,
        pin_tensors: bool = False,
    ) -> None:
        kind = SlotKind(kind)
        if view.geometry.fingerprint != geometry.fingerprint:
            raise ViewError(
                f"the tensors were viewed as geometry {view.geometry.fingerprint}, and the pool is "
                f"to be of {geometry.fingerprint}; build both from one"
            )
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
        self._pin_tensors = pin_tensors
        self.geometry = geometry
        self.kind = kind
        self.view = view
        self.num_slots = next(iter(pages.values()))
        self._layers = [layer for name in planes for layer in view.layers[name]]
        super().__init__(
            HostMapping(self.num_slots * len(geometry.spans(kind)) * _DIGEST_BYTES),
            num_slots=self.num_slots,
            digest_offset=0,
            when_closed="this registered host pool is closed; register its tensors anew",
        )

    @classmethod
    def from_tensors(
        cls,
        geometry: Geometry,
        tensors: Mapping[str, Any],
        *,
        slot_dims: SlotDims | Mapping[str, SlotDims] = (0,),
        layer_dim: int = 0,
        kind: SlotKind = SlotKind.PAGE,
        pin_tensors: bool = False,
    ) -> RegisteredHostPool:
        """A pool over an engine's tensors; arguments as for `PoolView.from_tensors`.

        With one tensor a plane: layer_first ``[L, tokens, *element]`` is the default, token_major
        ``[tokens, L, *element]`` is ``layer_dim=1``, page_major ``[pages, L, P, *element]`` is
        ``layer_dim=1, slot_dims=(0, 1)``.
        """
        view = PoolView.from_tensors(geometry, tensors, slot_dims=slot_dims, layer_dim=layer_dim)
        return cls(geometry, view, kind=kind, pin_tensors=pin_tensors)

    def pin(
        self,
        driver: PinDriver,
        *,
        pin_tensors: bool = False,
        chunk_bytes: int | None = None,
        allow_gaps: bool = False,
    ) -> Registration:
        """Register the digest table, and look the tensors up or register them too.

        A pool that is pinned already stays as it is, for all of its users.

        Args:
            driver: What talks to the driver.
            pin_tensors: The tensors are not pinned yet: register the memory pages that they lie
                in, until the pool is closed. Otherwise they must be pinned already, and stay so.
            chunk_bytes: As for `register`.
            allow_gaps: As for `register`.

        Raises:
            PinError: The driver refused, or the tensors are not pinned, and nothing was changed;
                or the pool was pinned with gaps, and here they are not allowed.
        """
        with self._lock:
            pinned = self._pinned_before(allow_gaps=allow_gaps)
            if pinned is not None:
                return pinned
            table, size = self._mapping.address, self._mapping.num_bytes
            parts = [register(table, size, driver, owner=self._mapping)]
            try:
                for start, end in _ranges(self._layers, whole_pages=pin_tensors):
                    if pin_tensors:
                        part = register(
                            start,
                            end - start,
                            driver,
                            chunk_bytes=chunk_bytes,
                            allow_gaps=allow_gaps,
                            owner=self.view,
                        )
                    else:
                        part = look_up(start, end - start, driver, owner=self.view)
                    parts.append(part)
            except BaseException as cause:
                for part in reversed(parts):
                    part.__exit__(type(cause), cause, None)
                raise
            self._registration = Registration.merged(driver, parts)
            return self._registration

    def pin_for(self, context: Context) -> Registration:
        """`pin` for the GPU of `context`."""
        return self.pin(ContextPinDriver(context), pin_tensors=self._pin_tensors)

    def check_slots(self, slots: NDArray[np.int64]) -> None:
        """Nothing: slots of an engine have no owners here."""

    def __repr__(self) -> str:
        return f"RegisteredHostPool({self.kind.value} slots: {self.num_slots}, {self.view!r})"

    def acquire(self, slots: NDArray[np.int64] | None = None) -> None:  # noqa: ARG002
        """Keep the pool open; raises PoolClosedError if it is closed. `slots` are the engine's."""
        self._take_lease()

    def release(self, slots: NDArray[np.int64] | None = None) -> None:  # noqa: ARG002
        """Give back one `acquire`. Raises HostMemoryError when none is out."""
        self._return_lease()

    def close(self) -> None:
        """Unregister what `pin` registered and forget the tensors; once closed, a no-op.

        Raises PoolInUseError, and leaves the pool open, while a transfer or a view of the digests
        uses it. Raises PinError where the driver does not let go of the memory: the pool is no
        longer pinned, and `close` may be called again.
        """
        with self._lock:
            if self._leases:
                raise PoolInUseError(
                    f"{self._leases} transfers still use this host pool; wait for them, then close"
                )
            self._close_memory()


def _ranges(layers: Iterable[LayerView], *, whole_pages: bool) -> Iterator[tuple[int, int]]:
    """Where `layers` lie, as (start, end); layers that share bytes are in one.

    With `whole_pages` the ranges are memory pages, which can be registered only once each, and
    neighbours are in one too.
    """
    page = mmap.PAGESIZE if whole_pages else 1
    found: tuple[int, int] | None = None
    for layer in sorted(layers, key=lambda layer: layer.address):
        start, end = layer.address // page * page, -(-layer.end // page) * page
        if found is not None and (start <= found[1] if whole_pages else start < found[1]):
            found = (found[0], max(found[1], end))
        else:
            if found is not None:
                yield found
            found = (start, end)
    if found is not None:
        yield found
