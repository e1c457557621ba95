"""Numbers of bytes as people write them: 8GiB, 500MB."""

from __future__ import annotations

import fractions
import re

__all__ = ["bytes_of"]

_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?) ?(?P<unit>[A-Za-z]+)", re.ASCII)
_UNITS = {"b": 1} | {
    f"{letter}{binary}{byte}": (1024 if binary else 1000) ** power
    for power, letter in enumerate("kmgt", start=1)
    for binary in ("", "i")
    for byte in ("", "b")
}


def bytes_of(text: str) -> int:
    """The bytes that `text`, a number with a unit, stands for; ValueError where it is none."""
    found = _SIZE.fullmatch(text)
    factor = _UNITS.get(found["unit"].lower()) if found else None
    if not found or factor is None:
        raise ValueError("a unit is B, K, M, G, T, Ki, Mi, Gi or Ti, with or without a B behind it")
    num_bytes = fractions.Fraction(found["number"]) * factor
    if num_bytes.denominator != 1:
        raise ValueError("that is no whole number of bytes")
    return int(num_bytes)
