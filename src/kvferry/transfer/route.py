"""Which mover carries a plan, and in which steps: one pure function of numbers.

It looks at no memory and no clock. Its estimates come from a device profile, which is measured or
built in; the same numbers always get the same route.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.errors import PlanError
from kvferry.transfer.staging import Group, LayerGroups, Place
from kvferry.types import Direction, Mover

if TYPE_CHECKING:
    from kvferry.geometry import Span
    from kvferry.transfer.profile import DeviceProfile

__all__ = ["Route", "growing_steps", "plan_route"]

# The first group is this many times what the link carries while a kernel starts: small enough to
# be ready early, large enough that starting is not most of it.
_FIRST_GROUP_LAUNCHES = 4
# What a second of the CPU counts, that the transfer does not wait for.
_CPU_WEIGHT = 0.1
# A way that is slower by less than this is taken for other reasons.
_CLOSE = 1.02


@dataclasses.dataclass(frozen=True)
class Route:
    """How a plan is carried."""

    mover: Mover
    sizes: tuple[int, ...]
    """Model layers of each step, in order; their bytes are there one step after another."""

    groups: tuple[Group, ...]
    """How each step lies in staging; empty where the mover is direct."""

    reason: str
    seconds: Mapping[str, float]
    """What each way was estimated to take."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "mover": self.mover.value,
            "layers_per_step": list(self.sizes),
            "copy_widths": [[band.width for band in group.bands] for group in self.groups],
            "reason": self.reason,
            "estimated_seconds": dict(self.seconds),
        }


def plan_route(
    spans: Sequence[Span],
    *,
    num_pages: int,
    num_runs: int,
    direction: Direction,
    profile: DeviceProfile,
    places: Mapping[int, Place] | None,
    capacity: int,
    batched: bool = True,
    why_not_staged: str = "",
    mover: Mover | None = None,
) -> Route:
    """The fastest route for `num_pages` pages in `num_runs` runs of neighbouring host slots.

    A load goes by layers, few first, so that an engine can begin with the first. A store goes by
    whole pages where those are one piece on the host: long copies, whatever the runs are, and
    nobody waits for its single layers.

    Args:
        spans: What moves of every page.
        num_pages: N.
        num_runs: How many runs.
        direction: LOAD or STORE.
        profile: What the device can do.
        places: Of every span on the host; None: it cannot be staged.
        capacity: Bytes of staging that one piece may take; a page of any layer fits.
        batched: All pages of a piece can be copied in one call; else each run is a call a band.
        why_not_staged: Where `places` is None.
        mover: Take this one; None: the faster.

    Raises:
        PlanError: `mover` is STAGED, and it cannot be.
    """
    # Nothing is carried like one page: the steps are those of the next plan.
    num_pages, num_runs = max(1, num_pages), max(1, num_runs)
    layer_bytes: dict[int, int] = {}
    for span in spans:
        layer_bytes[span.model_layer] = layer_bytes.get(span.model_layer, 0) + span.num_bytes
    num_layers, page_bytes = len(layer_bytes), sum(layer_bytes.values())
    total = num_pages * page_bytes
    ramp = profile.launch_seconds * profile.link[direction] * 1e9 * _FIRST_GROUP_LAUNCHES
    first = _power_up(ramp / max(1, total / num_layers), num_layers)
    direct_sizes = growing_steps(num_layers, first, num_layers)
    seconds = {
        "direct": total / (profile.direct[direction] * 1e9)
        + profile.launch_seconds * len(direct_sizes)
    }
    if places is None:
        if mover is Mover.STAGED:
            raise PlanError(
                f"this transfer cannot be staged: {why_not_staged}; change that, or leave mover out"
            )
        return Route(Mover.DIRECT, direct_sizes, (), f"not staged: {why_not_staged}", seconds)
    fit = max(1, int(capacity / max(1, total / num_layers)))
    staged: dict[str, tuple[float, tuple[int, ...]]] = {}
    groups_of = LayerGroups(spans, places, with_gaps=direction is Direction.LOAD).of
    seconds_of_group: dict[int, float] = {}

    def estimate(sizes: Sequence[int]) -> float:
        # Filling the first staging buffer and emptying the last is not beside anything.
        seconds = 2 * profile.launch_seconds
        for group in groups_of(sizes):
            took = seconds_of_group.get(id(group))
            if took is None:
                took = _group_seconds(
                    group, num_pages, num_runs, batched, direction, profile, capacity
                )
                seconds_of_group[id(group)] = took
            seconds += took
        return seconds

    def fits(sizes: Sequence[int]) -> bool:
        return all(group.pitch <= capacity for group in groups_of(sizes))

    # Fewest layers a step first, as those are ready earliest; steps of which all pages do not fit
    # staging are cut along their pages, so one page must.
    ways = {
        growing_steps(num_layers, step, most): None
        for step in _doublings(first, num_layers)
        for most in _doublings(max(step, 1 << (fit.bit_length() - 1)), num_layers)
    }
    ways = {sizes: None for sizes in ways if fits(sizes)} or {
        sizes: None
        for step in _doublings(1, num_layers)
        for most in _doublings(step, num_layers)
        if fits(sizes := growing_steps(num_layers, step, most))
    }
    took_by_way = {sizes: estimate(sizes) for sizes in ways}
    enough = min(took_by_way.values()) * _CLOSE
    sizes = next(sizes for sizes, took in took_by_way.items() if took <= enough)
    best = (took_by_way[sizes], sizes)
    staged["staged by layers"] = best
    if direction is Direction.STORE and fits((num_layers,)):
        staged["staged by pages"] = (estimate((num_layers,)), (num_layers,))
    seconds |= {name: took for name, (took, _) in staged.items()}
    name = min(reversed(staged), key=lambda one: staged[one][0])
    took, sizes = staged[name]
    if mover is Mover.DIRECT or (mover is None and seconds["direct"] < took):
        reason = "asked for" if mover else f"faster than {name} here"
        return Route(Mover.DIRECT, direct_sizes, (), reason, seconds)
    reason = "asked for" if mover else "the copy engine is faster than kernels here"
    groups = groups_of(sizes)
    return Route(Mover.STAGED, sizes, groups, f"{name}: {reason}", seconds)


def _group_seconds(
    group: Group,
    num_pages: int,
    num_runs: int,
    batched: bool,
    direction: Direction,
    profile: DeviceProfile,
    capacity: int,
) -> float:
    copying = 0.0
    for band in group.bands:
        rate = profile.copy_rate(direction, band.width)
        copying += num_pages * band.width / (rate * 1e9)
    num_pieces = -(-num_pages * group.pitch // capacity)
    by_runs = (num_runs + num_pieces - 1) * len(group.bands) * profile.copy_seconds
    # The CPU is beside the copies, unless it is slower. It has other things to do, too.
    cpu = num_pages * len(group.bands) * profile.piece_seconds
    by_pages = num_pieces * profile.copy_seconds + max(0.0, cpu - copying) + _CPU_WEIGHT * cpu
    return copying + (min(by_runs, by_pages) if batched else by_runs)


def growing_steps(num_layers: int, first: int, most: int) -> tuple[int, ...]:
    """`first`, as many again, twice as many, … layers a step, but at most `most`."""
    sizes: list[int] = []
    done = 0
    while done < num_layers:
        size = min(max(first, done), most, num_layers - done)
        sizes.append(size)
        done += size
    return tuple(sizes)


def _doublings(first: int, most: int) -> list[int]:
    found = [first]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found


def _power_up(wanted: float, most: int) -> int:
    """The smallest power of two that is not below `wanted`, and at most `most`."""
    size = 1
    while size < wanted and size < most:
        size *= 2
    return min(size, most)
