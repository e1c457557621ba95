"""One budget for all planes of a geometry: how many page slots and state slots it makes."""

from __future__ import annotations

import dataclasses
import math
import operator

from kvferry.errors import BudgetError, ConfigError
from kvferry.geometry import Geometry
from kvferry.memory.backing import HugePages, check_huge_pages
from kvferry.memory.budget import BudgetVerdict, check_budget, format_bytes
from kvferry.memory.pool_layout import PoolLayout
from kvferry.memory.reading import MemoryReading, read_memory
from kvferry.types import SlotKind

__all__ = ["DEFAULT_DEVICE_RATIO", "DEFAULT_STATE_FRACTION", "PoolSizes", "split_budget"]

DEFAULT_DEVICE_RATIO = 2.5
DEFAULT_STATE_FRACTION = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Pools that take no more than one budget between them, digests and padding included."""

    budget_bytes: int
    """What they may take."""

    page_slots: int
    """Slots of the pool of pages; 0: the geometry needs none."""

    page_bytes: int
    """What that pool takes, digests included."""

    state_slots: int
    """Slots of the pool of states; 0: the geometry needs none."""

    state_bytes: int
    """What that pool takes, digests included."""

    verdict: BudgetVerdict
    """Whether this host has the budget: asked, free, reserve, limit."""

    @property
    def num_bytes(self) -> int:
        """What both pools take."""
        return self.page_bytes + self.state_bytes

    def slots(self, kind: SlotKind) -> int:
        """Slots of the pool of `kind`."""
        return self.page_slots if kind is SlotKind.PAGE else self.state_slots


def split_budget(
    geometry: Geometry,
    *,
    num_bytes: int | None = None,
    device_bytes: int | None = None,
    ratio: float = DEFAULT_DEVICE_RATIO,
    state_fraction: float = DEFAULT_STATE_FRACTION,
    reserve_bytes: int | None = None,
    reading: MemoryReading | None = None,
    locked: bool = False,
    huge_pages: HugePages = "auto",
    processes: int = 1,
    unchecked_budget: bool = False,
) -> PoolSizes:
    """The sizes of this process's pools; make each with ``HostPool(..., num_slots=...)``.

    Args:
        geometry: The planes.
        num_bytes: What all pools may take together.
        device_bytes: The size of the device pool, instead: they may take `ratio` times that. Less
            than once is a pool that is smaller than the device's, which is in order.
        ratio: See `device_bytes`; more than 0.
        state_fraction: The share of states, above 0 and below 1, where the geometry has both kinds
            of planes; what they leave of it is for pages. One kind alone gets everything.
        reserve_bytes: What stays free for others; see `check_budget`.
        reading: The memory there is; by default it is read now.
        locked: Whether the pools are to be kept out of swap.
        huge_pages: What the pools are made with. Where reserved huge pages may be and suffice, the
            budget is judged by them, else by ordinary memory.
        processes: How many processes of this host take such a budget each, from the same reading.
        unchecked_budget: Give sizes whatever the verdict.

    Raises:
        ConfigError: Not exactly one budget was given, a number cannot be, or a share holds no slot.
        BudgetError: The host has less; the message has asked, free, reserve and limit.
    """
    budget, origin = _budget(num_bytes, device_bytes, ratio)
    reading = read_memory() if reading is None else reading
    verdict = check_budget(
        budget, reading, reserve_bytes=reserve_bytes, locked=locked, processes=processes
    )
    check_huge_pages(huge_pages)
    if huge_pages in ("auto", "always"):
        huge = check_budget(budget, reading, locked=locked, huge=True, processes=processes)
        if huge.allowed or huge_pages == "always":
            verdict = huge
    pages = PoolLayout(geometry, SlotKind.PAGE)
    states = PoolLayout(geometry, SlotKind.STATE)
    for_states = _state_share(pages, states, budget, state_fraction)
    state_slots = _count(states, for_states, origin)
    state_bytes = states.total_bytes(state_slots)
    page_slots = _count(pages, budget - state_bytes if pages.slot_bytes else 0, origin)
    if not verdict.allowed and not unchecked_budget:
        raise BudgetError(
            f"host pools of {page_slots} page slots and {state_slots} state slots ({origin}): "
            f"{verdict.message}"
        )
    return PoolSizes(
        budget_bytes=budget,
        page_slots=page_slots,
        page_bytes=pages.total_bytes(page_slots),
        state_slots=state_slots,
        state_bytes=state_bytes,
        verdict=verdict,
    )


def _budget(num_bytes: int | None, device_bytes: int | None, ratio: float) -> tuple[int, str]:
    """The budget in bytes, and where it comes from, in words."""
    if (num_bytes is None) == (device_bytes is None):
        raise ConfigError(
            f"num_bytes={num_bytes} and device_bytes={device_bytes}: give one of the two"
        )
    name = "num_bytes" if device_bytes is None else "device_bytes"
    given = num_bytes if device_bytes is None else device_bytes
    try:
        size = operator.index(given)  # type: ignore[arg-type]
    except TypeError as bad:
        raise ConfigError(f"{name}={given!r} must be a whole number of bytes") from bad
    if size < 1:
        raise ConfigError(f"{name}={size}: give at least 1 byte")
    if device_bytes is None:
        return size, f"num_bytes={size}"
    if not isinstance(ratio, int | float) or not math.isfinite(ratio) or ratio <= 0:
        raise ConfigError(f"ratio={ratio!r}: give how many times the device pool, more than 0")
    return int(size * ratio), f"{ratio:g} times a device pool of {format_bytes(size)}"


def _state_share(pages: PoolLayout, states: PoolLayout, budget: int, fraction: float) -> int:
    if not isinstance(fraction, int | float) or not 0 < fraction < 1:
        raise ConfigError(
            f"state_fraction={fraction!r}: give a share above 0 and below 1, for a prefix of a "
            f"model with states needs both kinds of slots"
        )
    if not states.slot_bytes:
        return 0
    return int(budget * fraction) if pages.slot_bytes else budget


def _count(layout: PoolLayout, num_bytes: int, origin: str) -> int:
    if layout.slot_bytes == 0:
        return 0
    if num_bytes < layout.total_bytes(1):
        raise ConfigError(
            f"{origin} leaves {format_bytes(num_bytes)} for {layout.kind.value} slots, and one "
            f"with its digests takes {format_bytes(layout.total_bytes(1))}: give more, or change "
            f"state_fraction"
        )
    return layout.count_slots(num_bytes, None)
