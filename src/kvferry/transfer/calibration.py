"""Measures what the link of one GPU can do: a `DeviceProfile` in less than three seconds.

The bytes are bounded, and so is the time: when it is up, no further figure is begun, and those that
are left stay built-in ones, by name. Other work on the GPU or the link makes all figures worse.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.transfer.link_bench import FULL, Effort, LinkBench
from kvferry.transfer.profile import BUILT_IN, CALIBRATED, DeviceProfile
from kvferry.types import Direction

if TYPE_CHECKING:
    from kvferry.kernels.jit import Context

__all__ = ["FULL", "Effort", "Measured", "calibrate"]


class Measured(NamedTuple):
    """One figure that a calibration came by."""

    name: str
    """Such as ``widths.load``; the first part is a field of `DeviceProfile`."""
    num_bytes: int
    """What was moved for it."""
    seconds: float
    """What it took, by the CPU's clock."""


def calibrate(
    context: Context,
    *,
    effort: Effort = FULL,
    report: Callable[[Measured], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> DeviceProfile:
    """The profile of the GPU of `context`, measured now. Nothing is saved.

    Takes `Effort.buffer_bytes` of pinned and of device memory meanwhile.

    Args:
        context: Of the GPU. It need not be current.
        effort: How much to move.
        report: Is told of each figure.
        clock: Seconds, for the deadline.

    Raises:
        DriverError: Memory could not be had, or the driver refused a copy or a launch.
        JITError, MissingDependencyError: The direct mover's kernel cannot be compiled.
        TransferTimeoutError: A copy does not end. What it uses is kept, for it may still go on.
    """
    found: dict[str, Any] = {}
    missed: list[str] = []
    with context.beside_captures(), LinkBench(context, effort) as bench:
        # From here, as the time to allocate memory and to compile says nothing of the link.
        deadline = clock() + effort.seconds
        for name, measure in _figures(bench, found):
            begin, moved = clock(), bench.moved
            if begin >= deadline:
                missed.append(name)
                continue
            found[name] = measure()
            report(Measured(name, bench.moved - moved, clock() - begin))
    return _profile(found, tuple(missed))


def _figures(bench: LinkBench, found: dict[str, Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All figures by name, in the order in which they build on one another."""
    for way in Direction:
        yield f"link.{way}", functools.partial(bench.link, way)
    yield "copy_seconds", bench.copy_seconds
    yield "piece_seconds", bench.piece_seconds
    cost = found.get("copy_seconds", BUILT_IN.copy_seconds)
    for way in Direction:
        yield f"widths.{way}", functools.partial(bench.widths, way, cost)
    for way in Direction:
        yield f"direct.{way}", functools.partial(bench.direct, way)
    quotas = dict(BUILT_IN.direct_blocks)
    quotas |= {way: found[f"direct.{way}"].blocks for way in Direction if f"direct.{way}" in found}
    yield "launch_seconds", functools.partial(bench.launch_seconds, quotas)


def _profile(found: dict[str, Any], missed: tuple[str, ...]) -> DeviceProfile:
    launch_seconds = found.get("launch_seconds", BUILT_IN.launch_seconds)
    rates, quotas = dict(BUILT_IN.direct), dict(BUILT_IN.direct_blocks)
    for way in Direction:
        if (best := found.get(f"direct.{way}")) is not None:
            rates[way], quotas[way] = best.rate(launch_seconds), best.blocks
    return DeviceProfile(
        source=CALIBRATED,
        link={way: found.get(f"link.{way}", BUILT_IN.link[way]) for way in Direction},
        widths={way: found.get(f"widths.{way}", BUILT_IN.widths[way]) for way in Direction},
        copy_seconds=found.get("copy_seconds", BUILT_IN.copy_seconds),
        piece_seconds=found.get("piece_seconds", BUILT_IN.piece_seconds),
        launch_seconds=launch_seconds,
        direct=rates,
        direct_blocks=quotas,
        unmeasured=missed,
    )
