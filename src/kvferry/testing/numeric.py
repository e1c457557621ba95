"""Exact comparison of bytes, with a failure that says where and what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["assert_bytes_equal", "first_difference"]


def first_difference(found: Any, expected: Any) -> tuple[int, ...] | None:
    """The coordinate of the first byte that differs, or None.

    Args:
        found: An array of any dtype; compared as bytes, so NaN equals NaN and 0.0 is not -0.0.
        expected: An array of the same shape and dtype.
    """
    one, other = _as_bytes(found), _as_bytes(expected)
    if one.shape != other.shape:
        raise AssertionError(f"shapes differ: found {one.shape}, expected {other.shape} bytes")
    differs = one != other
    if not differs.any():
        return None
    return tuple(int(axis) for axis in np.unravel_index(int(differs.argmax()), one.shape))


def assert_bytes_equal(
    found: Any, expected: Any, what: str = "bytes", axes: Sequence[str] | None = None
) -> None:
    """Fail with the first byte that differs: its coordinate, both values, and how many differ.

    Args:
        found: As for `first_difference`.
        expected: As for `first_difference`.
        what: What is compared, for the message.
        axes: A name for each dimension, such as ``("page", "layer", "token", "byte")``.
    """
    where = first_difference(found, expected)
    if where is None:
        return
    one, other = _as_bytes(found), _as_bytes(expected)
    names = axes if axes is not None else [f"axis {axis}" for axis in range(len(where))]
    told = ", ".join(f"{name} {index}" for name, index in zip(names, where, strict=True))
    raise AssertionError(
        f"{what}: {int((one != other).sum())} of {one.size} bytes differ, first at {told}: "
        f"found 0x{int(one[where]):02x}, expected 0x{int(other[where]):02x}"
    )


def _as_bytes(given: Any) -> Any:
    array = np.ascontiguousarray(given)
    return array if array.dtype == np.uint8 else array.view(np.uint8)
