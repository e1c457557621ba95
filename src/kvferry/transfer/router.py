"""The routes of one engine: what its host pool and its device allow, and routes already planned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvferry.errors import ConfigError
from kvferry.transfer.route import Route, plan_route
from kvferry.transfer.staging import Place, piece_capacity, place_of
from kvferry.types import Mover

if TYPE_CHECKING:
    from kvferry.geometry import LayerView, Span
    from kvferry.transfer.host_pages import HostPages
    from kvferry.transfer.plan import TransferPlan
    from kvferry.transfer.profile import DeviceProfile

__all__ = ["Router", "check_staging_bytes", "host_places", "planned_count", "refuse_little_staging"]

_MAX_ROUTES = 1024


class Router:
    """Plans routes, and remembers them.

    Numbers of pages and of runs count as the power of two below them: so that there are few routes,
    each with a table on the device, and serving soon makes no new ones.

    Args:
        host: Page slots.
        profile: What the device can do.
        staging_bytes: Of a direction; 0: nothing is staged.
        mover: Take this one; None: the faster for each plan.
        why_not_staged: A reason that has nothing to do with the pool, or nothing.

    Raises:
        ConfigError: `mover` is STAGED and nothing can be.
    """

    def __init__(
        self,
        host: HostPages,
        profile: DeviceProfile,
        *,
        staging_bytes: int,
        mover: Mover | None,
        why_not_staged: str,
    ) -> None:
        self.profile = profile
        self._mover = mover
        self.capacity = piece_capacity(staging_bytes)
        """Bytes of staging that one piece may take."""

        self._why_not = why_not_staged
        self._places: dict[int, Place] = {}
        if not self._why_not:
            self._places, self._why_not = _places(host, self.capacity)
        if self._why_not and mover is Mover.STAGED:
            raise ConfigError(
                f"nothing can be staged here: {self._why_not}; change that, or leave mover out"
            )
        self.batched = True
        """Whether all pages of a piece are copied in one call: the mover's to say."""

        self._routes: dict[tuple[object, ...], Route] = {}

    @property
    def can_stage(self) -> bool:
        """Whether any transfer can be staged."""
        return not self._why_not

    def route(self, plan: TransferPlan) -> Route:
        """How `plan` is carried."""
        pages, runs = planned_count(plan.num_pages), planned_count(len(plan.run_table))
        key = (plan.direction, pages, runs, *plan.spans_key)
        found = self._routes.get(key)
        if found is None:
            if len(self._routes) >= _MAX_ROUTES:
                self._routes.clear()
            found = self._routes[key] = plan_route(
                plan.spans,
                num_pages=pages,
                num_runs=runs,
                direction=plan.direction,
                profile=self.profile,
                places=None if self._why_not else self._places,
                capacity=self.capacity,
                batched=self.batched,
                why_not_staged=self._why_not,
                mover=self._mover,
            )
        return found

    def direct(self, plan: TransferPlan) -> Route:
        """How `plan` is carried in a graph, which holds no ring of staging memory."""
        return plan_route(
            plan.spans,
            num_pages=planned_count(plan.num_pages),
            num_runs=1,
            direction=plan.direction,
            profile=self.profile,
            places=None,
            capacity=0,
            why_not_staged="it is captured into a graph",
        )


def check_staging_bytes(host: HostPages, staging_bytes: int) -> None:
    """Raise ConfigError where a page of one layer takes more than half of it."""
    refuse_little_staging(staging_bytes, _places(host, piece_capacity(staging_bytes))[1])


def refuse_little_staging(staging_bytes: int, why_not: str) -> None:
    """Raise ConfigError where `why_not`, of `host_places`, is that they are too few."""
    if "staging_bytes" in why_not:
        raise ConfigError(f"staging_bytes={staging_bytes:,} is too little: {why_not}")


def _places(host: HostPages, capacity: int) -> tuple[dict[int, Place], str]:
    return host_places(
        host.geometry.spans(host.kind),
        lambda span: host.view.view(span.plane.name, span.layer),
        capacity,
    )


def host_places(
    spans: Iterable[Span], view_of: Callable[[Span], LayerView], capacity: int
) -> tuple[dict[int, Place], str]:
    """Where each of `spans` lies on the host, or why nothing can be staged.

    Args:
        spans: All of a page.
        view_of: Where the rows of each lie on the host.
        capacity: Bytes of staging that one piece may take.
    """
    places: dict[int, Place] = {}
    layer_bytes: dict[int, int] = {}
    for span in spans:
        view = view_of(span)
        place = place_of(view, span.rows)
        if place is None:
            return {}, (
                f"the pages of {view.name} on the host are not one piece each at even distances, "
                f"as in page_major and layer_first pools"
            )
        places[span.index] = place
        # Each band is aligned, so leave room for that.
        layer_bytes[span.model_layer] = (
            layer_bytes.get(span.model_layer, 0) + -(-span.num_bytes // 256) * 256
        )
    largest = max(layer_bytes, key=lambda layer: layer_bytes[layer])
    if layer_bytes[largest] > capacity:
        return {}, (
            f"a page of model layer {largest} takes {layer_bytes[largest]:,} bytes, and half of "
            f"the staging memory of a direction is {capacity:,}; pass staging_bytes of at least "
            f"{2 * layer_bytes[largest]:,}, or a smaller page_size"
        )
    return places, ""


def planned_count(count: int) -> int:
    """What `count` pages or runs count as in a route: the power of two below; 0 for none."""
    return 1 << (count.bit_length() - 1) if count else 0
