"""Plans laid out for the device: which kernel carries each span, worked out once a kind of plan."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.kernels import CopyDecision, CopyPath, GroupedConfig, decide_span, no_kernel, span_args
from kvferry.transfer.closing import close_all
from kvferry.transfer.span_table import Carried, SpanTable
from kvferry.types import Direction, Mover

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvferry.geometry import LayerView, PoolView, Span
    from kvferry.kernels.jit import Context, Stream
    from kvferry.transfer.host_pages import HostPages, PinnedAddresses
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.route import Route

__all__ = ["SpanTables"]

_MAX_TABLES = 64

_Key = tuple[
    Mover,
    Direction | None,
    tuple[int, ...],
    tuple[object, ...],
    tuple[tuple[str, int, int], ...],
]


class SpanTables:
    """The span tables of one mover, and the decisions in them.

    Two plans are of one kind that move the same spans in the same steps, with the same runs and row
    tables.

    Args:
        device: The pool.
        host: Page slots.
        pinned: Where the GPU finds them.
        context: Of the GPU.
        setup: An idle stream, for bringing tables to the device.
        load: Compiles or loads the kernels for some spans and a mover.
        in_use: Whether a table may still be read by a kernel.
        verify: Whether digests are on.
        path: Carry everything this way, or refuse; None: flat, where it cannot realign.
        unroll: With grouped: how its threads share an element.
        disabled: Paths not to use.
    """

    def __init__(
        self,
        device: PoolView,
        host: HostPages,
        pinned: PinnedAddresses,
        context: Context,
        setup: Stream,
        *,
        load: Callable[[Sequence[Carried], Mover], None],
        in_use: Callable[[SpanTable], bool],
        verify: bool,
        path: CopyPath | None,
        unroll: int | None,
        disabled: frozenset[CopyPath],
    ) -> None:
        self._device = device
        self._host = host
        self._pinned = pinned
        self._context = context
        self._setup = setup
        self._load = load
        self._in_use = in_use
        self._verify = verify
        self._path = path
        self._unroll = unroll
        self._disabled = disabled
        self._tables: collections.OrderedDict[_Key, SpanTable] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._tables)

    def decide(self, span: Span, run_rows: int, host: LayerView | None = None) -> CopyDecision:
        """Which kernel carries `span` where `run_rows` rows are neighbours, and why.

        `host`: where its rows lie besides the device; None: in the host pool.
        """
        return decide_span(
            span,
            self._device.view(span.plane.name, span.layer),
            self._host_view(span) if host is None else host,
            run_rows=run_rows,
            path=self._path,
            unroll=self._unroll,
            disabled=self._disabled,
            verify=self._verify,
        )

    def explain(self, plan: TransferPlan, route: Route) -> Mapping[tuple[str, int], CopyDecision]:
        """For each plane and layer of `plan`: which kernel carries it, and why."""
        return {
            (span.plane.name, span.layer): self.decide(span, plan.device_run(span.plane.name), host)
            for step in self._steps(plan, route)
            for span, host in step
        }

    def take(self, plan: TransferPlan, table_of: Mapping[str, int], route: Route) -> SpanTable:
        """The table for `plan`, whose planes use these row tables; the context must be current.

        Raises:
            PlanError: A span cannot be carried the way that was asked for.
            DriverError, JITError, MissingDependencyError: The table or a kernel cannot be had.
        """
        runs = {name: plan.device_run(name) for name in plan.device_rows}
        planes = tuple((name, table_of[name], run) for name, run in runs.items())
        # A load is staged with the padding between layers, and a store is not.
        way = plan.direction if route.mover is Mover.STAGED else None
        key: _Key = (route.mover, way, route.sizes, plan.spans_key, planes)
        found = self._tables.get(key)
        if found is None:
            steps = [
                [
                    self._carry(span, table_of[span.plane.name], runs[span.plane.name], host)
                    for span, host in step
                ]
                for step in self._steps(plan, route)
            ]
            # Here, where nothing is under way yet that a compiler's failure would leave behind.
            self._load([one for step in steps for one in step], route.mover)
            found = self._tables[key] = SpanTable(self._context, steps, self._setup)
            self._forget(found)
        self._tables.move_to_end(key)
        return found

    def _steps(
        self, plan: TransferPlan, route: Route
    ) -> Iterator[list[tuple[Span, LayerView | None]]]:
        """The spans of each step, and where they lie besides the device; None: in the host pool."""
        if route.mover is Mover.STAGED:
            for group in route.groups:
                yield list(zip(group.spans, group.views(), strict=True))
            return
        of_layers = itertools.groupby(plan.spans, key=lambda span: span.model_layer)
        by_layer = (list(spans) for _, spans in of_layers)
        for size in route.sizes:
            yield [(span, None) for spans in itertools.islice(by_layer, size) for span in spans]

    def _forget(self, newest: SpanTable) -> None:
        """Down to `_MAX_TABLES`, oldest first, but none that a kernel may still read."""
        for key, table in list(self._tables.items()):
            if len(self._tables) <= _MAX_TABLES:
                break
            if table is not newest and not self._in_use(table):
                del self._tables[key]
                table.close()

    def _carry(self, span: Span, rows_table: int, run_rows: int, host: LayerView | None) -> Carried:
        decision = self.decide(span, run_rows, host)
        if decision.chosen is None:
            raise no_kernel(span, decision)
        grouped: GroupedConfig | None = None
        if decision.chosen is CopyPath.GROUPED:
            grouped = decision.grouped.config
        digests: NDArray[np.uint64] = self._host.digests
        address = digests.ctypes.data + span.index * digests.itemsize
        args = span_args(
            span,
            self._device.view(span.plane.name, span.layer),
            self._host_view(span) if host is None else host,
            run_rows=run_rows,
            digest_address=self._pinned.device_address(address),
            digest_stride=digests.strides[0],
            rows_table=rows_table,
        )
        return Carried(span.model_layer, decision.chosen, grouped, args)

    def _host_view(self, span: Span) -> LayerView:
        """The span's rows on the host, where the device sees them."""
        view = self._host.view.view(span.plane.name, span.layer)
        address = self._pinned.device_address(view.address, view.end - view.address)
        return dataclasses.replace(view, address=address)

    def close(self) -> None:
        """Free all tables; no kernel may read one any more."""
        close_all(self._tables.values())
        self._tables.clear()
