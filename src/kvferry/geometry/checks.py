"""Checks of the values that describe a geometry; each raises GeometryError and names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import GeometryError

__all__ = ["check_fields", "check_int", "check_type"]


def check_int(what: str, value: Any, low: int, high: int) -> None:
    """Raise GeometryError unless `value` is a whole number in ``[low, high]``."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise GeometryError(f"{what} must be a whole number from {low} to {high}, not {value!r}")


def check_type(what: str, value: Any, wanted: type, example: str) -> None:
    """Raise GeometryError unless `value` is a `wanted`; the message gives `example`."""
    if not isinstance(value, wanted):
        raise GeometryError(
            f"{what} must be a {wanted.__name__}, {example}; not {type(value).__name__}"
        )


def check_fields(what: str, told: Mapping[Any, Any], known: set[str], needed: set[str]) -> None:
    """Raise GeometryError unless `told` has every field in `needed` and none beside `known`."""
    unknown = sorted(repr(name) for name in told if name not in known)
    missing = sorted(needed - set(told))
    if unknown or missing:
        raise GeometryError(
            f"{what}: unknown fields [{', '.join(unknown)}], missing fields {missing}; "
            f"it takes {', '.join(sorted(known))}"
        )
