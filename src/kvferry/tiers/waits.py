"""Seconds to wait, as callers give them."""

from __future__ import annotations

import math

from kvferry.errors import ConfigError

__all__ = ["check_seconds"]

_MAX_SECS = 86_400.0


def check_seconds(what: str, seconds: float) -> float:
    """`seconds`, from 0 to a day. Raises ConfigError for what is no such time, as a NaN is."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or math.isnan(seconds) or not 0 <= seconds <= _MAX_SECS:
        raise ConfigError(
            f"{what}={seconds!r} is no time to wait: give seconds from 0 to {_MAX_SECS:.0f}, a day"
        )
    return float(seconds)
