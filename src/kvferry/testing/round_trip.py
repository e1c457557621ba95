"""One prefix, stored to the host and loaded back to other device rows, compared whole each time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvferry.closing import ClosedAtExit
from kvferry.geometry import Geometry, HitRule, Plane, PoolView
from kvferry.kernels import digest_spans, span_seeds
from kvferry.memory import HostPool, RegisteredHostPool, SlotOwner
from kvferry.testing.layouts import (
    DeviceLayout,
    num_pool_bytes,
    place_device_layers,
    place_host_layers,
)
from kvferry.testing.numeric import assert_bytes_equal
from kvferry.testing.patterns import (
    POISON,
    GuardedBuffer,
    memory_at,
    moved_view,
    pattern_rows,
    write_rows,
)
from kvferry.transfer import TransferEngine, TransferPlan
from kvferry.types import Layout, Mover, SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvferry.geometry import LayerView

__all__ = ["DeviceMemory", "RoundTrip"]

_NUM_LAYERS = 2
_NUM_HOST_SLOTS = 5
_BLOCK_ROWS = 16
# Page sizes that give a page several runs where runs are short, and one where they are long.
_PAGE_SIZE_OF_RUN = {1: 16, 16: 32}
# From this element size on, two pages make a case large enough.
_LARGE_ELEMENT = 4096


class DeviceMemory(Protocol):
    """A guarded buffer on a device; `GuardedBuffer` is the one in host memory."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def device(self) -> str:
        """As in `LayerView.device`."""

    def fill(self, image: NDArray[np.uint8] | None = None) -> None:
        """Make the buffer `image`; None: poison."""

    def check(self, expected: NDArray[np.uint8] | None = None, what: str = "buffer") -> None:
        """Raise AssertionError unless guards and buffer are as they should be."""


class RoundTrip(ClosedAtExit):
    """Pools, page lists and what the pools should hold, for `store` and then `load` on any path.

    Args:
        element_size: Bytes of a row.
        kind: PAGE, or STATE for rows that are checkpoints.
        device_run: Consecutive tokens in consecutive device rows.
        host_layout: Of an engine's host pool; None: kvferry's own.
        device_layout: Of the device pool.
        allocate: Makes guarded device memory of so many bytes.
    """

    def __init__(
        self,
        *,
        element_size: int,
        kind: SlotKind,
        device_run: int,
        host_layout: Layout | None,
        device_layout: DeviceLayout,
        allocate: Callable[[int], DeviceMemory],
    ) -> None:
        self._geometry = _geometry(element_size, kind, device_run)
        self._kind = kind
        self._plane = self._geometry.planes[0]
        self._per_page = self._geometry.rows_per_page(self._plane)
        self._block_rows = max(_BLOCK_ROWS, device_run)
        rng = np.random.default_rng((element_size, device_run))
        pages = 2 if element_size >= _LARGE_ELEMENT else 3
        self._host_slots = rng.permutation(_NUM_HOST_SLOTS)[:pages]
        self._damaged = int(rng.integers(pages))
        rows = _device_rows(rng, pages=2 * pages, per_page=self._per_page, run=device_run)
        self._sources, self._targets = rows[:pages], rows[pages:]
        num_blocks = int(rows.max()) // self._block_rows + 1
        self._elements = [
            pattern_rows(
                0,
                pool=0,
                layer=layer,
                slots=np.arange(pages * self._per_page),
                element_size=element_size,
            )
            for layer in range(_NUM_LAYERS)
        ]
        # What the device pool holds before the store and after the load, and the host pool between.
        layers = self._device_layers(device_layout, num_blocks, base=0)
        num_bytes = num_pool_bytes(layers)
        self._before = self._image(num_bytes, layers, self._sources)
        self._after = self._image(num_bytes, layers, self._targets)
        self._memory = allocate(num_bytes)
        placed = self._device_layers(
            device_layout, num_blocks, base=self._memory.address, device=self._memory.device
        )
        self._device = PoolView(self._geometry, {self._plane.name: placed})
        self._guarded: GuardedBuffer | None = None
        self._host = self._own_pool() if host_layout is None else self._engine_pool(host_layout)
        self._stored = self._host_image()
        self._digests = self._expected_digests()

    @property
    def num_bytes(self) -> int:
        """What one transfer moves."""
        return sum(layer.size for layer in self._elements)

    def takes(self, path: str) -> bool:
        """Whether `path` can carry this case at all; only GPU paths are particular.

        ``staged`` is the staged mover, with the kernels that it takes; others go direct.
        """
        if self._memory.device == "cpu":
            return True
        if path == Mover.STAGED:
            staging = self._staging_bytes
            with TransferEngine(self._device, self._host, staging_bytes=staging) as engine:
                return engine.path == path
        plan = TransferPlan.store(self._geometry, **self._indices(self._sources, "int64"))
        with TransferEngine(self._device, self._host, mover=Mover.DIRECT) as engine:
            decisions = engine.explain(plan).values()
        return {
            "flat": all(decision.flat.eligible for decision in decisions),
            "realign": all(decision.realign.eligible for decision in decisions),
            "grouped": all(decision.grouped.eligible for decision in decisions),
        }[path]

    def store(self, path: str, index_type: str) -> float:
        """Store into poisoned slots and compare; the seconds the store took.

        Raises AssertionError for a difference, and whatever the transfer raises.
        """
        self._memory.fill(self._before)
        self._poison_host()
        plan = TransferPlan.store(self._geometry, **self._indices(self._sources, index_type))
        with self._engine(path) as engine:
            began = time.perf_counter()
            handle = engine.store(plan)
            handle.wait()
            seconds = time.perf_counter() - began
        _check_path(handle.path, path)
        self._check_host("host pool after the store")
        self._memory.check(self._before, "device pool after the store")
        self._check_digests()
        return seconds

    def load(self, path: str, index_type: str) -> float:
        """Load what `store` left into poisoned rows and compare, then again with a flipped byte.

        Returns and raises as `store` does.
        """
        self._memory.fill()
        plan = TransferPlan.load(self._geometry, **self._indices(self._targets, index_type))
        with self._engine(path) as engine:
            began = time.perf_counter()
            handle = engine.load(plan)
            handle.wait()
            seconds = time.perf_counter() - began
            _check_path(handle.path, path)
            if handle.verified_pages != plan.num_pages:
                raise AssertionError(
                    f"{handle.verified_pages} of {plan.num_pages} good pages were verified; "
                    f"{handle.bad_pages} were refused"
                )
            self._memory.check(self._after, "device pool after the load")
            self._check_host("host pool after the load")
            self._load_damaged(engine, plan)
        return seconds

    @property
    def _staging_bytes(self) -> int:
        """Room for a page at a time, so that a few pages go through it again and again."""
        return 2 * self._geometry.slot_bytes(self._plane.slot_kind) + (1 << 16)

    def _engine(self, path: str) -> TransferEngine:
        if path == Mover.STAGED:
            return TransferEngine(
                self._device, self._host, mover=path, staging_bytes=self._staging_bytes
            )
        return TransferEngine(self._device, self._host, path=path)

    def close(self) -> None:
        """Give the host pool's memory back."""
        self._host.close()

    def _load_damaged(self, engine: TransferEngine, plan: TransferPlan) -> None:
        layer = self._host.view.view(self._plane.name, _NUM_LAYERS - 1)
        row = int(self._host_slots[self._damaged]) * self._per_page + self._per_page // 2
        byte = memory_at(layer.row_address(row) + self._plane.element_size // 2, 1)
        byte ^= 0x10
        handle = engine.load(plan)
        handle.wait()
        byte ^= 0x10
        if handle.bad_pages != (self._damaged,):
            raise AssertionError(
                f"a stored byte of page {self._damaged} was flipped, but {handle.bad_pages} were "
                f"refused"
            )

    def _device_layers(
        self, layout: DeviceLayout, num_blocks: int, *, base: int, device: str = "cpu"
    ) -> tuple[LayerView, ...]:
        return place_device_layers(
            layout,
            self._plane,
            num_rows=num_blocks * self._block_rows,
            block_rows=self._block_rows,
            base=base,
            device=device,
        )

    def _own_pool(self) -> HostPool:
        pool = HostPool(self._geometry, num_slots=_NUM_HOST_SLOTS, kind=self._kind)
        pool.allocate(_NUM_HOST_SLOTS, SlotOwner.INDEX)
        return pool

    def _engine_pool(self, layout: Layout) -> RegisteredHostPool:
        def placed(base: int) -> tuple[LayerView, ...]:
            return place_host_layers(
                layout,
                self._plane,
                rows_per_page=self._per_page,
                num_pages=_NUM_HOST_SLOTS,
                base=base,
            )

        self._guarded = GuardedBuffer(num_pool_bytes(placed(0)))
        view = PoolView(self._geometry, {self._plane.name: placed(self._guarded.address)})
        return RegisteredHostPool(self._geometry, view, kind=self._kind, pin_tensors=True)

    def _poison_host(self) -> None:
        self._host.digests[:] = 0
        if self._guarded is not None:
            self._guarded.fill()
        else:
            self._host_bytes()[:] = POISON

    def _host_bytes(self) -> NDArray[np.uint8]:
        """The host pool's memory itself, padding included."""
        if self._guarded is not None:
            return self._guarded.inside
        base = self._host.view.view(self._plane.name, 0).address
        return memory_at(base, _NUM_HOST_SLOTS * self._geometry.slot_bytes(self._kind))

    def _host_image(self) -> NDArray[np.uint8]:
        memory = self._host_bytes()
        layers = self._host.view.layers[self._plane.name]
        rows = self._host_slots[:, None] * self._per_page + np.arange(self._per_page)
        at_zero = tuple(
            moved_view(layer, from_address=int(memory.ctypes.data), to_address=0)
            for layer in layers
        )
        return self._image(memory.size, at_zero, rows)

    def _image(
        self, num_bytes: int, layers: tuple[LayerView, ...], rows: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """Poison, with the prefix in `rows`; `layers` are placed at address 0."""
        image = np.full(num_bytes, POISON, dtype=np.uint8)
        for layer, elements in zip(layers, self._elements, strict=True):
            view = moved_view(layer, from_address=0, to_address=int(image.ctypes.data))
            write_rows(view, rows, elements)
        return image

    def _indices(self, rows: NDArray[np.int64], index_type: str) -> dict[str, Any]:
        indices: dict[str, Any] = {
            "host_slots": self._host_slots.astype(index_type),
            "kind": self._kind,
        }
        if self._kind is SlotKind.STATE:
            return {**indices, "plane_slots": {self._plane.name: rows.astype(index_type)}}
        return {**indices, "device_slots": rows.astype(index_type)}

    def _expected_digests(self) -> NDArray[np.uint64]:
        """Of every page and span, over the elements themselves. Shape: ``[pages, spans]``."""
        pages = len(self._host_slots)
        columns = []
        for span in self._geometry.spans(self._kind):
            seeds = span_seeds(
                np.zeros(pages, dtype=np.uint64),
                plane_index=span.plane_index,
                layer=span.layer,
                num_bytes=span.num_bytes,
            )
            spans = self._elements[span.layer].reshape(pages, span.num_bytes)
            columns.append(digest_spans(spans, seeds))
        return np.stack(columns, axis=1)

    def _check_host(self, what: str) -> None:
        if self._guarded is not None:
            self._guarded.check(self._stored, what)
        else:
            assert_bytes_equal(self._host_bytes(), self._stored, what, ["byte"])

    def _check_digests(self) -> None:
        """All paths must make the same digests, or none could load what another stored."""
        found = self._host.digests[self._host_slots]
        if not found.all():
            raise AssertionError(f"{int((found == 0).sum())} spans were stored without a digest")
        assert_bytes_equal(found, self._digests, "digests, compared with the plain ones")


def _geometry(element_size: int, kind: SlotKind, device_run: int) -> Geometry:
    if kind is SlotKind.STATE:
        plane = Plane(
            name="state",
            num_layers=_NUM_LAYERS,
            element_size=element_size,
            rows_per_page=1,
            hit_rule=HitRule.exact_boundary(),
        )
    else:
        plane = Plane(name="kv", num_layers=_NUM_LAYERS, element_size=element_size)
    return Geometry(planes=(plane,), page_size=_PAGE_SIZE_OF_RUN.get(device_run, device_run))


def _device_rows(
    rng: np.random.Generator, *, pages: int, per_page: int, run: int
) -> NDArray[np.int64]:
    """Rows of pages, in runs that lie anywhere in the pool. Shape: ``[pages, per_page]``."""
    run = min(run, per_page)
    runs = pages * per_page // run
    # One run more than needed, so that one is nobody's.
    starts = rng.permutation(runs + 1)[:runs] * run
    rows: NDArray[np.int64] = starts[:, None] + np.arange(run)
    return rows.reshape(pages, per_page)


def _check_path(found: str, wanted: str) -> None:
    # Who calls the driver, compiled code or Python, is another matter.
    taken = found.replace("interpreted ", "")
    if wanted == Mover.STAGED:
        taken = taken.partition(" ")[0]
    if taken != wanted:
        raise AssertionError(f"the transfer took path {found}, not {wanted}")
