"""What the link between one GPU and host memory can do, as figures that a planner reads.

Rates are GB/s, 10^9 bytes of payload a second; widths are bytes. Nothing here asks a GPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from kvferry.errors import ConfigError
from kvferry.types import Direction

__all__ = ["BUILT_IN", "CALIBRATED", "DeviceProfile", "WidthCurve"]

_BUILT_IN = "built-in"
CALIBRATED = "calibrated"

WidthCurve = tuple[tuple[int, float], ...]
"""Row widths in bytes, ascending, each with a rate in GB/s."""

_FORMAT = 1

# Far outside of what any link has. A file may hold any number, and what is worked out from these
# stays finite and above zero.
_LEAST_RATE, _MOST_RATE = 1e-6, 1e6
_MOST_BLOCKS = (1 << 31) - 1
_MOST_WIDTH = 1 << 40

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """What copies and kernels reach over one GPU's link, and what starting one costs.

    Raises:
        ConfigError: A figure is missing, is not finite, or makes no sense as what it is.
    """

    source: str
    """``built-in`` or ``calibrated``."""

    link: Mapping[Direction, float]
    """GB/s of the largest plain copy from or to pinned memory."""

    widths: Mapping[Direction, WidthCurve]
    """Of strided copies: rows at the pitch of a page on the host, tight on the device. The rate
    is what is left when each call has paid `copy_seconds`."""

    copy_seconds: float
    """What one further copy call costs the GPU, beyond its bytes."""

    piece_seconds: float
    """What one further piece of a copy of many costs the CPU."""

    launch_seconds: float
    """What one further launch costs the GPU: filling the link, and draining it."""

    direct: Mapping[Direction, float]
    """GB/s of the direct mover's kernel `flat` between page_major host pages and scattered rows,
    when each launch has paid `launch_seconds`."""

    direct_blocks: Mapping[Direction, int]
    """The quota of blocks that this rate takes."""

    unmeasured: tuple[str, ...] = ()
    """What a calibration had no time for, such as ``widths.store``: the built-in figures stand."""

    def __post_init__(self) -> None:
        if self.source not in (_BUILT_IN, CALIBRATED):
            raise _bad("source", self.source, f"it is {_BUILT_IN!r} or {CALIBRATED!r}")
        checks: tuple[tuple[str, Callable[[str, Any], Any]], ...] = (
            ("link", _rate),
            ("widths", _curve),
            ("direct", _rate),
            ("direct_blocks", _quota),
        )
        for name, check in checks:
            object.__setattr__(self, name, _both_ways(name, getattr(self, name), check))
        for name in ("copy_seconds", "piece_seconds", "launch_seconds"):
            value = _number(name, getattr(self, name))
            if not 0 <= value < 1:
                raise _bad(name, value, "it is seconds, from 0 to below 1")
            object.__setattr__(self, name, value)
        if not all(isinstance(one, str) for one in _sequence("unmeasured", self.unmeasured)):
            raise _bad("unmeasured", self.unmeasured, "it lists names of figures")
        object.__setattr__(self, "unmeasured", tuple(self.unmeasured))

    def copy_rate(self, direction: Direction, width: int) -> float:
        """GB/s of a strided copy of rows of `width` bytes.

        Between two widths that were measured it is linear in the logarithm of the width, as copies
        feel a doubling alike wherever it happens; outside of them it is that of the nearest.

        Raises:
            ConfigError: `width` is below 1 byte.
        """
        if width < 1:
            raise ConfigError(f"width={width}: a row has 1 byte or more; leave empty copies out")
        curve = self.widths[direction]
        above = bisect.bisect_left(curve, width, key=lambda point: point[0])
        if above == 0:
            return curve[0][1]
        if above == len(curve):
            return curve[-1][1]
        (narrow, low), (wide, high) = curve[above - 1 : above + 1]
        return low + (high - low) * math.log2(width / narrow) / math.log2(wide / narrow)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` makes an equal profile of it."""
        return {
            "format": _FORMAT,
            "source": self.source,
            "link": {way.value: rate for way, rate in self.link.items()},
            "widths": {
                way.value: [list(point) for point in curve] for way, curve in self.widths.items()
            },
            "copy_seconds": self.copy_seconds,
            "piece_seconds": self.piece_seconds,
            "launch_seconds": self.launch_seconds,
            "direct": {way.value: rate for way, rate in self.direct.items()},
            "direct_blocks": {way.value: quota for way, quota in self.direct_blocks.items()},
            "unmeasured": list(self.unmeasured),
        }

    @classmethod
    def from_dict(cls, told: Any) -> DeviceProfile:
        """The profile that `to_dict` told of.

        Raises:
            ConfigError: It is of another format, lacks a field, has one too many, or a value that
                cannot be.
        """
        if not isinstance(told, Mapping):
            raise ConfigError(f"a device profile is a mapping, not a {type(told).__name__}")
        if "format" not in told:
            raise ConfigError(
                "it is no device profile, as it has no field `format`; give what kvferry calibrate "
                "kept or printed with --json"
            )
        if told["format"] != _FORMAT:
            raise ConfigError(
                f"device profile of format {told['format']!r}; this kvferry reads {_FORMAT}: run "
                f"kvferry calibrate again"
            )
        fields = {field.name for field in dataclasses.fields(cls)}
        given = set(told) - {"format"}
        if given != fields:
            raise ConfigError(
                f"device profile: fields {sorted(map(str, given ^ fields))} are missing or too "
                f"many; run kvferry calibrate again"
            )
        return cls(**{name: told[name] for name in fields})


def _bad(name: str, value: object, should: str) -> ConfigError:
    return ConfigError(
        f"device profile: {name}={reprlib.repr(value)}, but {should}; run kvferry calibrate"
    )


def _both_ways(name: str, given: Any, check: Callable[[str, Any], _T]) -> Mapping[Direction, _T]:
    wanted = {way.value for way in Direction}
    if not isinstance(given, Mapping) or {str(way) for way in given} != wanted:
        raise _bad(name, given, f"it has one figure each for {' and '.join(sorted(wanted))}")
    return MappingProxyType(
        {way: check(f"{name}.{way.value}", given[way.value]) for way in Direction}
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad(name, value, "it is a finite number")
    try:
        number = float(value)
    except OverflowError as huge:  # whole numbers have no end
        raise _bad(name, value, "it is a finite number") from huge
    if not math.isfinite(number):
        raise _bad(name, value, "it is a finite number")
    return number


def _rate(name: str, value: Any) -> float:
    rate = _number(name, value)
    if not _LEAST_RATE <= rate <= _MOST_RATE:
        raise _bad(name, rate, f"it is GB/s, from {_LEAST_RATE:g} to {_MOST_RATE:,.0f}")
    return rate


def _quota(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_BLOCKS:
        raise _bad(name, value, f"it is a number of blocks, from 1 to {_MOST_BLOCKS:,}")
    return value


def _sequence(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _bad(name, value, "it is a list")
    return value


def _curve(name: str, value: Any) -> WidthCurve:
    points = []
    for point in _sequence(name, value):
        if len(_sequence(name, point)) != 2:
            raise _bad(name, point, "a point of it is a width and a rate")
        width, rate = point
        whole = isinstance(width, int) and not isinstance(width, bool)
        if not whole or not 1 <= width <= _MOST_WIDTH:
            raise _bad(
                name, width, f"a width is a whole number of bytes, from 1 to {_MOST_WIDTH:,}"
            )
        points.append((width, _rate(name, rate)))
    if not points or any(one[0] >= two[0] for one, two in itertools.pairwise(points)):
        raise _bad(name, value, "it has one width or more, each above the one before")
    return tuple(points)


# Measured on a PCIe 5 x16 link. A slower link scales the rates down about alike, and what a plan
# is chosen by is how they compare.
BUILT_IN = DeviceProfile(
    source=_BUILT_IN,
    link={Direction.LOAD: 55.5, Direction.STORE: 55.4},
    widths={
        Direction.LOAD: (
            (656, 27.2), (1_312, 31.4), (2_624, 37.5), (5_248, 39.3), (8_192, 48.4), (10_496, 51.6),
            (13_120, 54.0), (20_992, 54.6), (41_984, 54.9),
        ),
        Direction.STORE: (
            (656, 24.8), (1_312, 29.3), (2_624, 32.7), (5_248, 38.7), (8_192, 47.5), (9_216, 28.0),
            (10_496, 31.7), (13_120, 52.5), (20_992, 54.5), (41_984, 54.9),
        ),
    },
    copy_seconds=3e-6,
    piece_seconds=1.5e-6,
    launch_seconds=10e-6,
    direct={Direction.LOAD: 50.5, Direction.STORE: 51.0},
    direct_blocks={Direction.LOAD: 24, Direction.STORE: 32},
)  # fmt: skip
"""What holds until a device is calibrated."""
